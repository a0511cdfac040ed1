//! A simulated machine: units, processes, boots and a virtual clock. What runs is read from the simulated disk.
//!
//! A unit's process *is* the file that `current/bin/app` resolved to when it was started; how it behaves is written in
//! that file (`app VERSION BEHAVIOUR`), and a file that is torn cannot be executed. Time passes only in
//! [`Machine::advance`]; jobs take effect a moment after they are queued, as systemd's do.
//!
//! - A *crash* ends every process and job; [`Machine::reboot`] starts what is enabled, from what `current` names then.
//! - A *kill of the worker* leaves everything as it is: jobs queued by the dead worker still land, so does a call that
//!   was sent and not yet received ([`Machine::flight`]), and a command of the adapter goes on.
//! - A *triggered* unit can be started by its socket whenever it is down.

use std::time::Duration;

use cutover::durable::{FileId, Kind};

use crate::disk::DiskState;

pub(crate) const UNIT: &str = "app.service";
pub(crate) const SOCKET: &str = "app.socket";
pub(crate) const DEPENDANT: &str = "needs-app.service";
/// Where the state directory is in the simulated machine.
pub(crate) const STATE: &str = "/var/lib/cutover/app";

/// `TimeoutStartSec=` and `TimeoutStopSec=`, in milliseconds.
pub(crate) const TIMEOUT_START: u64 = 3_000;
pub(crate) const TIMEOUT_STOP: u64 = 2_000;
/// From an exec to `READY=1`.
const READY: u64 = 10;
/// From SIGTERM to the end.
const ENDING: u64 = 10;
/// From queueing to running a job.
const JOB: u64 = 1;
/// How long a command of the adapter takes.
const COMMAND: u64 = 50;
/// How many failed starts a socket bears (`TriggerLimitBurst=`, and the service's start limit).
const START_LIMIT: u32 = 5;

/// What a program does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Behaviour {
    Good,
    /// Ends before it is ready.
    ExitsAtOnce,
    /// Ends a while after it was ready.
    ExitsLater,
    /// Runs, and answers nothing.
    NeverPasses,
    /// Answers with another version.
    WrongVersion,
    /// Does not react to SIGTERM.
    DeafToStop,
    /// Never becomes ready.
    HungStart,
}

impl Behaviour {
    pub(crate) const ALL: [(Self, &str); 7] = [
        (Self::Good, "good"),
        (Self::ExitsAtOnce, "exits-at-once"),
        (Self::ExitsLater, "exits-later"),
        (Self::NeverPasses, "never-passes"),
        (Self::WrongVersion, "wrong-version"),
        (Self::DeafToStop, "deaf-to-stop"),
        (Self::HungStart, "hung-start"),
    ];

    pub(crate) fn name(self) -> &'static str {
        Self::ALL.iter().find(|(b, _)| *b == self).expect("listed").1
    }
}

/// The text of a program: longer than a sector, so that it can be torn.
pub(crate) fn program(version: &str, behaviour: Behaviour) -> Vec<u8> {
    let mut text = format!("app {version} {}\n", behaviour.name()).into_bytes();
    while text.len() < 700 {
        text.extend(b"# the rest of the program\n");
    }
    text.extend(b"end\n");
    text
}

#[derive(Clone, Debug)]
pub(crate) struct Proc {
    pub(crate) pid: u32,
    pub(crate) exe: FileId,
    pub(crate) path: String,
    pub(crate) version: String,
    pub(crate) behaviour: Behaviour,
    dies_at: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Job {
    pub(crate) id: u32,
    start: bool,
    due: Option<u64>,
}

#[derive(Clone, Debug)]
pub(crate) struct Unit {
    pub(crate) active: &'static str,
    pub(crate) job: Option<Job>,
    pub(crate) main: u32,
    pub(crate) invocation: u32,
    pub(crate) result: &'static str,
    pub(crate) exit: &'static str,
    pub(crate) procs: Vec<Proc>,
    pub(crate) failures: u32,
    enabled: bool,
    ready_at: Option<u64>,
    kill_at: Option<u64>,
}

impl Unit {
    fn new(active: &'static str, enabled: bool) -> Self {
        Self {
            active,
            job: None,
            main: 0,
            invocation: 0,
            result: "success",
            exit: "",
            procs: vec![],
            failures: 0,
            enabled,
            ready_at: None,
            kill_at: None,
        }
    }

