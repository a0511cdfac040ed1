//! Stopping and starting a unit, and knowing that it happened.
//!
//! The truth is the unit's state and its cgroup, read again until they show the end or the time is up; jobs and signals
//! only wake. Gone means: at rest, *and* no process left.

use std::time::Duration;

use crate::manager::{Manager, ManagerError, Process, UnitState};
use crate::watch::Watch;

/// How often a state is read without a hint that it changed.
const POLL: Duration = Duration::from_millis(200);
/// How long a start may leave the unit as it was, without a job, before that is the answer: systemd takes a job off its
/// queue before the state shows what came of it.
const PATIENCE: Duration = Duration::from_secs(1);

/// Why a unit is not gone.
#[derive(Debug, thiserror::Error)]
pub enum StopError {
    /// systemd did not end it in time.
    #[error("{unit} did not stop within {after:?}: it is {state}")]
    NotEnding {
        /// The unit.
        unit: String,
        /// The bound.
        after: Duration,
        /// Its state at the end.
        state: String,
    },
    /// systemd is done with it, and processes are left.
    #[error("{unit} has stopped, but {} left in its cgroup", list(.left))]
    Leftover {
        /// The unit.
        unit: String,
        /// What is left.
        left: Vec<Process>,
    },
    /// systemd said no.
    #[error(transparent)]
    Manager(#[from] ManagerError),
    /// The worker was asked to leave.
    #[error("interrupted")]
    Interrupted,
}

fn list(processes: &[Process]) -> String {
    let each: Vec<String> = processes.iter().map(|p| format!("process {} ({})", p.pid, p.exe_path)).collect();
    match each.len() {
        1 => format!("{} is", each[0]),
        _ => format!("{} are", each.join(", ")),
    }
}

/// Whether the end was in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gone {
    /// It ended by itself or by the signal that asks.
    Clean,
    /// It had to be killed; how, for the receipt.
    Killed(String),
}

/// How long to wait, and for whom.
pub struct Stopping<'a> {
    /// The unit.
    pub unit: &'a str,
    /// How long systemd may take.
    pub within: Duration,
    /// How long processes may be left after that.
    pub linger: Duration,
    /// The activation that is to end; any other is no concern of ours. `None` where nobody else may start the unit: then
    /// the unit must be at rest.
    pub triggered_from: Option<&'a str>,
}

/// Stops a unit in whatever state it is, and waits until it is gone. `losing` says which processes must not be left.
///
/// # Errors
/// [`StopError`].
pub fn stop(
    manager: &mut dyn Manager,
    watch: &dyn Watch,
    how: &Stopping,
    losing: &mut dyn FnMut(&mut dyn Manager, &Process, &UnitState) -> bool,
) -> Result<Gone, StopError> {
    let before = manager.state(how.unit)?;
    let begun = manager.now();
    manager.stop(how.unit)?;
    let mut rested_at = None;
    loop {
        // First of all: a question would be answered before the job is run, and delay it.
        manager.wait(if rested_at.is_some() { Duration::from_millis(20) } else { POLL });
        let state = manager.state(how.unit)?;
        let replaced = how.triggered_from.is_some_and(|old| state.invocation != old && state.job.is_none());
        if state.is_down() || replaced {
            let processes = manager.processes(how.unit)?;
            let left: Vec<Process> = processes.into_iter().filter(|p| losing(manager, p, &state)).collect();
            if left.is_empty() {
                return Ok(how_it_ended(&before, &state, replaced));
            }
            let rested = *rested_at.get_or_insert_with(|| manager.now());
            if manager.now().saturating_sub(rested) > how.linger {
                return Err(StopError::Leftover { unit: how.unit.to_owned(), left });
            }
        } else if manager.now().saturating_sub(begun) > how.within {
            let state = describe(&state);
            return Err(StopError::NotEnding { unit: how.unit.to_owned(), after: how.within, state });
        }
        if watch.interrupted() {
            return Err(StopError::Interrupted);
        }
    }
}

fn how_it_ended(before: &UnitState, state: &UnitState, replaced: bool) -> Gone {
    let nothing_ran = before.main_pid == 0 && before.result == state.result && before.exit == state.exit;
    if nothing_ran {
        // What is written there is an earlier end, which may well be why it is upgraded.
        return Gone::Clean;
    }
    if replaced {
        // The state is the next activation's; how the last one ended can no longer be read.
        return Gone::Clean;
    }
    match state.result.as_str() {
        "timeout" => Gone::Killed("it did not stop in its time, and systemd killed it".into()),
        "watchdog" | "oom-kill" => Gone::Killed(format!("it was killed while stopping: {}", state.result)),
        _ if state.exit == "killed by 9" => Gone::Killed("it was killed with SIGKILL while stopping".into()),
        _ => Gone::Clean,
    }
}

/// A unit that is up.
pub type UnitUp = UnitState;

/// Why a unit did not come up.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Its own fault.
    #[error("{0}")]
    Failed(String),
    /// Not its fault: it was not given the chance.
    #[error("{0}")]
    NotTried(String),
    /// systemd could not be asked.
    #[error(transparent)]
    Manager(#[from] ManagerError),
    /// The worker was asked to leave.
    #[error("interrupted")]
    Interrupted,
}

