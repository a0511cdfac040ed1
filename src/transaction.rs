//! The transaction: one upgrade, in order. A record is written and synced *before* the effect it announces.
//!
//! ```text
//! prepare    resolve ─ stage ─ prove the way back ─ [staged] ─ experiment slot ─ baseline
//! hand over  [handing-over] ─ quiesce ─ [running-experiment] ─ stop ─ gone ─ current ─ start ─ dependants
//! prove      [readback] ─ probe for the settle time ─ [promoted]
//! finish     experiment over stable ─ resume ─ [done] ─ receipt                     (way_back.rs)
//! ```
//!
//! How it fails:
//! - before `staged`, and until `handing-over`: the receipt says `held` or `failed`; nothing that runs has changed;
//! - from `handing-over` until `promoted`: the way back of [`crate::way_back`], the same code that recovery runs;
//! - after `promoted`: the operation is finished, by this worker or by the next.
//!
//! Where neither is possible now, the operation stays open, and [`Stop`] says why.
//!
//! No sync lies between the end of the stop and the start.

mod close;
mod hands;
mod prepare;

use std::time::Duration;

use self::close::{REASON_MAX, cut};
use self::prepare::{Draft, Early};
use crate::adapter::Adapter;
use crate::evidence::Sides;
use crate::failpoint;
use crate::journal::{AppendError, Journal};
use crate::judge;
use crate::manager::{Manager, ManagerError, UnitSettings, UnitState};
use crate::operation::{Action, Baseline, Cause, Event, Handover, OperationId, Proof, Subject, Verdict};
use crate::receipt::Receipt;
use crate::recovery::Origin;
use crate::release::{Digest, Manifest, Release, Version};
use crate::store::{Slot, Store, StoreError};
use crate::unit::{self, Gone, StartError, StopError};
use crate::watch::Watch;

/// What is asked of an upgrade.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upgrade {
    /// The exact version wanted.
    pub target: Version,
    /// The administrator consents.
    pub consent: bool,
    /// An older version is wanted on purpose.
    pub allow_downgrade: bool,
    /// A digest that failed before is wanted on purpose.
    pub retry_quarantined: bool,
}

/// Where releases come from.
pub trait Source {
    /// Finds exactly this version, and verifies what is said of it.
    fn resolve(&mut self, version: &Version) -> Result<Artifact, SourceFailure>;
    /// Seals what was resolved as a release of `store`; `carry` is the release whose file capabilities it inherits.
    fn stage(
        &mut self,
        store: &Store,
        version: &Version,
        carry: Option<&Release>,
        watch: &dyn Watch,
    ) -> Result<Manifest, SourceFailure>;
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artifact {
    /// Its hash, where that is known before it is read.
    pub sha256: Option<Digest>,
    /// Where it is, for people.
    pub provenance: String,
}

/// Why there is no release.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SourceFailure {
    /// There is no such version: held.
    #[error("{0}")]
    NoSuchVersion(String),
    /// There is something, and it cannot be used: failed.
    #[error("{0}")]
    Unusable(String),
}

/// Why a worker ends without having closed the operation.
#[derive(Debug, thiserror::Error)]
pub enum Stop {
    /// Not settled now; another attempt may settle it.
    #[error("{0}")]
    Again(String),
    /// The disk failed, and what is on it is unknown: only an attempt that reads it again may settle it.
    #[error("{0}")]
    Disk(String),
    /// Asked to leave, or the machine is shutting down: no verdict.
    #[error("interrupted: {0}")]
    Leave(String),
    /// Not to be settled by trying again.
    #[error("{0}")]
    Unresolved(String),
}

impl From<StoreError> for Stop {
    fn from(e: StoreError) -> Self {
        Self::Disk(e.to_string())
    }
}

impl From<ManagerError> for Stop {
    fn from(e: ManagerError) -> Self {
        match e {
            ManagerError::Stopping(why) => Self::Leave(why),
            other => Self::Again(other.to_string()),
        }
    }
}

impl From<AppendError> for Stop {
    fn from(e: AppendError) -> Self {
        Self::Disk(e.to_string())
    }
}

/// An operation in the hands of the worker that holds the service's lock.
pub struct Transaction<'a> {
    pub(crate) store: &'a Store<'a>,
    pub(crate) journal: Journal,
    pub(crate) manager: &'a mut dyn Manager,
    pub(crate) adapter: &'a Adapter,
    pub(crate) watch: &'a dyn Watch,
    pub(crate) id: OperationId,
    pub(crate) notes: Vec<String>,
    pub(crate) settings: UnitSettings,
    pub(crate) sides: Sides,
}