    pub(crate) fn is_down(&self) -> bool {
        matches!(self.active, "inactive" | "failed") && self.job.is_none()
    }

    fn end(&mut self, active: &'static str, result: &'static str, exit: &'static str) {
        self.active = active;
        self.result = result;
        self.exit = exit;
        self.main = 0;
        self.procs.clear();
        self.ready_at = None;
        self.kill_at = None;
    }
}

/// A call on its way to systemd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Start,
    Stop,
}

/// A command of the adapter that runs.
#[derive(Clone, Debug)]
pub(crate) struct Running {
    pub(crate) unit: String,
    purpose: String,
    ends_at: u64,
}

/// The machine. A clone is cheap.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    pub(crate) now: u64,
    pub(crate) wall: u64,
    pub(crate) boot: u32,
    pub(crate) app: Unit,
    /// The socket that triggers the unit, where it has one.
    pub(crate) socket: Option<Unit>,
    /// A unit that is pulled down with it, where it has one.
    pub(crate) dependant: Option<Unit>,
    pub(crate) commands: Vec<Running>,
    /// Whether the application's work is parked. Outlives a crash.
    pub(crate) parked: bool,
    /// Sent by a worker that died since, and not yet received.
    pub(crate) flight: Option<Call>,
    /// The worker that lives.
    pub(crate) worker: u32,
    /// How many launches of a worker there were, and how many attempts of the last one.
    pub(crate) launch: (u32, u32),
    /// Whether the last launch is for recovery.
    pub(crate) recovers: bool,
    /// Whether the boot hook runs, so that the boot has started nothing yet.
    pub(crate) in_hook: bool,
    /// A version that behaves otherwise than its file says: its surroundings broke.
    pub(crate) broken: Option<(&'static str, Behaviour)>,
    next: u32,
}

impl Machine {
    pub(crate) fn new(enabled: bool, triggered: bool, dependant: bool) -> Self {
        Self {
            now: 1_000,
            wall: 1_700_000_000_000,
            boot: 1,
            app: Unit::new("inactive", enabled),
            socket: triggered.then(|| Unit::new("active", true)),
            dependant: dependant.then(|| Unit::new("active", true)),
            commands: vec![],
            parked: false,
            flight: None,
            worker: 0,
            launch: (0, 0),
            recovers: false,
            in_hook: false,
            broken: None,
            next: 100,
        }
    }

