//! Writing records, and what follows from the last one: quarantine, receipt, clean-up.

use super::{Stop, Transaction};
use crate::failpoint;
use crate::journal::Stamp;
use crate::manager::Manager;
use crate::operation::{Cause, Done, Event, Outcome};
use crate::receipt::Receipt;
use crate::release::Release;

/// A reason in a record, in bytes as JSON has them: the record has to fit into one block of the journal.
pub(super) const REASON_MAX: usize = 800;
/// Where a release came from, for the same reason.
const PROVENANCE_MAX: usize = 400;
/// Notes of a receipt, together.
const NOTES_MAX: usize = 1200;

impl Transaction<'_> {
    pub(crate) fn append(&mut self, mut event: Event) -> Result<(), Stop> {
        if let Event::Adopting(subject) | Event::Staged(subject) = &mut event {
            cut(&mut subject.provenance, PROVENANCE_MAX);
        }
        let stamp = Stamp { boot_id: self.manager.boot_id(), at_ms: self.manager.wall_clock_ms() };
        self.watch.note(&format!("record {}", event.phase()));
        Ok(self.journal.append(&self.id, &stamp, event)?)
    }

    /// Writes the end of the operation: the record, then what follows from it.
    pub(crate) fn close(&mut self, mut done: Done) -> Result<Receipt, Stop> {
        self.release_reserve();
        done.notes.append(&mut self.notes);
        make_fit(&mut done);
        self.append(Event::Done(done.clone()))?;
        self.record(&done)
    }

    /// What follows from a `done`: run again after a crash, it changes nothing more.
    pub(crate) fn record(&mut self, done: &Done) -> Result<Receipt, Stop> {
        let receipt =
            Receipt::of(self.store.service(), self.journal.records()).expect("the journal has a record");
        let target = done.subject.target();
        match (done.outcome, &target) {
            (Outcome::RolledBack, Some(target)) if done.cause == Some(Cause::BadCandidate) => {
                self.store.set_staged(target, false)?;
                self.store.add_to_quarantine(&crate::store::Quarantined {
                    digest: target.digest,
                    artifact_sha256: done.subject.artifact_sha256,
                    version: target.version.clone(),
                    at_ms: receipt.updated_at_ms,
                    operation: self.id.clone(),
                    reason: done.reason.clone(),
                })?;
            }
            (Outcome::Promoted, Some(target)) => {
                self.store.set_staged(target, false)?;
                self.store.clear_quarantine(&target.digest)?;
                if let Some(from) = done.subject.from.as_ref().filter(|from| *from != target) {
                    self.store.remember(from, target)?;
                }
            }
            _ => {}
        }
        // A power cut may have brought it back since its removal was seen.
        self.store.drop_experiment()?;
        failpoint::hit("before:receipt");
        self.store.record(&receipt)?;
        failpoint::hit("after:receipt");
        self.clean_up(Some(done));
        Ok(receipt)
    }

    /// Removes what no longer serves, also what an operation left that was cut before its first record or behind its last
    /// one. `done` is the end of the latest operation, where there was one.
    pub(crate) fn clean_up(&mut self, done: Option<&Done>) {
        self.release_reserve();
        let mut keep: Vec<String> =
            done.iter().flat_map(|d| d.stable.iter().chain(&d.subject.from)).map(Release::dir_name).collect();
        keep.extend(self.store.staged().iter().map(Release::dir_name));
        let previous = self.store.past().last().map(Release::dir_name);
        keep.extend(previous);
        let processes = self.manager.processes(&self.adapter.unit).unwrap_or_default();
        let used = |manager: &mut dyn Manager, name: &str| {
            let tree = self.store.absolute(&format!("releases/{name}/tree"));
            let tree = tree.to_string_lossy();
            processes
                .iter()
                .any(|p| p.exe_path.starts_with(&format!("{tree}/")) || manager.process_uses(p.pid, &tree))
        };
        for name in self.store.disk().list("releases").unwrap_or_default() {
            if !keep.contains(&name) && used(self.manager, &name) {
                keep.push(name);
            }
        }
        self.store.clean_up(&|name| keep.iter().any(|k| k == name));
    }

    pub(crate) fn note(&mut self, text: String) {
        self.watch.note(&text);
        self.notes.push(text);
    }
}

