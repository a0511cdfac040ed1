//! Reading a tar stream, header by header.
//!
//! The crate `tar` decodes the headers. Its own iterator is not used: it reads long names of any length into
//! memory, and takes an archive that was cut between two members for a complete one. Here both are errors.
//!
//! Known are ustar, GNU and pax headers with files, directories, symbolic links, long names and pax paths and
//! sizes. Everything else in a pax header (times, owners, extended attributes) is for the tree to decide, and it
//! keeps none of it. What other readers would take differently is refused: sparse files, sizes on entries
//! without data, global headers that rename, members behind the end.

use std::io::{self, BufRead, Read};

use tar::{EntryType, Header, PaxExtensions};

/// The unit of a tar stream.
const BLOCK: u64 = 512;
/// The most that a long name or a pax header may have. Paths end at 4096 bytes (`PATH_MAX`); pax headers may carry
/// extended attributes, of 64 KiB at most.
const EXTENSION_MAX: u64 = 1024 * 1024;

/// Why a stream is no tar archive that can be unpacked.
#[derive(Debug, thiserror::Error)]
pub enum TarError {
    /// It ends where more must come.
    #[error("is cut off {place}")]
    Truncated {
        /// Where in the archive.
        place: String,
    },
    /// It breaks the format.
    #[error("is not a valid tar archive at byte {at}: {why}")]
    Malformed {
        /// Where in the (decompressed) stream.
        at: u64,
        /// What is wrong.
        why: String,
    },
    /// It is larger than its members can account for.
    #[error("has more than {0} bytes when unpacked, by limits.bytes and limits.files of the adapter")]
    TooLong(u64),
    /// The bytes cannot be read.
    #[error("cannot be read: {0}")]
    Read(#[source] io::Error),
}

/// One member.
pub(super) struct Member {
    /// Its name, as written.
    pub(super) name: Vec<u8>,
    /// What it is.
    pub(super) kind: MemberKind,
    /// Its mode.
    pub(super) mode: u32,
}

/// What a member is.
pub(super) enum MemberKind {
    /// A file of so many bytes, which [`Tarball::data`] gives.
    File(u64),
    /// A directory.
    Dir,
    /// A symbolic link with its target.
    Link(Vec<u8>),
    /// Something that a release cannot hold.
    Other(&'static str),
}

/// A tar stream.
pub(super) struct Tarball<R> {
    from: R,
    /// How far into the stream.
    at: u64,
    /// What is left of the current member's data, and the padding behind it.
    left: (u64, u64),
    /// How long the stream may be.
    most: u64,
}

impl<R: BufRead> Tarball<R> {
    pub(super) fn new(from: R, most: u64) -> Self {
        Self { from, at: 0, left: (0, 0), most }
    }

    /// The next member, or `None` at the end of the archive.
    pub(super) fn next(&mut self) -> Result<Option<Member>, TarError> {
        let (data, padding) = self.left;
        self.skip(data + padding)?;
        let mut extensions = Extensions::default();
        loop {
            let Some(header) = self.header()? else {
                if extensions.any {
                    return Err(self.malformed("a long name without a member"));
                }
                return Ok(None);
            };
            let size = match header.entry_size() {
                Ok(size) => size,
                Err(_) => return Err(self.malformed("a size that is no number")),
            };
            match header.entry_type() {
                EntryType::GNULongName => {
                    let name = self.extension(size)?;
                    self.set(&mut extensions.name, until_nul(&name))?;
                }
                EntryType::GNULongLink => {
                    let name = self.extension(size)?;
                    self.set(&mut extensions.link, until_nul(&name))?;
                }
                EntryType::XHeader => {
                    let pax = self.extension(size)?;
                    self.pax(&pax, &mut extensions)?;
                }
                EntryType::XGlobalHeader => {
                    let pax = self.extension(size)?;
                    self.global_pax(&pax)?;
                    continue;
                }
                _ => return self.member(&header, size, extensions).map(Some),
            }
            extensions.any = true;
        }
    }

    /// The current member's data; it ends when the member does.
    pub(super) fn data(&mut self) -> Data<'_, R> {
        Data(self)
    }

    /// Reads what is behind the end, so that a damaged or endless compressed stream shows.
    pub(super) fn drain(&mut self) -> Result<(), TarError> {
        loop {
            let n = self.from.fill_buf().map_err(TarError::Read)?.len();
            if n == 0 {
                return Ok(());
            }
            self.advance(n)?;
        }
    }

    fn member(&mut self, header: &Header, size: u64, known: Extensions) -> Result<Member, TarError> {
        let name = known.name.unwrap_or_else(|| header.path_bytes().into_owned());
        let link = known.link.or_else(|| header.link_name_bytes().map(std::borrow::Cow::into_owned));
        let size = known.size.unwrap_or(size);
        let Ok(mode) = header.mode() else { return Err(self.malformed("a mode that is no number")) };
        let kind = match header.entry_type() {
            // Before ustar a directory was a file whose name ends with a slash.
            EntryType::Regular if name.ends_with(b"/") => MemberKind::Dir,
            EntryType::Regular | EntryType::Continuous => MemberKind::File(size),
            EntryType::Directory => MemberKind::Dir,
            EntryType::Symlink => MemberKind::Link(link.unwrap_or_default()),
            EntryType::Link => MemberKind::Other("a hard link; pack with --hard-dereference"),
            EntryType::GNUSparse => MemberKind::Other("a sparse file; pack without --sparse"),
            EntryType::Char | EntryType::Block => MemberKind::Other("a device; leave it out"),
            EntryType::Fifo => MemberKind::Other("a pipe; leave it out"),
            _ => MemberKind::Other("of a type that cutover does not know; leave it out"),
        };
        let kind =
            if known.sparse { MemberKind::Other("a sparse file; pack without --sparse") } else { kind };
        match kind {
            MemberKind::File(_) => self.left = (size, padding(size)),
            MemberKind::Dir | MemberKind::Link(_) if size > 0 => {
                return Err(self.malformed("data on an entry that has none"));
            }
            _ => self.left = (0, 0),
        }
        Ok(Member { name, kind, mode })
    }

