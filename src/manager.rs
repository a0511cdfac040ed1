//! What the transaction asks of the service manager, without saying how: the seam between what decides and what
//! acts. [`crate::systemd`] is the real one; a simulated one drives the same transaction in the proofs.
//!
//! The truth is a unit's *state*, read again. [`Manager::wait`] may return early, late or without cause; nobody
//! concludes anything from it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::durable::FileId;

/// A service manager. Units are named in full (`demo.service`).
///
/// Calls survive a lost bus connection: the implementation connects again, reads again, and gives up with
/// [`ManagerError::Unreachable`] after its own bound. Units that are asked about stay loaded (`Ref`).
pub trait Manager {
    /// The unit as it is now.
    fn state(&mut self, unit: &str) -> Result<UnitState, ManagerError>;
    /// The unit's effective settings and its relations to other units.
    fn settings(&mut self, unit: &str) -> Result<UnitSettings, ManagerError>;
    /// The processes in the unit's cgroup and below it; empty means that the cgroup is empty or gone.
    fn processes(&mut self, unit: &str) -> Result<Vec<Process>, ManagerError>;
    /// Queues a start (mode `replace`), without waiting.
    fn start(&mut self, unit: &str) -> Result<(), ManagerError>;
    /// Queues a stop (mode `replace`), without waiting. Also ends a pending automatic restart.
    fn stop(&mut self, unit: &str) -> Result<(), ManagerError>;
    /// Cancels the job that is queued on the unit, if there is one.
    fn cancel_job(&mut self, unit: &str) -> Result<(), ManagerError>;
    /// Forgets failures and start counts of the unit.
    fn reset_failed(&mut self, unit: &str) -> Result<(), ManagerError>;
    /// Reads unit files again.
    fn reload(&mut self) -> Result<(), ManagerError>;
    /// Whether the unit was seen to begin its stop under a job that is not ours, since `state` was first asked for
    /// it. Automatic restarts, a start of what was down or up, and a reload are no such jobs. A hint: what happened
    /// while the bus was away is not seen.
    fn foreign_job_seen(&mut self, unit: &str) -> bool;
    /// Whether the manager has room to work in (/run): asked before a stop.
    fn has_room(&mut self) -> Result<(), ManagerError>;
    /// Whether the machine is shutting down.
    fn is_stopping(&mut self) -> Result<bool, ManagerError>;
    /// A round trip: when it returns, whatever was sent before by others is at the manager.
    fn barrier(&mut self) -> Result<(), ManagerError>;
    /// Whether this bus name, as an earlier worker knew its own, has an owner.
    fn bus_name_alive(&mut self, name: &str) -> Result<bool, ManagerError>;
    /// Whether the process with this start time is alive.
    fn process_alive(&mut self, pid: u32, start_time: u64) -> bool;
    /// Returns when something may have changed, or after `at_most`. After `start` and `stop`, wait before reading:
    /// the manager answers readings before it runs jobs, so an early one delays the service.
    fn wait(&mut self, at_most: Duration);
    /// CLOCK_MONOTONIC: it does not jump, and stands still while the machine is suspended, so that no suspend ends
    /// a window. Its zero is arbitrary.
    fn now(&mut self) -> Duration;
    /// The wall clock, in milliseconds since 1970: for people only.
    fn wall_clock_ms(&mut self) -> u64;
    /// The id of this boot.
    fn boot_id(&mut self) -> String;
    /// Runs a command of the adapter in a transient unit of its own, and waits for it to be gone.
    fn run(&mut self, command: &Command) -> Result<CommandResult, ManagerError>;
    /// The transient units of commands run for `service` that are still there.
    fn running_commands(&mut self, service: &str) -> Result<Vec<String>, ManagerError>;
    /// Asks the application over HTTP: one `GET`, bounded in time and size. The processes of `unit` are the first
    /// in which the server's end of the connection is looked for.
    fn http_get(
        &mut self,
        unit: &str,
        target: &HttpTarget,
        timeout: Duration,
    ) -> Result<HttpAnswer, ProbeError>;
    /// Whether the process has a file open, mapped or as its working directory that lies below the directory with
    /// this identity; `root` is the absolute path of that directory.
    fn process_uses(&mut self, pid: u32, root: &str) -> bool;
    /// SHA-256 of the file that the process executes; `None` where it cannot be read.
    fn exe_digest(&mut self, pid: u32) -> Option<crate::release::Digest>;
}

