//! A service's state directory: where things are, and how they are read and changed together.
//!
//! ```text
//! lock  journal  operation.json  receipts/  releases/  slots/stable  slots/experiment  current  run/  quarantine.json
//! ```
//!
//! Reading changes nothing. Every change goes through [`crate::durable`].

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::durable::{self, Disk, Kind};
use crate::journal::Journal;
use crate::operation::{OperationId, Outcome};
use crate::receipt::{Receipt, ReceiptError};
use crate::recovery::{Aim, Links};
use crate::release::{Digest, Manifest, Release, Version};
use crate::seal::{self, SealError};

/// Where the state directories of all services are.
pub const STATE: &str = "/var/lib/cutover";
/// Where the adapters are.
pub const ADAPTERS: &str = "/etc/cutover/services";
/// How many receipts are kept, the latest apart.
pub const RECEIPTS_KEPT: usize = 10_000;
/// How many receipts beyond that are removed together.
const RECEIPTS_AT_ONCE: usize = 500;
/// How many quarantined digests and past versions are remembered; the oldest fall out.
const REMEMBERED: usize = 1000;
/// The largest receipt that is read: its parts are bounded by the journal's block size.
const RECEIPT_MAX: u64 = 64 * 1024;

const CURRENT: &str = "current";
const STABLE: &str = "slots/stable";
const EXPERIMENT: &str = "slots/experiment";
const LATEST: &str = "operation.json";
const QUARANTINE: &str = "quarantine.json";
const PAST: &str = "past.json";
const STAGED: &str = "staged.json";

/// A slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// The version to fall back to.
    Stable,
    /// The candidate, while an operation is open.
    Experiment,
}

impl Slot {
    fn path(self) -> &'static str {
        match self {
            Self::Stable => STABLE,
            Self::Experiment => EXPERIMENT,
        }
    }
}

/// The state directory of one service.
pub struct Store<'a> {
    disk: &'a dyn Disk,
    root: PathBuf,
    service: String,
}

/// A file of the state directory that cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The disk's own error.
    #[error("{path}: {source}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A receipt that was changed or is of another format.
    #[error("{path} {source}")]
    Receipt {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: ReceiptError,
    },
}

/// A digest that failed its probe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Quarantined {
    /// The release.
    pub digest: Digest,
    /// Its artifact, so that it is recognised before it is unpacked.
    pub artifact_sha256: Option<Digest>,
    /// What it called itself.
    pub version: Version,
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// Which operation found it.
    pub operation: OperationId,
    /// Why.
    pub reason: String,
}

impl<'a> Store<'a> {
    /// The state directory of `service`: `disk` is that directory, and `root` is its absolute path.
    #[must_use]
    pub fn new(disk: &'a dyn Disk, root: &Path, service: &str) -> Self {
        Self { disk, root: root.to_owned(), service: service.to_owned() }
    }

