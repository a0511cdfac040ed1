//! Adopting: a sealed release from what a service already runs. It is only read, and copied byte by byte.

use std::io::BufReader;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::{Built, StageError, build, check_space, full_or_broken, prepare};
use crate::adapter::Limits;
use crate::archive::PROGRAM_MODE;
use crate::durable::{Disk, Kind, RealDisk, Space};
use crate::feed::{FeedError, Progress};
use crate::release::{Manifest, Version};
use crate::tree::{Attributes, CARRIED, SPECIAL_BITS, Tree, TreeError};

/// Files are copied in pieces of this size.
const PIECE: usize = 256 * 1024;

/// What is adopted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Adoptee {
    /// A single program, and its path in the release.
    Program {
        /// The program, absolute.
        path: PathBuf,
        /// Its path in the release: the adapter's `source.program`, or its file name.
        name: String,
    },
    /// A directory with everything below it (`--from DIR`).
    Directory(PathBuf),
}

/// Builds the sealed release of a program or directory outside the state directory, with its capabilities and
/// labels, or finds it sealed and whole. The same bytes from an archive give the same digest. At most three syncs.
///
/// # Errors
/// [`StageError`]; then nothing of the release is left. What is adopted is never changed.
pub fn adopt_tree(
    disk: &dyn Disk,
    what: &Adoptee,
    version: &Version,
    limits: Limits,
    progress: &mut Progress<'_>,
) -> Result<Manifest, StageError> {
    prepare(disk)?;
    let path = match what {
        Adoptee::Program { path, .. } | Adoptee::Directory(path) => path,
    };
    let mut found = Vec::new();
    let from = match what {
        Adoptee::Program { path, name } => {
            let (from, item) = look(path, name.clone())?;
            found.push(item);
            from
        }
        Adoptee::Directory(dir) => {
            let dir =
                std::fs::canonicalize(dir).map_err(|source| FeedError::Open { path: dir.clone(), source })?;
            walk(&dir, "", &mut found)?;
            open_source(&dir)?
        }
    };
    let total = found.iter().map(|item| item.size).sum();
    let free = check_space(disk, total)?;
    let payload = Space { bytes: total, inodes: found.len() as u64 };
    build(disk, version, |root| {
        let mut tree = Tree::new(disk, root, limits, 0);
        let mut done = 0;
        for item in &found {
            item.copy(&from, &mut tree).map_err(|e| match e {
                Failed::Read(e) => e.into(),
                Failed::Tree(TreeError::Write { path, source }) => {
                    full_or_broken(disk, &path, source, payload, free)
                }
                Failed::Tree(source) => StageError::Adopt { path: item.path.clone(), source },
            })?;
            done += item.size;
            progress(done, total);
        }
        let entries = tree.finish().map_err(|source| StageError::Adopt { path: path.clone(), source })?;
        Ok::<Built, _>((entries, None, format!("adopted from {}", path.display())))
    })
}

/// Something to copy.
struct Item {
    /// Where it is, for messages.
    path: PathBuf,
    /// Where it is below the directory that is read.
    at: String,
    /// Its path in the release.
    name: String,
    mode: u32,
    size: u64,
    kind: ItemKind,
}

enum ItemKind {
    File,
    Dir,
    Link(Vec<u8>),
    Other,
}

enum Failed {
    Read(FeedError),
    Tree(TreeError),
}

impl Item {
    fn copy(&self, from: &dyn Disk, tree: &mut Tree<'_>) -> Result<(), Failed> {
        let name = self.name.as_bytes();
        match &self.kind {
            ItemKind::Dir => tree.dir(name, self.mode),
            ItemKind::Link(target) => tree.link(name, target),
            ItemKind::Other => Err(TreeError::Kind {
                path: self.name.clone(),
                kind: "a device, a socket or a pipe; adopt a directory without it",
            }),
            ItemKind::File => {
                let open = |source| Failed::Read(FeedError::Open { path: self.path.clone(), source });
                let file = from.reader(&self.at).map_err(open)?;
                let attributes = attributes(from, &self.at).map_err(open)?;
                let mut data = BufReader::with_capacity(PIECE, file);
                tree.file(name, self.mode, self.size, &mut data, &attributes)
            }
        }
        .map_err(|e| match e {
            TreeError::Read(source) => Failed::Read(FeedError::Read { path: self.path.clone(), source }),
            other => Failed::Tree(other),
        })
    }
}

/// The directory that is read. Whoever may write it may be the service's user: nothing in it is followed elsewhere, also
/// not what is exchanged for a link while it is read.
fn open_source(path: &Path) -> Result<RealDisk, StageError> {
    RealDisk::open(path).map_err(|source| FeedError::Open { path: path.to_owned(), source }.into())
}

/// Describes the program at `path`, whatever links lead to it: what runs is what they lead to.
fn look(path: &Path, name: String) -> Result<(RealDisk, Item), StageError> {
    let open = |source| FeedError::Open { path: path.to_owned(), source };
    let real = std::fs::canonicalize(path).map_err(open)?;
    let (Some(dir), Some(at)) = (real.parent(), real.file_name().and_then(|n| n.to_str())) else {
        return Err(FeedError::NotAFile { path: path.to_owned() }.into());
    };
    let from = open_source(dir)?;
    let about = from.stat(at).map_err(open)?;
    if about.kind != Kind::File {
        return Err(FeedError::NotAFile { path: path.to_owned() }.into());
    }
    // As the same program from an artifact has, so that both are one release; set-id bits are refused later.
    let mode = about.mode & SPECIAL_BITS | PROGRAM_MODE;
    let item =
        Item { path: path.to_owned(), at: at.to_owned(), name, mode, size: about.size, kind: ItemKind::File };
    Ok((from, item))
}

fn walk(root: &Path, below: &str, found: &mut Vec<Item>) -> Result<(), StageError> {
    let dir = root.join(below);
    let open = |path: &Path, source| FeedError::Open { path: path.to_owned(), source };
    let read = std::fs::read_dir(&dir).map_err(|e| open(&dir, e))?;
    let mut entries = read.collect::<Result<Vec<_>, _>>().map_err(|e| open(&dir, e))?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        let Some(name) = entry.file_name().to_str().map(str::to_owned) else {
            let name = entry.file_name().to_string_lossy().into_owned();
            return Err(StageError::Adopt { path, source: TreeError::Name { name, why: "is not UTF-8" } });
        };
        let name = if below.is_empty() { name } else { format!("{below}/{name}") };
        let about = std::fs::symlink_metadata(&path).map_err(|e| open(&path, e))?;
        let kind = about.file_type();
        let kind = if kind.is_file() {
            ItemKind::File
        } else if kind.is_dir() {
            ItemKind::Dir
        } else if kind.is_symlink() {
            let target = std::fs::read_link(&path).map_err(|e| open(&path, e))?;
            ItemKind::Link(target.into_os_string().into_encoded_bytes())
        } else {
            ItemKind::Other
        };
        let is_dir = matches!(kind, ItemKind::Dir);
        let size = if matches!(kind, ItemKind::File) { about.len() } else { 0 };
        found.push(Item {
            path,
            at: name.clone(),
            name: name.clone(),
            mode: about.mode() & 0o7777,
            size,
            kind,
        });
        if is_dir {
            walk(root, &name, found)?;
        }
    }
    Ok(())
}

fn attributes(from: &dyn Disk, at: &str) -> std::io::Result<Attributes> {
    let mut found = Vec::new();
    for name in CARRIED {
        found.extend(from.xattr(at, name)?.map(|value| (name, value)));
    }
    Ok(found)
}
