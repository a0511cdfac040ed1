//! Staging: a release is unpacked, made durable and sealed, or there is no trace of it (K38, K39).
//!
//! ```text
//! releases/.staging-ID/tree/…         unpacked and hashed in one pass
//! releases/.staging-ID/manifest.json  the seal
//!         syncfs                      everything above is on the disk
//! releases/VERSION-DIGEST12/          by one rename, or an exchange with a damaged release of that name
//!         sync of releases/           so is the name
//! ```
//!
//! Only a name without `.staging-` and with a seal counts, so whatever stops this on the way leaves nothing that
//! could be taken for a release; [`sweep_staging`] removes it. On an error it is removed at once.
//!
//! A release that is there and whole is never written again: it may be the one that runs. One that is damaged is
//! replaced by an exchange, and the damaged one is removed.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::adapter::Adapter;
use crate::archive::{self, ArchiveError, Kind};
use crate::durable::{self, Disk, Space};
use crate::feed::{Feed, FeedError, Progress};
use crate::release::{Digest, Entry, Manifest, Release, Version};
use crate::seal::{self, Depth, MANIFEST, RELEASES, SealError, TREE, TREE_MODE};
use crate::source::Resolved;
use crate::tree::{Tree, TreeError};

mod adopt;
#[cfg(test)]
mod tests;

pub use adopt::{Adoptee, adopt_tree};

/// How long staging may take: it gives up by itself when no bytes come, and a very large release may take long.
pub const STAGING_TIME: Duration = Duration::from_secs(24 * 3600);
/// How the directories of unfinished releases begin.
const STAGING: &str = ".staging-";
/// What must stay free beside the payload: journal, receipts, links and the seal of this release.
const RESERVE_BYTES: u64 = 16 * 1024 * 1024;
/// The same in files.
const RESERVE_FILES: u64 = 64;
/// The directories of a state directory, which all must lie on its own file system.
const STATE_DIRS: [&str; 5] = [RELEASES, "slots", "receipts", "run", "incoming"];

/// Why a release could not be staged. Nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum StageError {
    /// The artifact cannot be read.
    #[error(transparent)]
    Read(#[from] FeedError),
    /// The artifact is not the one that its publisher listed.
    #[error("{path}: has SHA-256 {actual}, should have {expected}{also}; fetch it again, or publish it again", path = path.display())]
    WrongHash {
        /// The artifact.
        path: PathBuf,
        /// By `SHA256SUMS`.
        expected: Digest,
        /// By its bytes.
        actual: Digest,
        /// What showed first, where it could not even be unpacked.
        also: String,
    },
    /// The artifact cannot be unpacked, or holds what a release must not hold.
    #[error("{path}: {source}; nothing was changed, publish a correct one", path = path.display())]
    Archive {
        /// The artifact.
        path: PathBuf,
        /// What is wrong.
        source: ArchiveError,
    },
    /// A program or directory cannot be adopted.
    #[error("{path}: {source}; nothing was changed", path = path.display())]
    Adopt {
        /// The program or directory.
        path: PathBuf,
        /// What is wrong.
        source: TreeError,
    },
    /// The disk is too full.
    #[error("{path}: no space: {need} {what} needed, {have} free; free some, then try again")]
    NoSpace {
        /// The path in the state directory.
        path: String,
        /// `bytes` or `files`.
        what: &'static str,
        /// How many are needed, as far as is known.
        need: u64,
        /// How many are free.
        have: u64,
    },
    /// The state directory cannot be read or written.
    #[error("{path}: {source}; check the file system, then try again")]
    Disk {
        /// The path in the state directory.
        path: String,
        /// The cause.
        source: io::Error,
    },
    /// A part of the state directory is on another file system: nothing could be moved there in one step.
    #[error(
        "{path}: is on another file system than the state directory; unmount it, or mount the whole state directory"
    )]
    OtherFileSystem {
        /// The directory.
        path: String,
    },
    /// Another release already has this name, and is whole.
    #[error("{path}: is a whole release with another digest; publish this one under another version")]
    Collision {
        /// The release's directory.
        path: String,
    },
}

