//! The tree of a release while it is built: what an archive or an adopted program may put into it.
//!
//! Every rule is checked before the call that would break it, so that a hostile archive writes nothing but
//! acceptable entries, and those below its own root alone:
//!
//! - names are relative, without `..`, UTF-8 without control characters, and no name comes twice;
//! - nothing is put through a symbolic link or below a file;
//! - a link's target is relative and stays inside the tree, letter by letter when it is made, and followed through
//!   all other links when the tree is complete;
//! - no set-id or sticky bits, no more bytes, entries or depth than the adapter's limits.
//!
//! Files and directories belong to the user that cutover runs as, root. Of their permission bits only `0755`
//! remain: nobody but root may change a release. A directory that is not listed has 0755, and root's own bits on a
//! directory are always set, so that the tree can be swept without special rights.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, BufRead};

use sha2::{Digest as _, Sha256};

use crate::adapter::Limits;
use crate::durable::{Disk, Kind, Space};
use crate::release::{Digest, Entry};

/// The extended attributes that a program keeps from its predecessor: what the file may do, and its SELinux label.
/// They belong to the machine and not to the release, so the digest does not cover them.
pub const CARRIED: [&str; 2] = ["security.capability", "security.selinux"];

/// The permission bits that remain.
const MODE_MASK: u32 = 0o755;
/// Root's own bits on a directory.
const DIR_OWNER: u32 = 0o700;
/// Set-user-id, set-group-id, sticky.
pub(crate) const SPECIAL_BITS: u32 = 0o7000;
/// More links in a row than the kernel follows (40, `MAXSYMLINKS`): such a path leads nowhere.
const LINKS_MAX: u32 = 41;

/// Why an entry is refused or cannot be written. The text fits after the name of the archive.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// A name that could leave the tree or deceive a reader.
    #[error("the name {name:?} {why}")]
    Name {
        /// The name, as far as it is text.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A name that was there before.
    #[error("{path:?} comes twice")]
    Twice {
        /// The name, without the leading directories that fall away.
        path: String,
    },
    /// A name below something that is no directory.
    #[error("{path:?} would go through {through:?}, which is not a directory")]
    Through {
        /// The name.
        path: String,
        /// The link or file.
        through: String,
    },
    /// A symbolic link to somewhere else.
    #[error("the link {path:?} points out of the release: {target:?}")]
    Escapes {
        /// The link.
        path: String,
        /// Where it points.
        target: String,
    },
    /// Something that is no file, directory or symbolic link.
    #[error("{path:?} is {kind}")]
    Kind {
        /// The entry.
        path: String,
        /// What it is, and what to do instead.
        kind: &'static str,
    },
    /// Set-id or sticky bits.
    #[error("{path:?} has mode {mode:04o}: set-id and sticky bits are refused")]
    SpecialBits {
        /// The entry.
        path: String,
        /// Its mode.
        mode: u32,
    },
    /// More than the adapter allows.
    #[error("{path:?} exceeds limits.{limit} = {most} of the adapter; raise it if the archive is right")]
    Limit {
        /// The entry.
        path: String,
        /// The adapter's key.
        limit: &'static str,
        /// Its value.
        most: u64,
    },
    /// A file that would lose its whole name.
    #[error("source.strip = {strip} of the adapter would drop {name:?}; correct it")]
    Stripped {
        /// The entry.
        name: String,
        /// The adapter's value.
        strip: u32,
    },
    /// A directory whose own entry comes after what it holds.
    #[error("the directory {path:?} has mode {mode:04o}, but is listed after what it holds; list it first")]
    LateDirectory {
        /// The directory.
        path: String,
        /// The mode listed.
        mode: u32,
    },
    /// Fewer bytes than the entry should have.
    #[error("{path:?} ends {missing} bytes too early")]
    Short {
        /// The entry.
        path: String,
        /// How much is missing.
        missing: u64,
    },
    /// There is nothing in it.
    #[error("holds no file")]
    Empty,
    /// The bytes cannot be read.
    #[error("cannot be read: {0}")]
    Read(io::Error),
    /// The release cannot be written.
    #[error("{path} cannot be written: {source}")]
    Write {
        /// The path in the state directory.
        path: String,
        /// The cause.
        source: io::Error,
    },
}

