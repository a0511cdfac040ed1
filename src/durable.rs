//! Durable writing: the only module that changes files.
//!
//! [`Disk`] is the seam: a directory and the few system calls that change what is below it, each named by the
//! [`Step`] that makes it. A simulated disk behind the same trait can lose, tear or refuse any of them.
//! The free functions are the operations that the rest of cutover uses; their order of calls is the guarantee:
//!
//! - data before name: write, sync the file, rename, sync the directory;
//! - every directory whose entries changed is synced, unless the caller derives the entry again at start;
//! - a failed write or sync is never tried again: after it, what is on the disk is unknown.
//!
//! [`RealDisk`] follows no symbolic link and leaves neither its directory nor its file system
//! (`openat2` with `RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV`).
#![expect(clippy::disallowed_methods, reason = "the one module that may")]

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{self as sys, AtFlags, FileType, Mode, OFlags, RenameFlags, ResolveFlags};

/// The name of a call: which operation makes it, and which part of the operation it is (`promote.rename`).
pub type Step = &'static str;

/// A directory with everything below it. Paths are relative to it and plain (no `..`, no leading `/`); the
/// directory itself is `""`.
pub trait Disk {
    /// Makes a directory with exactly these permission bits.
    fn mkdir(&self, step: Step, path: &str, mode: u32) -> io::Result<()>;
    /// Makes a file that did not exist, with exactly these permission bits.
    fn create(&self, step: Step, path: &str, mode: u32) -> io::Result<Box<dyn DiskFile>>;
    /// Opens an existing file to read and overwrite it.
    fn open(&self, path: &str) -> io::Result<Box<dyn DiskFile>>;
    /// Makes a symbolic link that did not exist.
    fn symlink(&self, step: Step, target: &str, path: &str) -> io::Result<()>;
    /// Renames, replacing what is at `to`.
    fn rename(&self, step: Step, from: &str, to: &str) -> io::Result<()>;
    /// Exchanges two names in one step.
    fn exchange(&self, step: Step, one: &str, other: &str) -> io::Result<()>;
    /// Removes a file or a symbolic link.
    fn unlink(&self, step: Step, path: &str) -> io::Result<()>;
    /// Removes an empty directory.
    fn rmdir(&self, step: Step, path: &str) -> io::Result<()>;
    /// Syncs the entries of a directory.
    fn sync_dir(&self, step: Step, path: &str) -> io::Result<()>;
    /// Syncs the whole file system; reports any write to it that failed since this disk was opened.
    fn sync_fs(&self, step: Step) -> io::Result<()>;

    /// Reads a file of at most `limit` bytes; a larger one is an error.
    fn read(&self, path: &str, limit: u64) -> io::Result<Vec<u8>>;
    /// Opens a regular file to read it in parts: for what is too large to be held in memory.
    fn reader(&self, path: &str) -> io::Result<Box<dyn io::Read>> {
        Ok(Box::new(io::Cursor::new(self.read(path, u64::MAX - 1)?)))
    }
    /// Reads where a symbolic link points.
    fn read_link(&self, path: &str) -> io::Result<String>;
    /// Describes what is at `path` without following a link.
    fn stat(&self, path: &str) -> io::Result<Stat>;
    /// The names in a directory, sorted.
    fn list(&self, path: &str) -> io::Result<Vec<String>>;
    /// An extended attribute, or `None` where there is none.
    fn xattr(&self, path: &str, name: &str) -> io::Result<Option<Vec<u8>>>;
    /// What is free on the file system.
    fn space(&self) -> io::Result<Space>;
    /// Whether what lies on it may be executed (it is not mounted `noexec`).
    fn may_execute(&self) -> bool {
        true
    }
}

/// An open file of a [`Disk`].
pub trait DiskFile {
    /// Writes all of `bytes` at `offset`.
    fn write_at(&mut self, step: Step, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Sets an extended attribute.
    fn set_xattr(&mut self, step: Step, name: &str, value: &[u8]) -> io::Result<()>;
    /// Syncs contents and attributes (`fsync`).
    fn sync(&mut self, step: Step) -> io::Result<()>;
    /// Syncs contents (`fdatasync`): for overwriting in place.
    fn sync_data(&mut self, step: Step) -> io::Result<()>;
    /// Syncs, drops what the kernel caches, and reads what the disk holds.
    fn read_uncached(&mut self, step: Step, limit: u64) -> io::Result<Vec<u8>>;
}

/// What `stat` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// What it is.
    pub kind: Kind,
    /// Permission bits, set-id bits included.
    pub mode: u32,
    /// Length in bytes.
    pub size: u64,
    /// Which file it is, whatever its path.
    pub id: FileId,
    /// The user who owns it.
    pub uid: u32,
}

