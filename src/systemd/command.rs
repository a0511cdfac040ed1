//! Transient units: how they are made, and the commands of an adapter that run in them.
//!
//! A command runs as `cutover-cmd-SERVICE-PURPOSE-RANDOM.service`, outside the caller's sandbox and cgroup, so
//! that its settings hold and all it leaves behind dies with it (`KillMode=control-group`). It has ended when its
//! unit is down *and* its cgroup is empty. Its standard output comes back through a pipe, 64 KiB of it; standard
//! error goes to the journal.
//!
//! How it fails: a command that outlasts its time gets SIGTERM, and SIGKILL [`STOP`] later. If the bus is lost for
//! so long that systemd forgets the unit, how the command ended is unknown, and that is an error, not a result.

use std::fs::File;
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use rustix::pipe::{PipeFlags, pipe_with};
use zbus::{Fd, Variant};

use super::bus::{CallError, MANAGER, MANAGER_PATH, body};
use super::{Systemd, failed};
use crate::manager::{Command, CommandResult, Manager as _, ManagerError};

/// A property of a transient unit, as systemd's D-Bus interface names it.
pub type Property<'a> = (&'static str, Variant<'a>);

/// Between SIGTERM and SIGKILL for a command whose time is up: enough to remove a lock file, short against any
/// recovery window.
const STOP: Duration = Duration::from_secs(2);
/// How much longer than its own bounds a command's unit is waited for, under load.
const GRACE: Duration = Duration::from_secs(10);
/// What is kept of a command's output.
const OUTPUT: usize = 64 << 10;
/// Signals can be lost: the state is read again this often all the same.
const REREAD: Duration = Duration::from_secs(1);