/// Extended attributes for one file.
pub type Attributes = Vec<(&'static str, Vec<u8>)>;

/// A tree that is being built.
pub struct Tree<'a> {
    disk: &'a dyn Disk,
    root: String,
    limits: Limits,
    strip: u32,
    predecessor: Option<String>,
    entries: BTreeMap<String, Entry>,
    /// Directories that were made because something is in them.
    implied: BTreeSet<String>,
    bytes: u64,
}

impl<'a> Tree<'a> {
    /// Begins a tree in `root`, an empty directory of `disk`. `strip` leading directories of all names fall away.
    #[must_use]
    pub fn new(disk: &'a dyn Disk, root: &str, limits: Limits, strip: u32) -> Self {
        Self {
            disk,
            root: root.to_owned(),
            limits,
            strip,
            predecessor: None,
            entries: BTreeMap::new(),
            implied: BTreeSet::new(),
            bytes: 0,
        }
    }

    /// Files get the [`CARRIED`] attributes of the file at the same path below `tree`, a directory of the disk.
    #[must_use]
    pub fn carrying_from(mut self, tree: Option<String>) -> Self {
        self.predecessor = tree;
        self
    }

    /// The limits it keeps to.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// What it has needed so far, the entry included that could not be written.
    #[must_use]
    pub fn payload(&self) -> Space {
        Space { bytes: self.bytes, inodes: self.entries.len() as u64 + 1 }
    }

    /// Adds a directory.
    ///
    /// # Errors
    /// [`TreeError`].
    pub fn dir(&mut self, name: &[u8], mode: u32) -> Result<(), TreeError> {
        let Some(path) = self.place(name)? else { return Ok(()) };
        refuse_special_bits(&path, mode)?;
        let kept = mode & MODE_MASK | DIR_OWNER;
        if self.implied.remove(&path) {
            if self.entries.get(&path) == Some(&Entry::Dir { mode: kept }) {
                return Ok(());
            }
            return Err(TreeError::LateDirectory { path, mode });
        }
        self.make_room(&path)?;
        self.make_dir(path, kept)
    }

    /// Adds a symbolic link.
    ///
    /// # Errors
    /// [`TreeError`].
    pub fn link(&mut self, name: &[u8], target: &[u8]) -> Result<(), TreeError> {
        let path = self.place_named(name)?;
        let target = text(target)?;
        if !stays_inside(&path, target) {
            return Err(TreeError::Escapes { path, target: target.to_owned() });
        }
        self.make_room(&path)?;
        let at = self.at(&path);
        self.disk.symlink("unpack.symlink", target, &at).map_err(|source| write_error(&at, source))?;
        self.entries.insert(path, Entry::Link { target: target.to_owned() });
        Ok(())
    }

    /// Adds a file of `size` bytes, which are read from `data`, with `attributes` beside the predecessor's.
    ///
    /// # Errors
    /// [`TreeError`].
    pub fn file(
        &mut self,
        name: &[u8],
        mode: u32,
        size: u64,
        data: &mut dyn BufRead,
        attributes: &Attributes,
    ) -> Result<(), TreeError> {
        let path = self.place_named(name)?;
        refuse_special_bits(&path, mode)?;
        let mode = mode & MODE_MASK;
        match self.bytes.checked_add(size) {
            Some(sum) if sum <= self.limits.bytes => self.bytes = sum,
            _ => return Err(TreeError::Limit { path, limit: "bytes", most: self.limits.bytes }),
        }
        self.make_room(&path)?;
        let at = self.at(&path);
        let mut file =
            self.disk.create("unpack.create", &at, mode).map_err(|source| write_error(&at, source))?;
        let mut hash = Sha256::new();
        let mut offset = 0;
        while offset < size {
            let chunk = data.fill_buf().map_err(TreeError::Read)?;
            let n = chunk.len().min(usize::try_from(size - offset).unwrap_or(usize::MAX));
            if n == 0 {
                return Err(TreeError::Short { path, missing: size - offset });
            }
            file.write_at("unpack.write", offset, &chunk[..n]).map_err(|source| write_error(&at, source))?;
            hash.update(&chunk[..n]);
            data.consume(n);
            offset += n as u64;
        }
        // Attributes last: the kernel takes a file's capabilities away at each write.
        for (name, value) in self.inherited(&path)?.iter().chain(attributes) {
            file.set_xattr("unpack.set-xattr", name, value).map_err(|source| write_error(&at, source))?;
        }
        let sha256 = Digest::from(<[u8; 32]>::from(hash.finalize()));
        self.entries.insert(path, Entry::File { mode, size, sha256 });
        crate::failpoint::hit("unpacked-file");
        Ok(())
    }

