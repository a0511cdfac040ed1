//! Settling an open operation: the way back before the promote intent, the way on after it.
//!
//! The live worker and a recovery worker run the same code. What is to be done is decided by [`recovery::decide`] from
//! facts; here it is carried out. Every act is state-based: what is so already is not done again, and a crash anywhere is
//! answered by deciding anew.

use std::time::Duration;

use crate::evidence::{Side, Sides};
use crate::failpoint;
use crate::journal::{AppendError, Contents, Journal, Stamp, Unreadable};
use crate::judge;
use crate::lock::Lock;
use crate::manager::Manager;
use crate::operation::{Baseline, Cause, Done, Event, Handover, Outcome, Proof, State, Subject, Verdict};
use crate::receipt::Receipt;
use crate::recovery::{self, Facts, Journaled, Moves, Next, Origin, UnitFacts};
use crate::seal;
use crate::store::{Slot, Store};
use crate::transaction::{Stop, Transaction};
use crate::unit::{self, Gone, StartError, StopError};

/// How long the facts may take: a release may have some hundred thousand files, and each is looked at.
const DECIDING: Duration = Duration::from_secs(10 * 60);

/// The facts that files alone can tell: all that the boot hook has.
#[must_use]
pub fn facts_on_disk(store: &Store, journal: Journaled) -> Facts {
    let stable_slot = store.slot(Slot::Stable);
    let whole = |dir: &str| store.manifest(dir).ok().map(|m| m.release);
    let stable_slot_whole = stable_slot
        .as_deref()
        .and_then(whole)
        .is_some_and(|release| seal::verify(store.disk(), &release, seal::Depth::Shape).is_ok());
    let from = match &journal {
        Journaled::State(state) => state.subject().and_then(|s| s.from.clone()),
        _ => None,
    };
    let from_whole = from.map_or(Ok(()), |from| {
        seal::verify(store.disk(), &from, seal::Depth::Shape).map(drop).map_err(|e| e.to_string())
    });
    let has_history = store.has_history();
    Facts {
        journal,
        has_history,
        receipted: false,
        stable_slot,
        stable_slot_whole,
        from_whole,
        booted: false,
        unit: None,
    }
}

/// What a journal says, for a decision.
#[must_use]
pub fn journaled(read: Result<Option<Contents>, Unreadable>) -> Journaled {
    match read {
        Ok(Some(contents)) => Journaled::State(Box::new(contents.state)),
        Ok(None) => Journaled::Missing,
        Err(why) => Journaled::Unreadable(why.to_string()),
    }
}

/// What is done about a state directory whose journal cannot be used: `current` follows `slots/stable`, and nothing else
/// is changed. The reason is the answer.
///
/// # Errors
/// The disk's.
pub fn settle_without_journal(store: &Store, journal: Journaled) -> Result<String, Stop> {
    let decision = recovery::decide(&facts_on_disk(store, journal));
    store.aim(&decision.links)?;
    match decision.next {
        Next::Unresolved(why) => Ok(why),
        other => Ok(format!("nothing is known of an operation ({other:?})")),
    }
}

