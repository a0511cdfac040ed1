//! The bytes of an artifact: read and hashed by a thread of its own, handed over in large buffers.
//!
//! Two hashes are needed, that of the artifact and that of each file in it. The reader's thread computes the
//! first while the consumer writes and hashes files, so that two processors share the work. At most
//! `BUFFERS` buffers exist, whatever the artifact's size.
//!
//! A source may be a network directory that no longer answers, and a thread that waits for it cannot be
//! interrupted. So the consumer waits with a limit, gives up with [`FeedError::Stalled`] and leaves the thread
//! behind; it holds no lock and ends with the process, or when the source answers.

use std::fs::{File, Metadata};
use std::io::{self, BufRead, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use sha2::{Digest as _, Sha256};

use crate::release::Digest;

/// The size of a buffer: large enough that the hand-over costs nothing measurable beside the hash, small enough
/// to stay in a processor's cache between hash and write.
const BUFFER: usize = 256 * 1024;
/// How many buffers there are: one is filled, one is consumed, the others even out a slow disk.
const BUFFERS: usize = 8;
/// Every buffer but the last holds at least this much, so that a file's first bytes can be looked at together.
const LEAST: usize = 512;

/// Why an artifact cannot be read to its end.
#[derive(Debug, thiserror::Error)]
pub enum FeedError {
    /// It is not there or may not be opened.
    #[error("{path}: cannot be opened: {source}; check that it exists and that root may read it", path = path.display())]
    Open {
        /// The artifact.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// It is a directory, a pipe, a device.
    #[error("{path}: is not a regular file; put the artifact itself there", path = path.display())]
    NotAFile {
        /// The artifact.
        path: PathBuf,
    },
    /// Nothing came for too long.
    #[error("{path}: gave no bytes for {after:?}; check the file system it is on, then try again", path = path.display())]
    Stalled {
        /// The artifact.
        path: PathBuf,
        /// The limit (`timeouts.stall`).
        after: Duration,
    },
    /// A read failed.
    #[error("{path}: cannot be read: {source}; check the file system it is on, then try again", path = path.display())]
    Read {
        /// The artifact.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Its length is not what it was when it was opened.
    #[error("{path}: has {read} bytes, had {size} when it was opened; wait until it is no longer written, then try again", path = path.display())]
    Changed {
        /// The artifact.
        path: PathBuf,
        /// Its length when it was opened.
        size: u64,
        /// What could be read.
        read: u64,
    },
}

/// How far a feed has been consumed: bytes, of how many.
pub type Progress<'a> = dyn FnMut(u64, u64) + 'a;

enum Message {
    Block(Vec<u8>, usize),
    End(Digest),
    Failed(io::Error),
}

/// An artifact that is being read. Its errors as [`Read`] are for the decoders between; the cause itself is kept
/// for [`Feed::failure`].
pub struct Feed<'a> {
    path: PathBuf,
    size: u64,
    stall: Duration,
    progress: &'a mut Progress<'a>,
    full: Receiver<Message>,
    empty: SyncSender<Vec<u8>>,
    block: Vec<u8>,
    start: usize,
    end: usize,
    consumed: u64,
    digest: Option<Digest>,
    failure: Option<FeedError>,
}

impl<'a> Feed<'a> {
    /// Opens the regular file at `path` and begins to read it.
    ///
    /// # Errors
    /// [`FeedError`]; within `stall` also where the file system does not answer.
    pub fn open(path: &Path, stall: Duration, progress: &'a mut Progress<'a>) -> Result<Self, FeedError> {
        let (file, size) = open(path, stall)?;
        Ok(Self::new(path, Box::new(file), size, stall, progress))
    }

    fn new(
        path: &Path,
        from: Box<dyn Read + Send>,
        size: u64,
        stall: Duration,
        progress: &'a mut Progress<'a>,
    ) -> Self {
        let (to_consumer, full) = sync_channel(BUFFERS);
        let (empty, to_reader) = sync_channel(BUFFERS);
        for _ in 0..BUFFERS {
            // The channel holds as many as there are: this neither waits nor fails.
            let _ = empty.try_send(Vec::new());
        }
        std::thread::spawn(move || read_all(from, &to_reader, &to_consumer));
        Self {
            path: path.to_owned(),
            size,
            stall,
            progress,
            full,
            empty,
            block: Vec::new(),
            start: 0,
            end: 0,
            consumed: 0,
            digest: None,
            failure: None,
        }
    }

    /// Its length when it was opened.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Why reading failed, if it did.
    pub fn failure(&mut self) -> Option<FeedError> {
        self.failure.take()
    }

    /// Reads what is left, so that the digest is of *all* bytes, and returns it.
    ///
    /// # Errors
    /// [`FeedError`], also for a length that changed meanwhile.
    pub fn finish(&mut self) -> Result<Digest, FeedError> {
        loop {
            let fetched = self.fill_buf().map(<[u8]>::len);
            match (fetched, self.digest) {
                (Ok(0), Some(_)) if self.consumed != self.size => {
                    let (path, size) = (self.path.clone(), self.size);
                    return Err(FeedError::Changed { path, size, read: self.consumed });
                }
                (Ok(0), Some(digest)) => return Ok(digest),
                (Ok(n), _) => self.consume(n),
                (Err(source), _) => {
                    let path = self.path.clone();
                    return Err(self.failure().unwrap_or(FeedError::Read { path, source }));
                }
            }
        }
    }

    fn fetch(&mut self) -> Result<(), FeedError> {
        let path = || self.path.clone();
        let gone = || io::Error::other("the reading thread is gone");
        match self.full.recv_timeout(self.stall) {
            Ok(Message::Block(block, len)) => (self.block, self.start, self.end) = (block, 0, len),
            Ok(Message::End(digest)) => self.digest = Some(digest),
            Ok(Message::Failed(source)) => return Err(FeedError::Read { path: path(), source }),
            Err(RecvTimeoutError::Timeout) => {
                return Err(FeedError::Stalled { path: path(), after: self.stall });
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(FeedError::Read { path: path(), source: gone() });
            }
        }
        Ok(())
    }
}

impl BufRead for Feed<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.start == self.end && self.digest.is_none() {
            if self.failure.is_some() {
                return Err(io::Error::other("the artifact cannot be read"));
            }
            (self.start, self.end) = (0, 0);
            let used = std::mem::take(&mut self.block);
            if !used.is_empty() {
                // As many fit as there are; a reader that is gone needs none.
                let _ = self.empty.try_send(used);
            }
            if let Err(e) = self.fetch() {
                let told = io::Error::other(e.to_string());
                self.failure = Some(e);
                return Err(told);
            }
        }
        Ok(&self.block[self.start..self.end])
    }

    fn consume(&mut self, n: usize) {
        self.start = (self.start + n).min(self.end);
        self.consumed += n as u64;
        (self.progress)(self.consumed, self.size);
    }
}