/// Unpacks and seals `version` from its artifact, or finds it sealed and whole. Files get the capabilities and
/// labels of `carry`'s files at the same paths. At most three syncs.
///
/// # Errors
/// [`StageError`]; then nothing of the release is left, and what was there is as it was.
pub fn stage(
    disk: &dyn Disk,
    adapter: &Adapter,
    resolved: &Resolved,
    version: &Version,
    carry: Option<&Release>,
    progress: &mut Progress<'_>,
) -> Result<Manifest, StageError> {
    prepare(disk)?;
    if let Some(whole) = find_whole(disk, version, resolved.expected)? {
        progress(resolved.size, resolved.size);
        return confirmed(disk, whole);
    }
    let failed = |source| StageError::Archive { path: resolved.path.clone(), source };
    let kind = Kind::of(&resolved.name).map_err(failed)?;
    let free = check_space(disk, resolved.size.saturating_mul(kind.growth()))?;
    let predecessor = carry.map(|release| format!("{}/{TREE}", seal::dir_of(release)));
    build(disk, version, |root| {
        let source = &adapter.source;
        let mut tree = Tree::new(disk, root, adapter.limits, source.strip).carrying_from(predecessor);
        let mut feed = Feed::open(&resolved.path, adapter.timeouts.stall, progress)?;
        let unpacked = archive::unpack(kind, &mut feed, &mut tree, source.program.as_deref());
        let payload = tree.payload();
        let unpacked = unpacked.and_then(|()| tree.finish().map_err(ArchiveError::Tree));
        if let Some(failure) = feed.failure() {
            return Err(failure.into());
        }
        if let Err(ArchiveError::Tree(TreeError::Write { path, source })) = unpacked {
            return Err(full_or_broken(disk, &path, source, payload, free));
        }
        // An archive that cannot be unpacked is a publisher's mistake if its hash is right, and a damaged copy if
        // it is not: what to do next differs.
        let actual = feed.finish()?;
        if let Some(expected) = resolved.expected
            && actual != expected
        {
            let also = unpacked.err().map(|e| format!(" (and {e})")).unwrap_or_default();
            return Err(StageError::WrongHash { path: resolved.path.clone(), expected, actual, also });
        }
        Ok((unpacked.map_err(failed)?, Some(actual), resolved.provenance.clone()))
    })
}

/// What a release is built from: its entries, the artifact's hash, and where it came from.
type Built = (BTreeMap<String, Entry>, Option<Digest>, String);

/// Builds a release with `fill`, which is given the tree's directory, and publishes it.
fn build(
    disk: &dyn Disk,
    version: &Version,
    fill: impl FnOnce(&str) -> Result<Built, StageError>,
) -> Result<Manifest, StageError> {
    let staging = format!("{RELEASES}/{STAGING}{}", uuid::Uuid::now_v7().simple());
    let built = build_in(disk, version, &staging, fill);
    // After a success this is the damaged release that was exchanged, if anything. Best effort: what cannot be
    // removed now has no name that counts, and is swept before the next staging.
    let _ = durable::sweep(disk, &staging);
    built
}

fn build_in(
    disk: &dyn Disk,
    version: &Version,
    staging: &str,
    fill: impl FnOnce(&str) -> Result<Built, StageError>,
) -> Result<Manifest, StageError> {
    let failed = |path: &str, source| disk_error(disk, path, source);
    let root = format!("{staging}/{TREE}");
    disk.mkdir("stage.mkdir", staging, 0o755).map_err(|e| failed(staging, e))?;
    disk.mkdir("stage.mkdir-tree", &root, TREE_MODE).map_err(|e| failed(&root, e))?;
    let (entries, artifact, provenance) = fill(&root)?;
    let manifest = Manifest::seal(version.clone(), entries, artifact, provenance);

    let name = seal::dir_of(&manifest.release);
    match seal::verify(disk, &manifest.release, Depth::Hashes) {
        Ok(whole) => return confirmed(disk, whole),
        // Twelve digits agree and the rest does not. What is there may be running.
        Err(SealError::Other { found, .. }) if seal::verify(disk, &found, Depth::Hashes).is_ok() => {
            return Err(StageError::Collision { path: name });
        }
        Err(_) => {}
    }
    let path = format!("{staging}/{MANIFEST}");
    disk.create("stage.create-seal", &path, 0o644)
        .and_then(|mut file| file.write_at("stage.write-seal", 0, &manifest.to_bytes()))
        .map_err(|e| failed(&path, e))?;
    let is_new = !is_there(disk, &name)?;
    crate::failpoint::hit("before:seal");
    durable::publish_tree(disk, staging, &name).map_err(|e| {
        if is_new {
            // It may have its name already, and only the sync failed: what is not surely durable is not left.
            let _ = durable::sweep(disk, &name);
        }
        failed(&name, e)
    })?;
    crate::failpoint::hit("after:seal");
    Ok(manifest)
}

/// Makes sure that the name of a release that was found is durable: whoever made it may have been killed before.
fn confirmed(disk: &dyn Disk, whole: Manifest) -> Result<Manifest, StageError> {
    durable::confirm(disk, RELEASES).map_err(|e| disk_error(disk, RELEASES, e))?;
    Ok(whole)
}

fn prepare(disk: &dyn Disk) -> Result<(), StageError> {
    one_file_system(disk)?;
    if !is_there(disk, RELEASES)? {
        durable::make_dir(disk, RELEASES, 0o755).map_err(|e| disk_error(disk, RELEASES, e))?;
    }
    sweep_staging(disk)
}

