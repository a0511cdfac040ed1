//! The journal: the write-ahead record of the operation in hand.
//!
//! A file of fixed size, made once and overwritten in place. It holds [`BLOCKS`] blocks of 4 KiB, twice: a record is
//! one block of readable JSON, padded with spaces, written at the same place of both copies under one `fdatasync`.
//! `cat journal` shows it.
//!
//! What is guaranteed:
//! - a record that [`Journal::append`] returned for is on the disk, in both copies;
//! - one bad sector, or one torn write, removes nothing that was returned for;
//! - an append that was cut leaves the record whole, or as if it had not been begun;
//! - damage is reported: an operation whose records are not all whole is [`Unreadable`], never a shorter operation;
//! - no block that holds a record of the operation in hand is written again.
//!
//! After an error the journal accepts nothing more: what is on the disk is then unknown (a failed sync is never
//! repeated), and the next process reads it again past the kernel's cache.

use std::collections::BTreeMap;
use std::io;

use serde::{Deserialize, Serialize};

use crate::durable::{self, Disk, DiskFile};
use crate::operation::{Event, OperationId, Phase, State};
use crate::release::Digest;

/// The journal's name in the state directory.
pub const FILE: &str = "journal";
/// The format that this build writes and reads.
pub const FORMAT: u32 = 1;
/// The size of a block: the page of every common machine, and a multiple of every sector size.
pub const BLOCK: usize = 4096;
/// How many blocks each copy has. An operation takes at most [`MOST_RECORDS`], so that the operation before it stays
/// readable until the next one begins.
pub const BLOCKS: u64 = 64;
/// How many records one operation may have; the longest legal path has six.
pub const MOST_RECORDS: u32 = 16;

/// The longest id of a boot: the kernel's, and PID 1's start.
const BOOT_ID_MAX: usize = 64;

const COPY: u64 = BLOCKS * BLOCK as u64;
const LENGTH: u64 = 2 * COPY;
const HEAD: &[u8] = b"{\"sha256\":\"";
const SUM_END: usize = HEAD.len() + 64;

/// A record in its envelope.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// The format of the record.
    pub format_version: u32,
    /// Counts every record this journal ever held; `seq % BLOCKS` is its block.
    pub seq: u64,
    /// Counts the records of this operation.
    pub index: u32,
    /// The operation.
    pub id: OperationId,
    /// The boot in which it was written.
    pub boot_id: String,
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// What it says.
    #[serde(flatten)]
    pub event: Event,
}

/// A journal that cannot be trusted to be complete.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// It has not the length it was made with.
    #[error("has {0} bytes instead of {LENGTH}: it was cut or replaced")]
    Length(u64),
    /// Records of the last operation are damaged or missing.
    #[error("record {0} of its last operation is damaged in both copies or missing")]
    Gap(u64),
    /// Whole records that contradict each other.
    #[error("record {0} is at a place, or in an order, that no writer leaves")]
    Misplaced(u64),
    /// Not one whole record, and something that is not blank.
    #[error("holds no whole record")]
    NoRecord,
    /// Records of a format that this build does not know.
    #[error("has records of format {0}, this build knows {FORMAT}: use the cutover that wrote them")]
    Format(u32),
    /// Records in an order that no operation has.
    #[error("is no operation: {0}")]
    Illegal(#[from] crate::operation::Illegal),
    /// The disk does not give it.
    #[error("cannot be read: {0}")]
    Io(String),
}

/// What a journal's bytes say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contents {
    /// The records of the last operation, in order; empty where there was none.
    pub records: Vec<Record>,
    /// What they amount to.
    pub state: State,
    /// Damage that took nothing away, for the log.
    pub damage: Vec<String>,
}

