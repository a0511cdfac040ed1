//! The systemd controller: [`Manager`] over the system bus and the kernel's own files.
//!
//! Guarantees:
//!
//! - What is answered was read from PID 1 or the kernel during the call. Signals only end a [`Manager::wait`]
//!   early; [`Manager::foreign_job_seen`] alone rests on them, and is a hint.
//! - A state is one reading of all properties: its fields belong to one moment.
//! - Each unit that is asked about is referenced (`Ref`) as long as the connection lives, so that systemd does
//!   not forget how it ended.
//! - Reads outlive a restart of the bus and a `daemon-reexec`. A start or stop whose answer was lost is judged by
//!   reading the state again, and sent again only when nothing of it can be seen.
//!
//! Times are on CLOCK_MONOTONIC. A call that finds no bus takes up to 30 s, and 25 s more if the bus accepts
//! connections without answering, then fails with [`ManagerError::Unreachable`]. It needs root, or a policy that
//! allows the calls: it never prompts.
//!
//! | file | idea |
//! |---|---|
//! | `bus.rs` | a connection that comes back |
//! | `signals.rs` | what signals tell: hints |
//! | `properties.rs` | what systemd says, as our values (pure) |
//! | `cgroup.rs` | which processes a unit has, from the kernel |
//! | `command.rs` | commands in transient units of their own |

mod bus;
mod cgroup;
mod command;
mod properties;
mod signals;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use zbus::{OwnedObjectPath, OwnedVariant};

use self::bus::{Bus, CallError, MANAGER, MANAGER_PATH, body};
use self::cgroup::Hierarchy;
use self::properties::{PULLS_DOWN, Properties};
use crate::manager::{
    Command, CommandResult, HttpAnswer, HttpTarget, Manager, ManagerError, ProbeError, Process, UnitSettings,
    UnitState,
};

pub use self::command::{Property, escape};
pub(crate) use self::command::{exec_start, micros, random};

/// systemd over the system bus.
#[derive(Debug)]
pub struct Systemd {
    bus: Bus,
    hierarchy: Hierarchy,
    /// The control group that each unit had when it last had one.
    groups: BTreeMap<String, String>,
}

impl Systemd {
    /// Prepares a connection to the system bus, which is made with the first call.
    ///
    /// # Errors
    /// Where the kernel refuses the descriptors that it takes.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self { bus: Bus::new()?, hierarchy: Hierarchy::find(), groups: BTreeMap::new() })
    }

    /// From when this flag is set, a lost bus is not waited for: the flag of SIGTERM, since in a shutdown the bus
    /// goes away before the worker does and does not come back.
    pub fn give_up_when(&mut self, flag: Arc<AtomicBool>) {
        self.bus.give_up_when(flag);
    }

    /// All properties of a unit, in one reading, given to `look`.
    fn look<T>(&mut self, unit: &str, look: impl FnOnce(&Properties<'_>) -> T) -> Result<T, ManagerError> {
        let path = self.bus.watch(unit).map_err(|error| failed(unit, error))?;
        let message = self.bus.get_all(&path).map_err(|error| failed(unit, error))?;
        let body = message.body();
        let properties =
            body.deserialize().map(Properties::new).map_err(|error| failed(unit, bus::unexpected(&error)))?;
        if !properties.has("ActiveState") || !properties.has("LoadState") {
            return Err(ManagerError::Refused(format!("no state of {unit} in the answer")));
        }
        let group = properties.text("ControlGroup");
        if !group.is_empty() {
            self.groups.insert(unit.to_owned(), group);
        }
        Ok(look(&properties))
    }

    /// The processes in a control group, by the name that systemd gives it (`/system.slice/…`), and below it.
    ///
    /// # Errors
    /// Where the kernel does not let it be read.
    pub fn processes_in(&self, group: &str) -> Result<Vec<Process>, ManagerError> {
        self.hierarchy
            .processes(group)
            .map_err(|error| ManagerError::Refused(format!("cannot read control group {group}: {error}")))
    }

    /// Our own name on the bus, and which bus: what a successor looks for, to know that we are gone. A bus that was
    /// started again gives the same names to others.
    ///
    /// # Errors
    /// Where the bus cannot be reached.
    pub fn own_name(&mut self) -> Result<String, ManagerError> {
        self.bus.own_name().map_err(|error| failed("", error))
    }

    /// Gives back what keeps a unit loaded, and hears of it no more.
    pub fn forget(&mut self, unit: &str) {
        self.bus.forget(unit);
        self.groups.remove(unit);
    }

    /// Queues a job, and knows it as ours.
    fn queue(
        &mut self,
        unit: &str,
        member: &str,
        wanted: fn(&UnitState) -> bool,
    ) -> Result<(), ManagerError> {
        let path = self.bus.watch(unit).map_err(|error| failed(unit, error))?;
        let begun = Instant::now();
        loop {
            let before = self.bus.settle(&path);
            match self.bus.send(MANAGER_PATH, MANAGER, member, &(unit, "replace")) {
                Ok(answer) => {
                    let job: OwnedObjectPath = body(&answer).map_err(|error| failed(unit, error))?;
                    if let Some(id) = job_number(&job) {
                        self.bus.own_job(&path, id, &before);
                    }
                    return Ok(());
                }
                // Heard or not, nobody knows. If it was, its job or its effect can be seen. If it cannot, sending
                // it again is harmless: systemd merges equal jobs, a start of what is up does nothing, and so does
                // a stop of what is down. At worst an equal job of somebody else is taken for ours.
                Err(CallError::Lost(why)) => {
                    if !self.bus.try_again(begun) {
                        return Err(ManagerError::Unreachable(why));
                    }
                    let state = self.state(unit)?;
                    if let Some(id) = state.job {
                        self.bus.own_job(&path, id, &before);
                    }
                    if wanted(&state) {
                        return Ok(());
                    }
                }
                Err(CallError::Refused { name, message }) => {
                    // Start jobs are refused during shutdown, since its stop jobs cannot be reversed. The same error
                    // has other causes, so the machine is asked.
                    let destructive =
                        name.ends_with(".TransactionIsDestructive") || name.ends_with(".ShuttingDown");
                    if destructive && self.is_stopping()? {
                        return Err(ManagerError::Stopping(message));
                    }
                    return Err(failed(unit, CallError::Refused { name, message }));
                }
            }
        }
    }

    /// A call that can be made twice, whose answer is empty.
    fn tell<B>(
        &mut self,
        unit: &str,
        path: &str,
        interface: &str,
        member: &str,
        with: &B,
    ) -> Result<(), ManagerError>
    where
        B: serde::Serialize + zbus::DynamicType,
    {
        self.bus.read(path, interface, member, with).map(drop).map_err(|error| failed(unit, error))
    }

    /// One property of the manager.
    fn manager_property(&mut self, property: &str) -> Result<String, ManagerError> {
        let message = self.bus.get(MANAGER_PATH, MANAGER, property).map_err(|error| failed("", error))?;
        let value: OwnedVariant = body(&message).map_err(|error| failed("", error))?;
        String::try_from(value).map_err(|error| failed("", bus::unexpected(&error)))
    }
}

