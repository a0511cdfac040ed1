//! The recovery decision: one pure function from what is known to what is done. No I/O, no clock, no guess.
//!
//! | the journal ends with | and | then |
//! |---|---|---|
//! | nothing, and there is neither receipt nor slot | | nothing: genesis |
//! | it cannot be read, or is missing or blank beside receipts or slots | | `current` follows `slots/stable`; unresolved |
//! | `done` | | the links it names; its receipt, where that is missing |
//! | `adopting` | | finish or undo the adoption, as its drop-in says |
//! | `staged` | | drop the experiment: failed, nothing had changed |
//! | `handing-over` | | resume: rolled back, undetermined |
//! | | a boot ended what ran, and did not start it again | restore it |
//! | `running-experiment`, `readback`, `rolling-back` | the old activation still runs untouched | resume: rolled back |
//! | | stable is whole | restore it |
//! | | stable is gone or damaged | touch nothing: unresolved |
//! | | `slots/stable` names the candidate | a record is lost: as for an unreadable journal |
//! | `promoted` | | finish the promotion |
//!
//! The boot hook carries out the [`Links`] alone; a worker carries out [`Next`] as well. Carrying either out twice
//! changes nothing more.

use crate::operation::{Done, Handover, Outcome, State, Subject};
use crate::release::Release;

/// All that the decision depends on.
#[derive(Clone, Debug)]
pub struct Facts {
    /// What the journal says.
    pub journal: Journaled,
    /// Whether a receipt or a slot exists, so that a journal must have existed too.
    pub has_history: bool,
    /// Whether the receipt of the journal's operation is on the disk.
    pub receipted: bool,
    /// The directory that `slots/stable` names.
    pub stable_slot: Option<String>,
    /// Whether the release in `slots/stable` is whole by manifest, sizes and modes.
    pub stable_slot_whole: bool,
    /// Whether the release that the way back leads to is whole; the reason where it is not.
    pub from_whole: Result<(), String>,
    /// Whether the machine was booted since the last record: what ran before is then gone, whoever was to stop it.
    pub booted: bool,
    /// The unit; none where systemd was not asked (the boot hook).
    pub unit: Option<UnitFacts>,
}

/// What the journal says, for a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Journaled {
    /// There is none.
    Missing,
    /// It cannot be trusted.
    Unreadable(String),
    /// It reads.
    State(Box<State>),
}

/// The unit, as far as the decision depends on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitFacts {
    /// It is active.
    pub up: bool,
    /// It is inactive or failed, with no job.
    pub down: bool,
    /// A job is queued on it.
    pub job: bool,
    /// Its activation.
    pub invocation: String,
    /// Its main process.
    pub main_pid: u32,
    /// Where each of its live processes comes from.
    pub processes: Vec<Origin>,
}

/// Which release a process is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The stable release.
    Stable,
    /// The candidate.
    Candidate,
    /// Nothing says which: it counts as the release that is to go.
    Unknown,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Where the links belong, first of all.
    pub links: Links,
    /// What the worker then does.
    pub next: Next,
}

/// Where the links belong.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Links {
    /// `slots/stable`.
    pub stable: Aim,
    /// `current`.
    pub current: Aim,
}

/// Where a link belongs.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Aim {
    /// Where it is.
    #[default]
    Keep,
    /// At this release.
    At(Release),
    /// At the release directory of this name, where no more is known of it.
    AtDir(String),
    /// Nowhere.
    Absent,
}

/// What a worker does about an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing is open.
    Nothing,
    /// It is over, but its receipt is not on the disk.
    Record(Done),
    /// Nothing that runs has changed: drop the experiment, `failed`.
    Drop(Subject),
    /// Commit the adoption or undo it.
    Adoption(Subject),
    /// The old activation runs as it was: resume, `rolled-back`.
    Leave(Subject, Handover),
    /// Put back what was there.
    Restore(Subject, Handover, Moves),
    /// Carry the promotion to its end.
    Finish(Subject, Handover, Moves),
    /// Nothing may be done.
    Unresolved(String),
}