    /// The disk below it.
    #[must_use]
    pub fn disk(&self) -> &'a dyn Disk {
        self.disk
    }

    /// The service's name.
    #[must_use]
    pub fn service(&self) -> &str {
        &self.service
    }

    /// The absolute path of `path`, for messages and for other processes.
    #[must_use]
    pub fn absolute(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// Puts the path into an error.
    pub fn at<T>(&self, path: &str, result: io::Result<T>) -> Result<T, StoreError> {
        result.map_err(|source| StoreError::Io { path: self.absolute(path), source })
    }

    /// Makes what a first operation finds missing. Existing files are left as they are.
    ///
    /// # Errors
    /// The disk's.
    pub fn lay_out(&self) -> Result<(), StoreError> {
        // Whoever may open `run` may lock it, and keep everybody from launching a worker.
        for (dir, mode) in [("releases", 0o755), ("slots", 0o755), ("receipts", 0o755), ("run", 0o700)] {
            if !self.disk.stat(dir).is_ok_and(|s| s.kind == Kind::Dir) {
                self.at(dir, durable::make_dir(self.disk, dir, mode))?;
            }
        }
        if !self.has_history() {
            match self.disk.stat(crate::journal::FILE) {
                Err(_) => self.at(crate::journal::FILE, Journal::create(self.disk))?,
                // Whoever made it may have been killed before its name was durable.
                Ok(_) => self.at("", durable::confirm(self.disk, ""))?,
            }
        }
        Ok(())
    }

    /// Whether receipts or slots exist: a journal must have existed then, too.
    #[must_use]
    pub fn has_history(&self) -> bool {
        let any = |dir| self.disk.list(dir).is_ok_and(|names| !names.is_empty());
        self.disk.stat(LATEST).is_ok() || any("receipts") || any("slots")
    }

    // ---- links ----

    /// The release directory that a slot names; none where the slot is empty or points elsewhere.
    #[must_use]
    pub fn slot(&self, slot: Slot) -> Option<String> {
        let target = self.disk.read_link(slot.path()).ok()?;
        target.strip_prefix("../releases/").filter(|n| is_name(n)).map(str::to_owned)
    }

    /// The release directory that `current` goes into.
    #[must_use]
    pub fn current(&self) -> Option<String> {
        let target = self.disk.read_link(CURRENT).ok()?;
        target.strip_prefix("releases/")?.strip_suffix("/tree").filter(|n| is_name(n)).map(str::to_owned)
    }

    /// Makes the link now that [`Store::set_current`] will rename, so that switching needs no space.
    ///
    /// # Errors
    /// The disk's.
    pub fn prepare_current(&self, release: &Release) -> Result<(), StoreError> {
        let target = format!("releases/{}/tree", release.dir_name());
        self.at(CURRENT, durable::prepare_link(self.disk, CURRENT, &target).map(drop))
    }

    /// Points `current` at a release. Not synced: see [`durable::set_link`].
    ///
    /// # Errors
    /// The disk's.
    pub fn set_current(&self, release: &Release) -> Result<(), StoreError> {
        self.set_current_dir(&release.dir_name())
    }

    fn set_current_dir(&self, dir: &str) -> Result<(), StoreError> {
        if self.current().as_deref() == Some(dir) {
            return Ok(());
        }
        self.at(CURRENT, durable::set_link(self.disk, CURRENT, &format!("releases/{dir}/tree")))
    }

    /// Makes `current` durable as it is.
    ///
    /// # Errors
    /// The disk's.
    pub fn sync_current(&self) -> Result<(), StoreError> {
        self.at("", self.disk.sync_dir("current.sync", ""))
    }

    /// Points a slot at a release, durably.
    ///
    /// # Errors
    /// The disk's.
    pub fn set_slot(&self, slot: Slot, release: &Release) -> Result<(), StoreError> {
        let target = format!("../releases/{}", release.dir_name());
        self.at(slot.path(), durable::set_link(self.disk, slot.path(), &target))?;
        self.at("slots", self.disk.sync_dir("slot.sync", "slots"))
    }

    /// Empties the experiment slot, durably.
    ///
    /// # Errors
    /// The disk's.
    pub fn drop_experiment(&self) -> Result<(), StoreError> {
        if self.disk.stat(EXPERIMENT).is_err() {
            return Ok(());
        }
        self.at(EXPERIMENT, durable::remove(self.disk, EXPERIMENT))
    }

    /// Makes `target` the stable release: the experiment slot takes the place of the stable one by one rename. Where
    /// that has happened already, it is made durable again.
    ///
    /// # Errors
    /// The disk's.
    pub fn promote(&self, target: &Release) -> Result<(), StoreError> {
        let name = target.dir_name();
        if self.slot(Slot::Experiment).as_ref() == Some(&name) {
            return self.at(STABLE, durable::promote(self.disk, EXPERIMENT, STABLE));
        }
        self.set_slot(Slot::Stable, target)
    }

    /// Puts the links where a decision says they belong. What is there already is left alone.
    ///
    /// # Errors
    /// The disk's.
    pub fn aim(&self, links: &Links) -> Result<(), StoreError> {
        match &links.stable {
            Aim::At(release) if self.slot(Slot::Stable).as_deref() != Some(&release.dir_name()) => {
                self.set_slot(Slot::Stable, release)?;
            }
            Aim::Absent if self.disk.stat(STABLE).is_ok() => {
                self.at(STABLE, durable::remove(self.disk, STABLE))?;
            }
            _ => {}
        }
        match &links.current {
            Aim::At(release) => self.aim_current(&release.dir_name()),
            Aim::AtDir(dir) => self.aim_current(dir),
            Aim::Absent if self.disk.stat(CURRENT).is_ok() => {
                self.at(CURRENT, durable::remove(self.disk, CURRENT))
            }
            Aim::Absent | Aim::Keep => Ok(()),
        }
    }

    fn aim_current(&self, dir: &str) -> Result<(), StoreError> {
        if self.current().as_deref() == Some(dir) {
            return Ok(());
        }
        self.set_current_dir(dir)?;
        self.sync_current()
    }

    // ---- releases ----

    /// The manifest in a release directory, if it is that release's seal.
    ///
    /// # Errors
    /// Why it is none.
    pub fn manifest(&self, dir: &str) -> Result<Manifest, SealError> {
        seal::read_manifest(self.disk, &format!("{}/{dir}", seal::RELEASES))
    }

    /// The absolute path of a release's tree.
    #[must_use]
    pub fn tree(&self, release: &Release) -> PathBuf {
        self.absolute(&format!("releases/{}/tree", release.dir_name()))
    }

    // ---- receipts ----

    fn receipt_path(id: &OperationId) -> String {
        format!("receipts/{}.json", id.hash())
    }

    fn read_receipt(&self, path: &str) -> Result<Option<Receipt>, StoreError> {
        match self.disk.read(path, RECEIPT_MAX) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(StoreError::Io { path: self.absolute(path), source }),
            Ok(bytes) => Receipt::parse(&bytes)
                .map(Some)
                .map_err(|source| StoreError::Receipt { path: self.absolute(path), source }),
        }
    }

    /// The receipt of the latest operation.
    ///
    /// # Errors
    /// Where it exists and cannot be read.
    pub fn latest(&self) -> Result<Option<Receipt>, StoreError> {
        self.read_receipt(LATEST)
    }

    /// The receipt of an operation, latest or archived.
    ///
    /// # Errors
    /// Where it exists and cannot be read.
    pub fn receipt(&self, id: &OperationId) -> Result<Option<Receipt>, StoreError> {
        match self.latest() {
            Ok(Some(latest)) if latest.id == *id => return Ok(Some(latest)),
            _ => {}
        }
        Ok(self.read_receipt(&Self::receipt_path(id))?.filter(|r| r.id == *id))
    }

    /// The receipt of an operation that says how it ended. Without one, the operation is open.
    #[must_use]
    pub fn ended(&self, id: &OperationId) -> Option<Receipt> {
        self.receipt(id).ok().flatten().filter(|r| r.outcome.is_some())
    }

    /// Every receipt that can be read, newest first.
    ///
    /// # Errors
    /// The disk's, for the directory.
    pub fn receipts(&self) -> Result<Vec<Receipt>, StoreError> {
        let mut found: Vec<Receipt> = self.latest().ok().flatten().into_iter().collect();
        let names = match self.disk.list("receipts") {
            Err(e) if e.kind() == io::ErrorKind::NotFound => vec![],
            other => self.at("receipts", other)?,
        };
        for name in names {
            if let Ok(Some(receipt)) = self.read_receipt(&format!("receipts/{name}"))
                && found.first().is_none_or(|latest| latest.id != receipt.id)
            {
                found.push(receipt);
            }
        }
        found.sort_by_key(|r| std::cmp::Reverse((r.updated_at_ms, r.started_at_ms)));
        Ok(found)
    }

    /// Makes `receipt` the latest one. The one that was is archived first; run again, it changes nothing more.
    ///
    /// # Errors
    /// The disk's. An `operation.json` that cannot be read is set aside.
    pub fn record(&self, receipt: &Receipt) -> Result<(), StoreError> {
        match self.latest() {
            Ok(Some(latest)) if latest.id == receipt.id => {}
            Ok(Some(latest)) => {
                // A held answer that repeats an earlier one leaves no further file.
                let repeats = latest.outcome == Some(Outcome::Held)
                    && receipt.outcome == Some(Outcome::Held)
                    && latest.target_version == receipt.target_version
                    && latest.reason == receipt.reason;
                if !repeats {
                    let path = Self::receipt_path(&latest.id);
                    self.at(&path, durable::replace(self.disk, &path, &latest.to_bytes(), 0o644))?;
                }
            }
            Ok(None) => {}
            Err(_) => {
                let aside = format!("receipts/unreadable-{}.json", receipt.started_at_ms);
                self.at(LATEST, self.disk.rename("record.set-aside", LATEST, &aside))?;
                self.at("receipts", self.disk.sync_dir("record.set-aside-sync", "receipts"))?;
            }
        }
        self.at(LATEST, durable::replace(self.disk, LATEST, &receipt.to_bytes(), 0o644))
    }

    // ---- quarantine, and what was stable before ----

    fn read_list<T: for<'de> Deserialize<'de>>(&self, path: &str) -> Vec<T> {
        // Neither may veto an operation: what cannot be read counts as empty.
        let bytes = self.disk.read(path, 1 << 20).unwrap_or_default();
        serde_json::from_slice(&bytes).unwrap_or_default()
    }

    fn write_list<T: Serialize>(&self, path: &str, list: &[T]) -> Result<(), StoreError> {
        let newest = &list[list.len().saturating_sub(REMEMBERED)..];
        let mut bytes = serde_json::to_vec_pretty(newest).expect("plain data");
        bytes.push(b'\n');
        self.at(path, durable::replace(self.disk, path, &bytes, 0o644))
    }

    /// The digests that failed their probe.
    #[must_use]
    pub fn quarantine(&self) -> Vec<Quarantined> {
        self.read_list(QUARANTINE)
    }

    /// Adds a digest; run again, it changes nothing more.
    ///
    /// # Errors
    /// The disk's.
    pub fn add_to_quarantine(&self, entry: &Quarantined) -> Result<(), StoreError> {
        // Written again where it is there already: it may be there only because a sync failed and was not believed.
        let mut list = self.quarantine();
        list.retain(|q| q.digest != entry.digest);
        list.push(entry.clone());
        self.write_list(QUARANTINE, &list)
    }

    /// Takes a digest out: it has passed after all.
    ///
    /// # Errors
    /// The disk's.
    pub fn clear_quarantine(&self, digest: &Digest) -> Result<(), StoreError> {
        let mut list = self.quarantine();
        let before = list.len();
        list.retain(|q| q.digest != *digest);
        if list.len() == before { Ok(()) } else { self.write_list(QUARANTINE, &list) }
    }

    /// Releases that were stable before the one that is, oldest first: how an older target is known where versions
    /// cannot be compared.
    #[must_use]
    pub fn past(&self) -> Vec<Release> {
        self.read_list(PAST)
    }

    /// Remembers that `gone` was stable and that `now` is; run again, it changes nothing more.
    ///
    /// # Errors
    /// The disk's.
    pub fn remember(&self, gone: &Release, now: &Release) -> Result<(), StoreError> {
        let before = self.past();
        let mut list: Vec<Release> = before.iter().filter(|r| *r != gone && *r != now).cloned().collect();
        list.push(gone.clone());
        if list == before { Ok(()) } else { self.write_list(PAST, &list) }
    }

    /// Releases that were staged by hand and wait for their upgrade: no clean-up takes them.
    #[must_use]
    pub fn staged(&self) -> Vec<Release> {
        self.read_list(STAGED)
    }

    /// Remembers that a release was staged by hand, or forgets it.
    ///
    /// # Errors
    /// The disk's.
    pub fn set_staged(&self, release: &Release, staged: bool) -> Result<(), StoreError> {
        let mut list = self.staged();
        if list.contains(release) == staged {
            return Ok(());
        }
        list.retain(|r| r != release);
        if staged {
            list.push(release.clone());
        }
        self.write_list(STAGED, &list)
    }

    // ---- clean-up ----

    /// Removes what no longer serves: releases that are not in `keep`, unsealed leftovers, prepared links and files that
    /// were not used, and receipts beyond [`RECEIPTS_KEPT`]. Errors are not errors: what is left is tried again next time.
    pub fn clean_up(&self, keep: &dyn Fn(&str) -> bool) {
        for name in self.disk.list("releases").unwrap_or_default() {
            let linked = [self.slot(Slot::Stable), self.slot(Slot::Experiment), self.current()];
            if !keep(&name) && !linked.contains(&Some(name.clone())) {
                let _ = self.retire(&name);
            }
        }
        for dir in ["", "slots", "receipts"] {
            for name in self.disk.list(dir).unwrap_or_default() {
                if name.contains(".to-") || name.ends_with(".new") {
                    let _ = durable::sweep(self.disk, format!("{dir}/{name}").trim_start_matches('/'));
                }
            }
        }
        let receipts = self.disk.list("receipts").unwrap_or_default();
        // Not one by one: reading them all for each new one would make an operation dearer the more there were.
        if receipts.len() > RECEIPTS_KEPT + RECEIPTS_AT_ONCE {
            let mut by_age = self.receipts().unwrap_or_default();
            for old in by_age.drain(..).skip(RECEIPTS_KEPT + 1) {
                let _ = durable::sweep(self.disk, &Self::receipt_path(&old.id));
            }
        }
    }

    /// Removes a release, its seal first, so that what a crash leaves is no release.
    fn retire(&self, name: &str) -> io::Result<()> {
        let seal = format!("releases/{name}/manifest.json");
        if self.disk.stat(&seal).is_ok() {
            durable::remove(self.disk, &seal)?;
        }
        durable::sweep(self.disk, &format!("releases/{name}"))
    }
}