impl Read for Feed<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let from = self.fill_buf()?;
        let n = from.len().min(into.len());
        into[..n].copy_from_slice(&from[..n]);
        self.consume(n);
        Ok(n)
    }
}

fn read_all(mut from: Box<dyn Read + Send>, empty: &Receiver<Vec<u8>>, full: &SyncSender<Message>) {
    let mut hash = Sha256::new();
    // Either channel closes when the consumer has given up: then nobody is left to tell.
    while let Ok(mut block) = empty.recv() {
        block.resize(BUFFER, 0);
        let mut len = 0;
        let mut ended = false;
        while len < LEAST && !ended {
            match from.read(&mut block[len..]) {
                Ok(0) => ended = true,
                Ok(n) => len += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => {
                    let _ = full.send(Message::Failed(e));
                    return;
                }
            }
        }
        hash.update(&block[..len]);
        if len > 0 && full.send(Message::Block(block, len)).is_err() {
            return;
        }
        if ended {
            let _ = full.send(Message::End(Digest::from(<[u8; 32]>::from(hash.finalize()))));
            return;
        }
    }
}

/// Opens a regular file within `stall`. What it is, is asked first: opening a pipe would wait for a writer, and
/// opening a device may do anything.
fn open(path: &Path, stall: Duration) -> Result<(File, u64), FeedError> {
    let asked = path.to_owned();
    let answer = within(stall, move || {
        let regular = std::fs::metadata(&asked)?.is_file();
        if !regular {
            return Ok(None);
        }
        let file = File::open(&asked)?;
        let size = file.metadata()?.len();
        Ok::<_, io::Error>(Some((file, size)))
    });
    let path = path.to_owned();
    match answer {
        None => Err(FeedError::Stalled { path, after: stall }),
        Some(Err(source)) => Err(FeedError::Open { path, source }),
        Some(Ok(None)) => Err(FeedError::NotAFile { path }),
        Some(Ok(Some(opened))) => Ok(opened),
    }
}