/// Reads a journal's bytes. Pure: the same bytes always say the same.
///
/// # Errors
/// [`Unreadable`], where the last operation may have had more, or other, records than can be read.
pub fn parse(bytes: &[u8]) -> Result<Contents, Unreadable> {
    if bytes.len() as u64 != LENGTH {
        return Err(Unreadable::Length(bytes.len() as u64));
    }
    let mut whole: BTreeMap<u64, Record> = BTreeMap::new();
    let mut torn: Vec<u64> = Vec::new();
    let mut damage = Vec::new();
    for (place, block) in bytes.chunks(BLOCK).enumerate() {
        let place = place as u64;
        match read_block(block)? {
            Block::Blank => {}
            Block::Torn => torn.push(place),
            Block::Whole(record) => {
                if record.seq % BLOCKS != place % BLOCKS {
                    return Err(Unreadable::Misplaced(record.seq));
                }
                match whole.get(&record.seq) {
                    Some(twin) if *twin != *record => return Err(Unreadable::Misplaced(record.seq)),
                    _ => drop(whole.insert(record.seq, *record)),
                }
            }
        }
    }
    let Some((&last, newest)) = whole.last_key_value() else {
        let tail_only = torn.iter().all(|place| place % BLOCKS == 0);
        return if tail_only { Ok(Contents::empty()) } else { Err(Unreadable::NoRecord) };
    };
    // A cut append tears one block. Where two are lost behind the last whole record, the first of them was durable.
    let lost = |seq: u64| [0, BLOCKS].iter().all(|copy| torn.contains(&(seq % BLOCKS + copy)));
    if lost(last + 1) && lost(last + 2) {
        return Err(Unreadable::Gap(last + 1));
    }
    let first = last.checked_sub(u64::from(newest.index)).ok_or(Unreadable::Misplaced(last))?;
    let mut records = Vec::new();
    for (index, seq) in (0u32..).zip(first..=last) {
        let record = whole.get(&seq).ok_or(Unreadable::Gap(seq))?;
        if record.index != index || record.id != newest.id {
            return Err(Unreadable::Misplaced(seq));
        }
        records.push(record.clone());
    }
    for place in torn {
        // One record is written at a time, so a cut append tears the block behind the last record and no other.
        if place % BLOCKS != (last + 1) % BLOCKS {
            damage
                .push(format!("block {place} of the journal is damaged; no record of the operation is lost"));
        }
    }
    let state = records.iter().try_fold(State::Idle, |state, record| state.apply(&record.event))?;
    Ok(Contents { records, state, damage })
}

impl Contents {
    fn empty() -> Self {
        Self { records: vec![], state: State::Idle, damage: vec![] }
    }
}

enum Block {
    Blank,
    Torn,
    Whole(Box<Record>),
}

fn read_block(block: &[u8]) -> Result<Block, Unreadable> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Format {
        format_version: u32,
    }
    if block == blank() {
        return Ok(Block::Blank);
    }
    let sum = block.strip_prefix(HEAD).and_then(|rest| std::str::from_utf8(&rest[..64]).ok());
    if sum != Some(&Digest::of(&block[SUM_END..]).to_string()) {
        return Ok(Block::Torn);
    }
    // The checksum holds, so this is what somebody wrote: from here on, what cannot be read is refused.
    let json = block.trim_ascii_end();
    match serde_json::from_slice(json) {
        Ok(Format { format_version: FORMAT }) => {}
        Ok(Format { format_version }) => return Err(Unreadable::Format(format_version)),
        Err(e) => return Err(Unreadable::Io(e.to_string())),
    }
    serde_json::from_slice(json)
        .map(|record| Block::Whole(Box::new(record)))
        .map_err(|e| Unreadable::Io(e.to_string()))
}

fn blank() -> Vec<u8> {
    let mut block = vec![b' '; BLOCK];
    block[BLOCK - 1] = b'\n';
    block
}

/// The block of a record; `None` where it does not fit.
fn encode(record: &Record) -> Option<Vec<u8>> {
    let json = serde_json::to_vec(record).expect("a record is plain data");
    let mut block = HEAD.to_vec();
    block.extend([b'0'; 64]);
    block.extend(b"\",");
    block.extend(&json[1..]);
    if block.len() >= BLOCK {
        return None;
    }
    block.resize(BLOCK - 1, b' ');
    block.push(b'\n');
    let sum = Digest::of(&block[SUM_END..]).to_string();
    block[HEAD.len()..SUM_END].copy_from_slice(sum.as_bytes());
    Some(block)
}