    fn id(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    /// The next worker's process.
    pub(crate) fn new_worker(&mut self) -> u32 {
        self.worker = self.id();
        self.worker
    }

    pub(crate) fn now(&self) -> Duration {
        Duration::from_millis(self.now)
    }

    pub(crate) fn wall_ms(&self) -> u64 {
        self.wall + self.now
    }

    pub(crate) fn boot_id(&self) -> String {
        format!("{:032x}", 0xb007_0000 + u128::from(self.boot))
    }

    // ---- jobs ----

    fn queue(&mut self, start: bool) {
        let (id, due) = (self.id(), Some(self.now + JOB));
        self.app.job = Some(Job { id, start, due });
    }

    pub(crate) fn call(&mut self, call: Call) {
        self.queue(call == Call::Start);
    }

    /// Ends what runs and starts it again, as an administrator would.
    pub(crate) fn restart(&mut self, disk: &DiskState) {
        self.queue(false);
        self.pass(disk, 100);
        self.queue(true);
    }

    /// What a dead worker sent arrives.
    pub(crate) fn land(&mut self) {
        if let Some(call) = self.flight.take() {
            self.call(call);
        }
    }

    /// The socket has traffic: a unit that is down is started.
    pub(crate) fn activate(&mut self) {
        let listening = self.socket.as_ref().is_some_and(|s| s.active == "active");
        if listening && self.app.is_down() {
            if self.app.failures >= START_LIMIT {
                let socket = self.socket.as_mut().expect("it listens");
                socket.active = "failed";
                socket.result = "service-start-limit-hit";
                return;
            }
            self.queue(true);
        }
    }

    pub(crate) fn other(&mut self, unit: &str) -> Option<&mut Unit> {
        match unit {
            SOCKET => self.socket.as_mut(),
            DEPENDANT => self.dependant.as_mut(),
            _ => None,
        }
    }

    // ---- time ----

    fn next_due(&self) -> Option<u64> {
        let app = &self.app;
        let job = app.job.and_then(|j| j.due);
        let procs = app.procs.iter().filter_map(|p| p.dies_at);
        let commands = self.commands.iter().map(|c| c.ends_at);
        job.into_iter().chain(app.ready_at).chain(app.kill_at).chain(procs).chain(commands).min()
    }

    /// Lets time pass, at most until something happens. Whether something did.
    pub(crate) fn advance(&mut self, disk: &DiskState, at_most: u64) -> bool {
        let until = self.now + at_most;
        match self.next_due().filter(|due| *due <= until) {
            Some(due) => {
                self.now = self.now.max(due);
                self.happen(disk);
                true
            }
            None => {
                self.now = until;
                false
            }
        }
    }

    /// Lets time pass to the end.
    pub(crate) fn pass(&mut self, disk: &DiskState, ms: u64) {
        let until = self.now + ms;
        while self.now < until {
            self.advance(disk, until - self.now);
        }
    }

    fn happen(&mut self, disk: &DiskState) {
        let now = self.now;
        let over = |at: Option<u64>| at.is_some_and(|at| at <= now);
        let mut ended = vec![];
        self.commands.retain(|c| {
            let over = c.ends_at <= now;
            if over {
                ended.push(c.purpose.clone());
            }
            !over
        });
        for purpose in ended {
            self.command_took_effect(&purpose);
        }
        if self.app.procs.iter().any(|p| over(p.dies_at)) {
            self.died();
        }
        if over(self.app.kill_at) {
            let stopping = self.app.active == "deactivating";
            self.app.end("failed", "timeout", "killed by 9");
            self.app.failures += u32::from(!stopping);
            self.app.job = self.app.job.filter(|j| j.start == stopping);
            self.run_waiting_job();
        }
        if over(self.app.ready_at) {
            self.app.ready_at = None;
            self.app.active = "active";
            self.app.failures = 0;
            self.app.job = self.app.job.filter(|j| !j.start);
        }
        if over(self.app.job.and_then(|j| j.due)) {
            self.run_job(disk);
        }
    }

    fn died(&mut self) {
        match self.app.active {
            "deactivating" => {
                self.app.end("inactive", "success", "killed by 15");
                self.app.job = self.app.job.filter(|j| j.start);
                self.run_waiting_job();
            }
            _ => {
                self.app.end("failed", "exit-code", "exited 1");
                self.app.failures += 1;
                self.app.job = self.app.job.filter(|j| !j.start);
            }
        }
    }

    /// A start that waited for the stop to end.
    fn run_waiting_job(&mut self) {
        let due = Some(self.now + JOB);
        if let Some(job) = &mut self.app.job {
            job.due = due;
        }
    }

    fn run_job(&mut self, disk: &DiskState) {
        let Some(job) = &mut self.app.job else { return };
        let start = job.start;
        job.due = None;
        match (start, self.app.active) {
            (true, "active") | (false, "inactive" | "failed") => self.app.job = None,
            (true, "inactive" | "failed") => self.exec(disk),
            (false, "active" | "activating") => self.terminate(),
            // Waits: for the stop to end, or for the start that is under way.
            _ => {}
        }
    }

    fn exec(&mut self, disk: &DiskState) {
        self.app.invocation = self.id();
        self.app.result = "success";
        self.app.exit = "";
        let Some(mut process) = load(disk) else {
            self.app.end("failed", "exit-code", "exited 203");
            self.app.failures += 1;
            self.app.job = None;
            return;
        };
        process.pid = self.id();
        if let Some((version, behaviour)) = self.broken
            && process.version == version
        {
            process.behaviour = behaviour;
        }
        match process.behaviour {
            Behaviour::ExitsAtOnce => process.dies_at = Some(self.now + READY / 2),
            Behaviour::HungStart => self.app.kill_at = Some(self.now + TIMEOUT_START),
            Behaviour::ExitsLater => {
                process.dies_at = Some(self.now + READY + 300);
                self.app.ready_at = Some(self.now + READY);
            }
            _ => self.app.ready_at = Some(self.now + READY),
        }
        self.app.main = process.pid;
        self.app.procs = vec![process];
        self.app.active = "activating";
    }

    fn terminate(&mut self) {
        self.app.active = "deactivating";
        self.app.ready_at = None;
        if let Some(dependant) = &mut self.dependant {
            dependant.end("inactive", "success", "");
        }
        let (now, app) = (self.now, &mut self.app);
        if app.procs.iter().any(|p| p.behaviour == Behaviour::DeafToStop) {
            app.kill_at = Some(now + TIMEOUT_STOP);
        } else {
            app.kill_at = None;
            for process in &mut app.procs {
                process.dies_at = Some(now + ENDING);
            }
        }
    }

    // ---- commands of the adapter ----

    pub(crate) fn begin_command(&mut self, purpose: &str) -> String {
        let unit = format!("cutover-cmd-app-{purpose}-{}.service", self.id());
        let ends_at = self.now + COMMAND;
        self.commands.push(Running { unit: unit.clone(), purpose: purpose.to_owned(), ends_at });
        unit
    }

    fn command_took_effect(&mut self, purpose: &str) {
        match purpose {
            "quiesce" => self.parked = true,
            "resume" => self.parked = false,
            _ => {}
        }
    }

    // ---- boot ----

    /// The power was cut, and is back: nothing runs. The boot's own jobs come with [`Machine::start_enabled`].
    pub(crate) fn reboot(&mut self) {
        self.boot += 1;
        self.now += 20_000;
        self.flight = None;
        self.commands.clear();
        self.worker = 0;
        self.app = Unit::new("inactive", self.app.enabled);
        for unit in [&mut self.socket, &mut self.dependant].into_iter().flatten() {
            *unit = Unit::new("inactive", unit.enabled);
        }
    }

    /// The boot starts what is enabled, the unit after `delay` milliseconds.
    pub(crate) fn start_enabled(&mut self, delay: u64) {
        for unit in [&mut self.socket, &mut self.dependant].into_iter().flatten() {
            unit.active = "active";
        }
        if self.app.enabled {
            let (id, due) = (self.id(), Some(self.now + JOB + delay));
            self.app.job = Some(Job { id, start: true, due });
        }
    }

    /// A hash of what a worker in the same boot could tell apart, but for the time.
    pub(crate) fn hash(&self) -> u64 {
        let mut rng = 0u64;
        let mut add = |n: u64| rng = (rng.rotate_left(17) ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        add(u64::from(self.parked));
        for unit in [Some(&self.app), self.socket.as_ref(), self.dependant.as_ref()].into_iter().flatten() {
            add(unit.active.len() as u64 * 31 + u64::from(unit.main));
            add(u64::from(unit.invocation));
            add(unit.job.map_or(0, |j| 1 + u64::from(j.start)));
            add(unit.procs.len() as u64);
        }
        rng
    }
}

/// What `current/bin/app` is now; none where it cannot be executed.
fn load(disk: &DiskState) -> Option<Proc> {
    let tree = disk.read_link("current").ok()?;
    let below = format!("{tree}/bin/app");
    let stat = disk.stat(&below).ok()?;
    if stat.kind != Kind::File || stat.mode & 0o111 == 0 {
        return None;
    }
    let bytes = disk.read(&below, 1 << 20).ok()?;
    let text = String::from_utf8(bytes).ok()?;
    // Every sector counts: what is torn does not run.
    let words = text.lines().next()?;
    let mut words = words.split(' ');
    if words.next()? != "app" {
        return None;
    }
    let version = words.next()?.to_owned();
    let name = words.next()?;
    let behaviour = Behaviour::ALL.iter().find(|(_, n)| *n == name)?.0;
    if text.as_bytes() != program(&version, behaviour) {
        return None;
    }
    let path = format!("{STATE}/{below}");
    Some(Proc { pid: 0, exe: stat.id, path, version, behaviour, dies_at: None })
}

/// Whether what `current` names would come up and pass.
pub(crate) fn would_run(disk: &DiskState, broken: Option<(&'static str, Behaviour)>) -> bool {
    load(disk).is_some_and(|p| {
        let broken = broken.is_some_and(|(version, b)| p.version == version && b != Behaviour::DeafToStop);
        !broken && matches!(p.behaviour, Behaviour::Good | Behaviour::WrongVersion | Behaviour::NeverPasses)
    })
}
