//! A simulated disk that loses everything it may lose.
//!
//! # What survives a crash
//!
//! [`DiskState`] keeps two trees: what the running kernel shows, and what is certainly on the medium. Between them lie
//! the *pending* changes, in the order in which they were made. A crash keeps any legal subset of them:
//!
//! - **Names.** Each change of a directory's entries (create, mkdir, symlink, rename, exchange, unlink, rmdir) is
//!   pending on its own until *that directory* is synced, or the file system. Any subset survives, in any combination;
//!   of several changes of one name, the last one that survived decides. Syncing a file does not make its name durable,
//!   and syncing one directory does nothing for another.
//! - **Renames** are one change: both names or neither. One across directories is pending until *both* were synced, and
//!   even so no name is half moved. An exchange likewise.
//! - **Contents** are pending until the file, or the file system, is synced: each 512-byte sector is old, new, zero, or
//!   (where it was never written before) junk; the length is the old one, the new one, or that of a part. A rename that
//!   survived therefore gives an empty or torn file, if the file was not synced first.
//! - **Inodes** come with their kind, permission bits and (of a symbolic link) target: whoever has the name has these.
//!   A new directory is empty until its own entries survive.
//!
//! That is weaker than ext4, xfs and btrfs in every respect: those log names in order, sync a new file's name with the
//! file, keep what a rename replaces until the new contents are out (`auto_da_alloc`), and show no junk. Code that holds
//! here leans on none of it.
//!
//! # How calls fail
//!
//! [`Fault`] makes any one call fail, or all from there on. A sync fails in both known ways: *lost* (the error is
//! reported once, the pages count as clean, later syncs succeed, and the data is in limbo for ever: it may or may not be
//! there) and *dead* (every later write and sync fails). A full disk is one with no free byte or inode: calls that need
//! none still work, and what is removed becomes free.
//!
//! # What is not modelled
//!
//! Reordering within one 512-byte sector, disks that lie about a flush, damage to what was not being written, the loss of
//! permission bits or extended attributes apart from their file, and shared block tails.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use std::io;
use std::rc::Rc;

use cutover::durable::{FileId, Kind, Space, Stat};

use crate::rng::Rng;

pub(crate) type Ino = u32;

const ROOT: Ino = 1;
const PAGE: usize = 4096;
pub(crate) const SECTOR: usize = 512;
const PER_PAGE: usize = PAGE / SECTOR;
/// In the set of sectors in limbo: the length.
const LENGTH: u64 = u64::MAX;
const PLENTY: Space = Space { bytes: 1 << 40, inodes: 1 << 20 };
/// The owner of every file: root.
const UID: u32 = 0;

/// One page of a file, never changed, with its hash.
#[derive(Clone)]
struct Page(Rc<(Box<[u8]>, u64)>);

thread_local! {
    static ZERO: Page = Page::of(vec![0; PAGE].into());
}

impl Page {
    fn of(bytes: Box<[u8]>) -> Self {
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        for word in bytes.chunks_exact(8) {
            let word = u64::from_le_bytes(word.try_into().expect("8 bytes"));
            hash = (hash.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
        Self(Rc::new((bytes, hash)))
    }

    fn zero() -> Self {
        ZERO.with(Clone::clone)
    }

    fn bytes(&self) -> &[u8] {
        &self.0.0
    }

    fn same(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.0, &other.0) || (self.0.1 == other.0.1 && self.0.0 == other.0.0)
    }
}

/// The contents of a file.
#[derive(Clone)]
struct Data {
    len: u64,
    pages: Rc<Vec<Page>>,
}

impl Data {
    fn empty() -> Self {
        Self { len: 0, pages: Rc::new(vec![]) }
    }

    fn read(&self) -> Vec<u8> {
        let len = usize::try_from(self.len).expect("small");
        let mut bytes = Vec::with_capacity(self.pages.len() * PAGE);
        for page in self.pages.iter() {
            bytes.extend_from_slice(page.bytes());
        }
        bytes.resize(len, 0);
        bytes
    }