/// The moving part of a unit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnitState {
    /// `loaded`, `not-found`, `masked`, `bad-setting`, `error`.
    pub load: String,
    /// `active`, `reloading`, `inactive`, `failed`, `activating`, `deactivating`.
    pub active: String,
    /// The type's own state: `running`, `exited`, `auto-restart`, …
    pub sub: String,
    /// The id of the job queued on it.
    pub job: Option<u32>,
    /// The main process; 0 without one.
    pub main_pid: u32,
    /// The id of this activation, as 32 hexadecimal digits; empty before the first.
    pub invocation: String,
    /// Automatic restarts since the last start by hand.
    pub restarts: u32,
    /// Whether the conditions held at the last start; true before the first.
    pub condition: bool,
    /// `success`, `exit-code`, `signal`, `timeout`, `core-dump`, `watchdog`, `start-limit-hit`, …
    pub result: String,
    /// How the last main process ended, for messages: `exited 1`, `killed by 9`.
    pub exit: String,
    /// Whether its unit file or a drop-in changed since it was loaded.
    pub needs_reload: bool,
}

impl UnitState {
    /// Up: it has started and has not begun to stop.
    #[must_use]
    pub fn is_up(&self) -> bool {
        matches!(self.active.as_str(), "active" | "reloading")
    }

    /// At rest: it runs nothing and will not start by itself.
    #[must_use]
    pub fn is_down(&self) -> bool {
        matches!(self.active.as_str(), "inactive" | "failed") && self.job.is_none()
    }

    /// Between an exit and an automatic restart.
    #[must_use]
    pub fn is_auto_restarting(&self) -> bool {
        self.sub.starts_with("auto-restart")
    }
}

/// The part of a unit that only a reload changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnitSettings {
    /// Its own name, where it was asked for by an alias.
    pub id: String,
    /// `simple`, `exec`, `notify`, `dbus`, `forking`, `oneshot`, `idle`; empty where it is no service.
    pub service_type: String,
    /// Every `Exec*=` line in order.
    pub exec: Vec<ExecLine>,
    /// `RemainAfterExit=`.
    pub remain_after_exit: bool,
    /// `PIDFile=`, empty without one.
    pub pid_file: String,
    /// `KillMode=`.
    pub kill_mode: String,
    /// `User=`, empty for root.
    pub user: String,
    /// `TimeoutStartSec=`; `None` is infinity.
    pub timeout_start: Option<Duration>,
    /// `TimeoutStopSec=`; `None` is infinity.
    pub timeout_stop: Option<Duration>,
    /// Units that may start it: `TriggeredBy`, and `UpheldBy` where systemd has it.
    pub triggered_by: Vec<String>,
    /// Units that stopping it stops, by `Requires=`, `BindsTo=`, `PartOf=` and the like, over any number of steps.
    pub pulls_down: Vec<String>,
    /// Units that it requires or binds to.
    pub requires: Vec<String>,
    /// `RefuseManualStart=` or `RefuseManualStop=`.
    pub refuses_manual: bool,
    /// `RootDirectory=` or `RootImage=`, empty without either.
    pub root: String,
    /// Paths that the unit may not execute from (`NoExecPaths=`) and those it may (`ExecPaths=`).
    pub no_exec_paths: Vec<String>,
    /// `ExecPaths=`.
    pub exec_paths: Vec<String>,
    /// `InaccessiblePaths=` and `TemporaryFileSystem=`.
    pub hidden_paths: Vec<String>,
    /// `WorkingDirectory=`, with a leading `!` where it may be absent.
    pub working_directory: String,
    /// Of a socket: `Accept=`, so that each connection has an instance of its own.
    pub accept: bool,
    /// The profile of `AppArmorProfile=`, empty without one.
    pub apparmor_profile: String,
    /// The unit file.
    pub fragment: String,
    /// Its drop-ins, in order.
    pub drop_ins: Vec<String>,
}

/// One effective `Exec*=` line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecLine {
    /// The setting: `ExecStart`, `ExecStartPre`, `ExecReload`, …
    pub setting: String,
    /// The executable.
    pub path: String,
    /// The arguments, `argv[0]` first.
    pub argv: Vec<String>,
    /// The prefixes in effect: any of `-`, `+`, `!`, `!!`, `:`; `@` follows from `argv[0]`.
    pub prefixes: String,
}

/// A live process of a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// The file it executes; `None` where the kernel does not say (a kernel thread, a zombie).
    pub exe: Option<FileId>,
    /// The path of that file, for messages.
    pub exe_path: String,
}

/// A command of the adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// The service it is run for; part of the transient unit's name.
    pub service: String,
    /// What it is for: `quiesce`, `resume`, `probe`; part of the name too.
    pub purpose: String,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Who it runs as; `None` for root.
    pub user: Option<String>,
    /// Variables added to its environment.
    pub environment: Vec<(String, String)>,
    /// When it is killed.
    pub timeout: Duration,
}