    /// Checks what only the complete tree can tell, and returns its entries.
    ///
    /// # Errors
    /// [`TreeError::Escapes`], [`TreeError::Empty`].
    pub fn finish(self) -> Result<BTreeMap<String, Entry>, TreeError> {
        for (path, entry) in &self.entries {
            if let Entry::Link { target } = entry
                && !resolves_inside(&self.entries, path, target)
            {
                return Err(TreeError::Escapes { path: path.clone(), target: target.clone() });
            }
        }
        if !self.entries.values().any(|e| matches!(e, Entry::File { .. })) {
            return Err(TreeError::Empty);
        }
        Ok(self.entries)
    }

    fn at(&self, path: &str) -> String {
        format!("{}/{path}", self.root)
    }

    /// The path of `name` in the tree: normal, without its leading directories. `None` if nothing is left.
    fn place(&self, name: &[u8]) -> Result<Option<String>, TreeError> {
        let name = text(name)?;
        let refuse = |why| Err(TreeError::Name { name: name.to_owned(), why });
        if name.starts_with('/') {
            return refuse("is absolute");
        }
        let parts: Vec<&str> = name.split('/').filter(|part| !matches!(*part, "" | ".")).collect();
        if parts.contains(&"..") {
            return refuse("has a part `..`");
        }
        let strip = usize::try_from(self.strip).unwrap_or(usize::MAX);
        Ok(parts.get(strip..).filter(|rest| !rest.is_empty()).map(|rest| rest.join("/")))
    }

    fn place_named(&self, name: &[u8]) -> Result<String, TreeError> {
        self.place(name)?.ok_or_else(|| TreeError::Stripped {
            name: String::from_utf8_lossy(name).into_owned(),
            strip: self.strip,
        })
    }

    /// Refuses `path` if it is taken or too deep, and makes the directories above it.
    fn make_room(&mut self, path: &str) -> Result<(), TreeError> {
        if self.entries.contains_key(path) {
            return Err(TreeError::Twice { path: path.to_owned() });
        }
        let above: Vec<&str> = path.match_indices('/').map(|(at, _)| &path[..at]).collect();
        if above.len() as u64 > u64::from(self.limits.depth) {
            let most = u64::from(self.limits.depth);
            return Err(TreeError::Limit { path: path.to_owned(), limit: "depth", most });
        }
        for dir in above {
            match self.entries.get(dir) {
                Some(Entry::Dir { .. }) => {}
                Some(_) => {
                    return Err(TreeError::Through { path: path.to_owned(), through: dir.to_owned() });
                }
                None => {
                    self.make_dir(dir.to_owned(), MODE_MASK)?;
                    self.implied.insert(dir.to_owned());
                }
            }
        }
        self.count(path)
    }

    fn count(&self, path: &str) -> Result<(), TreeError> {
        if self.entries.len() as u64 >= self.limits.files {
            return Err(TreeError::Limit { path: path.to_owned(), limit: "files", most: self.limits.files });
        }
        Ok(())
    }

    fn make_dir(&mut self, path: String, mode: u32) -> Result<(), TreeError> {
        self.count(&path)?;
        let at = self.at(&path);
        self.disk.mkdir("unpack.mkdir", &at, mode).map_err(|source| write_error(&at, source))?;
        self.entries.insert(path, Entry::Dir { mode });
        Ok(())
    }

