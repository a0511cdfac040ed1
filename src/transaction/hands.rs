//! What both directions do to units, and how long it may take.

use std::time::Duration;

use super::{Stop, Transaction};
use crate::adapter::Hook;
use crate::evidence::Side;
use crate::judge::Judge;
use crate::manager::{Command, Manager, Process, UnitState};
use crate::operation::Subject;
use crate::recovery::Origin;
use crate::release::Release;
use crate::unit::{self, Gone, StopError, Stopping};

/// How long units that were started again may take to be up.
const AWAKE: Duration = Duration::from_secs(10);

impl Transaction<'_> {
    /// Stops the unit; what is left may only be from `winner`.
    pub(crate) fn stop(&mut self, triggered_from: Option<&str>, winner: Origin) -> Result<Gone, StopError> {
        let within = self.stop_bound();
        let linger = self.adapter.timeouts.linger;
        self.watch.step("stopping", within + linger + Duration::from_secs(30));
        let unit = self.adapter.unit.clone();
        let how = Stopping { unit: &unit, within, linger, triggered_from };
        let sides = &self.sides;
        let mut losing = |manager: &mut dyn Manager, process: &Process, state: &UnitState| {
            // At rest, nothing may be left. Where another activation is up already, it may be the right one.
            triggered_from.is_none()
                || state.is_down()
                || sides.origin(manager, process, &state.invocation) != winner
        };
        unit::stop(self.manager, self.watch, &how, &mut losing)
    }

    pub(crate) fn judge<'s>(&'s mut self, side: &'s Side, same_bytes_count: bool) -> Judge<'s> {
        Judge { manager: self.manager, watch: self.watch, adapter: self.adapter, side, same_bytes_count }
    }

    /// Starts units again that our stop took down. One that fails is a note.
    pub(crate) fn wake(&mut self, units: &[String]) {
        for unit in units {
            match self.manager.state(unit) {
                Ok(state) if state.is_up() => continue,
                Ok(state) if state.active == "failed" => drop(self.manager.reset_failed(unit)),
                _ => {}
            }
            if let Err(e) = self.manager.start(unit) {
                self.note(format!("{unit} was running before and could not be started again: {e}"));
            }
        }
    }

    /// The same where the service itself stays down: what would start it is left down, and is a note.
    pub(crate) fn wake_beside(&mut self, units: &[String]) -> Result<(), Stop> {
        let unit = self.adapter.unit.clone();
        let mut without = vec![];
        for dependant in units {
            if self.manager.settings(dependant)?.requires.contains(&unit) {
                if !self.manager.state(dependant)?.is_up() {
                    self.note(format!(
                        "{dependant} was running before, and was not started again: it would start {unit}, which was stopped"
                    ));
                }
            } else {
                without.push(dependant.clone());
            }
        }
        self.wake(&without);
        self.are_awake(&without);
        Ok(())
    }

    /// Looks whether units that were woken are up: they were started together, and have [`AWAKE`] together.
    pub(crate) fn are_awake(&mut self, units: &[String]) {
        if units.is_empty() {
            return;
        }
        self.watch.step("waiting for other units", AWAKE + Duration::from_secs(30));
        let deadline = self.manager.now() + AWAKE;
        for unit in units {
            while let Ok(state) = self.manager.state(unit) {
                if state.is_up() {
                    break;
                }
                if state.job.is_none() || self.manager.now() > deadline {
                    self.note(format!("{unit} was running before and is now {}", unit::describe(&state)));
                    break;
                }
                self.manager.wait(Duration::from_millis(100));
            }
        }
    }

    /// Runs a command of the adapter.
    pub(crate) fn hook(&mut self, purpose: &str, hook: &Hook, subject: &Subject) -> Result<(), String> {
        self.watch.step(purpose, hook.timeout + Duration::from_secs(30));
        let version = |r: &Option<Release>| r.as_ref().map_or(String::new(), |r| r.version.to_string());
        let result = self.manager.run(&Command {
            service: self.adapter.service.clone(),
            purpose: purpose.into(),
            argv: hook.command.clone(),
            user: hook.user.clone(),
            environment: vec![
                ("CUTOVER_SERVICE".into(), self.adapter.service.clone()),
                ("CUTOVER_OPERATION".into(), self.id.to_string()),
                ("CUTOVER_FROM".into(), version(&subject.from)),
                ("CUTOVER_TARGET".into(), subject.target_version.to_string()),
            ],
            timeout: hook.timeout,
        });
        match result {
            Err(e) => Err(format!("the {purpose} command could not be run: {e}")),
            Ok(r) if r.status == Some(0) => Ok(()),
            Ok(r) if r.timed_out => Err(format!("the {purpose} command took longer than {:?}", hook.timeout)),
            Ok(r) => Err(match r.status {
                Some(status) => format!("the {purpose} command exited with {status}"),
                None => format!("the {purpose} command was killed"),
            }),
        }
    }

    fn lines(&self, setting: &str) -> u32 {
        let count = self.settings.exec.iter().filter(|line| line.setting.starts_with(setting)).count();
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    fn stop_bound(&self) -> Duration {
        let each = self.settings.timeout_stop.unwrap_or(self.adapter.timeouts.stop);
        each.saturating_mul(2 + self.lines("ExecStop"))
    }

    pub(crate) fn start_bound(&self) -> Duration {
        let each = self.settings.timeout_start.unwrap_or(self.adapter.timeouts.start);
        each.saturating_mul(self.lines("ExecStart").max(1))
    }

    /// How long one recovery attempt may take.
    pub(super) fn bound(&self) -> Duration {
        let resume = self.adapter.resume.as_ref().map_or(Duration::ZERO, |h| h.timeout);
        let probe = &self.adapter.probe;
        self.stop_bound()
            + self.start_bound()
            + probe.timeout
            + probe.settle
            + resume
            + Duration::from_secs(30)
    }
}
