//! Unpacking an artifact into the tree of a release, in one pass over its bytes.
//!
//! An artifact is a single executable, a `.tar`, a `.tar.gz` (`.tgz`) or a `.tar.zst` (`.tzst`). Its name says
//! which, and its first bytes must agree: a web server's error page under the name of an archive is refused as what
//! it is. What an archive may hold is decided by [`Tree`]; hard links are refused by name, because what they share
//! is lost in a tree of files that are hashed one by one.
//!
//! Memory is bounded whatever the archive says of itself: zstd windows end at 8 MiB (`WINDOW_LOG`), names at
//! 1 MiB, and the stream at what the adapter's limits can account for.

mod tarball;
#[cfg(test)]
mod tests;

use std::io::{self, BufRead, BufReader};

pub use tarball::TarError;
use tarball::{MemberKind, Tarball};

use crate::feed::Feed;
use crate::tree::{Tree, TreeError};

/// The largest zstd window, as a power of two: 8 MiB, what `zstd -19` uses and every decoder must support
/// (RFC 8878, 3.1.1.1.2).
const WINDOW_LOG: u32 = 23;
/// What comes out of a decoder is handed on in pieces of this size.
const DECODED: usize = 128 * 1024;
/// Room for headers, padding and long names: this much for each entry, and once for the end of the archive.
const PER_ENTRY: u64 = 4096;
const AT_END: u64 = 1024 * 1024;
/// Who may run a single executable: everybody, and nobody but root may change it.
pub(crate) const PROGRAM_MODE: u32 = 0o755;

/// What an artifact is, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A single executable.
    Program,
    /// An uncompressed archive.
    Tar,
    /// An archive compressed by gzip.
    TarGz,
    /// An archive compressed by zstd.
    TarZst,
}

/// Names that look like archives and are none that cutover unpacks. As executables they would be refused as well,
/// but with a reason that helps nobody.
const OTHER_ARCHIVES: [&str; 11] =
    [".zip", ".tar.xz", ".txz", ".tar.bz2", ".tbz2", ".7z", ".rar", ".deb", ".rpm", ".gz", ".zst"];

impl Kind {
    /// What the artifact called `name` is.
    ///
    /// # Errors
    /// [`ArchiveError::Unsupported`] for archives of other kinds.
    pub fn of(name: &str) -> Result<Self, ArchiveError> {
        let ends = |suffixes: &[&str]| suffixes.iter().any(|s| name.ends_with(s));
        Ok(if ends(&[".tar"]) {
            Self::Tar
        } else if ends(&[".tar.gz", ".tgz"]) {
            Self::TarGz
        } else if ends(&[".tar.zst", ".tzst"]) {
            Self::TarZst
        } else if let Some(suffix) = OTHER_ARCHIVES.iter().find(|s| name.ends_with(*s)) {
            return Err(ArchiveError::Unsupported { suffix });
        } else {
            Self::Program
        })
    }

    /// How often its bytes may be expected to fit into what it unpacks to. Only a first guess, so that a disk that
    /// is far too full is found before anything is written.
    #[must_use]
    pub fn growth(self) -> u64 {
        match self {
            Self::Program | Self::Tar => 1,
            // What gzip and zstd typically achieve on programs.
            Self::TarGz | Self::TarZst => 3,
        }
    }

    /// Whether a file that begins with `head` can be one.
    fn agrees(self, head: &[u8]) -> Result<(), ArchiveError> {
        let found = looks_like(head);
        let expected = match self {
            Self::Program => "an executable (ELF or #!)",
            Self::Tar => "a tar archive",
            Self::TarGz => "gzip data",
            Self::TarZst => "zstd data",
        };
        if found == expected {
            return Ok(());
        }
        Err(ArchiveError::WrongKind { expected, found })
    }
}

/// What the first bytes of a file look like.
fn looks_like(head: &[u8]) -> &'static str {
    let begins = |magic: &[u8]| head.starts_with(magic);
    if begins(b"\x7fELF") || begins(b"#!") {
        "an executable (ELF or #!)"
    } else if begins(&[0x1f, 0x8b]) {
        "gzip data"
    } else if begins(&[0x28, 0xb5, 0x2f, 0xfd]) {
        "zstd data"
    } else if is_tar(head) {
        "a tar archive"
    } else if begins(b"PK\x03\x04") {
        "a zip archive"
    } else if head.trim_ascii_start().first() == Some(&b'<') {
        "a web page"
    } else if head.iter().all(|b| *b == 0) {
        "zeros"
    } else {
        "something unknown"
    }
}

/// `ustar` at its place, or, for the older format, a checksum that fits.
fn is_tar(head: &[u8]) -> bool {
    head.get(257..262) == Some(b"ustar") || {
        head.get(..512).is_some_and(|block| {
            let sum: u32 = block[..148].iter().chain(&block[156..]).map(|b| u32::from(*b)).sum();
            tar::Header::from_byte_slice(block).cksum().ok() == Some(sum + 8 * 32)
        })
    }
}

