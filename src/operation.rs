//! The operation: the records of its journal, and the one total function that says what they amount to.
//!
//! ```text
//!            ┌────────────────────────── done(held | failed | up-to-date) ───────────────────────────┐
//!  Idle ─────┼─ staged ─▶ Staged ── handing-over ─▶ HandingOver ── running-experiment ─▶ Running     │
//!            │               │                           │                                 │ readback│
//!            │          done(failed)                rolling-back                           ▼         │
//!            │               │                           │           ┌─ rolling-back ── Readback     │
//!            │               │                           ▼           ▼                     │ promoted│
//!            │               │                       RollingBack ◀───┘                     ▼         ▼
//!            │               └──────────────▶ Done ◀── done(rolled-back)     Promoted ─ done(promoted) ─▶ Done
//!            └─ adopting ─▶ Adopting ── done(adopted | failed) ─▶ Done
//! ```
//!
//! [`State::apply`] is used by the worker that writes a record and by whoever reads it back: a journal that reads
//! is a journal that could have happened. An illegal record is an error value, never a panic.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::release::{Digest, InvalidName, Release, Version};

/// What everything about one operation is bound to: 1 to 128 of `[A-Za-z0-9._:-]`, and neither `.` nor `..`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct OperationId(String);

impl OperationId {
    /// A new id: a UUID of version 7, so that ids sort by time.
    #[must_use]
    pub fn generate() -> Self {
        Self(uuid::Uuid::now_v7().simple().to_string())
    }

    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// SHA-256 of the id: names its receipt, and its units and bus objects by the first 16 digits.
    #[must_use]
    pub fn hash(&self) -> String {
        Digest::of(self.0.as_bytes()).to_string()
    }
}

impl fmt::Display for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<OperationId> for String {
    fn from(id: OperationId) -> Self {
        id.0
    }
}

impl TryFrom<String> for OperationId {
    type Error = InvalidName;
    fn try_from(s: String) -> Result<Self, InvalidName> {
        let legal = |c: char| c.is_ascii_alphanumeric() || "._:-".contains(c);
        if (1..=128).contains(&s.len()) && s.chars().all(legal) && s != "." && s != ".." {
            return Ok(Self(s));
        }
        let rule = "1 to 128 of [A-Za-z0-9._:-], and neither . nor ..";
        Err(InvalidName { what: "valid id", rule, given: s })
    }
}

impl FromStr for OperationId {
    type Err = InvalidName;
    fn from_str(s: &str) -> Result<Self, InvalidName> {
        Self::try_from(s.to_owned())
    }
}

/// What kind of operation it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// To another release.
    Upgrade,
    /// Putting an existing service under management.
    Adopt,
}

/// What an operation is about. Known from its first record on; never changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Subject {
    /// The kind of operation.
    pub action: Action,
    /// The stable release before it; none at genesis.
    pub from: Option<Release>,
    /// The version asked for.
    pub target_version: Version,
    /// The digest of the target; none where the operation ended before it was known.
    pub target_digest: Option<Digest>,
    /// SHA-256 of the artifact, where there was one.
    pub artifact_sha256: Option<Digest>,
    /// Where the release came from, for people.
    pub provenance: String,
    /// When it began, in milliseconds since 1970.
    pub started_at_ms: u64,
}

impl Subject {
    /// The candidate.
    #[must_use]
    pub fn target(&self) -> Option<Release> {
        let version = self.target_version.clone();
        self.target_digest.map(|digest| Release { version, digest })
    }
}

/// The running version before anything changed, as the probe saw it. It is what the way back restores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Baseline {
    /// It ran and passed.
    Passing,
    /// It ran and did not pass, or it should have run and had failed.
    Failing,
    /// It was stopped on purpose.
    Stopped,
    /// There was no release yet.
    Nothing,
}

impl Baseline {
    /// Whether the service is to run when what was there before is back.
    #[must_use]
    pub fn was_wanted(self) -> bool {
        matches!(self, Self::Passing | Self::Failing)
    }