    fn grow(&mut self, len: u64) {
        let pages = usize::try_from(len).expect("small").div_ceil(PAGE);
        if pages > self.pages.len() {
            Rc::make_mut(&mut self.pages).resize_with(pages, Page::zero);
        }
        self.len = self.len.max(len);
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.grow(offset + bytes.len() as u64);
        let pages = Rc::make_mut(&mut self.pages);
        let mut at = usize::try_from(offset).expect("small");
        let mut rest = bytes;
        while !rest.is_empty() {
            let (page, within) = (at / PAGE, at % PAGE);
            let n = rest.len().min(PAGE - within);
            let mut new: Box<[u8]> = pages[page].bytes().into();
            new[within..within + n].copy_from_slice(&rest[..n]);
            pages[page] = Page::of(new);
            at += n;
            rest = &rest[n..];
        }
    }

    fn sector(&self, sector: u64) -> &[u8] {
        let at = usize::try_from(sector).expect("small");
        match self.pages.get(at / PER_PAGE) {
            Some(page) => &page.bytes()[at % PER_PAGE * SECTOR..][..SECTOR],
            None => &[0; SECTOR],
        }
    }

    fn allocated(&self, sector: u64) -> bool {
        sector * (SECTOR as u64) < self.len
    }

    fn same(&self, other: &Self) -> bool {
        self.len == other.len
            && (Rc::ptr_eq(&self.pages, &other.pages)
                || (self.pages.len() == other.pages.len()
                    && self.pages.iter().zip(other.pages.iter()).all(|(a, b)| a.same(b))))
    }

    /// The sectors in which two contents differ.
    fn differences(&self, other: &Self) -> Vec<u64> {
        let mut found = vec![];
        for page in 0..self.pages.len().max(other.pages.len()) {
            if let (Some(a), Some(b)) = (self.pages.get(page), other.pages.get(page))
                && a.same(b)
            {
                continue;
            }
            for sector in 0..PER_PAGE {
                let sector = (page * PER_PAGE + sector) as u64;
                if self.sector(sector) != other.sector(sector) {
                    found.push(sector);
                }
            }
        }
        found
    }
}

#[derive(Clone)]
enum Body {
    Dir(BTreeMap<Rc<str>, Ino>),
    File(Data),
    Link(Rc<str>),
}

#[derive(Clone)]
struct Node {
    body: Body,
    mode: u32,
    xattrs: BTreeMap<String, Vec<u8>>,
}

type Nodes = BTreeMap<Ino, Rc<Node>>;

/// A pending change of names.
#[derive(Clone)]
struct Change {
    /// What each name is after it.
    parts: Vec<(Ino, Rc<str>, Option<Ino>)>,
    /// Directories that have to be synced still.
    unsynced: Vec<Ino>,
    /// A sync of it failed: no later sync makes it durable.
    limbo: bool,
}

/// How a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Fault {
    /// EIO, without effect. Of a sync: reported once, the data is lost (or not).
    Eio,
    /// EIO, although it took effect.
    EioDone,
    /// ENOSPC without effect, as a full btrfs does at any call.
    Enospc,
    /// EROFS.
    Erofs,
    /// A write that is cut in the middle, then ENOSPC.
    Short,
    /// From here on, nothing is free.
    Full,
}

impl Fault {
    pub(crate) const ALL: [Self; 6] =
        [Self::Eio, Self::EioDone, Self::Enospc, Self::Erofs, Self::Short, Self::Full];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Eio => "eio",
            Self::EioDone => "eio-done",
            Self::Enospc => "enospc",
            Self::Erofs => "erofs",
            Self::Short => "short",
            Self::Full => "full",
        }
    }

    pub(crate) fn error(self) -> io::Error {
        io::Error::from_raw_os_error(match self {
            Self::Eio | Self::EioDone => 5,
            Self::Enospc | Self::Short | Self::Full => 28,
            Self::Erofs => 30,
        })
    }
}

/// The simulated disk, with all that is pending. A clone is cheap and shares what is not changed.
#[derive(Clone)]
pub(crate) struct DiskState {
    shown: Nodes,
    medium: Nodes,
    log: Vec<Rc<Change>>,
    limbo: BTreeMap<Ino, BTreeSet<u64>>,
    dirty: BTreeSet<Ino>,
    next: Ino,
    free: Space,
}

