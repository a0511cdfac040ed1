//! Whether a release on disk is still what its seal says.
//!
//! A release counts only with its `manifest.json`, and only while every entry that it names is there and nothing
//! else is. [`Depth::Shape`] is what can be told without reading contents; it is what the boot hook and the way
//! back rely on. [`Depth::Hashes`] reads every byte.

use std::collections::BTreeMap;
use std::io::{self, Read as _};

use sha2::{Digest as _, Sha256};

use crate::durable::{Disk, Kind};
use crate::release::{Digest, Entry, Manifest, ManifestError, Release};

/// Where releases are, in a state directory.
pub const RELEASES: &str = "releases";
/// The seal's name in a release.
pub const MANIFEST: &str = "manifest.json";
/// The payload's name in a release.
pub const TREE: &str = "tree";
/// The mode of the payload's directory: the service's user must get in.
pub const TREE_MODE: u32 = 0o755;
/// The largest seal that is read: 200,000 entries with long paths have a third of it.
pub const MANIFEST_MAX: u64 = 128 * 1024 * 1024;
/// Contents are read in pieces of this size.
const PIECE: usize = 256 * 1024;

/// How closely a release is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// Kinds, sizes, modes, owners and link targets; nothing missing, nothing more.
    Shape,
    /// Also the SHA-256 of every file.
    Hashes,
}

/// Why a release is not whole. The text fits after what was wanted of it.
#[derive(Debug, thiserror::Error)]
pub enum SealError {
    /// There is no such release, or it was never finished.
    #[error("{dir} has no seal: it was never finished or is gone")]
    Unsealed {
        /// The release's directory.
        dir: String,
    },
    /// The seal cannot be used.
    #[error("{path} {source}")]
    Manifest {
        /// The seal.
        path: String,
        /// What is wrong.
        source: ManifestError,
    },
    /// The seal is that of another release.
    #[error("{path} seals {found}, not {wanted}")]
    Other {
        /// The seal.
        path: String,
        /// What it seals.
        found: Box<Release>,
        /// What it should seal.
        wanted: Box<Release>,
    },
    /// An entry is not as sealed.
    #[error("{path} is damaged: {why}")]
    Damaged {
        /// The entry.
        path: String,
        /// In what way.
        why: String,
    },
    /// Something is there that the seal does not name.
    #[error("{path} does not belong to the release")]
    Foreign {
        /// The entry.
        path: String,
    },
    /// It cannot be read.
    #[error("{path} cannot be read: {source}")]
    Read {
        /// The entry.
        path: String,
        /// The cause.
        source: io::Error,
    },
}

/// The directory of a release in the state directory.
#[must_use]
pub fn dir_of(release: &Release) -> String {
    format!("{RELEASES}/{}", release.dir_name())
}

/// Reads the seal in the release directory `dir`, without looking at what it seals.
///
/// # Errors
/// [`SealError`].
pub fn read_manifest(disk: &dyn Disk, dir: &str) -> Result<Manifest, SealError> {
    let path = format!("{dir}/{MANIFEST}");
    match disk.read(&path, MANIFEST_MAX) {
        Ok(bytes) => Manifest::parse(&bytes).map_err(|source| SealError::Manifest { path, source }),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Err(SealError::Unsealed { dir: dir.to_owned() })
        }
        Err(source) => Err(SealError::Read { path, source }),
    }
}

/// Checks that `release` is on the disk, sealed and whole, and returns its seal.
///
/// # Errors
/// [`SealError`], for the first thing found.
pub fn verify(disk: &dyn Disk, release: &Release, depth: Depth) -> Result<Manifest, SealError> {
    let dir = dir_of(release);
    let manifest = read_manifest(disk, &dir)?;
    if manifest.release != *release {
        let path = format!("{dir}/{MANIFEST}");
        let (found, wanted) = (Box::new(manifest.release), Box::new(release.clone()));
        return Err(SealError::Other { path, found, wanted });
    }
    verify_tree(disk, &format!("{dir}/{TREE}"), &manifest.entries, depth)?;
    Ok(manifest)
}