/// How a command ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandResult {
    /// Its exit status; `None` when it was killed.
    pub status: Option<i32>,
    /// Whether it was ended because its time was up.
    pub timed_out: bool,
    /// The first 64 KiB of its output.
    pub stdout: Vec<u8>,
}

/// Where an HTTP probe goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HttpTarget {
    /// `http://HOST:PORT/PATH`; the host is an IP address or `localhost`.
    Tcp {
        /// The address.
        address: std::net::SocketAddr,
        /// The `Host:` header.
        host: String,
        /// The path, with its `/`.
        path: String,
    },
    /// A Unix socket.
    Unix {
        /// The socket.
        socket: String,
        /// The path, with its `/`.
        path: String,
    },
}

/// What the application answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpAnswer {
    /// The status code.
    pub status: u16,
    /// At most 64 KiB of the body; a larger one is an error.
    pub body: Vec<u8>,
    /// The processes that hold the server's end of the connection; empty where that cannot be read.
    pub peers: Vec<u32>,
}

/// Why the application gave no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ProbeError(pub String);

/// Why the manager did not do what was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManagerError {
    /// The bus or the manager does not answer.
    #[error("systemd cannot be reached: {0}")]
    Unreachable(String),
    /// The machine is shutting down, and jobs are refused.
    #[error("the machine is shutting down: {0}")]
    Stopping(String),
    /// The unit is not there, masked, or cannot be loaded.
    #[error("unit {unit}: {why}")]
    Unit {
        /// Which.
        unit: String,
        /// `not-found`, `masked`, or systemd's own words.
        why: String,
    },
    /// Any other refusal.
    #[error("systemd refused: {0}")]
    Refused(String),
}

/// A manager whose unit goes through given states, one a reading; the last one stays.
#[cfg(test)]
pub(crate) mod fake {
    use super::*;

    #[derive(Default)]
    pub(crate) struct Fake {
        pub(crate) states: std::collections::VecDeque<UnitState>,
        pub(crate) processes: Vec<Process>,
        /// What was asked for, in order.
        pub(crate) asked: Vec<String>,
        pub(crate) now: Duration,
    }

    impl Manager for Fake {
        fn state(&mut self, _: &str) -> Result<UnitState, ManagerError> {
            let next = if self.states.len() > 1 { self.states.pop_front() } else { None };
            Ok(next.or_else(|| self.states.front().cloned()).unwrap_or_default())
        }
        fn settings(&mut self, _: &str) -> Result<UnitSettings, ManagerError> {
            Ok(UnitSettings::default())
        }
        fn processes(&mut self, _: &str) -> Result<Vec<Process>, ManagerError> {
            Ok(self.processes.clone())
        }
        fn start(&mut self, unit: &str) -> Result<(), ManagerError> {
            self.asked.push(format!("start {unit}"));
            Ok(())
        }
        fn stop(&mut self, unit: &str) -> Result<(), ManagerError> {
            self.asked.push(format!("stop {unit}"));
            Ok(())
        }
        fn cancel_job(&mut self, _: &str) -> Result<(), ManagerError> {
            Ok(())
        }
        fn reset_failed(&mut self, _: &str) -> Result<(), ManagerError> {
            Ok(())
        }
        fn reload(&mut self) -> Result<(), ManagerError> {
            Ok(())
        }
        fn foreign_job_seen(&mut self, _: &str) -> bool {
            false
        }
        fn has_room(&mut self) -> Result<(), ManagerError> {
            Ok(())
        }
        fn is_stopping(&mut self) -> Result<bool, ManagerError> {
            Ok(false)
        }
        fn barrier(&mut self) -> Result<(), ManagerError> {
            Ok(())
        }
        fn bus_name_alive(&mut self, _: &str) -> Result<bool, ManagerError> {
            Ok(false)
        }
        fn process_alive(&mut self, _: u32, _: u64) -> bool {
            false
        }
        fn wait(&mut self, at_most: Duration) {
            self.now += at_most;
        }
        fn now(&mut self) -> Duration {
            self.now
        }
        fn wall_clock_ms(&mut self) -> u64 {
            0
        }
        fn boot_id(&mut self) -> String {
            String::new()
        }
        fn run(&mut self, _: &Command) -> Result<CommandResult, ManagerError> {
            Err(ManagerError::Refused("it is a fake".into()))
        }
        fn running_commands(&mut self, _: &str) -> Result<Vec<String>, ManagerError> {
            Ok(vec![])
        }
        fn http_get(&mut self, _: &str, _: &HttpTarget, _: Duration) -> Result<HttpAnswer, ProbeError> {
            Err(ProbeError("it is a fake".into()))
        }
        fn process_uses(&mut self, _: u32, _: &str) -> bool {
            false
        }
        fn exe_digest(&mut self, _: u32) -> Option<crate::release::Digest> {
            None
        }
    }
}