impl Transaction<'_> {
    /// Settles whatever the journal has open. `Ok(None)`: nothing was.
    ///
    /// # Errors
    /// [`Stop`]: it is still open.
    pub fn settle(&mut self) -> Result<Option<Receipt>, Stop> {
        if let (Some(_), Some(last)) = (self.journal.state().subject(), self.journal.records().last())
            && let Some(receipt) = self.store.ended(&last.id)
        {
            self.append_as_received(&receipt)?;
        }
        let open = match self.journal.state() {
            State::Idle => false,
            State::Done(_) => !self.is_receipted(),
            _ => true,
        };
        if open {
            self.know()?;
            let settled = self.settle_open();
            return self.kept_up(settled).map(Some);
        }
        let facts = facts_on_disk(self.store, Journaled::State(Box::new(self.journal.state().clone())));
        let facts = Facts { receipted: true, ..facts };
        let decision = recovery::decide(&facts);
        self.store.aim(&decision.links)?;
        let done = match self.journal.state() {
            State::Done(done) => Some(done.clone()),
            _ => None,
        };
        if done.is_some() {
            self.store.drop_experiment()?;
        }
        // A power cut can bring back what was removed at the end, since that is not synced; and a worker that was killed
        // before its first record left what it had staged.
        self.clean_up(done.as_ref());
        Ok(None)
    }

    /// The same result, after what a disk that failed leaves to do.
    pub(crate) fn kept_up<T>(&mut self, result: Result<T, Stop>) -> Result<T, Stop> {
        if let Err(Stop::Disk(_)) = result {
            keep_up(self.journal.state(), self.manager, &self.adapter.unit);
        }
        result
    }

    fn is_receipted(&self) -> bool {
        self.journal.records().last().is_none_or(|last| self.store.ended(&last.id).is_some())
    }

    /// The receipt says how the operation ended, and the record of it is lost: it is written again, as it was. What was
    /// acknowledged stands.
    fn append_as_received(&mut self, receipt: &Receipt) -> Result<(), Stop> {
        let (Some(subject), Some(outcome)) = (self.journal.state().subject().cloned(), receipt.outcome)
        else {
            return Ok(());
        };
        self.watch.note("the journal has lost the end of its operation; it is taken from the receipt");
        let done = Done {
            subject,
            outcome,
            cause: receipt.cause,
            reason: receipt.reason.clone(),
            stable: receipt.stable.clone(),
            proof: receipt.proof.clone(),
            notes: receipt.metadata.notes.clone(),
        };
        let last = self.journal.records().last().expect("an open operation has records");
        let after_reboot = receipt.metadata.timeline.last().is_some_and(|step| step.after_reboot);
        let boot_id = if after_reboot { self.manager.boot_id() } else { last.boot_id.clone() };
        let stamp = Stamp { boot_id, at_ms: receipt.updated_at_ms };
        match self.journal.append(&receipt.id, &stamp, Event::Done(done)) {
            Err(AppendError::Illegal(why)) => Err(Stop::Unresolved(format!(
                "the receipt of operation {} says {}, and the journal does not lead there: {why}",
                receipt.id,
                crate::response::name(outcome)
            ))),
            other => Ok(other?),
        }
    }

    /// Reads what the live path knows already.
    fn know(&mut self) -> Result<(), Stop> {
        self.settings = self.manager.settings(&self.adapter.unit)?;
        let state = self.journal.state();
        let side = |release: Option<&_>| release.and_then(|r| Side::of(self.store, r));
        self.sides = Sides {
            stable: side(state.subject().and_then(|s| s.from.as_ref())),
            candidate: side(state.subject().and_then(Subject::target).as_ref()),
            stable_invocation: state.handover().map(|was| was.invocation.clone()),
            candidate_invocation: state.candidate_invocation().map(str::to_owned),
        };
        Ok(())
    }

    /// Decides and carries out, for an operation that is open.
    pub(crate) fn settle_open(&mut self) -> Result<Receipt, Stop> {
        if self.manager.is_stopping()? {
            return Err(Stop::Leave("the machine is shutting down".into()));
        }
        self.watch.step("deciding", DECIDING);
        let facts = self.facts()?;
        let decision = recovery::decide(&facts);
        self.watch.note(&format!("settling: {}", name(&decision.next)));
        match decision.next {
            Next::Restore(subject, was, moves) => self.restore(subject, was, moves),
            Next::Finish(subject, was, moves) => self.finish(subject, was, moves, None),
            next => {
                self.store.aim(&decision.links)?;
                match next {
                    Next::Leave(subject, was) => self.leave_running(subject, was),
                    Next::Drop(subject) => self.drop_candidate(subject),
                    Next::Record(done) => self.record(&done),
                    Next::Adoption(subject) => crate::adopt::settle(self, subject),
                    Next::Unresolved(why) => {
                        keep_up(self.journal.state(), self.manager, &self.adapter.unit);
                        Err(Stop::Unresolved(why))
                    }
                    Next::Nothing | Next::Restore(..) | Next::Finish(..) => {
                        Err(Stop::Unresolved("the journal has nothing open".into()))
                    }
                }
            }
        }
    }

    /// After the promote intent, with the proof at hand.
    pub(crate) fn finish_promoted(&mut self, proof: Proof) -> Result<Receipt, Stop> {
        let State::Promoted(subject, was, _) = self.journal.state().clone() else {
            return Err(Stop::Unresolved("the promote intent is not the last record".into()));
        };
        let moves = Moves { stop: false, start: was.baseline.wants_promoted() };
        self.finish(subject, was, moves, Some(proof))
    }

    fn facts(&mut self) -> Result<Facts, Stop> {
        let journal = Journaled::State(Box::new(self.journal.state().clone()));
        let state = self.manager.state(&self.adapter.unit)?;
        let processes = self.manager.processes(&self.adapter.unit)?;
        let unit = UnitFacts {
            up: state.is_up(),
            down: state.is_down(),
            job: state.job.is_some(),
            processes: self.sides.origins(self.manager, &processes, &state.invocation),
            invocation: state.invocation,
            main_pid: state.main_pid,
        };
        let receipted = self.is_receipted();
        let boot = self.manager.boot_id();
        let booted = self.journal.records().last().is_some_and(|last| last.boot_id != boot);
        Ok(Facts { receipted, booted, unit: Some(unit), ..facts_on_disk(self.store, journal) })
    }

    /// Nothing that ran has changed.
    fn drop_candidate(&mut self, subject: Subject) -> Result<Receipt, Stop> {
        self.store.drop_experiment()?;
        let stable = subject.from.clone();
        let reason = "interrupted before any change".into();
        let (outcome, notes) = (Outcome::Failed, vec![]);
        self.close(Done { subject, outcome, cause: None, reason, stable, proof: None, notes })
    }

    /// The old activation still runs, or the stop was never sent.
    fn leave_running(&mut self, subject: Subject, was: Handover) -> Result<Receipt, Stop> {
        self.rolling_back("it was interrupted before the stop")?;
        if was.baseline != Baseline::Stopped {
            self.wake(&was.triggers);
            self.wake(&was.dependants);
        }
        self.resume(&subject)?;
        self.close_back(subject, None)
    }

    /// Writes the way-back record, where no verdict was recorded: the interruption is then the reason.
    fn rolling_back(&mut self, why: &str) -> Result<Verdict, Stop> {
        if let State::RollingBack(.., verdict) = self.journal.state() {
            return Ok(verdict.clone());
        }
        let phase = self.journal.state().name();
        let reason = format!("{why}, in phase {phase}");
        let verdict = Verdict { cause: Cause::Undetermined, reason };
        self.append(Event::RollingBack(verdict.clone()))?;
        Ok(verdict)
    }

    /// Puts back what was there: the release, and whether it ran.
    fn restore(&mut self, subject: Subject, was: Handover, moves: Moves) -> Result<Receipt, Stop> {
        self.is_the_unit()?;
        self.rolling_back("the worker was interrupted")?;
        let unit = self.adapter.unit.clone();
        if was.triggered {
            self.point_back(&subject)?;
        }
        if moves.stop || moves.start && self.has_lost_its_socket(&was)? {
            let running = self.manager.state(&unit)?.invocation;
            self.make_way(was.triggered.then_some(&*running), Origin::Stable)?;
        }
        failpoint::hit("after:stop-back");
        self.point_back(&subject)?;
        failpoint::hit("after:switch-back");
        let mut proof = None;
        if moves.start {
            let started = self.bring_up(&was);
            failpoint::hit("after:start-back");
            self.wake(&was.dependants);
            self.store.sync_current()?;
            proof = self.prove_restored(&was, started)?;
            self.are_awake(&was.dependants);
        } else {
            // It was inactive: the candidate's failure is not left standing as the service's.
            self.manager.reset_failed(&unit)?;
            self.wake(&was.triggers);
            self.store.sync_current()?;
            self.wake_beside(&was.dependants)?;
        }
        self.resume(&subject)?;
        self.close_back(subject, proof)
    }

    /// Refuses to stop or start a unit that is not this operation's: the adapter may name another one by now. The
    /// operation's own executes through `current`, or is still one of the activations that were recorded.
    fn is_the_unit(&mut self) -> Result<(), Stop> {
        let state = self.manager.state(&self.adapter.unit)?;
        let recorded = [&self.sides.stable_invocation, &self.sides.candidate_invocation];
        let is_recorded = recorded.iter().any(|i| i.as_deref() == Some(&*state.invocation));
        if state.load != "loaded" || is_recorded && !state.invocation.is_empty() {
            return Ok(());
        }
        self.goes_through_current()
            .map_err(|why| Stop::Unresolved(format!("{why}, or the adapter names the wrong unit")))
    }

    fn point_back(&self, subject: &Subject) -> Result<(), Stop> {
        match &subject.from {
            Some(from) => Ok(self.store.set_current(from)?),
            None => {
                let links = recovery::Links { stable: recovery::Aim::Absent, current: recovery::Aim::Absent };
                Ok(self.store.aim(&links)?)
            }
        }
    }

    /// Stops what must not run. Nothing is started beside a process that will not end.
    fn make_way(&mut self, triggered_from: Option<&str>, winner: Origin) -> Result<(), Stop> {
        match self.stop(triggered_from, winner) {
            Ok(Gone::Clean) => Ok(()),
            Ok(Gone::Killed(how)) => {
                self.note(format!("on the way: {how}"));
                Ok(())
            }
            Err(StopError::Interrupted) => Err(Stop::Leave("while stopping".into())),
            Err(StopError::Manager(e)) => Err(e.into()),
            Err(e) => Err(Stop::Again(format!("{e}; nothing was started beside it"))),
        }
    }

    /// Whether a socket that the unit had is closed. It cannot be opened again beside the running service.
    fn has_lost_its_socket(&mut self, was: &Handover) -> Result<bool, Stop> {
        for socket in was.triggers.iter().filter(|unit| unit.ends_with(".socket")) {
            if !self.manager.state(socket)?.is_up() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Starts the unit, unless it is up, and before it what triggers it: a service that starts while its socket is closed
    /// has none. The error says why it is not up.
    fn bring_up(&mut self, was: &Handover) -> Result<unit::UnitUp, StartError> {
        let unit = self.adapter.unit.clone();
        self.manager.reset_failed(&unit)?;
        self.wake(&was.triggers);
        self.are_awake(&was.triggers);
        let state = self.manager.state(&unit)?;
        if state.is_up() && state.job.is_none() {
            return Ok(state);
        }
        let within = self.start_bound();
        self.watch.step("starting", within + Duration::from_secs(30));
        // At boot the unit's own start job may be under way: it is joined. Its activation is then not the recorded one.
        let before = if state.job.is_some() { was.invocation.clone() } else { state.invocation };
        unit::start(self.manager, self.watch, &unit, &before, within)
    }

    /// A stable version that had passed must pass again, for a whole fresh window. One that had not is as it was.
    fn prove_restored(
        &mut self,
        was: &Handover,
        started: Result<unit::UnitUp, StartError>,
    ) -> Result<Option<Proof>, Stop> {
        let passed_before = was.baseline == Baseline::Passing;
        let bad = match started {
            Err(StartError::Interrupted) => return Err(Stop::Leave("while starting".into())),
            Err(StartError::Manager(e)) => return Err(e.into()),
            Err(StartError::NotTried(why)) if passed_before => return Err(Stop::Again(why)),
            Err(StartError::Failed(why) | StartError::NotTried(why)) => why,
            Ok(_) if !passed_before => return Ok(None),
            Ok(state) => {
                let Some(side) = self.sides.stable.clone() else {
                    return Err(Stop::Again("the stable release has lost its seal".into()));
                };
                match self.judge(&side, true).judge(&state) {
                    Ok(proof) => return Ok(Some(proof)),
                    Err(judge::Verdict::Interrupted) => return Err(Stop::Leave("while probing".into())),
                    Err(judge::Verdict::Manager(e)) => return Err(e.into()),
                    Err(judge::Verdict::Bad(why) | judge::Verdict::Disturbed(why)) => why,
                }
            }
        };
        if !passed_before {
            self.note(format!("the version before failed before the upgrade, and fails again: {bad}"));
            return Ok(None);
        }
        if let State::RollingBack(.., verdict) = self.journal.state()
            && verdict.cause == Cause::BadCandidate
        {
            let reason = format!("{} — and the version before fails as well", verdict.reason);
            self.append(Event::RollingBack(Verdict { cause: Cause::Undetermined, reason }))?;
        }
        Err(Stop::Again(format!(
            "the stable version was put back, but does not pass as it did before: {bad}"
        )))
    }

    /// Carries the promotion to its end. The slots are finished whatever happens to the service.
    fn finish(
        &mut self,
        subject: Subject,
        was: Handover,
        moves: Moves,
        proof: Option<Proof>,
    ) -> Result<Receipt, Stop> {
        let target = subject.target().expect("a staged operation has its target");
        self.store.promote(&target)?;
        failpoint::hit("after:promote");
        let live = proof.is_some();
        let mut proof = proof;
        if !live {
            self.is_the_unit()?;
            if was.triggered {
                self.store.set_current(&target)?;
            }
            if moves.stop || moves.start && self.has_lost_its_socket(&was)? {
                let running = self.manager.state(&self.adapter.unit)?.invocation;
                self.make_way(was.triggered.then_some(&*running), Origin::Candidate)?;
            }
        }
        self.store.set_current(&target)?;
        if moves.start && !live {
            let state = match self.bring_up(&was) {
                Ok(state) => state,
                Err(StartError::Interrupted) => return Err(Stop::Leave("while starting".into())),
                Err(e) => return Err(Stop::Again(format!("the promoted version does not come up: {e}"))),
            };
            self.store.sync_current()?;
            let Some(side) = self.sides.candidate.clone() else {
                return Err(Stop::Again("the promoted release has lost its seal".into()));
            };
            proof = match self.judge(&side, false).judge(&state) {
                Ok(proof) => Some(proof),
                Err(judge::Verdict::Interrupted) => return Err(Stop::Leave("while probing".into())),
                Err(e) => return Err(Stop::Again(format!("the promoted version does not pass: {e}"))),
            };
        }
        if !moves.start && !live {
            self.manager.reset_failed(&self.adapter.unit)?;
        }
        self.wake(&was.triggers);
        if moves.start {
            self.wake(&was.dependants);
            self.are_awake(&was.dependants);
        } else {
            self.wake_beside(&was.dependants)?;
        }
        self.resume(&subject)?;
        let (outcome, stable) = (Outcome::Promoted, Some(target));
        self.close(Done {
            subject,
            outcome,
            cause: None,
            reason: String::new(),
            stable,
            proof,
            notes: vec![],
        })
    }

    /// Takes up parked work: always, also where nothing was parked.
    fn resume(&mut self, subject: &Subject) -> Result<(), Stop> {
        let Some(hook) = self.adapter.resume.clone() else { return Ok(()) };
        self.hook("resume", &hook, subject).map_err(Stop::Again)
    }

    fn close_back(&mut self, subject: Subject, proof: Option<Proof>) -> Result<Receipt, Stop> {
        let State::RollingBack(.., verdict) = self.journal.state().clone() else {
            return Err(Stop::Unresolved("the way back is not the last record".into()));
        };
        self.store.drop_experiment()?;
        let stable = subject.from.clone();
        let Verdict { cause, reason } = verdict;
        let (outcome, notes) = (Outcome::RolledBack, vec![]);
        self.close(Done { subject, outcome, cause: Some(cause), reason, stable, proof, notes })
    }
}

/// Neither a dying disk nor a damaged release must keep a service down: what should run, and of which nothing runs, is
/// started as `current` stands, without a record. The operation stays open.
pub(crate) fn keep_up(state: &State, manager: &mut dyn Manager, unit: &str) {
    let wanted = match state {
        State::Promoted(_, was, _) => was.baseline.wants_promoted(),
        state => state.handover().is_some_and(|was| was.baseline.was_wanted()),
    };
    // Not beside a process that does not end.
    if wanted
        && manager.state(unit).is_ok_and(|s| s.is_down())
        && manager.processes(unit).is_ok_and(|left| left.is_empty())
    {
        let _ = manager.start(unit);
    }
}

/// What is left to an attempt that cannot be recorded: [`keep_up`], by what the journal says, where no other worker is
/// at work.
pub(crate) fn keep_up_unrecorded(store: &Store, manager: &mut dyn Manager, unit: &str) {
    if let Ok(Some(_lock)) = Lock::take(store)
        && let Ok(Some(contents)) = Journal::look(store.disk())
    {
        keep_up(&contents.state, manager, unit);
    }
}

fn name(next: &Next) -> &'static str {
    match next {
        Next::Nothing => "nothing is open",
        Next::Record(_) => "write the receipt",
        Next::Drop(_) => "drop the candidate",
        Next::Adoption(_) => "settle the adoption",
        Next::Leave(..) => "leave the running version as it is",
        Next::Restore(..) => "restore the stable version",
        Next::Finish(..) => "finish the promotion",
        Next::Unresolved(_) => "nothing can be done",
    }
}