/// The kinds of file that cutover tells apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Dir,
    /// A symbolic link.
    Link,
    /// A device, a socket or a pipe.
    Other,
}

/// Device and inode: the identity of a file, where paths deceive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId {
    /// The file system.
    pub dev: u64,
    /// The file on it.
    pub ino: u64,
}

/// What a file system has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Bytes.
    pub bytes: u64,
    /// Files; `u64::MAX` where the file system has no such limit.
    pub inodes: u64,
}

// ---- operations ------------------------------------------------------------------------------------------

/// Makes a directory and syncs its parent. An existing directory is left as it is, and its parent is synced.
pub fn make_dir(disk: &dyn Disk, path: &str, mode: u32) -> io::Result<()> {
    match disk.mkdir("make-dir.mkdir", path, mode) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && is_dir(disk, path) => {}
        other => other?,
    }
    disk.sync_dir("make-dir.sync", parent(path))
}

/// Replaces the file at `path` by one with these bytes: readers see the old or the new one, never a mix.
pub fn replace(disk: &dyn Disk, path: &str, bytes: &[u8], mode: u32) -> io::Result<()> {
    let new = format!("{path}.new");
    remove_if_there(disk, "replace.clear", &new)?;
    let written = disk.create("replace.create", &new, mode).and_then(|mut file| {
        file.write_at("replace.write", 0, bytes)?;
        file.sync("replace.sync-file")
    });
    if let Err(e) = written {
        // Best effort: a leftover is cleared by the next replacement.
        let _ = disk.unlink("replace.abandon", &new);
        return Err(e);
    }
    disk.rename("replace.rename", &new, path)?;
    disk.sync_dir("replace.sync-dir", parent(path))
}

/// Makes `path` a symbolic link to `target`, whatever was there, in one step. Not synced: a link is derived from
/// the journal or the receipt, and set again wherever it differs.
pub fn set_link(disk: &dyn Disk, path: &str, target: &str) -> io::Result<()> {
    let new = prepare_link(disk, path, target)?;
    disk.rename("set-link.rename", &new, path)
}

/// Makes the link that [`set_link`] would rename, so that later only the rename is left to do.
pub fn prepare_link(disk: &dyn Disk, path: &str, target: &str) -> io::Result<String> {
    let new = format!("{path}.to-{}", target.replace('/', "_"));
    match disk.symlink("set-link.symlink", target, &new) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && link_is(disk, &new, target) => {}
        other => other?,
    }
    Ok(new)
}

/// Removes a link or file, which may be gone already, and syncs its directory.
pub fn remove(disk: &dyn Disk, path: &str) -> io::Result<()> {
    remove_if_there(disk, "remove.unlink", path)?;
    disk.sync_dir("remove.sync", parent(path))
}

/// The promotion: `from` takes the place of `to` by one rename, and the rename is made durable.
pub fn promote(disk: &dyn Disk, from: &str, to: &str) -> io::Result<()> {
    disk.rename("promote.rename", from, to)?;
    disk.sync_dir("promote.sync", parent(to))
}

/// Gives a finished tree its name: everything in it is made durable first, then the name.
pub fn publish_tree(disk: &dyn Disk, staging: &str, name: &str) -> io::Result<()> {
    disk.sync_fs("publish-tree.sync-fs")?;
    if disk.stat(name).is_ok() {
        disk.exchange("publish-tree.exchange", staging, name)?;
    } else {
        disk.rename("publish-tree.rename", staging, name)?;
    }
    disk.sync_dir("publish-tree.sync-dir", parent(name))
}

/// Makes the names in a directory durable as they are found: a predecessor may have been killed between its rename
/// and its sync, and nothing may be claimed of a name that a power cut can still take back.
pub fn confirm(disk: &dyn Disk, dir: &str) -> io::Result<()> {
    disk.sync_dir("confirm.sync-dir", dir)
}