impl Manager for Systemd {
    fn state(&mut self, unit: &str) -> Result<UnitState, ManagerError> {
        let state = self.look(unit, |properties| properties.state())?;
        let path = self.bus.watch(unit).map_err(|error| failed(unit, error))?;
        self.bus.note(&path, &state.active, &state.sub, state.job);
        Ok(state)
    }

    fn settings(&mut self, unit: &str) -> Result<UnitSettings, ManagerError> {
        let names = |properties: &Properties<'_>| -> Vec<String> {
            PULLS_DOWN.iter().flat_map(|relation| properties.list(relation)).collect()
        };
        let (mut settings, own_id, mut next) =
            self.look(unit, |properties| (properties.settings(), properties.text("Id"), names(properties)))?;
        let mut pulled = BTreeSet::new();
        while let Some(name) = next.pop() {
            if name == unit || name == own_id || !pulled.insert(name.clone()) {
                continue;
            }
            // Not watched: only its relations are wanted, once.
            let message =
                self.bus.get_all(&signals::object_path(&name)).map_err(|error| failed(&name, error))?;
            let body = message.body();
            let properties = body
                .deserialize()
                .map(Properties::new)
                .map_err(|error| failed(&name, bus::unexpected(&error)))?;
            next.extend(names(&properties));
        }
        settings.pulls_down = pulled.into_iter().collect();
        Ok(settings)
    }

    fn processes(&mut self, unit: &str) -> Result<Vec<Process>, ManagerError> {
        // The group that was seen last is asked even when the unit no longer has one: that is where processes are
        // left over. It is read again with each state, and a unit gets another one only by a start.
        if !self.groups.contains_key(unit) {
            self.look(unit, |_| ())?;
        }
        self.groups.get(unit).map_or(Ok(Vec::new()), |group| self.processes_in(group))
    }

    fn start(&mut self, unit: &str) -> Result<(), ManagerError> {
        self.queue(unit, "StartUnit", |state| state.is_up() || state.active == "activating")
    }

    fn stop(&mut self, unit: &str) -> Result<(), ManagerError> {
        self.queue(unit, "StopUnit", |state| state.is_down() || state.active == "deactivating")
    }

    fn cancel_job(&mut self, unit: &str) -> Result<(), ManagerError> {
        let Some(job) = self.state(unit)?.job else { return Ok(()) };
        match self.bus.read(MANAGER_PATH, MANAGER, "CancelJob", &job) {
            // It ended meanwhile.
            Err(CallError::Refused { name, .. }) if name.ends_with(".NoSuchJob") => Ok(()),
            answer => answer.map(drop).map_err(|error| failed(unit, error)),
        }
    }

    fn reset_failed(&mut self, unit: &str) -> Result<(), ManagerError> {
        self.bus.watch(unit).map_err(|error| failed(unit, error))?;
        self.tell(unit, MANAGER_PATH, MANAGER, "ResetFailedUnit", &unit)
    }

    fn reload(&mut self) -> Result<(), ManagerError> {
        self.tell("", MANAGER_PATH, MANAGER, "Reload", &())
    }

    fn foreign_job_seen(&mut self, unit: &str) -> bool {
        self.bus.foreign_job_seen(unit)
    }

    fn is_stopping(&mut self) -> Result<bool, ManagerError> {
        // A scheduled shutdown (/run/systemd/shutdown/scheduled) is no stop yet: jobs are still accepted.
        Ok(self.manager_property("SystemState")? == "stopping")
    }

    fn barrier(&mut self) -> Result<(), ManagerError> {
        self.manager_property("Version").map(drop)
    }

    fn bus_name_alive(&mut self, name: &str) -> Result<bool, ManagerError> {
        let own = self.own_name()?;
        let bus = |name: &str| name.split_once('/').map(|(bus, _)| bus.to_owned());
        if bus(name).is_some_and(|named| bus(&own) != Some(named)) {
            return Ok(false);
        }
        let name = name.rsplit('/').next().unwrap_or(name);
        let message = self
            .bus
            .read_from(bus::DBUS, bus::DBUS_PATH, bus::DBUS, "NameHasOwner", &name)
            .map_err(|error| failed("", error))?;
        body(&message).map_err(|error| failed("", error))
    }

    fn process_alive(&mut self, pid: u32, start_time: u64) -> bool {
        crate::process::start_time(pid) == Some(start_time)
    }

    fn wait(&mut self, at_most: Duration) {
        self.bus.wait(at_most);
    }

    fn now(&mut self) -> Duration {
        monotonic_now()
    }

    fn wall_clock_ms(&mut self) -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    }

    fn boot_id(&mut self) -> String {
        // The kernel always has it; where /proc is not mounted nothing else works either. In a container the kernel's id
        // is the host's, which stays: what begins anew there is PID 1.
        let kernel = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        format!("{}-{}", kernel.trim(), crate::process::start_time(1).unwrap_or_default())
    }

    fn run(&mut self, command: &Command) -> Result<CommandResult, ManagerError> {
        self.run_command(command)
    }

    fn running_commands(&mut self, service: &str) -> Result<Vec<String>, ManagerError> {
        self.live_commands(service)
    }

    fn http_get(
        &mut self,
        unit: &str,
        target: &HttpTarget,
        timeout: Duration,
    ) -> Result<HttpAnswer, ProbeError> {
        // Whose processes are looked at first; where they cannot be read, all are.
        let first =
            self.processes(unit).unwrap_or_default().iter().map(|process| process.pid).collect::<Vec<_>>();
        crate::http::get(target, timeout, &first)
    }

    fn process_uses(&mut self, pid: u32, root: &str) -> bool {
        crate::process::uses(pid, root)
    }

    fn exe_digest(&mut self, pid: u32) -> Option<crate::release::Digest> {
        crate::process::exe_digest(pid)
    }

    fn has_room(&mut self) -> Result<(), ManagerError> {
        crate::supervise::run_has_room()
    }
}