    /// Whether the service is to run when the candidate is stable: the first release of a service does.
    #[must_use]
    pub fn wants_promoted(self) -> bool {
        self != Self::Stopped
    }
}

/// What was there before the stop. Everything that the way back needs and that the stop destroys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Handover {
    /// How the running version did.
    pub baseline: Baseline,
    /// The startId: the InvocationID of the activation that is to be replaced; empty where nothing ran.
    pub invocation: String,
    /// Its main process; 0 where nothing ran.
    pub main_pid: u32,
    /// Its automatic restarts.
    pub restarts: u32,
    /// Whether others may start the unit between our stop and our start, so that `current` switches first.
    pub triggered: bool,
    /// Units that trigger it and were active.
    pub triggers: Vec<String>,
    /// Units that the stop pulls down and that were active.
    pub dependants: Vec<String>,
    /// How long a recovery attempt may take, computed from the unit's own timeouts.
    pub bound_ms: u64,
}

/// Whose fault it is that a candidate did not become stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    /// The candidate's own: its digest is quarantined.
    BadCandidate,
    /// It could not be judged: nothing is quarantined.
    Undetermined,
}

/// Why the way back was taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Verdict {
    /// Provisional until the operation is done: a stable that then fails too takes the blame off the candidate.
    pub cause: Cause,
    /// What was seen, as a sentence.
    pub reason: String,
}

/// What proved that the process that runs is the release that should.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Proof {
    /// The main process.
    pub pid: u32,
    /// Its activation.
    pub invocation: String,
    /// What the kernel showed of it.
    pub kernel: KernelProof,
    /// The version that the application reported, where it reports one.
    pub version: Option<String>,
    /// Whether the process that answered was shown to belong to the unit.
    pub peer: PeerProof,
}

/// How the kernel ties a process to a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KernelProof {
    /// It executes a file of the release: same device, same inode.
    Executable,
    /// It executes a file with the same bytes: an adopted program that has not been started through `current`.
    SameBytes,
    /// Its working directory, a mapping or an open file lies in the release: an interpreted service.
    OpenFile,
    /// It has ended, as a oneshot does: the answer of the probe is the proof.
    Exited,
    /// Nothing ties it but its answer.
    AnswerOnly,
}

/// What is known of the process at the other end of a probe's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PeerProof {
    /// It is a process of the unit.
    Proved,
    /// It could not be read.
    Unproved,
    /// The probe has no connection.
    None,
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The candidate is stable.
    Promoted,
    /// The target already ran.
    UpToDate,
    /// The candidate ran, or was about to, and what was there before is back.
    RolledBack,
    /// Policy said no; nothing changed.
    Held,
    /// It ended before any change.
    Failed,
    /// The service is under management.
    Adopted,
}

/// The end of an operation, and all that its receipt says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Done {
    /// What it was about.
    pub subject: Subject,
    /// How it ended.
    pub outcome: Outcome,
    /// Whose fault, for a rollback.
    pub cause: Option<Cause>,
    /// Why, as a sentence; empty where there is nothing to explain.
    pub reason: String,
    /// The stable release after it.
    pub stable: Option<Release>,
    /// What proved the running version.
    pub proof: Option<Proof>,
    /// What else happened that somebody should know.
    pub notes: Vec<String>,
}

/// One record of the journal, without its envelope.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "phase", content = "data", rename_all = "kebab-case")]
pub enum Event {
    /// Intent to put the service under management.
    Adopting(Subject),
    /// The candidate is sealed; intent to put it in the experiment slot.
    Staged(Subject),
    /// Intent to quiesce, with what the way back needs.
    HandingOver(Handover),
    /// Intent to stop the running version and to start the candidate.
    RunningExperiment,
    /// The candidate is up, as this activation; intent to probe it.
    Readback {
        /// The candidate's InvocationID.
        invocation: String,
    },
    /// The promote intent: it has passed. From here on the only way is to finish.
    Promoted(Proof),
    /// Intent to take the way back.
    RollingBack(Verdict),
    /// It is over.
    Done(Done),
}