/// What has to move so that the unit runs the release it should.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moves {
    /// Stop what runs: it is not that release.
    pub stop: bool,
    /// Start the unit: it is to run.
    pub start: bool,
}

/// Decides. Total: every combination of facts has an answer.
#[must_use]
pub fn decide(facts: &Facts) -> Decision {
    let state = match &facts.journal {
        Journaled::Unreadable(why) => return commit_of_the_slot(facts, format!("the journal {why}")),
        Journaled::Missing if facts.has_history => {
            return commit_of_the_slot(facts, "the journal is missing".into());
        }
        Journaled::Missing => return Decision { links: Links::default(), next: Next::Nothing },
        Journaled::State(state) => (**state).clone(),
    };
    let at = |release: &Option<Release>| release.clone().map_or(Aim::Keep, Aim::At);
    match state {
        State::Idle if facts.has_history => commit_of_the_slot(facts, "the journal is blank".into()),
        State::Idle => Decision { links: Links::default(), next: Next::Nothing },
        State::Done(done) => {
            let current = match (&done.stable, done.outcome) {
                (None, Outcome::RolledBack) => Aim::Absent,
                (stable, _) => at(stable),
            };
            let links = Links { stable: at(&done.stable), current };
            let next = if facts.receipted { Next::Nothing } else { Next::Record(done) };
            Decision { links, next }
        }
        State::Adopting(subject) => Decision { links: Links::default(), next: Next::Adoption(subject) },
        State::Staged(subject) => {
            let links = Links { stable: at(&subject.from), current: at(&subject.from) };
            Decision { links, next: Next::Drop(subject) }
        }
        State::HandingOver(subject, was)
            if facts.booted
                && was.baseline.was_wanted()
                && facts.unit.as_ref().is_some_and(|unit| unit.down) =>
        {
            back(facts, subject, was)
        }
        State::HandingOver(subject, was) => {
            let links = Links { stable: at(&subject.from), current: at(&subject.from) };
            Decision { links, next: Next::Leave(subject, was) }
        }
        State::Running(subject, was)
        | State::Readback(subject, was, _)
        | State::RollingBack(subject, was, ..) => back(facts, subject, was),
        State::Promoted(subject, was, _) => {
            let links = Links { stable: at(&subject.target()), current: at(&subject.target()) };
            let moves = moves(facts, Origin::Candidate, was.baseline.wants_promoted());
            Decision { links, next: Next::Finish(subject, was, moves) }
        }
    }
}

fn back(facts: &Facts, subject: Subject, was: Handover) -> Decision {
    let target = subject.target();
    if let (Some(slot), Some(target)) = (&facts.stable_slot, &target)
        && subject.from.as_ref() != Some(target)
        && *slot == target.dir_name()
    {
        let why = "the journal has lost the record of a promotion that slots/stable shows".into();
        return commit_of_the_slot(facts, why);
    }
    let Some(from) = &subject.from else {
        let links = Links { stable: Aim::Absent, current: Aim::Absent };
        let moves = moves(facts, Origin::Stable, false);
        return Decision { links, next: Next::Restore(subject, was, moves) };
    };
    if let Err(why) = &facts.from_whole {
        let why = format!("the release to go back to, {from}, {why}");
        return Decision { links: Links::default(), next: Next::Unresolved(why) };
    }
    let links = Links { stable: Aim::At(from.clone()), current: Aim::At(from.clone()) };
    let untouched = facts.unit.as_ref().is_some_and(|unit| {
        let same = unit.invocation == was.invocation && unit.main_pid == was.main_pid;
        unit.up && !unit.job && !was.invocation.is_empty() && same
    });
    let moves = moves(facts, Origin::Stable, was.baseline.was_wanted());
    let next = if untouched { Next::Leave(subject, was) } else { Next::Restore(subject, was, moves) };
    Decision { links, next }
}