/// Cuts what people read so that the record fits into its block.
fn make_fit(done: &mut Done) {
    cut(&mut done.reason, REASON_MAX);
    cut(&mut done.subject.provenance, PROVENANCE_MAX);
    let mut room = NOTES_MAX;
    for note in &mut done.notes {
        cut(note, room.min(REASON_MAX));
        // With its quotes and comma.
        room = room.saturating_sub(json_len(note) + 3);
    }
    done.notes.retain(|note| !note.is_empty());
}

/// Cuts a text to so many bytes, as JSON has them.
pub(super) fn cut(text: &mut String, most: usize) {
    if json_len(text) <= most {
        return;
    }
    let room = most.saturating_sub('…'.len_utf8());
    let mut used = 0;
    let end = text.char_indices().find(|(_, c)| {
        used += json_len_of(*c);
        used > room
    });
    text.truncate(end.map_or(0, |(at, _)| at));
    if most >= '…'.len_utf8() {
        text.push('…');
    }
}

fn json_len(text: &str) -> usize {
    text.chars().map(json_len_of).sum()
}

fn json_len_of(c: char) -> usize {
    match c {
        '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
        '\0'..='\u{1f}' => 6,
        c => c.len_utf8(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::durable::RealDisk;
    use crate::journal::Journal;
    use crate::operation::{Action, KernelProof, PeerProof, Proof, Subject};
    use crate::release::{Digest, Version};

    #[test]
    fn the_longest_end_of_an_operation_fits_into_its_record() {
        let version: Version = "v".repeat(64).parse().unwrap();
        let digest = Digest::of(b"");
        let release = Release { version: version.clone(), digest };
        let text = "\"a \u{1} \\".repeat(500);
        let mut done = Done {
            subject: Subject {
                action: Action::Upgrade,
                from: Some(release.clone()),
                target_version: version,
                target_digest: Some(digest),
                artifact_sha256: Some(digest),
                provenance: text.clone(),
                started_at_ms: u64::MAX,
            },
            outcome: Outcome::RolledBack,
            cause: Some(Cause::BadCandidate),
            reason: text.clone(),
            stable: Some(release),
            proof: Some(Proof {
                pid: u32::MAX,
                invocation: "f".repeat(32),
                kernel: KernelProof::Executable,
                version: Some("\u{1}".repeat(64)),
                peer: PeerProof::Unproved,
            }),
            notes: vec![text; 50],
        };
        make_fit(&mut done);
        let dir = tempfile::tempdir().unwrap();
        let disk = RealDisk::open(dir.path()).unwrap();
        Journal::create(&disk).unwrap();
        let journal = Journal::open(&disk).unwrap().unwrap();
        let id = "i".repeat(128).parse().unwrap();
        assert!(journal.fits(&id, &Event::Done(done.clone())));
        done.notes = vec!["x".repeat(4000)];
        assert!(!journal.fits(&id, &Event::Done(done)));
    }

    #[test]
    fn a_cut_text_has_no_more_bytes_in_json_than_it_may() {
        for text in ["plain", "\"\\\n", "\u{1}\0\u{8}", "ä…€", "q\"ä\u{1f}"] {
            let text = text.repeat(9);
            assert_eq!(json_len(&text) + 2, serde_json::to_string(&text).unwrap().len(), "{text:?}");
            for most in 0..80 {
                let mut short = text.clone();
                cut(&mut short, most);
                assert!(json_len(&short) <= most, "{short:?} {most}");
                assert!(short == text || json_len(&text) > most);
            }
        }
    }
}