/// Why a record could not be written.
#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    /// It is larger than a block. Nothing was written.
    #[error("record {0} does not fit into {BLOCK} bytes")]
    TooLarge(Phase),
    /// It cannot come next, or there are too many. Nothing was written: a mistake of ours.
    #[error("journal: {0}")]
    Illegal(String),
    /// The disk failed; the journal accepts nothing more.
    #[error("the journal cannot be written: {0}")]
    Io(#[from] io::Error),
}

/// An open journal, and what it says. Only the holder of the service's lock has one.
pub struct Journal {
    file: Box<dyn DiskFile>,
    contents: Contents,
    next: u64,
    failed: bool,
}

/// Who writes, and when: the envelope of a record.
#[derive(Clone, Debug)]
pub struct Stamp {
    /// This boot.
    pub boot_id: String,
    /// Now, in milliseconds since 1970.
    pub at_ms: u64,
}

impl Journal {
    /// Makes a blank journal where there is none.
    ///
    /// # Errors
    /// The disk's.
    pub fn create(disk: &dyn Disk) -> io::Result<()> {
        let bytes = blank().repeat(usize::try_from(LENGTH).expect("fits") / BLOCK);
        durable::create_filled(disk, FILE, &bytes)
    }

    /// Opens the journal and reads it past the kernel's cache.
    ///
    /// # Errors
    /// `Ok(None)` where there is none; [`Unreadable`] where it cannot be trusted. Nothing is changed.
    pub fn open(disk: &dyn Disk) -> Result<Option<Self>, Unreadable> {
        let io = |e: io::Error| Unreadable::Io(e.to_string());
        let mut file = match disk.open(FILE) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(io)?,
        };
        let bytes = file.read_uncached("journal.sync-before-read", LENGTH + 1).map_err(io)?;
        let contents = parse(&bytes)?;
        let next = contents.records.last().map_or(0, |r| r.seq + 1);
        Ok(Some(Self { file, contents, next, failed: false }))
    }

    /// Reads the journal without opening it for writing: for whoever holds no lock.
    ///
    /// # Errors
    /// As [`Journal::open`].
    pub fn look(disk: &dyn Disk) -> Result<Option<Contents>, Unreadable> {
        match disk.read(FILE, LENGTH + 1) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Unreadable::Io(e.to_string())),
            Ok(bytes) => parse(&bytes).map(Some),
        }
    }

    /// What the journal says.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.contents.state
    }

    /// The records of the last operation.
    #[must_use]
    pub fn records(&self) -> &[Record] {
        &self.contents.records
    }

    /// Damage that took nothing away.
    #[must_use]
    pub fn damage(&self) -> &[String] {
        &self.contents.damage
    }

    /// Whether a record would fit into its block, whenever it is written.
    #[must_use]
    pub fn fits(&self, id: &OperationId, event: &Event) -> bool {
        let (format_version, seq, index, at_ms) = (FORMAT, u64::MAX, MOST_RECORDS, u64::MAX);
        let (id, boot_id, event) = (id.clone(), "0".repeat(BOOT_ID_MAX), event.clone());
        encode(&Record { format_version, seq, index, id, boot_id, at_ms, event }).is_some()
    }

    /// Writes a record, durably, in both copies.
    ///
    /// # Errors
    /// [`AppendError`]. After [`AppendError::Io`] the journal must be opened again by another process.
    pub fn append(&mut self, id: &OperationId, stamp: &Stamp, event: Event) -> Result<(), AppendError> {
        if self.failed {
            return Err(AppendError::Io(io::Error::other("an earlier write failed")));
        }
        let phase = event.phase();
        let begins = matches!(self.contents.state, State::Idle | State::Done(_));
        let before: &[Record] = if begins { &[] } else { &self.contents.records };
        if before.first().is_some_and(|r| r.id != *id) {
            return Err(AppendError::Illegal(format!("operation {id} is not the one in hand")));
        }
        let state =
            self.contents.state.clone().apply(&event).map_err(|e| AppendError::Illegal(e.to_string()))?;
        let record = Record {
            format_version: FORMAT,
            seq: self.next,
            index: u32::try_from(before.len()).expect("few records"),
            id: id.clone(),
            boot_id: stamp.boot_id.clone(),
            at_ms: stamp.at_ms,
            event,
        };
        if record.index >= MOST_RECORDS {
            return Err(AppendError::Illegal("too many records".into()));
        }
        let block = encode(&record).ok_or(AppendError::TooLarge(phase))?;
        let offset = record.seq % BLOCKS * BLOCK as u64;
        crash_point("before", phase);
        if let Err(e) = durable::overwrite(&mut *self.file, &[offset, offset + COPY], &block) {
            self.failed = true;
            return Err(e.into());
        }
        if begins {
            self.contents.records.clear();
        }
        self.contents.records.push(record);
        self.contents.state = state;
        self.next += 1;
        crash_point("after", phase);
        Ok(())
    }
}