/// Removes `path` and all below it. Not synced: a leftover is swept again.
pub fn sweep(disk: &dyn Disk, path: &str) -> io::Result<()> {
    match disk.stat(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
        Ok(stat) if stat.kind != Kind::Dir => return disk.unlink("sweep.unlink", path),
        Ok(_) => {}
    }
    for name in disk.list(path)? {
        sweep(disk, &format!("{path}/{name}"))?;
    }
    disk.rmdir("sweep.rmdir", path)
}

/// Creates a file whose blocks are all written, so that overwriting it later needs no space.
pub fn create_filled(disk: &dyn Disk, path: &str, bytes: &[u8]) -> io::Result<()> {
    let new = format!("{path}.new");
    remove_if_there(disk, "create-filled.clear", &new)?;
    let mut file = disk.create("create-filled.create", &new, 0o600)?;
    file.write_at("create-filled.write", 0, bytes)?;
    file.sync("create-filled.sync-file")?;
    disk.rename("create-filled.rename", &new, path)?;
    disk.sync_dir("create-filled.sync-dir", parent(path)).inspect_err(|_| {
        // It has its name, and a power cut may take that away again: who finds it would take it for durable.
        let _ = disk.unlink("create-filled.abandon", path);
    })
}

/// Overwrites the same bytes at several places and makes them durable together by one `fdatasync`.
pub fn overwrite(file: &mut dyn DiskFile, offsets: &[u64], bytes: &[u8]) -> io::Result<()> {
    for &offset in offsets {
        file.write_at("overwrite.write", offset, bytes)?;
    }
    file.sync_data("overwrite.sync")
}

fn remove_if_there(disk: &dyn Disk, step: Step, path: &str) -> io::Result<()> {
    match disk.unlink(step, path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

fn is_dir(disk: &dyn Disk, path: &str) -> bool {
    disk.stat(path).is_ok_and(|s| s.kind == Kind::Dir)
}

fn link_is(disk: &dyn Disk, path: &str, target: &str) -> bool {
    disk.read_link(path).is_ok_and(|t| t == target)
}

/// The directory that holds `path`; `""` is the disk itself.
#[must_use]
pub fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(dir, _)| dir)
}

// ---- the real thing --------------------------------------------------------------------------------------

/// A directory of this machine.
#[derive(Debug)]
pub struct RealDisk {
    root: OwnedFd,
    path: PathBuf,
}

impl RealDisk {
    /// Opens the directory at `path`, itself not a link.
    ///
    /// # Errors
    /// As `open(2)`.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let root = sys::open(path, flags, Mode::empty())?;
        Ok(Self { root, path: path.to_owned() })
    }

    /// Where it is, for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn at(&self, path: &str, flags: OFlags, mode: u32) -> io::Result<OwnedFd> {
        let path = if path.is_empty() { "." } else { path };
        let inside = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        loop {
            match sys::openat2(&self.root, path, flags | OFlags::CLOEXEC, Mode::from(mode), inside) {
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
                other => return Ok(other?),
            }
        }
    }

    /// The directory that holds `path`, opened, and the last part of `path`.
    fn dir_of<'a>(&self, path: &'a str) -> io::Result<(OwnedFd, &'a str)> {
        let name = path.rsplit_once('/').map_or(path, |(_, name)| name);
        Ok((self.at(parent(path), OFlags::PATH | OFlags::DIRECTORY, 0)?, name))
    }
}

impl Disk for RealDisk {
    fn mkdir(&self, _: Step, path: &str, mode: u32) -> io::Result<()> {
        let (dir, name) = self.dir_of(path)?;
        sys::mkdirat(&dir, name, Mode::from(mode))?;
        // Not by the mode of mkdir alone: the umask would take bits away.
        let made = self.at(path, OFlags::RDONLY | OFlags::DIRECTORY, 0)?;
        Ok(sys::fchmod(&made, Mode::from(mode))?)
    }

    fn create(&self, _: Step, path: &str, mode: u32) -> io::Result<Box<dyn DiskFile>> {
        let fd = self.at(path, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL, mode)?;
        sys::fchmod(&fd, Mode::from(mode))?;
        Ok(Box::new(RealFile(File::from(fd))))
    }

    fn open(&self, path: &str) -> io::Result<Box<dyn DiskFile>> {
        let fd = self.at(path, OFlags::RDWR | OFlags::NOFOLLOW, 0)?;
        Ok(Box::new(RealFile(File::from(fd))))
    }