/// CLOCK_MONOTONIC.
#[must_use]
pub fn monotonic_now() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// The number in a job's path (`/org/freedesktop/systemd1/job/123`).
fn job_number(path: &OwnedObjectPath) -> Option<u32> {
    path.as_str().rsplit_once('/')?.1.parse().ok()
}

/// The manager's refusal in our words.
fn failed(unit: &str, error: CallError) -> ManagerError {
    let (name, message) = match error {
        CallError::Lost(why) => return ManagerError::Unreachable(why),
        CallError::Refused { name, message } => (name, message),
    };
    let short = name.strip_prefix("org.freedesktop.systemd1.").unwrap_or(&name);
    let why = match short {
        "NoSuchUnit" => "not-found".to_owned(),
        "UnitMasked" => "masked".to_owned(),
        "LoadFailed" | "BadUnitSetting" | "UnitExists" | "OnlyByDependency" | "NoIsolation" => message,
        _ => return ManagerError::Refused(format!("{message} ({short})")),
    };
    ManagerError::Unit { unit: unit.to_owned(), why }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_named() {
        let refused = |name: &str, message: &str| {
            failed("a.service", CallError::Refused { name: name.into(), message: message.into() })
        };
        assert_eq!(
            refused("org.freedesktop.systemd1.UnitMasked", "Unit a.service is masked.").to_string(),
            "unit a.service: masked"
        );
        assert_eq!(
            refused("org.freedesktop.systemd1.NoSuchUnit", "Unit a.service not found.").to_string(),
            "unit a.service: not-found"
        );
        assert_eq!(
            refused("org.freedesktop.systemd1.BadUnitSetting", "bad line").to_string(),
            "unit a.service: bad line"
        );
        assert_eq!(
            refused("org.freedesktop.DBus.Error.AccessDenied", "no").to_string(),
            "systemd refused: no (org.freedesktop.DBus.Error.AccessDenied)"
        );
        assert_eq!(
            failed("a.service", CallError::Lost("gone".into())).to_string(),
            "systemd cannot be reached: gone"
        );
    }

    #[test]
    fn job_numbers() {
        let path = OwnedObjectPath::try_from("/org/freedesktop/systemd1/job/123").unwrap();
        assert_eq!(job_number(&path), Some(123));
    }
}