/// Starts a unit and waits until it is up, under an activation other than `before`.
///
/// # Errors
/// [`StartError`].
pub fn start(
    manager: &mut dyn Manager,
    watch: &dyn Watch,
    unit: &str,
    before: &str,
    within: Duration,
) -> Result<UnitState, StartError> {
    let begun = manager.now();
    match manager.start(unit) {
        Ok(()) => {}
        Err(ManagerError::Unit { unit, why }) => {
            return Err(StartError::NotTried(format!("{unit} could not be started: {why}")));
        }
        Err(ManagerError::Refused(why)) => {
            return Err(StartError::NotTried(format!("{unit} could not be started: {why}")));
        }
        Err(other) => return Err(other.into()),
    }
    let mut reset = false;
    loop {
        manager.wait(POLL);
        let state = manager.state(unit)?;
        let fresh = state.invocation != before && !state.invocation.is_empty();
        if fresh && state.is_up() {
            // Our job ended with that. One that is there is somebody else's.
            return Ok(state);
        }
        let waiting = state.job.is_some() && !state.is_auto_restarting();
        if !waiting {
            match state.active.as_str() {
                "active" | "reloading" if manager.now().saturating_sub(begun) > PATIENCE => {
                    return Err(StartError::NotTried(format!(
                        "{unit} was never replaced: it runs as it did before"
                    )));
                }
                "inactive" | "failed" if !state.condition => {
                    return Err(StartError::Failed(format!(
                        "{unit} was not started: a condition or assertion of the unit does not hold"
                    )));
                }
                "failed" if state.result == "start-limit-hit" && !reset => {
                    // Our own starts count towards the unit's limit; a start that was never tried says nothing.
                    reset = true;
                    manager.reset_failed(unit)?;
                    manager.start(unit)?;
                }
                // An activation begins before anything of the unit is run: without one, what it needs failed, or
                // somebody cancelled the start.
                "failed" | "inactive" if !fresh && manager.now().saturating_sub(begun) > PATIENCE => {
                    return Err(StartError::NotTried(format!(
                        "{unit} was not started: it is {}; see what it requires",
                        describe(&state)
                    )));
                }
                // Failed, ended at once, or between two automatic attempts: it did not stay up.
                "failed" | "inactive" if fresh => {
                    return Err(StartError::Failed(format!(
                        "{unit} did not start: it is {}",
                        describe(&state)
                    )));
                }
                _ if state.is_auto_restarting() => {
                    return Err(StartError::Failed(format!(
                        "{unit} did not start: it is {}",
                        describe(&state)
                    )));
                }
                _ => {}
            }
        }
        if manager.now().saturating_sub(begun) > within {
            let why = format!("{unit} did not start within {within:?}: it is {}", describe(&state));
            return Err(StartError::Failed(why));
        }
        if watch.interrupted() {
            return Err(StartError::Interrupted);
        }
    }
}

/// A state in words.
#[must_use]
pub fn describe(state: &UnitState) -> String {
    let mut text = format!("{} ({})", state.active, state.sub);
    if !matches!(state.result.as_str(), "" | "success") {
        text += &format!(", result {}", state.result);
    }
    if !state.exit.is_empty() {
        text += &format!(", main process {}", state.exit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manager::fake::Fake;
    use crate::watch::Silent;

    #[test]
    fn a_killed_stop_is_told_from_a_clean_one() {
        // A18; a non-zero exit after SIGTERM is a clean stop.
        let state = |main_pid: u32, result: &str, exit: &str| UnitState {
            main_pid,
            result: result.into(),
            exit: exit.into(),
            ..UnitState::default()
        };
        let ended = |result, exit| how_it_ended(&state(7, "success", ""), &state(0, result, exit), false);
        assert_eq!(ended("success", "exited 0"), Gone::Clean);
        assert_eq!(ended("exit-code", "exited 143"), Gone::Clean);
        assert_eq!(ended("signal", "killed by 15"), Gone::Clean);
        assert!(matches!(ended("timeout", "killed by 9"), Gone::Killed(_)));
        assert!(matches!(ended("timeout", "exited 0"), Gone::Killed(_)));
        assert!(matches!(ended("signal", "killed by 9"), Gone::Killed(_)));
        // It had been killed long before, and there was nothing to stop.
        for (result, exit) in
            [("success", "killed by 9"), ("oom-kill", "killed by 9"), ("timeout", "exited 1")]
        {
            let dead = state(0, result, exit);
            assert_eq!(how_it_ended(&dead, &dead, false), Gone::Clean);
        }
    }

    #[test]
    fn a_start_that_never_began_is_not_the_candidates_fault() {
        let state = |active: &str, invocation: &str| UnitState {
            active: active.into(),
            invocation: invocation.into(),
            condition: true,
            ..UnitState::default()
        };
        let begin = |states: &[UnitState]| {
            let mut fake = Fake { states: states.iter().cloned().collect(), ..Fake::default() };
            start(&mut fake, &Silent, "demo.service", "old", Duration::from_secs(90))
        };
        // Its dependency failed: the job is gone, and there is no other activation.
        let waiting = UnitState { job: Some(1), ..state("inactive", "old") };
        assert!(matches!(begin(&[waiting, state("inactive", "old")]), Err(StartError::NotTried(_))));
        assert!(matches!(begin(&[state("failed", "old")]), Err(StartError::NotTried(_))));
        assert!(matches!(begin(&[state("failed", "new")]), Err(StartError::Failed(_))));
        assert!(matches!(begin(&[state("inactive", "new")]), Err(StartError::Failed(_))));
        let skipped = UnitState { condition: false, ..state("inactive", "old") };
        assert!(matches!(begin(&[skipped]), Err(StartError::Failed(_))));
        assert!(begin(&[state("active", "new")]).is_ok());
    }
}