impl<'a> Transaction<'a> {
    /// Takes an operation in hand. The caller holds the lock and has fenced off whoever held it before.
    pub fn new(
        store: &'a Store<'a>,
        journal: Journal,
        manager: &'a mut dyn Manager,
        adapter: &'a Adapter,
        watch: &'a dyn Watch,
        id: OperationId,
    ) -> Self {
        let (notes, settings, sides) = Default::default();
        Self { store, journal, manager, adapter, watch, id, notes, settings, sides }
    }

    /// Goes on with another operation: the one before is settled.
    pub fn take(&mut self, id: OperationId) {
        self.id = id;
        self.notes.clear();
    }

    /// Runs one upgrade, from a closed journal to a receipt.
    ///
    /// # Errors
    /// [`Stop`]: the operation is open and the next worker goes on with it.
    pub fn upgrade(&mut self, wanted: &Upgrade, source: &mut dyn Source) -> Result<Receipt, Stop> {
        let from =
            self.store.slot(Slot::Stable).and_then(|dir| self.store.manifest(&dir).ok()).map(|m| m.release);
        let mut draft = Draft {
            subject: Subject {
                action: Action::Upgrade,
                from,
                target_version: wanted.target.clone(),
                target_digest: None,
                artifact_sha256: None,
                provenance: String::new(),
                started_at_ms: self.manager.wall_clock_ms(),
            },
        };
        match self.prepare(&mut draft, wanted, source) {
            Ok(was) => {
                let handed_over = self.hand_over(draft.subject, was);
                self.kept_up(handed_over)
            }
            Err(Early::Over(done)) => {
                self.store.drop_experiment()?;
                self.close(*done)
            }
            Err(Early::Stop(stop)) => Err(stop),
        }
    }

    fn hand_over(&mut self, subject: Subject, was: Handover) -> Result<Receipt, Stop> {
        self.sides.stable_invocation = Some(was.invocation.clone());
        self.append(Event::HandingOver(was.clone()))?;
        if let Some(hook) = &self.adapter.quiesce
            && let Err(why) = self.hook("quiesce", &hook.clone(), &subject)
        {
            return self.go_back(Cause::Undetermined, why);
        }
        let state = self.manager.state(&self.adapter.unit)?;
        if was.baseline == Baseline::Passing && (state.invocation != was.invocation || !state.is_up()) {
            let why = "the running version was stopped or restarted by somebody else just before the stop";
            return self.go_back(Cause::Undetermined, why.into());
        }
        if let Err(why) = self.manager.has_room() {
            return self.go_back(Cause::Undetermined, why.to_string());
        }
        self.leave_if_asked()?;
        self.append(Event::RunningExperiment)?;
        match self.exchange(&subject, &was, &state) {
            Ok(proof) => {
                self.look_at_settings_again();
                self.append(Event::Promoted(proof.clone()))?;
                self.finish_promoted(proof)
            }
            Err(Setback::Verdict(cause, why)) => self.go_back(cause, why),
            Err(Setback::Stop(stop)) => Err(stop),
        }
    }

    /// Stops the one, starts the other, and proves it.
    fn exchange(&mut self, subject: &Subject, was: &Handover, before: &UnitState) -> Result<Proof, Setback> {
        let target = subject.target().expect("a staged operation has its target");
        let unit = self.adapter.unit.clone();
        self.manager.reset_failed(&unit)?;
        if was.triggered {
            self.store.set_current(&target)?;
        }
        let invocation = before.invocation.clone();
        self.stop_unit(was.triggered.then_some(&*invocation), Origin::Candidate)?;
        failpoint::hit("after:stop");
        self.store.set_current(&target)?;
        failpoint::hit("after:switch");
        let state = self.start_unit(was, &invocation)?;
        failpoint::hit("after:start");
        self.wake(&was.dependants);
        self.not_started_by_others(&state)?;
        self.append(Event::Readback { invocation: state.invocation.clone() })?;
        self.sides.candidate_invocation = Some(state.invocation.clone());
        self.store.sync_current()?;
        let side = self.sides.candidate.clone().expect("the candidate was sealed");
        let proof = match self.judge(&side, false).judge(&state) {
            Ok(proof) => proof,
            Err(judge::Verdict::Bad(why)) => return Err(self.blame(was, subject, why)),
            Err(judge::Verdict::Disturbed(why)) => return Err(Setback::Verdict(Cause::Undetermined, why)),
            Err(judge::Verdict::Manager(e)) => return Err(e.into()),
            Err(judge::Verdict::Interrupted) => {
                return Err(Setback::Stop(Stop::Leave("while probing".into())));
            }
        };
        if was.baseline == Baseline::Stopped {
            // It was run for its proof alone.
            self.stop_unit(was.triggered.then_some(&*state.invocation), Origin::Candidate)?;
            // It was inactive, not failed, whatever its exit code was.
            self.manager.reset_failed(&unit)?;
            self.note(
                "the service was stopped before: the candidate ran for its proof, and was stopped again"
                    .into(),
            );
        }
        Ok(proof)
    }

