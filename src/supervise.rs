//! The worker's unit: how it is started, what it may do, and how its end is observed.
//!
//! PID 1 is the supervisor: it cannot die, sees the exit itself, and starts the worker again, a bounded number of times, when
//! it is killed, exits with 75 or stops reporting to its watchdog. The unit is transient, in a cgroup of its own,
//! so that nothing that happens to the caller, to the daemon or to the managed unit stops it; only the machine's
//! shutdown does.
//!
//! Guarantees: [`launch`] returns when the start is queued, under a name of [`worker_unit`] that was never used before.
//! [`unit_gone`] is true only when systemd runs nothing by that name, will not by itself, *and* no process is left.
//!
//! How it fails: a full /run makes systemd refuse transient units ([`run_has_room`] tells before); a property that
//! this systemd does not know refuses the start by name, and nothing runs.

use std::path::PathBuf;
use std::time::Duration;

use zbus::Variant;

use crate::failpoint;
use crate::manager::{Manager as _, ManagerError};
use crate::release::Digest;
use crate::systemd::{Property, Systemd, exec_start, micros, random};

/// A worker to be started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerUnit {
    /// The service that it works on, for people.
    pub service: String,
    /// The operation's id.
    pub operation: String,
    /// The executable, by its absolute path.
    pub runner: String,
    /// Its arguments, without `argv[0]`.
    pub args: Vec<String>,
    /// All that it may write below. Each must exist, and is a mount of its own for the worker: nothing can be
    /// renamed from one to another.
    pub writable: Vec<PathBuf>,
    /// How many times it is started: once to work, then to recover.
    pub attempts: u32,
}

/// The exit status by which a worker asks to be started again, since it leaves something open: `EX_TEMPFAIL`.
pub const EXIT_AGAIN: i32 = 75;
/// How long a worker may be silent. It reports four times as often; a step's own deadline ends the reports.
const WATCHDOG: Duration = Duration::from_secs(120);
/// Between SIGTERM and SIGKILL: a worker that is asked to stop finishes no step, it only closes its files.
const STOP: Duration = Duration::from_secs(10);
/// Between the end of an attempt and the next: systemd's own default, long enough not to spin.
const RESTART: Duration = Duration::from_millis(100);
/// Where the unit's cgroup is, so that it is found without asking.
const SLICE: &str = "system.slice";
/// What /run must have: systemd writes a few files of some KiB for a unit, a reload a few hundred. journald and
/// others grow meanwhile.
const RUN_BYTES: u64 = 4 << 20;
const RUN_FILES: u64 = 64;

/// Starts the worker as `unit`, and returns once the start is queued.
///
/// # Errors
/// As [`Systemd::start_transient`].
pub fn launch(systemd: &mut Systemd, unit: &str, worker: &WorkerUnit) -> Result<(), ManagerError> {
    systemd.start_transient(unit, &properties(worker))
}

/// Whether nothing is left of a worker's unit, nor will come back by itself.
///
/// # Errors
/// As [`crate::manager::Manager::state`].
pub fn unit_gone(systemd: &mut Systemd, unit: &str) -> Result<bool, ManagerError> {
    let state = systemd.state(unit)?;
    let gone = (state.load == "not-found" || state.is_down())
        && systemd.processes(unit)?.is_empty()
        // A unit that this process never saw alive has told it no cgroup.
        && systemd.processes_in(&format!("/{SLICE}/{unit}"))?.is_empty();
    if gone {
        // Our reference is what keeps it loaded.
        systemd.forget(unit);
    }
    Ok(gone)
}

/// Whether /run has room for what systemd writes there during an operation.
///
/// # Errors
/// [`ManagerError::Refused`] with what is free and what is needed.
pub fn run_has_room() -> Result<(), ManagerError> {
    let stat = rustix::fs::statvfs("/run")
        .map_err(|error| ManagerError::Refused(format!("cannot see what is free on /run: {error}")))?;
    let bytes = stat.f_bavail.saturating_mul(stat.f_frsize);
    // A file system without a limit says that it has no inodes at all.
    let files = if stat.f_files == 0 { u64::MAX } else { stat.f_favail };
    room(bytes, files)
}