fn error(kind: io::ErrorKind) -> io::Error {
    kind.into()
}

impl DiskState {
    pub(crate) fn new() -> Self {
        let root = Rc::new(Node { body: Body::Dir(BTreeMap::new()), mode: 0o755, xattrs: BTreeMap::new() });
        let nodes = BTreeMap::from([(ROOT, root)]);
        let free = PLENTY;
        Self {
            shown: nodes.clone(),
            medium: nodes,
            log: vec![],
            limbo: BTreeMap::new(),
            dirty: BTreeSet::new(),
            next: 2,
            free,
        }
    }

    // ---- what is shown ----

    fn dir(&self, ino: Ino) -> io::Result<&BTreeMap<Rc<str>, Ino>> {
        match &self.shown[&ino].body {
            Body::Dir(entries) => Ok(entries),
            Body::Link(_) => Err(io::Error::from_raw_os_error(40)),
            Body::File(_) => Err(error(io::ErrorKind::NotADirectory)),
        }
    }

    fn find(&self, path: &str) -> io::Result<Ino> {
        let mut at = ROOT;
        for part in path.split('/').filter(|p| !p.is_empty()) {
            at = *self.dir(at)?.get(part).ok_or_else(|| error(io::ErrorKind::NotFound))?;
        }
        Ok(at)
    }