/// Runs `ask` in a thread of its own; `None` when it has no answer within `limit`.
fn within<T: Send + 'static>(limit: Duration, ask: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (tell, answer) = sync_channel(1);
    std::thread::spawn(move || tell.send(ask()));
    answer.recv_timeout(limit).ok()
}

/// Describes what is at `path`, links followed, within `stall`.
///
/// # Errors
/// As [`std::fs::metadata`], in [`FeedError::Open`]; [`FeedError::Stalled`].
pub fn describe(path: &Path, stall: Duration) -> Result<Metadata, FeedError> {
    let asked = path.to_owned();
    let path = path.to_owned();
    match within(stall, move || std::fs::metadata(asked)) {
        None => Err(FeedError::Stalled { path, after: stall }),
        Some(answer) => answer.map_err(|source| FeedError::Open { path, source }),
    }
}

/// Reads a whole file of at most `limit` bytes; `None` if it is larger.
///
/// # Errors
/// [`FeedError`].
pub fn read_small(path: &Path, limit: u64, stall: Duration) -> Result<Option<Vec<u8>>, FeedError> {
    let mut silent = |_, _| {};
    let mut feed = Feed::open(path, stall, &mut silent)?;
    if feed.size() > limit {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    match Read::take(&mut feed, limit + 1).read_to_end(&mut bytes) {
        Ok(_) => Ok((bytes.len() as u64 <= limit).then_some(bytes)),
        Err(source) => Err(feed.failure().unwrap_or(FeedError::Read { path: path.to_owned(), source })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives `bytes` in pieces of seven, then waits for ever, fails, or ends.
    struct Slow(Vec<u8>, Then);

    #[derive(Clone, Copy)]
    enum Then {
        End,
        Fail,
        Hang,
    }

    impl Read for Slow {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            if self.0.is_empty() {
                match self.1 {
                    Then::End => return Ok(0),
                    Then::Fail => return Err(io::ErrorKind::StaleNetworkFileHandle.into()),
                    Then::Hang => loop {
                        std::thread::park();
                    },
                }
            }
            let n = self.0.len().min(into.len()).min(7);
            into[..n].copy_from_slice(&self.0[..n]);
            self.0.drain(..n);
            Ok(n)
        }
    }

    fn finish(source: Slow, size: u64) -> Result<Digest, FeedError> {
        let mut silent = |_, _| {};
        let stall = Duration::from_millis(100);
        Feed::new(Path::new("/artifact"), Box::new(source), size, stall, &mut silent).finish()
    }

    #[test]
    fn all_bytes_are_hashed_and_counted() {
        let bytes: Vec<u8> = (0..3 * BUFFER + 5).map(|i| (i % 251) as u8).collect();
        let digest = finish(Slow(bytes.clone(), Then::End), bytes.len() as u64).unwrap();
        assert_eq!(digest, Digest::of(&bytes));
        let mut seen = 0;
        let mut progress = |done, total| {
            assert!(done > seen && total == 1000, "{done} of {total}");
            seen = done;
        };
        let source = Box::new(Slow(vec![1; 1000], Then::End));
        let stall = Duration::from_secs(5);
        Feed::new(Path::new("/artifact"), source, 1000, stall, &mut progress).finish().unwrap();
        assert_eq!(seen, 1000);
    }

    #[test]
    fn a_source_that_stops_answering_is_given_up() {
        let error = finish(Slow(vec![0; 100], Then::Hang), 200).unwrap_err();
        assert!(matches!(error, FeedError::Stalled { .. }), "{error}");
    }

    #[test]
    fn a_failed_read_and_a_changed_length_are_told_apart() {
        let error = finish(Slow(vec![0; 100], Then::Fail), 200);
        assert!(matches!(error, Err(FeedError::Read { .. })), "{error:?}");
        let error = finish(Slow(vec![0; 100], Then::End), 200);
        assert!(matches!(error, Err(FeedError::Changed { size: 200, read: 100, .. })), "{error:?}");
    }

    #[test]
    fn what_is_no_regular_file_is_not_opened() {
        let mut silent = |_, _| {};
        let error = Feed::open(Path::new("/dev/zero"), Duration::from_secs(5), &mut silent).err();
        assert!(matches!(error, Some(FeedError::NotAFile { .. })), "{error:?}");
    }
}