fn crash_point(when: &str, phase: Phase) {
    crate::failpoint::hit(&format!("{when}:{phase}"));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::durable::RealDisk;
    use crate::operation::tests::events;

    fn stamp(n: u64) -> Stamp {
        Stamp { boot_id: "boot".into(), at_ms: n }
    }

    fn id(name: &str) -> OperationId {
        name.parse().unwrap()
    }

    /// A journal after `operations` finished upgrades and the first `open` records of one more.
    fn written(operations: usize, open: usize) -> (Vec<u8>, Contents) {
        let dir = tempfile::tempdir().unwrap();
        let disk = RealDisk::open(dir.path()).unwrap();
        Journal::create(&disk).unwrap();
        let mut journal = Journal::open(&disk).unwrap().unwrap();
        let events = events();
        let path = [1, 2, 3, 4, 5, 7].map(|i| events[i].clone());
        for n in 0..operations {
            for event in &path {
                journal.append(&id(&format!("op-{n}")), &stamp(n as u64), event.clone()).unwrap();
            }
        }
        for event in &path[..open] {
            journal.append(&id("open"), &stamp(99), event.clone()).unwrap();
        }
        (disk.read(FILE, LENGTH).unwrap(), journal.contents)
    }

    #[test]
    fn what_was_appended_reads_back_also_after_going_round_the_ring() {
        for operations in [0, 1, 2, 11, 25] {
            for open in 0..6 {
                let (bytes, contents) = written(operations, open);
                assert_eq!(parse(&bytes).unwrap(), contents);
                assert!(std::str::from_utf8(&bytes).is_ok(), "readable with cat");
            }
        }
    }

    /// A02, B15: every length but the right one is seen.
    #[test]
    fn every_truncation_is_seen() {
        let (bytes, _) = written(1, 3);
        for n in (0..bytes.len()).step_by(7) {
            assert_eq!(parse(&bytes[..n]), Err(Unreadable::Length(n as u64)));
        }
    }

    /// A02, B15: each flipped bit of a block is seen, so that the other copy serves.
    #[test]
    fn a_flipped_bit_anywhere_is_seen_and_takes_nothing_away() {
        let (bytes, contents) = written(11, 3);
        let block = &bytes[..BLOCK];
        assert!(matches!(read_block(block), Ok(Block::Whole(_))));
        // All of what a record holds; of the padding, which is alike everywhere, a part.
        let end = block.iter().rposition(|b| *b == b'}').unwrap();
        for bit in (0..(end + 2) * 8).chain((end * 8..BLOCK * 8).step_by(97)) {
            let mut bent = block.to_vec();
            bent[bit / 8] ^= 1 << (bit % 8);
            assert!(matches!(read_block(&bent), Ok(Block::Torn)), "bit {bit}");
        }
        for at in (0..bytes.len()).step_by(4099) {
            let mut bent = bytes.clone();
            bent[at] ^= 1 << (at % 8);
            let read = parse(&bent).unwrap();
            assert_eq!((&read.records, &read.state), (&contents.records, &contents.state), "byte {at}");
        }
    }

    #[test]
    fn a_record_lost_in_both_copies_is_a_gap_unless_it_is_the_last() {
        let (bytes, contents) = written(1, 4);
        for record in &contents.records {
            for junk in [0u8, b'x'] {
                let mut bent = bytes.clone();
                for copy in [0, COPY] {
                    let at = usize::try_from(copy + record.seq % BLOCKS * BLOCK as u64).unwrap();
                    bent[at..at + 512].fill(junk);
                }
                let read = parse(&bent);
                if record.index == 3 {
                    assert_eq!(read.unwrap().records, contents.records[..3], "a torn tail is dropped");
                } else {
                    assert_eq!(read, Err(Unreadable::Gap(record.seq)));
                }
            }
        }
    }

    #[test]
    fn two_records_lost_at_the_end_are_no_torn_tail() {
        let (bytes, contents) = written(1, 4);
        let mut bent = bytes.clone();
        for record in &contents.records[2..] {
            for copy in [0, COPY] {
                let at = usize::try_from(copy + record.seq % BLOCKS * BLOCK as u64).unwrap();
                bent[at..at + 512].fill(0);
            }
        }
        assert_eq!(parse(&bent), Err(Unreadable::Gap(contents.records[2].seq)));
    }

    #[test]
    fn a_torn_append_is_whole_or_not_begun() {
        // Any 512-byte sector old, new or zero, in both copies.
        let (old, before) = written(11, 2);
        let (new, after) = written(11, 3);
        let changed: Vec<usize> =
            (0..old.len()).step_by(512).filter(|&at| old[at..at + 512] != new[at..at + 512]).collect();
        for seed in 0u32..200 {
            let mut torn = old.clone();
            for (n, &at) in changed.iter().enumerate() {
                match (seed.wrapping_mul(2_654_435_761).rotate_left(n as u32 * 2) >> 3) % 3 {
                    0 => {}
                    1 => torn[at..at + 512].copy_from_slice(&new[at..at + 512]),
                    _ => torn[at..at + 512].fill(0),
                }
            }
            let read = parse(&torn).unwrap();
            assert!(read.records == before.records || read.records == after.records, "seed {seed}");
        }
    }

    #[test]
    fn swapped_records_and_foreign_formats_are_refused() {
        let (bytes, contents) = written(0, 3);
        for (one, other) in [(0, 1), (1, 2), (0, 2)] {
            let mut bent = bytes.clone();
            for copy in [0, BLOCKS as usize] {
                for at in 0..BLOCK {
                    bent.swap((copy + one) * BLOCK + at, (copy + other) * BLOCK + at);
                }
            }
            assert!(matches!(parse(&bent), Err(Unreadable::Misplaced(_))), "{one} {other}");
        }
        let mut future = contents.records[0].clone();
        future.format_version = 2;
        let mut bent = bytes.clone();
        bent[..BLOCK].copy_from_slice(&encode(&future).unwrap());
        assert_eq!(parse(&bent), Err(Unreadable::Format(2)));
    }

    #[test]
    fn what_does_not_fit_or_cannot_follow_is_refused_before_it_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let disk = RealDisk::open(dir.path()).unwrap();
        Journal::create(&disk).unwrap();
        let before = disk.read(FILE, LENGTH).unwrap();
        let mut journal = Journal::open(&disk).unwrap().unwrap();
        let Event::Staged(mut subject) = events()[1].clone() else { panic!() };
        subject.provenance = "x".repeat(BLOCK);
        let error = journal.append(&id("a"), &stamp(0), Event::Staged(subject)).unwrap_err();
        assert!(matches!(error, AppendError::TooLarge(Phase::Staged)));
        let error = journal.append(&id("a"), &stamp(0), Event::RunningExperiment).unwrap_err();
        assert!(matches!(error, AppendError::Illegal(_)));
        assert_eq!(disk.read(FILE, LENGTH).unwrap(), before);
        journal.append(&id("a"), &stamp(0), events()[1].clone()).unwrap();
        let error = journal.append(&id("b"), &stamp(0), events()[2].clone()).unwrap_err();
        assert!(error.to_string().contains("not the one in hand"), "{error}");
    }
}