/// Why an artifact cannot be unpacked. The text fits after its path.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// A kind of archive that cutover does not know.
    #[error("is a {suffix} file; supported are .tar, .tar.gz, .tar.zst and single executables")]
    Unsupported {
        /// How its name ends.
        suffix: &'static str,
    },
    /// Its first bytes do not fit its name.
    #[error("should be {expected} by its name, and looks like {found}")]
    WrongKind {
        /// What its name says.
        expected: &'static str,
        /// What its first bytes say.
        found: &'static str,
    },
    /// It has no bytes.
    #[error("is empty")]
    Empty,
    /// The adapter does not say what a single executable is called in the release.
    #[error("is a single executable, and the adapter has no source.program; add its path in the release")]
    NoProgram,
    /// The compressed stream is cut off.
    #[error("is cut off: its compressed data do not end")]
    Truncated,
    /// The compressed stream is damaged.
    #[error("is damaged: {0}")]
    Corrupt(io::Error),
    /// Its zstd window is too large.
    #[error("needs a zstd window of more than 8 MiB; compress with --long=23 or less, and not with --ultra")]
    Window,
    /// It is no good tar archive.
    #[error(transparent)]
    Tar(TarError),
    /// It holds what a release must not hold, or the release cannot be written.
    #[error(transparent)]
    Tree(TreeError),
}

/// Unpacks the artifact that `feed` gives into `tree`. A single executable is put at `program`. The feed may have
/// bytes left; [`Feed::finish`] hashes those too.
///
/// # Errors
/// [`ArchiveError`]; where [`Feed::failure`] has a cause, that is the reason.
pub fn unpack(
    kind: Kind,
    feed: &mut Feed<'_>,
    tree: &mut Tree<'_>,
    program: Option<&str>,
) -> Result<(), ArchiveError> {
    let head = feed.fill_buf().map_err(ArchiveError::Corrupt)?;
    if head.is_empty() {
        return Err(ArchiveError::Empty);
    }
    kind.agrees(head)?;
    let unpacked = match kind {
        Kind::Program => {
            let name = program.ok_or(ArchiveError::NoProgram)?;
            let size = feed.size();
            tree.file(name.as_bytes(), PROGRAM_MODE, size, feed, &Vec::new()).map_err(ArchiveError::Tree)
        }
        Kind::Tar => unpack_tar(feed, tree),
        Kind::TarGz => {
            let decoder = flate2::bufread::MultiGzDecoder::new(feed);
            unpack_tar(BufReader::with_capacity(DECODED, decoder), tree)
        }
        Kind::TarZst => {
            let mut decoder =
                zstd::stream::read::Decoder::with_buffer(feed).map_err(ArchiveError::Corrupt)?;
            decoder.window_log_max(WINDOW_LOG).map_err(ArchiveError::Corrupt)?;
            unpack_tar(BufReader::with_capacity(DECODED, decoder), tree)
        }
    };
    unpacked.map_err(of_decoder)
}

fn unpack_tar(from: impl BufRead, tree: &mut Tree<'_>) -> Result<(), ArchiveError> {
    let limits = tree.limits();
    let most = limits.bytes.saturating_add(limits.files.saturating_mul(PER_ENTRY)).saturating_add(AT_END);
    let mut tarball = Tarball::new(from, most);
    while let Some(member) = tarball.next().map_err(ArchiveError::Tar)? {
        let (name, mode) = (&member.name, member.mode);
        match member.kind {
            MemberKind::Dir => tree.dir(name, mode),
            MemberKind::Link(target) => tree.link(name, &target),
            MemberKind::File(size) => tree.file(name, mode, size, &mut tarball.data(), &Vec::new()),
            MemberKind::Other(kind) => {
                let path = String::from_utf8_lossy(name).into_owned();
                Err(TreeError::Kind { path, kind })
            }
        }
        .map_err(ArchiveError::Tree)?;
    }
    tarball.drain().map_err(ArchiveError::Tar)
}

/// What a decoder's error means, wherever it surfaced.
fn of_decoder(error: ArchiveError) -> ArchiveError {
    match error {
        ArchiveError::Tar(TarError::Read(e)) | ArchiveError::Tree(TreeError::Read(e)) => match e.kind() {
            io::ErrorKind::UnexpectedEof => ArchiveError::Truncated,
            // zstd's own words (ZSTD_error_frameParameter_windowTooLarge); a test pins them.
            _ if e.to_string().contains("too much memory") => ArchiveError::Window,
            _ => ArchiveError::Corrupt(e),
        },
        other => other,
    }
}