/// A sealed and whole release of `version` that came from an artifact with this hash.
fn find_whole(
    disk: &dyn Disk,
    version: &Version,
    artifact: Option<Digest>,
) -> Result<Option<Manifest>, StageError> {
    let Some(artifact) = artifact else { return Ok(None) };
    let names = disk.list(RELEASES).map_err(|e| disk_error(disk, RELEASES, e))?;
    for name in names.iter().filter(|name| name.starts_with(&format!("{version}-"))) {
        let Ok(manifest) = seal::read_manifest(disk, &format!("{RELEASES}/{name}")) else { continue };
        if manifest.artifact_sha256 == Some(artifact)
            && manifest.release.version == *version
            && manifest.release.dir_name() == *name
            && seal::verify(disk, &manifest.release, Depth::Hashes).is_ok()
        {
            return Ok(Some(manifest));
        }
    }
    Ok(None)
}

/// Removes what an interrupted staging left: `releases/.staging-*`, and releases without a seal unless a slot or
/// `current` names them (then it is kept for whoever has to find out what happened). Nothing outside `releases/`.
///
/// # Errors
/// [`StageError::Disk`].
pub fn sweep_staging(disk: &dyn Disk) -> Result<(), StageError> {
    let names = match disk.list(RELEASES) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(|e| disk_error(disk, RELEASES, e))?,
    };
    let named: Vec<String> = ["slots/stable", "slots/experiment", "current"]
        .iter()
        .filter_map(|link| disk.read_link(link).ok())
        .flat_map(|target| target.split('/').map(str::to_owned).collect::<Vec<_>>())
        .collect();
    for name in names {
        let path = format!("{RELEASES}/{name}");
        let failed = |e| disk_error(disk, &path, e);
        let is_dir = disk.stat(&path).map_err(failed)?.kind == durable::Kind::Dir;
        let unsealed = !is_dir || !is_there(disk, &format!("{path}/{MANIFEST}"))?;
        if name.starts_with(STAGING) || unsealed && !named.contains(&name) {
            durable::sweep(disk, &path).map_err(failed)?;
        }
    }
    Ok(())
}

/// Checks that the directories of the state directory that exist are on its own file system and not mounted over,
/// so that everything in it can be moved by one rename (S3: found before, not at the rename).
///
/// # Errors
/// [`StageError::OtherFileSystem`], [`StageError::Disk`].
pub fn one_file_system(disk: &dyn Disk) -> Result<(), StageError> {
    let own = disk.stat("").map_err(|e| disk_error(disk, "", e))?.id.dev;
    for dir in STATE_DIRS {
        let path = dir.to_owned();
        // A mount of the same file system has the same device: only entering it tells.
        match disk.stat(dir).and_then(|stat| disk.list(dir).map(|_| stat)) {
            Ok(stat) if stat.id.dev == own => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Ok(_) => return Err(StageError::OtherFileSystem { path }),
            Err(e) if e.kind() == io::ErrorKind::CrossesDevices => {
                return Err(StageError::OtherFileSystem { path });
            }
            Err(source) => return Err(StageError::Disk { path, source }),
        }
    }
    Ok(())
}

/// Refuses before anything is written where the payload, by a first guess, and the reserve do not fit. Returns
/// what is free.
fn check_space(disk: &dyn Disk, payload: u64) -> Result<Space, StageError> {
    let free = disk.space().map_err(|e| disk_error(disk, RELEASES, e))?;
    let path = RELEASES.to_owned();
    let need = payload.saturating_add(RESERVE_BYTES);
    if free.bytes < need {
        return Err(StageError::NoSpace { path, what: "bytes", need, have: free.bytes });
    }
    if free.inodes < RESERVE_FILES {
        return Err(StageError::NoSpace { path, what: "files", need: RESERVE_FILES, have: free.inodes });
    }
    Ok(free)
}

/// What a failed call on the state directory means.
fn disk_error(disk: &dyn Disk, path: &str, source: io::Error) -> StageError {
    let free = disk.space().unwrap_or(Space { bytes: 0, inodes: 0 });
    full_or_broken(disk, path, source, Space { bytes: 0, inodes: 0 }, free)
}

/// What a failed call means that needed `payload` when there was `free`: a full disk or quota may show at any call.
fn full_or_broken(disk: &dyn Disk, path: &str, source: io::Error, payload: Space, free: Space) -> StageError {
    let path = path.to_owned();
    if !matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
        return StageError::Disk { path, source };
    }
    let (what, payload, reserve, have) = match disk.space() {
        Ok(now) if now.inodes < RESERVE_FILES => ("files", payload.inodes, RESERVE_FILES, free.inodes),
        _ => ("bytes", payload.bytes, RESERVE_BYTES, free.bytes),
    };
    // A quota, or somebody else who wrote meanwhile, leaves less than what seemed free.
    let need = payload.saturating_add(reserve).max(have.saturating_add(1));
    StageError::NoSpace { path, what, need, have }
}

fn is_there(disk: &dyn Disk, path: &str) -> Result<bool, StageError> {
    match disk.stat(path) {
        Ok(_) => Ok(true),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(false),
        Err(source) => Err(StageError::Disk { path: path.to_owned(), source }),
    }
}