impl Event {
    /// The phase's name.
    #[must_use]
    pub fn phase(&self) -> Phase {
        match self {
            Self::Adopting(_) => Phase::Adopting,
            Self::Staged(_) => Phase::Staged,
            Self::HandingOver(_) => Phase::HandingOver,
            Self::RunningExperiment => Phase::RunningExperiment,
            Self::Readback { .. } => Phase::Readback,
            Self::Promoted(_) => Phase::Promoted,
            Self::RollingBack(_) => Phase::RollingBack,
            Self::Done(_) => Phase::Done,
        }
    }
}

/// The name of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[expect(missing_docs, reason = "each is described at the event of the same name")]
pub enum Phase {
    Adopting,
    Staged,
    HandingOver,
    RunningExperiment,
    Readback,
    Promoted,
    RollingBack,
    Done,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Adopting => "adopting",
            Self::Staged => "staged",
            Self::HandingOver => "handing-over",
            Self::RunningExperiment => "running-experiment",
            Self::Readback => "readback",
            Self::Promoted => "promoted",
            Self::RollingBack => "rolling-back",
            Self::Done => "done",
        })
    }
}

/// What the records of a journal amount to. Each variant carries what exists in that state, and nothing else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// No operation was ever recorded.
    Idle,
    /// An adoption that is not committed as far as the journal knows.
    Adopting(Subject),
    /// Sealed; nothing that runs has changed.
    Staged(Subject),
    /// The running version may have parked work, and still runs.
    HandingOver(Subject, Handover),
    /// The running version may have been stopped, and the candidate started.
    Running(Subject, Handover),
    /// The candidate was started as this activation.
    Readback(Subject, Handover, String),
    /// The candidate has passed.
    Promoted(Subject, Handover, Proof),
    /// What was there before is being restored; the candidate's activation, where one was recorded.
    RollingBack(Subject, Handover, Option<String>, Verdict),
    /// Over.
    Done(Done),
}

/// A record that cannot follow the ones before it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("record {found} cannot follow {after}")]
pub struct Illegal {
    /// The state before, by name.
    pub after: &'static str,
    /// The record.
    pub found: Phase,
}

impl State {
    /// The state after one more record.
    ///
    /// # Errors
    /// [`Illegal`], where the record cannot come next.
    pub fn apply(self, event: &Event) -> Result<Self, Illegal> {
        use State as S;
        Ok(match (self, event) {
            (S::Idle | S::Done(_), Event::Adopting(subject)) => S::Adopting(subject.clone()),
            (S::Idle | S::Done(_), Event::Staged(subject)) => S::Staged(subject.clone()),
            (S::Idle | S::Done(_), Event::Done(done))
                if matches!(done.outcome, Outcome::Held | Outcome::Failed | Outcome::UpToDate) =>
            {
                S::Done(done.clone())
            }
            (S::Adopting(_), Event::Done(done))
                if matches!(done.outcome, Outcome::Adopted | Outcome::Failed) =>
            {
                S::Done(done.clone())
            }
            (S::Staged(_), Event::Done(done)) if done.outcome == Outcome::Failed => S::Done(done.clone()),
            (S::Staged(subject), Event::HandingOver(was)) => S::HandingOver(subject, was.clone()),
            (S::HandingOver(subject, was), Event::RunningExperiment) => S::Running(subject, was),
            (S::HandingOver(subject, was) | S::Running(subject, was), Event::RollingBack(verdict)) => {
                S::RollingBack(subject, was, None, verdict.clone())
            }
            (S::Running(subject, was), Event::Readback { invocation }) => {
                S::Readback(subject, was, invocation.clone())
            }
            (S::Readback(subject, was, invocation), Event::RollingBack(verdict)) => {
                S::RollingBack(subject, was, Some(invocation), verdict.clone())
            }
            (S::Readback(subject, was, _), Event::Promoted(proof)) => {
                S::Promoted(subject, was, proof.clone())
            }
            // A stable that fails too takes the blame off the candidate: once, and never back.
            (S::RollingBack(subject, was, invocation, before), Event::RollingBack(verdict))
                if before.cause == Cause::BadCandidate && verdict.cause == Cause::Undetermined =>
            {
                S::RollingBack(subject, was, invocation, verdict.clone())
            }
            (S::Promoted(..), Event::Done(done)) if done.outcome == Outcome::Promoted => {
                S::Done(done.clone())
            }
            (S::RollingBack(..), Event::Done(done)) if done.outcome == Outcome::RolledBack => {
                S::Done(done.clone())
            }
            (state, event) => return Err(Illegal { after: state.name(), found: event.phase() }),
        })
    }