/// Whether a link's target is the plain name of a directory beside the others.
fn is_name(name: &str) -> bool {
    !name.is_empty() && !name.contains('/') && !name.starts_with('.')
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "damage is done behind the disk's back")]
mod tests {
    use super::*;
    use crate::durable::RealDisk;
    use crate::receipt::tests::receipt;

    fn release(v: &str) -> Release {
        Release { version: v.parse().unwrap(), digest: Digest::of(v.as_bytes()) }
    }

    fn with_store(test: impl FnOnce(&Store, &Path)) {
        let dir = tempfile::tempdir().unwrap();
        let disk = RealDisk::open(dir.path()).unwrap();
        let store = Store::new(&disk, dir.path(), "demo");
        store.lay_out().unwrap();
        test(&store, dir.path());
    }

    #[test]
    fn promotion_run_again_stays_promoted_where_a_toggle_would_undo_it() {
        with_store(|store, _| {
            store.set_slot(Slot::Stable, &release("1")).unwrap();
            store.set_slot(Slot::Experiment, &release("2")).unwrap();
            for _ in 0..3 {
                store.promote(&release("2")).unwrap();
                assert_eq!(store.slot(Slot::Stable), Some(release("2").dir_name()));
                assert_eq!(store.slot(Slot::Experiment), None);
            }
        });
    }