/// Opens the journal for settling; what cannot be trusted is answered without it.
///
/// # Errors
/// What [`settle_without_journal`] did, as [`Stop::Unresolved`]; as [`Stop::Again`] where the disk did not give the journal,
/// which says nothing of what is in it.
pub fn open_journal(store: &Store) -> Result<Journal, Stop> {
    let why = match Journal::open(store.disk()) {
        Ok(Some(journal)) if !matches!(journal.state(), State::Idle) || !store.has_history() => {
            return Ok(journal);
        }
        Ok(Some(_)) => Journaled::State(Box::new(State::Idle)),
        Ok(None) => Journaled::Missing,
        Err(why @ Unreadable::Io(_)) => {
            return Err(Stop::Again(settle_without_journal(store, Journaled::Unreadable(why.to_string()))?));
        }
        Err(why) => Journaled::Unreadable(why.to_string()),
    };
    Err(Stop::Unresolved(settle_without_journal(store, why)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manager::fake::Fake;
    use crate::manager::{Process, UnitState};
    use crate::operation::tests::events;

    #[test]
    fn what_should_run_is_started_without_a_record_but_not_beside_what_is_left() {
        let mut states = vec![State::Idle];
        // staged, handing-over, running-experiment, readback, promoted.
        for event in &events()[1..6] {
            states.push(states.last().unwrap().clone().apply(event).unwrap());
        }
        let down = || UnitState { active: "failed".into(), ..UnitState::default() };
        let started = |state: &State, unit: UnitState, processes: Vec<Process>| {
            let mut fake = Fake { states: [unit].into(), processes, ..Fake::default() };
            keep_up(state, &mut fake, "demo.service");
            !fake.asked.is_empty()
        };
        let by_state: Vec<bool> = states.iter().map(|s| started(s, down(), vec![])).collect();
        assert_eq!(by_state, [false, false, true, true, true, true]);
        let left = Process { pid: 7, exe: None, exe_path: "/old".into() };
        assert!(!started(&states[3], down(), vec![left]));
        assert!(!started(&states[3], UnitState { job: Some(1), ..down() }, vec![]));
        let State::Running(subject, was) = states[3].clone() else { panic!() };
        let stopped = Handover { baseline: Baseline::Stopped, ..was };
        assert!(!started(&State::Running(subject, stopped), down(), vec![]));
    }
}