    /// What runs is proved; what the next start runs is another question, if somebody changed the unit meanwhile.
    fn look_at_settings_again(&mut self) {
        let unit = self.adapter.unit.clone();
        let (Ok(state), Ok(settings)) = (self.manager.state(&unit), self.manager.settings(&unit)) else {
            return;
        };
        self.settings = settings;
        if state.load != "loaded" {
            self.note(format!("{unit} is {} now: its next start fails", state.load));
        } else if let Err(why) = self.goes_through_current() {
            self.note(format!("the unit was changed meanwhile; {why}"));
        }
    }

    /// A unit that came up from the stable release between our stop and our start says nothing about the candidate.
    fn not_started_by_others(&mut self, state: &UnitState) -> Result<(), Setback> {
        let processes = self.manager.processes(&self.adapter.unit)?;
        match self.sides.origins(self.manager, &processes, &state.invocation).contains(&Origin::Stable) {
            true => Err(Setback::Verdict(
                Cause::Undetermined,
                "the unit was started from the stable release by somebody else, between the stop and the start".into(),
            )),
            false => Ok(()),
        }
    }

    /// Stops the unit so that nothing but processes of `winner` is left (of nobody, where that is unknown).
    fn stop_unit(&mut self, triggered_from: Option<&str>, winner: Origin) -> Result<(), Setback> {
        match self.stop(triggered_from, winner) {
            Ok(Gone::Clean) => Ok(()),
            Ok(Gone::Killed(how)) if self.adapter.policy.accept_killed_stop => {
                self.note(format!("{how}; the adapter accepts that"));
                Ok(())
            }
            Ok(Gone::Killed(how)) => Err(Setback::Verdict(
                Cause::Undetermined,
                format!("{how}, which may have cost data; `stop = \"any\"` in the adapter accepts it"),
            )),
            Err(StopError::Manager(e)) => Err(e.into()),
            Err(StopError::Interrupted) => Err(Setback::Stop(Stop::Leave("while stopping".into()))),
            Err(e) => Err(Setback::Verdict(Cause::Undetermined, e.to_string())),
        }
    }

    fn start_unit(&mut self, was: &Handover, invocation: &str) -> Result<UnitState, Setback> {
        let within = self.start_bound();
        self.watch.step("starting", within + Duration::from_secs(30));
        let unit = self.adapter.unit.clone();
        match unit::start(self.manager, self.watch, &unit, invocation, within) {
            Ok(state) => Ok(state),
            Err(StartError::Failed(why)) => {
                let subject = self.journal.state().subject().cloned().expect("the operation is open");
                Err(self.blame(was, &subject, why))
            }
            Err(StartError::NotTried(why)) => Err(Setback::Verdict(Cause::Undetermined, why)),
            Err(StartError::Manager(e)) => Err(e.into()),
            Err(StartError::Interrupted) => Err(Setback::Stop(Stop::Leave("while starting".into()))),
        }
    }

    /// Whose fault a failure is: not the candidate's, where the version before failed just so, or has the same bytes.
    fn blame(&mut self, was: &Handover, subject: &Subject, why: String) -> Setback {
        let same = subject.from.as_ref().map(|r| r.digest) == subject.target_digest;
        if was.baseline == Baseline::Failing || same {
            return Setback::Verdict(Cause::Undetermined, why);
        }
        Setback::Verdict(Cause::BadCandidate, why)
    }

    pub(crate) fn leave_if_asked(&self) -> Result<(), Stop> {
        if self.watch.interrupted() { Err(Stop::Leave("asked to leave".into())) } else { Ok(()) }
    }
}

/// Why the candidate is not to be promoted.
pub(crate) enum Setback {
    /// It was judged.
    Verdict(Cause, String),
    /// It was not.
    Stop(Stop),
}

impl<T: Into<Stop>> From<T> for Setback {
    fn from(stop: T) -> Self {
        Self::Stop(stop.into())
    }
}

impl Transaction<'_> {
    /// Takes the way back, unless the machine is shutting down: then nothing that happened says anything.
    fn go_back(&mut self, cause: Cause, reason: String) -> Result<Receipt, Stop> {
        if self.manager.is_stopping()? {
            return Err(Stop::Leave(format!("the machine is shutting down ({reason})")));
        }
        let mut verdict = Verdict { cause, reason };
        cut(&mut verdict.reason, REASON_MAX);
        self.append(Event::RollingBack(verdict))?;
        self.settle_open()
    }
}
