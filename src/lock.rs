//! The lock of a service: `flock` on a file that is never removed and holds nothing. It dies with its holder.

use std::fs::File;
use std::fs::TryLockError;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::durable::{Disk, FileId};
use crate::store::Store;

/// The lock's name in the state directory.
pub const FILE: &str = "lock";

/// A lock that is held until it is dropped.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock of a service; none where somebody else holds it.
    ///
    /// # Errors
    /// The disk's; also where the file at the path is another one than the one locked: the state directory was exchanged.
    pub fn take(store: &Store) -> io::Result<Option<Self>> {
        match store.disk().create("lock.create", FILE, 0o600) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
        let there = store.disk().stat(FILE)?.id;
        Self::of(&store.absolute(FILE), Some(there))
    }

    /// Takes the lock of another service, whose state directory is at `dir`. A service that has none has no operation.
    ///
    /// # Errors
    /// As [`Lock::take`].
    pub fn take_other(dir: &Path) -> io::Result<Option<Option<Self>>> {
        let path: PathBuf = dir.join(FILE);
        match Self::of(&path, None) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            other => other.map(Some),
        }
    }

    fn of(path: &Path, expected: Option<FileId>) -> io::Result<Option<Self>> {
        let file = File::open(path)?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(e)) => return Err(e),
            Ok(()) => {}
        }
        let meta = file.metadata()?;
        let locked = FileId { dev: meta.dev(), ino: meta.ino() };
        if expected.is_some_and(|there| there != locked) {
            return Err(io::Error::other("the lock was exchanged while it was taken; try again"));
        }
        Ok(Some(Self { _file: file }))
    }

    /// Whether somebody holds the lock of this service now.
    #[must_use]
    pub fn is_held(disk: &dyn Disk, dir: &Path) -> bool {
        disk.stat(FILE).is_ok() && matches!(Self::take_other(dir), Ok(Some(None)))
    }
}