    fn inherited(&self, path: &str) -> Result<Attributes, TreeError> {
        let Some(tree) = &self.predecessor else { return Ok(Vec::new()) };
        let old = format!("{tree}/{path}");
        let failed = |source| write_error(&old, source);
        match self.disk.stat(&old) {
            Ok(stat) if stat.kind == Kind::File => {}
            Ok(_) => return Ok(Vec::new()),
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(Vec::new());
            }
            // A link on the way, where the new release has a directory.
            Err(e) if e.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
                return Ok(Vec::new());
            }
            Err(e) => return Err(failed(e)),
        }
        let mut found = Vec::new();
        for name in CARRIED {
            found.extend(self.disk.xattr(&old, name).map_err(failed)?.map(|value| (name, value)));
        }
        Ok(found)
    }
}

fn write_error(path: &str, source: io::Error) -> TreeError {
    TreeError::Write { path: path.to_owned(), source }
}

fn refuse_special_bits(path: &str, mode: u32) -> Result<(), TreeError> {
    if mode & SPECIAL_BITS == 0 {
        return Ok(());
    }
    Err(TreeError::SpecialBits { path: path.to_owned(), mode: mode & 0o7777 })
}

fn text(name: &[u8]) -> Result<&str, TreeError> {
    let refuse =
        |why| Err(TreeError::Name { name: String::from_utf8_lossy(name).chars().take(200).collect(), why });
    match std::str::from_utf8(name) {
        Err(_) => refuse("is not UTF-8"),
        Ok(name) if name.contains(|c: char| c.is_control()) => refuse("has control characters"),
        Ok(name) => Ok(name),
    }
}

/// Whether a link at `path` with this target stays in the tree if no part of the target is a link itself.
#[must_use]
pub fn stays_inside(path: &str, target: &str) -> bool {
    if target.is_empty() || target.starts_with('/') {
        return false;
    }
    let mut depth = path.matches('/').count();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => match depth.checked_sub(1) {
                Some(up) => depth = up,
                None => return false,
            },
            _ => depth += 1,
        }
    }
    true
}

/// Whether following the link at `path`, and all links on the way, stays in the tree.
fn resolves_inside(entries: &BTreeMap<String, Entry>, path: &str, target: &str) -> bool {
    let mut here: Vec<&str> = path.split('/').collect();
    here.pop();
    let mut todo: Vec<&str> = target.split('/').rev().collect();
    let mut followed = 1;
    while let Some(part) = todo.pop() {
        match part {
            "" | "." => {}
            ".." => {
                if here.pop().is_none() {
                    return false;
                }
            }
            name => {
                here.push(name);
                if let Some(Entry::Link { target }) = entries.get(&here.join("/")) {
                    followed += 1;
                    if followed > LINKS_MAX {
                        return true;
                    }
                    here.pop();
                    todo.extend(target.split('/').rev());
                }
            }
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_may_go_up_as_far_as_the_root_and_no_further() {
        for (path, target) in
            [("l", "a"), ("d/l", "../a"), ("d/l", ".."), ("d/l", "x/../../a"), ("l", "./a//b")]
        {
            assert!(stays_inside(path, target), "{path} -> {target}");
        }
        for (path, target) in
            [("l", ""), ("l", "/a"), ("l", ".."), ("d/l", "../.."), ("d/l", "x/../../../a"), ("l", "a/../..")]
        {
            assert!(!stays_inside(path, target), "{path} -> {target}");
        }
    }

    #[test]
    fn links_together_do_not_leave_either() {
        let links = |all: &[(&str, &str)]| -> BTreeMap<String, Entry> {
            all.iter().map(|(p, t)| ((*p).to_owned(), Entry::Link { target: (*t).to_owned() })).collect()
        };
        // Each stays inside letter by letter; `w` leaves because `x/y/z` is the root itself.
        let pair = links(&[("x/y/z", "../.."), ("w", "x/y/z/../..")]);
        assert!(resolves_inside(&pair, "x/y/z", "../.."));
        assert!(!resolves_inside(&pair, "w", "x/y/z/../.."));
        // A circle leads nowhere, and following it ends.
        let circle = links(&[("a", "b"), ("b", "a")]);
        assert!(resolves_inside(&circle, "a", "b"));
    }
}