    /// The operation in hand, unless it is over.
    #[must_use]
    pub fn subject(&self) -> Option<&Subject> {
        match self {
            Self::Idle | Self::Done(_) => None,
            Self::Adopting(s)
            | Self::Staged(s)
            | Self::HandingOver(s, _)
            | Self::Running(s, _)
            | Self::Readback(s, ..)
            | Self::Promoted(s, ..)
            | Self::RollingBack(s, ..) => Some(s),
        }
    }

    /// What was there before the stop, once it is recorded and while the operation is open.
    #[must_use]
    pub fn handover(&self) -> Option<&Handover> {
        match self {
            Self::Idle | Self::Done(_) | Self::Adopting(_) | Self::Staged(_) => None,
            Self::HandingOver(_, was)
            | Self::Running(_, was)
            | Self::Readback(_, was, _)
            | Self::Promoted(_, was, _)
            | Self::RollingBack(_, was, ..) => Some(was),
        }
    }

    /// The candidate's activation, where one was recorded.
    #[must_use]
    pub fn candidate_invocation(&self) -> Option<&str> {
        match self {
            Self::Readback(_, _, invocation) | Self::RollingBack(_, _, Some(invocation), _) => {
                Some(invocation)
            }
            Self::Promoted(_, _, proof) => Some(&proof.invocation),
            _ => None,
        }
    }

    /// The name of the last record, in words for people.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Idle => "nothing",
            Self::Adopting(_) => "adopting",
            Self::Staged(_) => "staged",
            Self::HandingOver(..) => "handing-over",
            Self::Running(..) => "running-experiment",
            Self::Readback(..) => "readback",
            Self::Promoted(..) => "promoted",
            Self::RollingBack(..) => "rolling-back",
            Self::Done(_) => "done",
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// One of each event, the outcomes of `done` included: enough to walk every path.
    pub(crate) fn events() -> Vec<Event> {
        let release = |v: &str| Release { version: v.parse().unwrap(), digest: Digest::of(v.as_bytes()) };
        let subject = Subject {
            action: Action::Upgrade,
            from: Some(release("1.0")),
            target_version: "2.0".parse().unwrap(),
            target_digest: Some(release("2.0").digest),
            artifact_sha256: None,
            provenance: "test".into(),
            started_at_ms: 1,
        };
        let was = Handover {
            baseline: Baseline::Passing,
            invocation: "a".repeat(32),
            main_pid: 10,
            restarts: 0,
            triggered: false,
            triggers: vec![],
            dependants: vec![],
            bound_ms: 1000,
        };
        let proof = Proof {
            pid: 11,
            invocation: "b".repeat(32),
            kernel: KernelProof::Executable,
            version: Some("2.0".into()),
            peer: PeerProof::Proved,
        };
        let verdict = |cause| Event::RollingBack(Verdict { cause, reason: "exited 1".into() });
        let done = |outcome| {
            Event::Done(Done {
                subject: subject.clone(),
                outcome,
                cause: None,
                reason: String::new(),
                stable: None,
                proof: None,
                notes: vec![],
            })
        };
        vec![
            Event::Adopting(subject.clone()),
            Event::Staged(subject.clone()),
            Event::HandingOver(was),
            Event::RunningExperiment,
            Event::Readback { invocation: "b".repeat(32) },
            Event::Promoted(proof),
            verdict(Cause::BadCandidate),
            done(Outcome::Promoted),
            done(Outcome::UpToDate),
            done(Outcome::RolledBack),
            done(Outcome::Held),
            done(Outcome::Failed),
            done(Outcome::Adopted),
            verdict(Cause::Undetermined),
        ]
    }