    /// The directory that holds `path`, and the name in it.
    fn place<'p>(&self, path: &'p str) -> io::Result<(Ino, &'p str)> {
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        let dir = self.find(dir)?;
        self.dir(dir)?;
        Ok((dir, name))
    }

    fn data(&self, ino: Ino) -> io::Result<&Data> {
        match &self.shown[&ino].body {
            Body::File(data) => Ok(data),
            Body::Dir(_) => Err(error(io::ErrorKind::IsADirectory)),
            Body::Link(_) => Err(io::Error::from_raw_os_error(40)),
        }
    }

    pub(crate) fn open(&self, path: &str) -> io::Result<Ino> {
        let ino = self.find(path)?;
        self.data(ino)?;
        Ok(ino)
    }

    pub(crate) fn read_ino(&self, ino: Ino, limit: u64) -> io::Result<Vec<u8>> {
        let data = self.data(ino)?;
        if data.len > limit {
            return Err(error(io::ErrorKind::FileTooLarge));
        }
        Ok(data.read())
    }

    pub(crate) fn read(&self, path: &str, limit: u64) -> io::Result<Vec<u8>> {
        self.read_ino(self.find(path)?, limit)
    }

    pub(crate) fn read_link(&self, path: &str) -> io::Result<String> {
        match &self.shown[&self.find(path)?].body {
            Body::Link(target) => Ok(target.to_string()),
            _ => Err(error(io::ErrorKind::InvalidInput)),
        }
    }

    pub(crate) fn stat(&self, path: &str) -> io::Result<Stat> {
        let ino = self.find(path)?;
        let node = &self.shown[&ino];
        let (kind, size) = match &node.body {
            Body::Dir(_) => (Kind::Dir, 0),
            Body::File(data) => (Kind::File, data.len),
            Body::Link(target) => (Kind::Link, target.len() as u64),
        };
        Ok(Stat { kind, mode: node.mode, size, id: FileId { dev: 1, ino: ino.into() }, uid: UID })
    }

    pub(crate) fn list(&self, path: &str) -> io::Result<Vec<String>> {
        Ok(self.dir(self.find(path)?)?.keys().map(ToString::to_string).collect())
    }

    pub(crate) fn xattr(&self, path: &str, name: &str) -> io::Result<Option<Vec<u8>>> {
        Ok(self.shown[&self.find(path)?].xattrs.get(name).cloned())
    }

    pub(crate) fn space(&self) -> Space {
        self.free
    }

    // ---- changes ----

    /// From here on, nothing is free but what is removed.
    pub(crate) fn fill_up(&mut self) {
        self.free = Space { bytes: 0, inodes: 0 };
    }

    /// Somebody freed some space.
    pub(crate) fn make_room(&mut self) {
        self.free = PLENTY;
    }

    fn take_inode(&mut self) -> io::Result<()> {
        self.free.inodes = self.free.inodes.checked_sub(1).ok_or_else(|| Fault::Full.error())?;
        Ok(())
    }

    fn give_back(&mut self, ino: Ino) {
        let pages = match &self.shown[&ino].body {
            Body::File(data) => data.pages.len(),
            _ => 0,
        };
        self.free.bytes += (pages * PAGE) as u64;
        self.free.inodes += 1;
    }

    fn make(&mut self, path: &str, body: Body, mode: u32) -> io::Result<Ino> {
        let (dir, name) = self.place(path)?;
        if self.dir(dir)?.contains_key(name) {
            return Err(error(io::ErrorKind::AlreadyExists));
        }
        self.take_inode()?;
        let ino = self.make_nameless(body, mode);
        self.change(vec![(dir, name.into(), Some(ino))]);
        Ok(ino)
    }

    fn make_nameless(&mut self, body: Body, mode: u32) -> Ino {
        let ino = self.next;
        self.next += 1;
        let node = Rc::new(Node { body, mode, xattrs: BTreeMap::new() });
        self.shown.insert(ino, Rc::clone(&node));
        self.medium.insert(ino, node);
        ino
    }

    fn change(&mut self, parts: Vec<(Ino, Rc<str>, Option<Ino>)>) {
        let mut unsynced: Vec<Ino> = parts.iter().map(|(dir, ..)| *dir).collect();
        unsynced.dedup();
        for (dir, name, to) in &parts {
            set(&mut self.shown, *dir, name, *to);
        }
        self.log.push(Rc::new(Change { parts, unsynced, limbo: false }));
    }

    pub(crate) fn mkdir(&mut self, path: &str, mode: u32) -> io::Result<()> {
        self.make(path, Body::Dir(BTreeMap::new()), mode).map(drop)
    }

    /// A file that has no name yet.
    pub(crate) fn create_nameless(&mut self, mode: u32) -> Ino {
        self.make_nameless(Body::File(Data::empty()), mode)
    }

    /// Gives a nameless file its name: the part of a creation that a crash can lose.
    pub(crate) fn name(&mut self, ino: Ino, path: &str) -> io::Result<()> {
        let (dir, name) = self.place(path)?;
        if self.dir(dir)?.contains_key(name) {
            return Err(error(io::ErrorKind::AlreadyExists));
        }
        self.take_inode()?;
        self.change(vec![(dir, name.into(), Some(ino))]);
        Ok(())
    }

    pub(crate) fn symlink(&mut self, target: &str, path: &str) -> io::Result<()> {
        self.make(path, Body::Link(target.into()), 0o777).map(drop)
    }

    pub(crate) fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        let ino = self.find(from)?;
        let ((from_dir, from), (to_dir, to)) = (self.place(from)?, self.place(to)?);
        if (from_dir, from) == (to_dir, to) {
            return Ok(());
        }
        if let Some(&old) = self.dir(to_dir)?.get(to) {
            if let Body::Dir(entries) = &self.shown[&old].body
                && !entries.is_empty()
            {
                return Err(error(io::ErrorKind::DirectoryNotEmpty));
            }
            self.give_back(old);
        }
        self.change(vec![(from_dir, from.into(), None), (to_dir, to.into(), Some(ino))]);
        Ok(())
    }

    pub(crate) fn exchange(&mut self, one: &str, other: &str) -> io::Result<()> {
        let (a, b) = (self.find(one)?, self.find(other)?);
        let ((one_dir, one), (other_dir, other)) = (self.place(one)?, self.place(other)?);
        self.change(vec![(one_dir, one.into(), Some(b)), (other_dir, other.into(), Some(a))]);
        Ok(())
    }

    pub(crate) fn unlink(&mut self, path: &str) -> io::Result<()> {
        let ino = self.find(path)?;
        let (dir, name) = self.place(path)?;
        if matches!(self.shown[&ino].body, Body::Dir(_)) {
            return Err(error(io::ErrorKind::IsADirectory));
        }
        self.give_back(ino);
        self.change(vec![(dir, name.into(), None)]);
        Ok(())
    }

    pub(crate) fn rmdir(&mut self, path: &str) -> io::Result<()> {
        let ino = self.find(path)?;
        let (dir, name) = self.place(path)?;
        if !self.dir(ino)?.is_empty() {
            return Err(error(io::ErrorKind::DirectoryNotEmpty));
        }
        self.give_back(ino);
        self.change(vec![(dir, name.into(), None)]);
        Ok(())
    }

    pub(crate) fn write(&mut self, ino: Ino, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let pages = self.data(ino)?.pages.len();
        let end = usize::try_from(offset).expect("small") + bytes.len();
        let needed = (end.div_ceil(PAGE).saturating_sub(pages) * PAGE) as u64;
        self.free.bytes = self.free.bytes.checked_sub(needed).ok_or_else(|| Fault::Full.error())?;
        let node = Rc::make_mut(self.shown.get_mut(&ino).expect("open"));
        let Body::File(data) = &mut node.body else { unreachable!("a file is open") };
        let before = data.len;
        data.write(offset, bytes);
        if let Some(limbo) = self.limbo.get_mut(&ino) {
            let sectors = offset / SECTOR as u64..(end as u64).div_ceil(SECTOR as u64);
            limbo.retain(|s| !sectors.contains(s));
            if data.len != before {
                limbo.remove(&LENGTH);
            }
        }
        self.dirty.insert(ino);
        Ok(())
    }

    pub(crate) fn set_xattr(&mut self, ino: Ino, name: &str, value: &[u8]) {
        Rc::make_mut(self.shown.get_mut(&ino).expect("open")).xattrs.insert(name.into(), value.into());
        self.dirty.insert(ino);
    }

    // ---- syncs ----

    /// Commits the changes of names that `done` says are synced by now.
    fn commit(&mut self, mut done: impl FnMut(&mut Change) -> bool) {
        let mut left: Vec<Rc<Change>> = vec![];
        for mut change in std::mem::take(&mut self.log) {
            if change.limbo || !done(Rc::make_mut(&mut change)) {
                left.push(change);
                continue;
            }
            for (dir, name, to) in &change.parts {
                set(&mut self.medium, *dir, name, *to);
                // What was pending of this name before can no longer come after it.
                for earlier in &mut left {
                    if earlier.parts.iter().any(|(d, n, _)| (d, n) == (dir, name)) {
                        Rc::make_mut(earlier).parts.retain(|(d, n, _)| (d, n) != (dir, name));
                    }
                }
            }
        }
        left.retain(|change| !change.parts.is_empty());
        self.log = left;
    }

    pub(crate) fn sync_dir(&mut self, path: &str) -> io::Result<()> {
        let ino = self.find(path)?;
        self.dir(ino)?;
        self.commit(|change| {
            change.unsynced.retain(|dir| *dir != ino);
            change.unsynced.is_empty()
        });
        Ok(())
    }

    pub(crate) fn sync_fs(&mut self) {
        self.commit(|_| true);
        for ino in self.dirty.clone() {
            self.sync_file(ino);
        }
    }

    pub(crate) fn sync_file(&mut self, ino: Ino) {
        if !self.dirty.contains(&ino) {
            return;
        }
        let shown = Rc::clone(&self.shown[&ino]);
        let limbo = self.limbo.get(&ino).filter(|l| !l.is_empty());
        let Some(limbo) = limbo else {
            self.medium.insert(ino, shown);
            self.dirty.remove(&ino);
            return;
        };
        let (Body::File(new), Body::File(old)) = (&shown.body, &self.medium[&ino].body) else { return };
        let mut data = old.clone();
        for sector in new.differences(old) {
            if !limbo.contains(&sector) {
                data.write(sector * SECTOR as u64, new.sector(sector));
            }
        }
        data.len = if limbo.contains(&LENGTH) { old.len } else { new.len };
        let node = Node { body: Body::File(data), mode: shown.mode, xattrs: shown.xattrs.clone() };
        self.medium.insert(ino, Rc::new(node));
    }

    /// A sync of a file failed, and what it should have written counts as clean.
    pub(crate) fn lose_file(&mut self, ino: Ino) {
        let (Body::File(new), Body::File(old)) = (&self.shown[&ino].body, &self.medium[&ino].body) else {
            return;
        };
        let mut lost: BTreeSet<u64> = new.differences(old).into_iter().collect();
        if new.len != old.len {
            lost.insert(LENGTH);
        }
        self.limbo.entry(ino).or_default().extend(lost);
    }

    /// A sync of a directory failed.
    pub(crate) fn lose_dir(&mut self, path: &str) {
        let Ok(ino) = self.find(path) else { return };
        for change in &mut self.log {
            if change.unsynced.contains(&ino) {
                Rc::make_mut(change).limbo = true;
            }
        }
    }

    /// A sync of the file system failed.
    pub(crate) fn lose_all(&mut self) {
        for ino in self.dirty.clone() {
            self.lose_file(ino);
        }
        for change in &mut self.log {
            Rc::make_mut(change).limbo = true;
        }
    }

    /// Drops what is cached of a file: what was in limbo is now seen as the medium has it.
    pub(crate) fn drop_cache(&mut self, ino: Ino, rng: &mut Rng) {
        if self.limbo.remove(&ino).is_none_or(|l| l.is_empty()) {
            return;
        }
        let data = self.pick_data(ino, &mut |options| rng.below(options));
        let node = Rc::make_mut(self.shown.get_mut(&ino).expect("open"));
        node.body = Body::File(data);
        let node = Rc::clone(&self.shown[&ino]);
        self.medium.insert(ino, node);
        self.dirty.remove(&ino);
    }

    // ---- the crash ----

    /// Files whose contents are not certain.
    fn files_pending(&self) -> Vec<Ino> {
        self.dirty
            .iter()
            .copied()
            .filter(|ino| match (&self.shown[ino].body, &self.medium[ino].body) {
                (Body::File(new), Body::File(old)) => !new.same(old),
                _ => false,
            })
            .collect()
    }

    /// Contents of a file after a crash; `pick` chooses one of so many options.
    fn pick_data(&self, ino: Ino, pick: &mut dyn FnMut(u32) -> u32) -> Data {
        let (Body::File(new), Body::File(old)) = (&self.shown[&ino].body, &self.medium[&ino].body) else {
            unreachable!("only files have contents");
        };
        let sectors = new.differences(old);
        // 0: as it was. 1: as it should be. 2: as long as it should be, and zero. Others: torn.
        let shape = pick(if sectors.is_empty() { 2 } else { 4 });
        match shape {
            0 => return old.clone(),
            1 => return new.clone(),
            _ => {}
        }
        let mut data = old.clone();
        data.grow(new.len);
        data.len = new.len;
        for &sector in &sectors {
            let fresh = !old.allocated(sector);
            let choice = if shape == 2 { 2 } else { pick(if fresh { 4 } else { 3 }) };
            let at = sector * SECTOR as u64;
            match choice {
                0 => {}
                1 => data.write(at, new.sector(sector)),
                2 => data.write(at, &[0; SECTOR]),
                _ => data.write(at, &[0xa5; SECTOR]),
            }
        }
        if shape == 3 && new.len > old.len {
            // The length may have been written in between.
            let most = new.len - old.len;
            let cut = [0, 0, most.min(SECTOR as u64), most / 2][pick(4) as usize];
            data.len = new.len - cut;
        } else {
            data.len = new.len;
        }
        // Bytes behind the end are not the file's: a page that is cut reads as zero.
        data.pages = Rc::new(data.pages[..usize::try_from(data.len).expect("small").div_ceil(PAGE)].to_vec());
        data
    }

    /// How many yes-or-no choices a crash has here, where each file is all old or all new.
    pub(crate) fn choices(&self) -> usize {
        self.log.len() + self.files_pending().len()
    }

    /// The disk after a crash that keeps what `kept` says: one answer a pending change, then one a file; a file that is
    /// `Torn` is put together at random.
    pub(crate) fn crash(&self, kept: &[Kept], rng: &mut Rng) -> Self {
        let mut nodes = self.medium.clone();
        let (changes, files) = kept.split_at(self.log.len());
        for (change, kept) in self.log.iter().zip(changes) {
            if *kept != Kept::Lost {
                for (dir, name, to) in &change.parts {
                    set(&mut nodes, *dir, name, *to);
                }
            }
        }
        for (ino, kept) in self.files_pending().into_iter().zip(files) {
            let data = match kept {
                Kept::Lost => continue,
                Kept::Kept => {
                    nodes.insert(ino, Rc::clone(&self.shown[&ino]));
                    continue;
                }
                Kept::Torn => self.pick_data(ino, &mut |n| rng.below(n)),
            };
            let node = &self.shown[&ino];
            let node = Node { body: Body::File(data), mode: node.mode, xattrs: node.xattrs.clone() };
            nodes.insert(ino, Rc::new(node));
        }
        let nodes = reachable(&nodes);
        Self {
            shown: nodes.clone(),
            medium: nodes,
            log: vec![],
            limbo: BTreeMap::new(),
            dirty: BTreeSet::new(),
            next: self.next,
            free: PLENTY,
        }
    }

    /// The disk after a crash that loses all that it may.
    pub(crate) fn crash_losing_all(&self) -> Self {
        self.crash(&vec![Kept::Lost; self.choices()], &mut Rng::new(0))
    }

    /// A hash of all that is shown.
    pub(crate) fn hash_shown(&self) -> u64 {
        let mut hasher = std::hash::DefaultHasher::new();
        hash_tree(&self.shown, ROOT, &mut hasher);
        hasher.finish()
    }

    /// The same, without the directory `name`.
    pub(crate) fn hash_without(&self, name: &str) -> u64 {
        let mut nodes = self.shown.clone();
        set(&mut nodes, ROOT, &name.into(), None);
        let mut hasher = std::hash::DefaultHasher::new();
        hash_tree(&nodes, ROOT, &mut hasher);
        hasher.finish()
    }

    /// As after a sync of everything that succeeded.
    pub(crate) fn settle(&mut self) {
        self.limbo.clear();
        for change in &mut self.log {
            Rc::make_mut(change).limbo = false;
        }
        self.sync_fs();
    }

    /// A hash of all that is shown and of all that may come of it.
    pub(crate) fn hash_all(&self) -> u64 {
        let mut hasher = std::hash::DefaultHasher::new();
        hash_tree(&self.shown, ROOT, &mut hasher);
        hash_tree(&self.medium, ROOT, &mut hasher);
        self.log.len().hash(&mut hasher);
        for change in &self.log {
            change.limbo.hash(&mut hasher);
            for (dir, name, to) in &change.parts {
                (dir, name, to.is_some()).hash(&mut hasher);
                if let Some(to) = to {
                    hash_tree(&self.shown, *to, &mut hasher);
                }
            }
        }
        hasher.finish()
    }

    /// Cuts a file to half its length, behind everybody's back.
    pub(crate) fn cut(&mut self, path: &str) {
        let Ok(ino) = self.find(path) else { return };
        for nodes in [&mut self.shown, &mut self.medium] {
            if let Some(node) = nodes.get_mut(&ino)
                && let Body::File(data) = &mut Rc::make_mut(node).body
            {
                data.len /= 2;
                let pages = usize::try_from(data.len).expect("small").div_ceil(PAGE);
                Rc::make_mut(&mut data.pages).truncate(pages);
            }
        }
    }

    /// What is pending, in words.
    pub(crate) fn describe_pending(&self) -> Vec<String> {
        let mut lines: Vec<String> = self
            .log
            .iter()
            .map(|change| {
                let parts: Vec<String> = change
                    .parts
                    .iter()
                    .map(|(dir, name, to)| match to {
                        Some(to) => format!("{dir}/{name} = {to}"),
                        None => format!("{dir}/{name} removed"),
                    })
                    .collect();
                format!("{}{}", parts.join(", "), if change.limbo { " (limbo)" } else { "" })
            })
            .collect();
        lines.extend(self.files_pending().iter().map(|ino| format!("contents of {ino}")));
        lines
    }
}