    fn symlink(&self, _: Step, target: &str, path: &str) -> io::Result<()> {
        let (dir, name) = self.dir_of(path)?;
        Ok(sys::symlinkat(target, &dir, name)?)
    }

    fn rename(&self, _: Step, from: &str, to: &str) -> io::Result<()> {
        let ((from_dir, from), (to_dir, to)) = (self.dir_of(from)?, self.dir_of(to)?);
        Ok(sys::renameat(&from_dir, from, &to_dir, to)?)
    }

    fn exchange(&self, _: Step, one: &str, other: &str) -> io::Result<()> {
        let ((one_dir, one), (other_dir, other)) = (self.dir_of(one)?, self.dir_of(other)?);
        Ok(sys::renameat_with(&one_dir, one, &other_dir, other, RenameFlags::EXCHANGE)?)
    }

    fn unlink(&self, _: Step, path: &str) -> io::Result<()> {
        let (dir, name) = self.dir_of(path)?;
        Ok(sys::unlinkat(&dir, name, AtFlags::empty())?)
    }

    fn rmdir(&self, _: Step, path: &str) -> io::Result<()> {
        let (dir, name) = self.dir_of(path)?;
        Ok(sys::unlinkat(&dir, name, AtFlags::REMOVEDIR)?)
    }

    fn sync_dir(&self, _: Step, path: &str) -> io::Result<()> {
        Ok(sys::fsync(self.at(path, OFlags::RDONLY | OFlags::DIRECTORY, 0)?)?)
    }

    fn sync_fs(&self, _: Step) -> io::Result<()> {
        Ok(sys::syncfs(&self.root)?)
    }

    fn read(&self, path: &str, limit: u64) -> io::Result<Vec<u8>> {
        let file = File::from(self.at(path, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK, 0)?);
        read_limited(&file, limit)
    }