impl Systemd {
    /// Starts a transient unit and returns when its start is queued. The name must be new: where the answer was
    /// lost, a unit of that name is taken for ours.
    ///
    /// # Errors
    /// A property that systemd refuses, no space on /run, or a bus that stays away.
    pub fn start_transient(&mut self, unit: &str, properties: &[Property<'_>]) -> Result<(), ManagerError> {
        let none: Vec<(&str, Vec<Property<'_>>)> = Vec::new();
        let begun = Instant::now();
        loop {
            match self.bus.send(
                MANAGER_PATH,
                MANAGER,
                "StartTransientUnit",
                &(unit, "fail", properties, &none),
            ) {
                Ok(_) => return Ok(()),
                Err(CallError::Refused { name, .. }) if name.ends_with(".UnitExists") => return Ok(()),
                Err(CallError::Lost(_)) if self.bus.try_again(begun) => {}
                // Whatever the name of the error: a full /run is told as `NoSuchUnit`, since the file is empty.
                Err(CallError::Refused { message, .. }) => {
                    return Err(ManagerError::Unit {
                        unit: unit.to_owned(),
                        why: format!("could not be made: {message}"),
                    });
                }
                Err(error) => return Err(failed(unit, error)),
            }
        }
    }

    pub(super) fn run_command(&mut self, command: &Command) -> Result<CommandResult, ManagerError> {
        let unit = command_unit(&command.service, &command.purpose);
        let (output, input) = pipe_with(PipeFlags::CLOEXEC)
            .map_err(|error| ManagerError::Refused(format!("cannot make a pipe: {error}")))?;
        let properties = properties(command, Fd::from(input.as_fd()))?;
        // From here on changes of the unit wake `wait`; it is not there yet, which is no error.
        self.start_transient(&unit, &properties)?;
        drop(properties);
        drop(input);
        let output = Output::collect(File::from(output));
        let ended = self.await_command(&unit, command.timeout);
        self.forget(&unit);
        let (status, timed_out) = ended?;
        Ok(CommandResult { status, timed_out, stdout: output.take() })
    }

    /// Waits until the unit is down and empty: its exit status, and whether its time was up.
    fn await_command(&mut self, unit: &str, timeout: Duration) -> Result<(Option<i32>, bool), ManagerError> {
        let deadline = self.now() + timeout + STOP * 2 + GRACE;
        loop {
            let state = self.state(unit)?;
            if state.load == "not-found" {
                return Err(ManagerError::Refused(format!(
                    "how {unit} ended was lost with the bus connection"
                )));
            }
            if state.is_down() && self.processes(unit)?.is_empty() {
                if state.exit.is_empty() && state.result != "timeout" {
                    return Err(ManagerError::Unit {
                        unit: unit.to_owned(),
                        why: format!("was not started: {}", state.result),
                    });
                }
                let status = self.look(unit, |properties| properties.exit_status())?;
                return Ok((status, state.result == "timeout"));
            }
            let now = self.now();
            if now >= deadline {
                self.stop(unit)?;
                return Err(ManagerError::Unit { unit: unit.to_owned(), why: "does not end".to_owned() });
            }
            self.wait(REREAD.min(deadline - now));
        }
    }

    pub(super) fn live_commands(&mut self, service: &str) -> Result<Vec<String>, ManagerError> {
        type Row = (
            String,
            String,
            String,
            String,
            String,
            String,
            zbus::OwnedObjectPath,
            u32,
            String,
            zbus::OwnedObjectPath,
        );
        let pattern = format!("cutover-cmd-{}-*.service", escape(service));
        let states: Vec<&str> = Vec::new();
        let message = self
            .bus
            .read(MANAGER_PATH, MANAGER, "ListUnitsByPatterns", &(states, vec![pattern]))
            .map_err(|error| failed("", error))?;
        let rows: Vec<Row> = body(&message).map_err(|error| failed("", error))?;
        let mut live = Vec::new();
        for (unit, _, _, active, ..) in rows {
            // One that has ended counts as long as something is left in its cgroup.
            if !matches!(active.as_str(), "inactive" | "failed") || !self.processes(&unit)?.is_empty() {
                live.push(unit);
            }
        }
        live.sort_unstable();
        Ok(live)
    }
}

/// The settings of a command's unit. Everything an administrator's command may need is left open; what is set
/// bounds it and keeps it from becoming more than the user that it is run as.
fn properties<'a>(command: &'a Command, output: Fd<'a>) -> Result<Vec<Property<'a>>, ManagerError> {
    let Some(program) = command.argv.first() else {
        return Err(ManagerError::Refused(format!("the {} command is empty", command.purpose)));
    };
    let environment: Vec<String> =
        command.environment.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let mut properties = vec![
        ("Description", Variant::new(format!("cutover: {} command of {}", command.purpose, command.service))),
        // `exec`: a program that cannot be run fails the start. `oneshot` knows no RuntimeMaxSec.
        ("Type", Variant::new("exec")),
        exec_start(program, &command.argv),
        ("Environment", Variant::new(environment)),
        ("RuntimeMaxUSec", Variant::new(micros(command.timeout))),
        ("TimeoutStartUSec", Variant::new(micros(command.timeout))),
        ("TimeoutStopUSec", Variant::new(micros(STOP))),
        ("StandardInput", Variant::new("null")),
        // The descriptor comes first. Without this, both streams are the journal by name, and systemd makes the second a
        // copy of the first: of the descriptor.
        ("StandardOutput", Variant::new("null")),
        ("StandardOutputFileDescriptor", Variant::new(output)),
        ("StandardError", Variant::new("journal")),
        ("KillMode", Variant::new("control-group")),
        ("CollectMode", Variant::new("inactive-or-failed")),
        // Without a reference the exit status would be collected with the unit.
        ("AddRef", Variant::new(true)),
    ];
    if let Some(user) = &command.user {
        properties.push(("User", Variant::new(user.as_str())));
        if user != "root" && user != "0" {
            // A command that needs more says so by its user.
            properties.push(("NoNewPrivileges", Variant::new(true)));
        }
    }
    Ok(properties)
}

/// `ExecStart=` with each argument as it is: no variable is expanded.
///
/// Not by `ExecStartEx` and `no-env-expand`: 252 writes that name into the unit's file, which no reload can read
/// again, and the unit that has a bad setting from then on is not restarted.
pub(crate) fn exec_start(program: &str, argv: &[String]) -> Property<'static> {
    let argv: Vec<String> = argv.iter().map(|argument| argument.replace('$', "$$")).collect();
    ("ExecStart", Variant::new(vec![(program.to_owned(), argv, false)]))
}

/// A time as systemd counts it.
pub(crate) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// A name that was never used. The service is escaped, so that its end can be told: `-` is none of its letters.
fn command_unit(service: &str, purpose: &str) -> String {
    format!("cutover-cmd-{}-{}-{}.service", escape(service), escape(purpose), random())
}

/// Sixteen random hexadecimal digits.
pub(crate) fn random() -> String {
    // The last eight bytes of a version 7 id are random but for two bits.
    let id = uuid::Uuid::now_v7().simple().to_string();
    id[16..].to_owned()
}

/// A name as one part of a unit's name, as `systemd-escape` writes it.
#[must_use]
pub fn escape(name: &str) -> String {
    let mut escaped = String::new();
    for (at, byte) in name.bytes().enumerate() {
        match byte {
            b'/' => escaped.push('-'),
            b'.' if at == 0 => escaped.push_str("\\x2e"),
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b':' | b'_' | b'.' => escaped.push(char::from(byte)),
            _ => escaped.push_str(&format!("\\x{byte:02x}")),
        }
    }
    escaped
}

/// A pipe that is read to its end by a thread of its own, so that a command never waits for us.
struct Output {
    kept: Arc<Mutex<Vec<u8>>>,
    ended: mpsc::Receiver<()>,
}

impl Output {
    fn collect(mut pipe: File) -> Self {
        let kept = Arc::new(Mutex::new(Vec::new()));
        let (end, ended) = mpsc::channel();
        let into = Arc::clone(&kept);
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(read) = pipe.read(&mut buffer) {
                if read == 0 {
                    break;
                }
                let mut into = into.lock().unwrap_or_else(PoisonError::into_inner);
                // The rest is read all the same, or the command would block.
                let room = OUTPUT.saturating_sub(into.len()).min(read);
                into.extend_from_slice(&buffer[..room]);
            }
            // Nobody listens any more when the wait was over first.
            let _ = end.send(());
        });
        Self { kept, ended }
    }

    /// What came, once the command's processes are gone. The pipe has ended by then, unless the command gave it
    /// to a process elsewhere: that one is not waited for.
    fn take(self) -> Vec<u8> {
        let _ = self.ended.recv_timeout(REREAD);
        std::mem::take(&mut *self.kept.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_as_systemd_does() {
        assert_eq!(escape("demo"), "demo");
        assert_eq!(escape("my-app@1"), "my\\x2dapp\\x401");
        assert_eq!(escape(".hidden"), "\\x2ehidden");
        assert_eq!(escape("a/b"), "a-b");
        assert_eq!(escape("é"), "\\xc3\\xa9");
    }

    #[test]
    fn command_units_are_never_the_same() {
        let one = command_unit("my-app", "probe");
        assert!(one.starts_with("cutover-cmd-my\\x2dapp-probe-"), "{one}");
        assert!(one.ends_with(".service"));
        assert_ne!(one, command_unit("my-app", "probe"));
    }

    #[test]
    fn output_is_bounded_and_drained() {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let output = Output::collect(File::from(read));
        let mut left = 4 * OUTPUT;
        while left > 0 {
            left -= rustix::io::write(&write, &vec![b'x'; left.min(8192)]).unwrap();
        }
        drop(write);
        assert_eq!(output.take().len(), OUTPUT);
    }
}