/// What has to move so that the unit runs the release that `wanted` names, or nothing where it is not to run.
fn moves(facts: &Facts, wanted: Origin, start: bool) -> Moves {
    let stop = facts.unit.as_ref().is_none_or(|unit| {
        let right = unit.up && unit.processes.iter().all(|&p| p == wanted);
        let nothing = unit.down && unit.processes.is_empty();
        if start { !right && !nothing } else { !nothing }
    });
    Moves { stop, start }
}

/// Without a journal, `slots/stable` is the commit: old before the promotion's rename, new after it.
fn commit_of_the_slot(facts: &Facts, why: String) -> Decision {
    let current = match &facts.stable_slot {
        Some(dir) if facts.stable_slot_whole => Aim::AtDir(dir.clone()),
        _ => Aim::Keep,
    };
    let reason = format!("{why}; slots/stable was taken as the truth, and nothing else was changed");
    Decision { links: Links { stable: Aim::Keep, current }, next: Next::Unresolved(reason) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::tests::events;
    use crate::operation::{Baseline, Event};

    fn states() -> Vec<State> {
        let mut found = vec![State::Idle];
        let mut next = 0;
        while next < found.len() {
            for event in events() {
                if let Ok(state) = found[next].clone().apply(&event)
                    && !found.contains(&state)
                {
                    found.push(state);
                }
            }
            next += 1;
        }
        found
    }

    fn with_baseline(state: State, baseline: Baseline, genesis: bool) -> State {
        let mend = |mut s: Subject| {
            if genesis {
                s.from = None;
            }
            s
        };
        let set = |w: Handover| Handover { baseline, ..w };
        match state {
            State::HandingOver(s, w) => State::HandingOver(mend(s), set(w)),
            State::Running(s, w) => State::Running(mend(s), set(w)),
            State::Readback(s, w, i) => State::Readback(mend(s), set(w), i),
            State::Promoted(s, w, p) => State::Promoted(mend(s), set(w), p),
            State::RollingBack(s, w, i, v) => State::RollingBack(mend(s), set(w), i, v),
            other => other,
        }
    }

    fn every_fact(mut see: impl FnMut(Facts)) {
        let mut journals = vec![Journaled::Missing, Journaled::Unreadable("is torn".into())];
        for state in states() {
            for baseline in [Baseline::Passing, Baseline::Failing, Baseline::Stopped, Baseline::Nothing] {
                let state = with_baseline(state.clone(), baseline, baseline == Baseline::Nothing);
                let journal = Journaled::State(Box::new(state));
                if !journals.contains(&journal) {
                    journals.push(journal);
                }
            }
        }
        let old = "1.0-".to_owned() + &crate::release::Digest::of(b"1.0").short();
        let new = "2.0-".to_owned() + &crate::release::Digest::of(b"2.0").short();
        let mut units = vec![None];
        for (up, down) in [(true, false), (false, true), (false, false)] {
            for job in [false, true] {
                for invocation in ["a", "b", "c"] {
                    for processes in [
                        vec![],
                        vec![Origin::Stable],
                        vec![Origin::Candidate],
                        vec![Origin::Unknown],
                        vec![Origin::Stable, Origin::Candidate],
                    ] {
                        let main_pid = if up { 10 } else { 0 };
                        let invocation = invocation.repeat(32);
                        units.push(Some(UnitFacts { up, down, job, invocation, main_pid, processes }));
                    }
                }
            }
        }
        for journal in journals {
            for flags in 0..16 {
                for slot in [None, Some(old.clone()), Some(new.clone())] {
                    for unit in &units {
                        see(Facts {
                            journal: journal.clone(),
                            has_history: flags & 1 != 0 || slot.is_some(),
                            receipted: flags & 2 != 0,
                            stable_slot: slot.clone(),
                            stable_slot_whole: flags & 1 != 0,
                            booted: flags & 8 != 0,
                            from_whole: if flags & 4 == 0 { Ok(()) } else { Err("is gone".into()) },
                            unit: unit.clone(),
                        });
                    }
                }
            }
        }
    }

    /// Over every combination of facts: the rules that no decision may break (K51, K52, K71–K74, K88).
    #[test]
    fn no_combination_of_facts_breaks_a_rule() {
        let mut seen = 0;
        every_fact(|facts| {
            seen += 1;
            let Decision { links, next } = decide(&facts);
            let state = match &facts.journal {
                Journaled::State(state) => Some(&**state),
                _ => None,
            };
            match &next {
                Next::Restore(subject, was, moves) => {
                    assert!(
                        !matches!(state, Some(State::Promoted(..))),
                        "no way back after the promote intent"
                    );
                    assert!(subject.from.is_none() || facts.from_whole.is_ok(), "nothing to go back to");
                    assert!(!moves.start || subject.from.is_some(), "nothing to start");
                    assert_eq!(moves.start, was.baseline.was_wanted() && subject.from.is_some());
                    if let Some(unit) = &facts.unit {
                        let losing = unit.processes.iter().any(|p| *p != Origin::Stable);
                        assert!(
                            !losing || moves.stop,
                            "a process of the losing release would stay: {facts:?}"
                        );
                    }
                }
                Next::Finish(subject, was, moves) => {
                    assert!(matches!(state, Some(State::Promoted(..))));
                    assert_eq!(moves.start, was.baseline != Baseline::Stopped, "a first release runs, too");
                    if let Some(unit) = facts.unit.as_ref().filter(|unit| unit.up && moves.start) {
                        let right = unit.processes.iter().all(|p| *p == Origin::Candidate);
                        assert!(!right || !moves.stop, "what was promoted is not stopped");
                    }
                    assert_eq!(links.stable, Aim::At(subject.target().unwrap()));
                    if let Some(unit) = &facts.unit {
                        let losing = unit.processes.iter().any(|p| *p != Origin::Candidate);
                        assert!(!losing || moves.stop);
                    }
                }
                Next::Leave(subject, was) => {
                    assert!(!matches!(state, Some(State::Promoted(..))));
                    assert_eq!(links.current, subject.from.clone().map_or(Aim::Keep, Aim::At));
                    if !matches!(state, Some(State::HandingOver(..))) {
                        assert_eq!(facts.unit.as_ref().unwrap().invocation, was.invocation);
                    }
                }
                Next::Unresolved(why) => {
                    assert!(!why.is_empty());
                    assert_eq!(links.stable, Aim::Keep, "what is not understood is not changed");
                }
                Next::Nothing => {
                    let over = matches!(state, None | Some(State::Idle | State::Done(_)));
                    assert!(over, "an open operation is not forgotten");
                }
                Next::Record(_) => assert!(matches!(state, Some(State::Done(_))) && !facts.receipted),
                Next::Drop(_) => assert!(matches!(state, Some(State::Staged(_)))),
                Next::Adoption(_) => assert!(matches!(state, Some(State::Adopting(_)))),
            }
            if let Journaled::Unreadable(_) = facts.journal {
                assert!(matches!(next, Next::Unresolved(_)), "an unreadable journal is not an empty one");
            }
        });
        assert!(seen > 50_000, "{seen}");
    }

    #[test]
    fn a_staged_operation_that_was_cut_failed_before_any_change() {
        let staged = State::Idle.apply(&events()[1]).unwrap();
        let Event::Staged(subject) = events()[1].clone() else { panic!() };
        let facts = Facts {
            journal: Journaled::State(Box::new(staged)),
            has_history: true,
            receipted: false,
            stable_slot: Some(subject.from.clone().unwrap().dir_name()),
            stable_slot_whole: true,
            from_whole: Ok(()),
            booted: false,
            unit: None,
        };
        let from = subject.from.clone().unwrap();
        let expected = Decision {
            links: Links { stable: Aim::At(from.clone()), current: Aim::At(from) },
            next: Next::Drop(subject),
        };
        assert_eq!(decide(&facts), expected);
    }
}