fn room(bytes: u64, files: u64) -> Result<(), ManagerError> {
    if bytes < RUN_BYTES {
        return Err(ManagerError::Refused(format!("/run has {bytes} bytes free, {RUN_BYTES} are needed")));
    }
    if files < RUN_FILES {
        return Err(ManagerError::Refused(format!("/run has {files} files free, {RUN_FILES} are needed")));
    }
    Ok(())
}

/// A name that tells the operation and is new each time: a name cannot be used again while a unit of that name is
/// loaded, and its file in /run stays over a soft-reboot.
#[must_use]
pub fn worker_unit(operation: &str) -> String {
    let hash = Digest::of(operation.as_bytes()).to_string();
    format!("cutover-op-{}-{}.service", &hash[..16], random())
}

fn properties(worker: &WorkerUnit) -> Vec<Property<'static>> {
    let mut argv = vec![worker.runner.clone()];
    argv.extend(worker.args.iter().cloned());
    let mut properties = vec![
        (
            "Description",
            Variant::new(format!("cutover: operation {} of {}", worker.operation, worker.service)),
        ),
        ("Type", Variant::new("exec")),
        exec_start(&worker.runner, &argv),
        ("Slice", Variant::new(SLICE)),
    ];
    properties.extend(supervision(worker.attempts));
    properties.extend(sandbox(&worker.writable));
    properties
}

/// What makes PID 1 the supervisor.
fn supervision(attempts: u32) -> Vec<Property<'static>> {
    // SIGTERM, SIGHUP, SIGINT and SIGPIPE are clean ends for `on-failure`: a worker killed by one left things open.
    let signals = vec![15i32, 1, 2, 13];
    vec![
        ("Restart", Variant::new("on-failure")),
        ("RestartForceExitStatus", Variant::new((vec![EXIT_AGAIN], signals))),
        ("RestartUSec", Variant::new(micros(RESTART))),
        ("StartLimitIntervalUSec", Variant::new(u64::MAX)),
        ("StartLimitBurst", Variant::new(attempts)),
        ("WatchdogUSec", Variant::new(micros(failpoint::pace("watchdog", WATCHDOG)))),
        ("WatchdogSignal", Variant::new(9i32)),
        ("NotifyAccess", Variant::new("main")),
        ("TimeoutStopUSec", Variant::new(micros(STOP))),
        ("IgnoreOnIsolate", Variant::new(true)),
        ("RefuseManualStop", Variant::new(true)),
        ("CollectMode", Variant::new("inactive-or-failed")),
    ]
}