    /// The next header; `None` at the two empty blocks that end an archive.
    fn header(&mut self) -> Result<Option<Header>, TarError> {
        let mut header = Header::new_old();
        self.read_exact(header.as_mut_bytes(), "between two members")?;
        if header.as_bytes().iter().all(|b| *b == 0) {
            let mut second = [0; BLOCK as usize];
            self.read_exact(&mut second, "within its end marker")?;
            if second.iter().any(|b| *b != 0) {
                return Err(self.malformed("members behind an empty block"));
            }
            return Ok(None);
        }
        let bytes = header.as_bytes();
        let sum: u32 = bytes[..148].iter().chain(&bytes[156..]).map(|b| u32::from(*b)).sum();
        // The checksum's own field counts as eight spaces.
        if header.cksum().ok() != Some(sum + 8 * 32) {
            return Err(self.malformed("a header whose checksum is wrong"));
        }
        Ok(Some(header))
    }

    fn extension(&mut self, size: u64) -> Result<Vec<u8>, TarError> {
        if size > EXTENSION_MAX {
            return Err(self.malformed("a name or pax header of more than 1 MiB"));
        }
        let mut bytes = vec![0; usize::try_from(size).expect("1 MiB at most")];
        self.read_exact(&mut bytes, "within a long name")?;
        self.skip(padding(size))?;
        Ok(bytes)
    }

    fn pax(&self, pax: &[u8], known: &mut Extensions) -> Result<(), TarError> {
        for record in PaxExtensions::new(pax) {
            let record = record.map_err(|_| self.malformed("a pax header that cannot be read"))?;
            match record.key_bytes() {
                b"path" => self.set(&mut known.name, record.value_bytes())?,
                b"linkpath" => self.set(&mut known.link, record.value_bytes())?,
                b"size" => {
                    let size = record.value().ok().and_then(|v| v.parse().ok());
                    known.size = Some(size.ok_or_else(|| self.malformed("a pax size that is no number"))?);
                }
                key if key.starts_with(b"GNU.sparse.") => known.sparse = true,
                _ => {}
            }
        }
        Ok(())
    }

    fn global_pax(&self, pax: &[u8]) -> Result<(), TarError> {
        for record in PaxExtensions::new(pax) {
            let record = record.map_err(|_| self.malformed("a pax header that cannot be read"))?;
            if matches!(record.key_bytes(), b"path" | b"linkpath" | b"size") {
                return Err(self.malformed("a global header that renames or resizes members"));
            }
        }
        Ok(())
    }

    fn set(&self, known: &mut Option<Vec<u8>>, value: &[u8]) -> Result<(), TarError> {
        match known.replace(value.to_vec()) {
            None => Ok(()),
            Some(_) => Err(self.malformed("two names for one member")),
        }
    }

    fn malformed(&self, why: &str) -> TarError {
        TarError::Malformed { at: self.at, why: why.to_owned() }
    }

    fn read_exact(&mut self, into: &mut [u8], place: &str) -> Result<(), TarError> {
        let mut done = 0;
        while done < into.len() {
            let from = self.from.fill_buf().map_err(TarError::Read)?;
            let n = from.len().min(into.len() - done);
            if n == 0 {
                return Err(self.truncated(place));
            }
            into[done..done + n].copy_from_slice(&from[..n]);
            done += n;
            self.advance(n)?;
        }
        Ok(())
    }

    fn skip(&mut self, mut bytes: u64) -> Result<(), TarError> {
        while bytes > 0 {
            let n = self.from.fill_buf().map_err(TarError::Read)?.len() as u64;
            if n == 0 {
                return Err(self.truncated("within a member"));
            }
            let n = n.min(bytes);
            bytes -= n;
            self.advance(usize::try_from(n).expect("part of a buffer"))?;
        }
        Ok(())
    }

    fn truncated(&self, place: &str) -> TarError {
        TarError::Truncated { place: format!("{place}, after {} bytes", self.at) }
    }

    fn advance(&mut self, n: usize) -> Result<(), TarError> {
        self.from.consume(n);
        self.at += n as u64;
        if self.at > self.most {
            return Err(TarError::TooLong(self.most));
        }
        Ok(())
    }
}

/// What headers before a member say of it.
#[derive(Default)]
struct Extensions {
    any: bool,
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    sparse: bool,
}

/// The data of the current member.
pub(super) struct Data<'a, R>(&'a mut Tarball<R>);

impl<R: BufRead> BufRead for Data<'_, R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        let left = usize::try_from(self.0.left.0).unwrap_or(usize::MAX);
        if left == 0 {
            return Ok(&[]);
        }
        let from = self.0.from.fill_buf()?;
        Ok(&from[..from.len().min(left)])
    }

    fn consume(&mut self, n: usize) {
        self.0.left.0 -= n as u64;
        self.0.at += n as u64;
        self.0.from.consume(n);
    }
}

impl<R: BufRead> Read for Data<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let from = self.fill_buf()?;
        let n = from.len().min(into.len());
        into[..n].copy_from_slice(&from[..n]);
        self.consume(n);
        Ok(n)
    }
}

fn padding(size: u64) -> u64 {
    (BLOCK - size % BLOCK) % BLOCK
}

fn until_nul(name: &[u8]) -> &[u8] {
    name.split(|b| *b == 0).next().unwrap_or(name)
}