fn verify_tree(
    disk: &dyn Disk,
    root: &str,
    entries: &BTreeMap<String, Entry>,
    depth: Depth,
) -> Result<(), SealError> {
    let failed = |path: &str, source| SealError::Read { path: path.to_owned(), source };
    // The state directory's owner is root, and so must every entry's be.
    let owner = disk.stat("").map_err(|e| failed("", e))?.uid;
    match disk.stat(root) {
        Ok(stat) if stat.kind == Kind::Dir && stat.mode == TREE_MODE && stat.uid == owner => {}
        Ok(_) => {
            let why = format!("is not a directory of user {owner} with mode {TREE_MODE:04o}");
            return Err(SealError::Damaged { path: root.to_owned(), why });
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(SealError::Damaged { path: root.to_owned(), why: "is missing".into() });
        }
        Err(e) => return Err(failed(root, e)),
    }
    let mut buffer = match depth {
        Depth::Shape => Vec::new(),
        Depth::Hashes => vec![0; PIECE],
    };
    for (path, entry) in entries {
        let at = format!("{root}/{path}");
        let damaged = |why: String| SealError::Damaged { path: at.clone(), why };
        let stat = match disk.stat(&at) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(damaged("is missing".into())),
            other => other.map_err(|e| failed(&at, e))?,
        };
        let (kind, mode) = match entry {
            Entry::Dir { mode } => (Kind::Dir, Some(*mode)),
            Entry::File { mode, .. } => (Kind::File, Some(*mode)),
            Entry::Link { .. } => (Kind::Link, None),
        };
        if stat.kind != kind {
            return Err(damaged(format!("is a {:?}, was sealed as a {kind:?}", stat.kind)));
        }
        if stat.uid != owner {
            return Err(damaged(format!("belongs to user {}, not {owner}", stat.uid)));
        }
        if mode.is_some_and(|mode| mode != stat.mode) {
            let sealed = mode.unwrap_or_default();
            return Err(damaged(format!("has mode {:04o}, was sealed with {sealed:04o}", stat.mode)));
        }
        match entry {
            Entry::Dir { .. } => {}
            Entry::File { size, .. } if *size != stat.size => {
                return Err(damaged(format!("has {} bytes, was sealed with {size}", stat.size)));
            }
            Entry::File { sha256, .. } if depth == Depth::Hashes => {
                let actual = hash(disk, &at, &mut buffer).map_err(|e| failed(&at, e))?;
                if actual != *sha256 {
                    return Err(damaged(format!("has SHA-256 {actual}, was sealed with {sha256}")));
                }
            }
            Entry::File { .. } => {}
            Entry::Link { target } => {
                let actual = disk.read_link(&at).map_err(|e| failed(&at, e))?;
                if actual != *target {
                    return Err(damaged(format!("points to {actual:?}, was sealed with {target:?}")));
                }
            }
        }
    }
    refuse_foreign(disk, root, "", entries)
}

fn hash(disk: &dyn Disk, path: &str, buffer: &mut [u8]) -> io::Result<Digest> {
    let mut file = disk.reader(path)?;
    let mut hash = Sha256::new();
    loop {
        match file.read(buffer) {
            Ok(0) => return Ok(Digest::from(<[u8; 32]>::from(hash.finalize()))),
            Ok(n) => hash.update(&buffer[..n]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

fn refuse_foreign(
    disk: &dyn Disk,
    root: &str,
    below: &str,
    entries: &BTreeMap<String, Entry>,
) -> Result<(), SealError> {
    let dir = join(root, below);
    let names = disk.list(&dir).map_err(|source| SealError::Read { path: dir.clone(), source })?;
    for name in names {
        let path = join(below, &name);
        match entries.get(&path) {
            None => return Err(SealError::Foreign { path: join(root, &path) }),
            Some(Entry::Dir { .. }) => refuse_foreign(disk, root, &path, entries)?,
            Some(_) => {}
        }
    }
    Ok(())
}

fn join(dir: &str, name: &str) -> String {
    if dir.is_empty() || name.is_empty() { format!("{dir}{name}") } else { format!("{dir}/{name}") }
}