/// What a worker is left with. It runs as root, since it owns the state directory and is trusted by PID 1, with
/// everything taken away that it does not use:
///
/// - `PrivateTmp` stays off: an artifact named by the caller may lie in /tmp.
/// - `ProtectProc` and `ProcSubset` stay off: reading other processes is the proof.
/// - The network stays: probes over HTTP go to the application, wherever it listens. AF_NETLINK asks the kernel
///   who is at the other end of a Unix connection.
/// - `RestrictSUIDSGID` stays off: its filter cannot look into the arguments of `openat2`, so it answers that call with
///   ENOSYS, and `openat2` is what keeps every path inside the state directory.
fn sandbox(writable: &[PathBuf]) -> Vec<Property<'static>> {
    let writable: Vec<String> = writable.iter().map(|path| path.to_string_lossy().into_owned()).collect();
    let families = vec!["AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"];
    let mut properties = vec![
        ("ProtectSystem", Variant::new("strict")),
        ("ReadWritePaths", Variant::new(writable)),
        ("ProtectHome", Variant::new("read-only")),
        (
            "CapabilityBoundingSet",
            Variant::new(CAPABILITIES.iter().fold(0u64, |set, (bit, _)| set | 1 << bit)),
        ),
        ("RestrictAddressFamilies", Variant::new((true, families))),
        ("RestrictNamespaces", Variant::new(CLONE_NEWUTS)),
        ("SystemCallArchitectures", Variant::new(vec!["native"])),
        ("SystemCallFilter", Variant::new((true, vec!["@system-service"]))),
        ("SystemCallFilter", Variant::new((false, vec!["@privileged", "@resources"]))),
        // EPERM instead of a kill: an error that is reported.
        ("SystemCallErrorNumber", Variant::new(1i32)),
        // Modes are given explicitly, and the mask does not touch them.
        ("UMask", Variant::new(0o077u32)),
        ("KeyringMode", Variant::new("private")),
    ];
    for on in [
        "NoNewPrivileges",
        "PrivateDevices",
        "ProtectKernelTunables",
        "ProtectKernelModules",
        "ProtectKernelLogs",
        "ProtectControlGroups",
        "ProtectClock",
        "ProtectHostname",
        "RestrictRealtime",
        "LockPersonality",
        "MemoryDenyWriteExecute",
    ] {
        properties.push((on, Variant::new(true)));
    }
    properties
}

/// The one kind of namespace that may be made, from linux/sched.h. None at all would be right, but 252 writes that
/// into the unit's file as an empty setting, which a reload reads as all of them. This one takes CAP_SYS_ADMIN,
/// which the worker does not have.
const CLONE_NEWUTS: u64 = 0x0400_0000;

/// The capabilities that a worker keeps, by their number in linux/capability.h, and what each is for. Not needed:
/// CAP_CHOWN and CAP_FOWNER (all that it writes is its own), CAP_KILL (systemd ends processes), CAP_SYS_ADMIN
/// (systemd trusts root by its user id), CAP_MAC_ADMIN (labels are ones that the policy knows).
const CAPABILITIES: [(u8, &str); 3] = [
    (1, "CAP_DAC_OVERRIDE: programs and sockets that only the service's user may read or connect to"),
    (19, "CAP_SYS_PTRACE: /proc/PID/exe, fd, cwd, root and maps of the service's processes"),
    (31, "CAP_SETFCAP: file capabilities of an adopted program, carried over to its release"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_the_operation_and_are_new() {
        let one = worker_unit("op-1");
        let other = worker_unit("op-1");
        assert_ne!(one, other);
        let (hash, random) =
            one.strip_prefix("cutover-op-").unwrap().strip_suffix(".service").unwrap().split_at(16);
        assert!(other.contains(hash));
        assert!(hash.bytes().all(|byte| byte.is_ascii_hexdigit()));
        assert_eq!(random.len(), 17, "{random}");
        assert!(!worker_unit("op-2").contains(hash));
    }

    #[test]
    fn a_full_run_is_said() {
        assert!(room(RUN_BYTES, RUN_FILES).is_ok());
        assert!(room(RUN_BYTES - 1, u64::MAX).unwrap_err().to_string().contains("4194304 are needed"));
        assert!(room(u64::MAX, 3).unwrap_err().to_string().contains("3 files free"));
    }

    #[test]
    fn the_program_is_its_first_argument() {
        let worker = WorkerUnit {
            service: "demo".into(),
            operation: "1".into(),
            runner: "/var/lib/cutover/demo/run/1/runner".into(),
            args: vec!["worker".into(), "$HOME".into()],
            writable: vec!["/var/lib/cutover/demo".into()],
            attempts: 3,
        };
        let properties = properties(&worker);
        let (_, exec) = properties.iter().find(|(name, _)| *name == "ExecStart").unwrap();
        let wanted = Variant::new(vec![(
            worker.runner.clone(),
            vec![worker.runner.clone(), "worker".into(), "$$HOME".into()],
            false,
        )]);
        assert_eq!(exec, &wanted);
    }
}