    /// Every sequence of up to seven records, from nothing: the legal complete ones are exactly these (K28, K40–K52).
    #[test]
    fn every_path_through_one_operation_is_known() {
        fn walk(state: &State, path: &mut Vec<String>, found: &mut Vec<String>) {
            for event in events() {
                let Ok(next) = state.clone().apply(&event) else { continue };
                path.push(match &event {
                    Event::Done(done) => format!("{:?}", done.outcome),
                    Event::RollingBack(verdict) => format!("{:?}", verdict.cause),
                    other => other.phase().to_string(),
                });
                if matches!(next, State::Done(_)) {
                    found.push(path.join(" "));
                } else {
                    walk(&next, path, found);
                }
                path.pop();
            }
        }
        let mut found = vec![];
        walk(&State::Idle, &mut vec![], &mut found);
        found.sort();
        let run = "staged handing-over running-experiment";
        let mut expected = vec![
            "Failed".to_owned(),
            "Held".into(),
            "UpToDate".into(),
            "adopting Adopted".into(),
            "adopting Failed".into(),
            "staged Failed".into(),
            format!("{run} readback promoted Promoted"),
        ];
        for before in ["staged handing-over", run, &format!("{run} readback")] {
            for verdicts in ["BadCandidate", "Undetermined", "BadCandidate Undetermined"] {
                expected.push(format!("{before} {verdicts} RolledBack"));
            }
        }
        expected.sort();
        assert_eq!(found, expected);
    }

    #[test]
    fn after_the_promote_intent_there_is_no_way_back() {
        // K51, K52.
        let [_, staged, handing_over, running, readback, promoted, back, ..] = &events()[..] else {
            panic!()
        };
        let state = [staged, handing_over, running, readback, promoted]
            .into_iter()
            .try_fold(State::Idle, State::apply)
            .unwrap();
        let error = state.clone().apply(back).unwrap_err();
        assert_eq!(error.to_string(), "record rolling-back cannot follow promoted");
        for event in events() {
            let legal = matches!(&event, Event::Done(d) if d.outcome == Outcome::Promoted);
            assert_eq!(state.clone().apply(&event).is_ok(), legal, "{event:?}");
        }
    }

    proptest! {
        /// Whatever is thrown at it, the function answers, and a state always knows its subject while open.
        #[test]
        fn any_sequence_is_answered(picks in proptest::collection::vec(0usize..14, 0..24)) {
            let events = events();
            let mut state = State::Idle;
            for pick in picks {
                if let Ok(next) = state.clone().apply(&events[pick]) {
                    state = next;
                }
                let over = matches!(state, State::Idle | State::Done(_));
                prop_assert_eq!(state.subject().is_none(), over);
                if state.handover().is_some() {
                    prop_assert!(state.subject().is_some());
                }
            }
        }
    }

    #[test]
    fn ids_are_names_that_stay_in_their_directory() {
        for bad in ["", ".", "..", "a/b", "a b", "ä", &"x".repeat(129)] {
            assert!(bad.parse::<OperationId>().is_err(), "{bad:?}");
        }
        for good in ["a", "...", "2024-01-01T00:00:00", &"x".repeat(128)] {
            assert!(good.parse::<OperationId>().is_ok(), "{good:?}");
        }
        assert_eq!(OperationId::generate().as_str().len(), 32);
    }
}