    fn reader(&self, path: &str) -> io::Result<Box<dyn io::Read>> {
        let file = File::from(self.at(path, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK, 0)?);
        if FileType::from_raw_mode(sys::fstat(&file)?.st_mode) != FileType::RegularFile {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "is not a regular file"));
        }
        Ok(Box::new(file))
    }

    fn read_link(&self, path: &str) -> io::Result<String> {
        let (dir, name) = self.dir_of(path)?;
        let target = sys::readlinkat(&dir, name, Vec::new())?;
        target.into_string().map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "target is not UTF-8"))
    }

    fn stat(&self, path: &str) -> io::Result<Stat> {
        if path.is_empty() {
            return Ok(Stat::from(sys::fstat(&self.root)?));
        }
        let (dir, name) = self.dir_of(path)?;
        Ok(Stat::from(sys::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW)?))
    }

    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        let dir = self.at(path, OFlags::RDONLY | OFlags::DIRECTORY, 0)?;
        let mut names = Vec::new();
        for entry in sys::Dir::read_from(dir)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name != "." && name != ".." {
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn xattr(&self, path: &str, name: &str) -> io::Result<Option<Vec<u8>>> {
        let fd = self.at(path, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK, 0)?;
        let mut value = vec![0; 65536];
        match sys::fgetxattr(fd.as_fd(), name, &mut value[..]) {
            Ok(len) => {
                value.truncate(len);
                Ok(Some(value))
            }
            Err(rustix::io::Errno::NODATA | rustix::io::Errno::OPNOTSUPP) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    fn space(&self) -> io::Result<Space> {
        let fs = sys::fstatvfs(&self.root)?;
        // A file system that counts no inodes (btrfs) reports none at all.
        let inodes = if fs.f_files == 0 { u64::MAX } else { fs.f_favail };
        Ok(Space { bytes: fs.f_bavail.saturating_mul(fs.f_frsize), inodes })
    }

    fn may_execute(&self) -> bool {
        sys::fstatvfs(&self.root).is_ok_and(|fs| !fs.f_flag.contains(sys::StatVfsMountFlags::NOEXEC))
    }
}

impl From<sys::Stat> for Stat {
    fn from(s: sys::Stat) -> Self {
        let kind = match FileType::from_raw_mode(s.st_mode) {
            FileType::RegularFile => Kind::File,
            FileType::Directory => Kind::Dir,
            FileType::Symlink => Kind::Link,
            _ => Kind::Other,
        };
        let size = u64::try_from(s.st_size).unwrap_or(0);
        let id = FileId { dev: s.st_dev, ino: s.st_ino };
        Self { kind, mode: s.st_mode & 0o7777, size, id, uid: s.st_uid }
    }
}

struct RealFile(File);

/// Large files are sent to the disk in portions of this size while they are written, so that the disk works while
/// the processor hashes, and the sync at the end waits for the last portion alone.
const EARLY_WRITEBACK: u64 = 8 * 1024 * 1024;

impl DiskFile for RealFile {
    fn write_at(&mut self, _: Step, offset: u64, bytes: &[u8]) -> io::Result<()> {
        // write_all_at goes on after a short write and after EINTR.
        self.0.write_all_at(bytes, offset)?;
        let portion = (offset + bytes.len() as u64) / EARLY_WRITEBACK;
        if portion > offset / EARLY_WRITEBACK {
            // Starts writing what is dirty, and waits for nothing; only what is on the disk already would be
            // dropped from memory. A hint: if it fails, the sync writes it all.
            let start = (portion - 1) * EARLY_WRITEBACK;
            let _ = sys::fadvise(&self.0, start, NonZeroU64::new(EARLY_WRITEBACK), sys::Advice::DontNeed);
        }
        Ok(())
    }

    fn set_xattr(&mut self, _: Step, name: &str, value: &[u8]) -> io::Result<()> {
        Ok(sys::fsetxattr(&self.0, name, value, sys::XattrFlags::empty())?)
    }

    fn sync(&mut self, _: Step) -> io::Result<()> {
        self.0.sync_all()
    }

    fn sync_data(&mut self, _: Step) -> io::Result<()> {
        self.0.sync_data()
    }

    fn read_uncached(&mut self, _: Step, limit: u64) -> io::Result<Vec<u8>> {
        self.0.sync_data()?;
        sys::fadvise(&self.0, 0, None, sys::Advice::DontNeed)?;
        read_limited(&self.0, limit)
    }
}

fn read_limited(file: &File, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    io::Read::read_to_end(&mut io::Read::take(file, limit + 1), &mut bytes)?;
    if bytes.len() as u64 > limit {
        let why = format!("is larger than {limit} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk() -> (tempfile::TempDir, RealDisk) {
        let dir = tempfile::tempdir().unwrap();
        let disk = RealDisk::open(dir.path()).unwrap();
        (dir, disk)
    }

    #[test]
    fn nothing_is_followed_out_of_the_directory() {
        let (dir, disk) = disk();
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("secret"), "s").unwrap();
        std::os::unix::fs::symlink(outside.path(), dir.path().join("out")).unwrap();
        for path in ["out/secret", "../secret", "/etc/passwd", "out/../out/secret"] {
            assert!(disk.read(path, 100).is_err(), "{path}");
            assert!(disk.create("t", path, 0o600).is_err(), "{path}");
        }
        assert!(disk.open("out").is_err());
        assert!(replace(&disk, "out/new", b"x", 0o600).is_err());
        // The link itself may be replaced: it is ours, its target is not.
        set_link(&disk, "out", "elsewhere").unwrap();
        assert_eq!(disk.read_link("out").unwrap(), "elsewhere");
        assert_eq!(std::fs::read(outside.path().join("secret")).unwrap(), b"s");
    }

    #[test]
    fn replace_leaves_the_new_bytes_and_no_leftover() {
        let (_dir, disk) = disk();
        replace(&disk, "f", b"one", 0o640).unwrap();
        replace(&disk, "f", b"two", 0o600).unwrap();
        assert_eq!(disk.read("f", 3).unwrap(), b"two");
        assert_eq!(disk.stat("f").unwrap().mode, 0o600);
        assert_eq!(disk.list("").unwrap(), ["f"]);
        assert!(disk.read("f", 2).is_err(), "a larger file is an error, not a cut");
    }

    #[test]
    fn publishing_over_a_tree_keeps_the_old_one_for_the_sweep() {
        let (_dir, disk) = disk();
        for (name, content) in [("old", b"a"), ("new", b"b")] {
            make_dir(&disk, name, 0o755).unwrap();
            replace(&disk, &format!("{name}/f"), content, 0o644).unwrap();
        }
        publish_tree(&disk, "new", "old").unwrap();
        assert_eq!(disk.read("old/f", 9).unwrap(), b"b");
        sweep(&disk, "new").unwrap();
        sweep(&disk, "new").unwrap();
        assert_eq!(disk.list("").unwrap(), ["old"]);
    }
}