    #[test]
    fn links_that_lead_elsewhere_name_no_release() {
        with_store(|store, dir| {
            for target in ["/etc", "../../etc", "../releases/../..", "../releases/a/b", "../releases/"] {
                let _ = std::fs::remove_file(dir.join("slots/stable"));
                std::os::unix::fs::symlink(target, dir.join("slots/stable")).unwrap();
                assert_eq!(store.slot(Slot::Stable), None, "{target}");
            }
        });
    }

    #[test]
    fn a_receipt_is_archived_before_the_next_takes_its_place() {
        // K56, and I4: one receipt an operation, also when recording is repeated.
        with_store(|store, _| {
            let first = receipt();
            let second = Receipt { id: "second".parse().unwrap(), ..receipt() };
            for r in [&first, &first, &second, &second] {
                store.record(r).unwrap();
            }
            assert_eq!(store.latest().unwrap().unwrap(), second);
            assert_eq!(store.receipt(&first.id).unwrap().unwrap(), first);
            assert_eq!(store.disk().list("receipts").unwrap().len(), 1);
            assert_eq!(store.receipts().unwrap().len(), 2);
        });
    }

    #[test]
    fn a_latest_receipt_that_cannot_be_read_is_set_aside_not_lost() {
        with_store(|store, dir| {
            std::fs::write(dir.join("operation.json"), "junk").unwrap();
            store.record(&receipt()).unwrap();
            assert_eq!(store.latest().unwrap().unwrap(), receipt());
            let kept = store.disk().list("receipts").unwrap();
            assert_eq!(std::fs::read(dir.join("receipts").join(&kept[0])).unwrap(), b"junk");
        });
    }

    #[test]
    fn clean_up_never_takes_what_a_link_names() {
        // A09: by construction, whatever the caller's keep-set forgets.
        with_store(|store, dir| {
            for v in ["1", "2", "3", "4"] {
                std::fs::create_dir_all(dir.join("releases").join(release(v).dir_name()).join("tree"))
                    .unwrap();
            }
            store.set_slot(Slot::Stable, &release("1")).unwrap();
            store.set_slot(Slot::Experiment, &release("2")).unwrap();
            store.set_current(&release("3")).unwrap();
            store.clean_up(&|_| false);
            let left = store.disk().list("releases").unwrap();
            assert_eq!(left, [release("1"), release("2"), release("3")].map(|r| r.dir_name()));
        });
    }
}