/// What a crash does with one pending thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    Lost,
    Kept,
    Torn,
}

fn set(nodes: &mut Nodes, dir: Ino, name: &Rc<str>, to: Option<Ino>) {
    let Some(node) = nodes.get_mut(&dir) else { return };
    let Body::Dir(entries) = &mut Rc::make_mut(node).body else { return };
    match to {
        Some(ino) => drop(entries.insert(Rc::clone(name), ino)),
        None => drop(entries.remove(name)),
    }
}

fn reachable(nodes: &Nodes) -> Nodes {
    let mut found = Nodes::new();
    let mut left = vec![ROOT];
    while let Some(ino) = left.pop() {
        let Some(node) = nodes.get(&ino) else { continue };
        if found.insert(ino, Rc::clone(node)).is_none()
            && let Body::Dir(entries) = &node.body
        {
            left.extend(entries.values());
        }
    }
    found
}

/// Files that are only ever removed or replaced, so that their contents make no difference: those that were not given
/// their name yet, and the reserve.
fn is_never_read(name: &str) -> bool {
    name.ends_with(".new") || name.starts_with("reserve-")
}

fn hash_tree(nodes: &Nodes, ino: Ino, hasher: &mut impl Hasher) {
    let Some(node) = nodes.get(&ino) else { return };
    node.mode.hash(hasher);
    match &node.body {
        Body::Dir(entries) => {
            (0u8, entries.len()).hash(hasher);
            for (name, ino) in entries {
                name.hash(hasher);
                if !is_never_read(name) {
                    hash_tree(nodes, *ino, hasher);
                }
            }
        }
        Body::File(data) => {
            (1u8, data.len).hash(hasher);
            for page in data.pages.iter() {
                page.0.1.hash(hasher);
            }
        }
        Body::Link(target) => (2u8, target).hash(hasher),
    }
}

/// The crash states of a disk: all of them where they are few, else the corners and as many others as `limit` leaves.
pub(crate) fn crash_states(disk: &DiskState, limit: usize, rng: &mut Rng) -> Vec<Vec<Kept>> {
    let (changes, files) = (disk.log.len(), disk.files_pending().len());
    let n = changes + files;
    if n == 0 {
        return vec![vec![]];
    }
    let mut found = vec![];
    if files <= 3 && n <= 10 && (1 << changes) * 3usize.pow(u32::try_from(files).expect("few")) <= limit {
        let torn = 3usize.pow(u32::try_from(files).expect("few"));
        for bits in 0..1u32 << changes {
            for mut torn in 0..torn {
                let mut state: Vec<Kept> =
                    (0..changes).map(|i| if bits >> i & 1 == 1 { Kept::Kept } else { Kept::Lost }).collect();
                for _ in 0..files {
                    state.push([Kept::Lost, Kept::Kept, Kept::Torn][torn % 3]);
                    torn /= 3;
                }
                found.push(state);
            }
        }
        return found;
    }
    let full = |kept| vec![kept; n];
    found.push(full(Kept::Lost));
    found.push(full(Kept::Kept));
    for i in 0..n {
        let mut one = full(Kept::Lost);
        one[i] = Kept::Kept;
        found.push(one);
        let mut all_but = full(Kept::Kept);
        all_but[i] = Kept::Lost;
        found.push(all_but);
        // What came first was written first.
        found.push((0..n).map(|j| if j <= i { Kept::Kept } else { Kept::Lost }).collect());
        if i >= changes {
            let mut torn = full(Kept::Kept);
            torn[i] = Kept::Torn;
            found.push(torn);
        }
    }
    // The corners first, but no more than is asked for.
    while found.len() > limit.max(2) {
        let at = rng.below(u32::try_from(found.len() - 2).expect("few")) as usize + 2;
        found.swap_remove(at);
    }
    while found.len() < limit {
        let state = (0..n)
            .map(|i| match rng.below(if i < changes { 2 } else { 3 }) {
                0 => Kept::Lost,
                1 => Kept::Kept,
                _ => Kept::Torn,
            })
            .collect();
        found.push(state);
    }
    found
}
