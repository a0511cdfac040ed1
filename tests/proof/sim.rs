//! The simulated disk and machine behind cutover's own seams, with every call counted, recorded and open to failure.
//!
//! [`Sim`] is a [`Disk`] and a [`Manager`] over one [`World`]. A run of real code against it leaves a trace: the world
//! after each call that changed anything. Any of these worlds can then be crashed, or continued as after a kill.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use cutover::durable::{Disk, DiskFile, Space, Stat, Step};
use cutover::journal;
use cutover::manager::{
    Command, CommandResult, ExecLine, HttpAnswer, HttpTarget, Manager, ManagerError, ProbeError, Process,
    UnitSettings, UnitState,
};
use cutover::release::Digest;
use cutover::watch::Watch;

use crate::check;
use crate::disk::{DiskState, Fault, Ino};
use crate::machine::{Call, DEPENDANT, Machine, SOCKET, STATE, TIMEOUT_START, TIMEOUT_STOP, UNIT, Unit};
use crate::rng::Rng;

/// Disk and machine together.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) disk: DiskState,
    pub(crate) machine: Machine,
}

/// What a test of the tests does to one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutation {
    /// It says that it was done, and was not.
    Remove,
    /// It is done after the next call.
    AfterNext,
    /// It is done after the next sync.
    AfterSync,
    /// It is done after the next record of the journal is durable.
    AfterRecord,
    /// It is done twice.
    Double,
    /// A rename that exchanges what it should replace.
    Toggle,
}

/// When the socket starts a triggered unit that is down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Activation {
    #[default]
    Never,
    /// As soon as it is down: it is never seen so.
    Always,
    /// Now and then.
    Random(u64),
}

/// What goes wrong in a run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Plan {
    /// The disk's call of this number fails so; and all later ones.
    pub(crate) fault: Option<(u32, Fault, bool)>,
    pub(crate) mutation: Option<(Step, Mutation)>,
    pub(crate) activation: Activation,
    /// From this event on the worker is asked to leave.
    pub(crate) leave_at: Option<u32>,
    pub(crate) seed: u64,
}

/// A place at which a run can be cut: after this call.
#[derive(Clone)]
pub(crate) struct Point {
    pub(crate) what: What,
    pub(crate) world: World,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// Before the first call.
    Begin,
    /// After a call to the disk, its number.
    Disk(Step, u32),
    /// After a call to the manager, or, with `flight` set in the world, before it arrived.
    Manager(&'static str),
    /// After time passed.
    Wait,
}

impl What {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Begin => "begin",
            Self::Disk(step, _) => step,
            Self::Manager(call) => call,
            Self::Wait => "wait",
        }
    }
}

enum Op {
    Mkdir(String, u32),
    /// Gives a file that exists its name.
    Name(Ino, String),
    Symlink(String, String),
    Rename(String, String),
    Exchange(String, String),
    Unlink(String),
    Rmdir(String),
    Write(Ino, u64, Vec<u8>),
    SetXattr(Ino, String, Vec<u8>),
    SyncFile(Ino),
    SyncDir(String),
    SyncFs,
}

impl Op {
    fn is_sync(&self) -> bool {
        matches!(self, Self::SyncFile(_) | Self::SyncDir(_) | Self::SyncFs)
    }

    fn apply(&self, disk: &mut DiskState) -> io::Result<()> {
        match self {
            Self::Mkdir(path, mode) => disk.mkdir(path, *mode),
            Self::Name(ino, path) => disk.name(*ino, path),
            Self::Symlink(target, path) => disk.symlink(target, path),
            Self::Rename(from, to) => disk.rename(from, to),
            Self::Exchange(one, other) => disk.exchange(one, other),
            Self::Unlink(path) => disk.unlink(path),
            Self::Rmdir(path) => disk.rmdir(path),
            Self::Write(ino, offset, bytes) => disk.write(*ino, *offset, bytes),
            Self::SetXattr(ino, name, value) => {
                disk.set_xattr(*ino, name, value);
                Ok(())
            }
            Self::SyncFile(ino) => {
                disk.sync_file(*ino);
                Ok(())
            }
            Self::SyncDir(path) => disk.sync_dir(path),
            Self::SyncFs => {
                disk.sync_fs();
                Ok(())
            }
        }
    }

    /// The effect of a sync that failed.
    fn lose(&self, disk: &mut DiskState) {
        match self {
            Self::SyncFile(ino) => disk.lose_file(*ino),
            Self::SyncDir(path) => disk.lose_dir(path),
            Self::SyncFs => disk.lose_all(),
            _ => {}
        }
    }
}

/// One run.
pub(crate) struct Run {
    pub(crate) world: World,
    pub(crate) plan: Plan,
    pub(crate) trace: Vec<Point>,
    pub(crate) tracing: bool,
    /// Calls to the disk so far.
    pub(crate) calls: u32,
    /// Calls of all kinds so far.
    pub(crate) events: u32,
    pub(crate) steps: BTreeMap<Step, u32>,
    pub(crate) violations: Vec<String>,
    pub(crate) notes: Vec<String>,
    delayed: Vec<(Mutation, Op)>,
    /// Delayed operations whose time has come: they are done before the next call.
    due: Vec<Op>,
    rng: Rng,
    /// Waits and looks since the last change: a loop that never ends is ended.
    idle: u32,
}

/// The handle that the code under test has of a run.
#[derive(Clone)]
pub(crate) struct Sim(pub(crate) Rc<RefCell<Run>>);

/// What ends a loop that would never end.
pub(crate) const ENDLESS: &str = "the simulated machine has nothing left to do, and is still asked";
const MOST_IDLE: u32 = 20_000;

impl Sim {
    pub(crate) fn new(world: World, plan: Plan, tracing: bool) -> Self {
        let mut run = Run {
            world,
            plan,
            trace: vec![],
            tracing,
            calls: 0,
            events: 0,
            steps: BTreeMap::new(),
            violations: vec![],
            notes: vec![],
            delayed: vec![],
            due: vec![],
            rng: Rng::of(&[plan.seed, 1]),
            idle: 0,
        };
        run.point(What::Begin);
        Self(Rc::new(RefCell::new(run)))
    }

    /// A worker begins: what asked its predecessor to leave does not ask it.
    pub(crate) fn stays(&self) {
        let run = &mut *self.0.borrow_mut();
        if run.plan.leave_at.is_some_and(|at| run.events >= at) {
            run.plan.leave_at = None;
        }
    }

    pub(crate) fn world(&self) -> World {
        self.0.borrow().world.clone()
    }

    fn perform(&self, step: Step, op: Op) -> io::Result<()> {
        self.0.borrow_mut().perform(step, op)
    }
}

impl Run {
    fn point(&mut self, what: What) {
        self.events += 1;
        self.idle = 0;
        if self.tracing {
            self.trace.push(Point { what, world: self.world.clone() });
        }
        self.activate();
    }

    fn activate(&mut self) {
        let now = match self.plan.activation {
            Activation::Never => false,
            Activation::Always => true,
            Activation::Random(_) => self.rng.below(4) == 0,
        };
        if now {
            self.world.machine.activate();
        }
    }

    fn fault(&mut self, op: &Op) -> Option<Fault> {
        let (at, fault, forever) = self.plan.fault?;
        if self.calls < at || (self.calls > at && !forever) {
            return None;
        }
        match fault {
            Fault::Full => {
                if self.calls == at {
                    self.world.disk.fill_up();
                }
                None
            }
            Fault::Short if !matches!(op, Op::Write(..)) => None,
            fault => Some(fault),
        }
    }

    fn perform(&mut self, step: Step, op: Op) -> io::Result<()> {
        self.calls += 1;
        *self.steps.entry(step).or_default() += 1;
        for op in std::mem::take(&mut self.due) {
            let _: io::Result<()> = op.apply(&mut self.world.disk);
        }
        let result = match self.fault(&op) {
            Some(fault) => {
                let disk = &mut self.world.disk;
                match (fault, &op) {
                    (Fault::EioDone, _) => drop(op.apply(disk)),
                    (Fault::Short, Op::Write(ino, offset, bytes)) => {
                        drop(disk.write(*ino, *offset, &bytes[..bytes.len() / 2]));
                    }
                    _ => op.lose(disk),
                }
                Err(fault.error())
            }
            None => self.mutate(step, op),
        };
        self.point(What::Disk(step, self.calls));
        result
    }

    fn mutate(&mut self, step: Step, op: Op) -> io::Result<()> {
        let is_sync = op.is_sync();
        let disk = &mut self.world.disk;
        let mutation = self.plan.mutation.filter(|(mutated, _)| *mutated == step).map(|(_, m)| m);
        let result = match mutation {
            None => op.apply(disk),
            Some(Mutation::Remove) => Ok(()),
            Some(Mutation::Double) => {
                let result = op.apply(disk);
                let _ = op.apply(disk);
                result
            }
            Some(Mutation::Toggle) => match &op {
                Op::Rename(from, to) if disk.stat(to).is_ok() => disk.exchange(from, to),
                _ => op.apply(disk),
            },
            Some(late) => {
                self.delayed.push((late, op));
                return Ok(());
            }
        };
        let (due, kept): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.delayed).into_iter().partition(|(when, _)| match when {
                Mutation::AfterNext => true,
                Mutation::AfterSync => is_sync,
                _ => step == "overwrite.sync",
            });
        self.delayed = kept;
        self.due.extend(due.into_iter().map(|(_, op): (_, Op)| op));
        result
    }

    /// K28: what is about to be done was announced by a record that no crash can take back.
    fn must_be_announced(&mut self, what: &str, may: fn(&cutover::operation::State) -> bool) {
        let disk = self.world.disk.crash_losing_all();
        let announced = match disk.read(journal::FILE, u64::MAX - 1) {
            Ok(bytes) => journal::parse(&bytes).is_ok_and(|contents| may(&contents.state)),
            Err(_) => false,
        };
        if !announced {
            self.violations.push(format!("I7: {what}, and no record that survives says so"));
        }
    }

    fn look(&mut self) -> Result<(), ManagerError> {
        self.idle += 1;
        if self.idle > MOST_IDLE {
            self.violations.push(format!("I6: {ENDLESS}"));
            return Err(ManagerError::Unreachable(ENDLESS.into()));
        }
        Ok(())
    }
}

impl Disk for Sim {
    fn mkdir(&self, step: Step, path: &str, mode: u32) -> io::Result<()> {
        self.perform(step, Op::Mkdir(path.into(), mode))
    }

    fn create(&self, step: Step, path: &str, mode: u32) -> io::Result<Box<dyn DiskFile>> {
        let ino = {
            let mut run = self.0.borrow_mut();
            if run.world.disk.stat(path).is_ok() {
                // Refused before anything is counted: a call that changes nothing is no place for a crash.
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            run.world.disk.create_nameless(mode)
        };
        self.perform(step, Op::Name(ino, path.into()))?;
        Ok(Box::new(SimFile { sim: self.clone(), ino }))
    }

    fn open(&self, path: &str) -> io::Result<Box<dyn DiskFile>> {
        let ino = self.0.borrow().world.disk.open(path)?;
        Ok(Box::new(SimFile { sim: self.clone(), ino }))
    }

    fn symlink(&self, step: Step, target: &str, path: &str) -> io::Result<()> {
        self.perform(step, Op::Symlink(target.into(), path.into()))
    }

    fn rename(&self, step: Step, from: &str, to: &str) -> io::Result<()> {
        self.perform(step, Op::Rename(from.into(), to.into()))
    }

    fn exchange(&self, step: Step, one: &str, other: &str) -> io::Result<()> {
        self.perform(step, Op::Exchange(one.into(), other.into()))
    }

    fn unlink(&self, step: Step, path: &str) -> io::Result<()> {
        if self.stat(path).is_err() {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.perform(step, Op::Unlink(path.into()))
    }

    fn rmdir(&self, step: Step, path: &str) -> io::Result<()> {
        self.perform(step, Op::Rmdir(path.into()))
    }

    fn sync_dir(&self, step: Step, path: &str) -> io::Result<()> {
        self.perform(step, Op::SyncDir(path.into()))
    }

    fn sync_fs(&self, step: Step) -> io::Result<()> {
        self.perform(step, Op::SyncFs)
    }

    fn read(&self, path: &str, limit: u64) -> io::Result<Vec<u8>> {
        self.0.borrow().world.disk.read(path, limit)
    }

    fn read_link(&self, path: &str) -> io::Result<String> {
        self.0.borrow().world.disk.read_link(path)
    }

    fn stat(&self, path: &str) -> io::Result<Stat> {
        self.0.borrow().world.disk.stat(path)
    }

    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        self.0.borrow().world.disk.list(path)
    }

    fn xattr(&self, path: &str, name: &str) -> io::Result<Option<Vec<u8>>> {
        self.0.borrow().world.disk.xattr(path, name)
    }

    fn space(&self) -> io::Result<Space> {
        Ok(self.0.borrow().world.disk.space())
    }
}

struct SimFile {
    sim: Sim,
    ino: Ino,
}

impl DiskFile for SimFile {
    fn write_at(&mut self, step: Step, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.sim.perform(step, Op::Write(self.ino, offset, bytes.into()))
    }

    fn set_xattr(&mut self, step: Step, name: &str, value: &[u8]) -> io::Result<()> {
        self.sim.perform(step, Op::SetXattr(self.ino, name.into(), value.into()))
    }

    fn sync(&mut self, step: Step) -> io::Result<()> {
        self.sim.perform(step, Op::SyncFile(self.ino))
    }

    fn sync_data(&mut self, step: Step) -> io::Result<()> {
        self.sim.perform(step, Op::SyncFile(self.ino))
    }

    fn read_uncached(&mut self, step: Step, limit: u64) -> io::Result<Vec<u8>> {
        self.sim.perform(step, Op::SyncFile(self.ino))?;
        let run = &mut *self.sim.0.borrow_mut();
        run.world.disk.drop_cache(self.ino, &mut run.rng);
        run.world.disk.read_ino(self.ino, limit)
    }
}

fn invocation(id: u32) -> String {
    if id == 0 { String::new() } else { format!("{id:032x}") }
}

fn state_of(unit: &Unit) -> UnitState {
    UnitState {
        load: "loaded".into(),
        active: unit.active.into(),
        sub: unit.active.into(),
        job: unit.job.map(|j| j.id),
        main_pid: unit.main,
        invocation: invocation(unit.invocation),
        restarts: 0,
        condition: true,
        result: unit.result.into(),
        exit: unit.exit.into(),
        needs_reload: false,
    }
}

fn not_found(unit: &str) -> ManagerError {
    ManagerError::Unit { unit: unit.into(), why: "not-found".into() }
}

impl Manager for Sim {
    fn state(&mut self, unit: &str) -> Result<UnitState, ManagerError> {
        let run = &mut *self.0.borrow_mut();
        run.look()?;
        if unit == UNIT {
            return Ok(state_of(&run.world.machine.app));
        }
        run.world.machine.other(unit).map(|u| state_of(u)).ok_or_else(|| not_found(unit))
    }

    fn settings(&mut self, unit: &str) -> Result<UnitSettings, ManagerError> {
        if unit != UNIT {
            return Ok(UnitSettings::default());
        }
        let run = self.0.borrow();
        let path = format!("{STATE}/current/bin/app");
        Ok(UnitSettings {
            service_type: "notify".into(),
            exec: vec![ExecLine {
                setting: "ExecStart".into(),
                path: path.clone(),
                argv: vec![path],
                prefixes: String::new(),
            }],
            timeout_start: Some(Duration::from_millis(TIMEOUT_START)),
            timeout_stop: Some(Duration::from_millis(TIMEOUT_STOP)),
            triggered_by: run.world.machine.socket.iter().map(|_| SOCKET.to_owned()).collect(),
            pulls_down: run.world.machine.dependant.iter().map(|_| DEPENDANT.to_owned()).collect(),
            ..UnitSettings::default()
        })
    }

    fn processes(&mut self, unit: &str) -> Result<Vec<Process>, ManagerError> {
        let run = &mut *self.0.borrow_mut();
        run.look()?;
        if unit != UNIT {
            return Ok(vec![]);
        }
        let of =
            |p: &crate::machine::Proc| Process { pid: p.pid, exe: Some(p.exe), exe_path: p.path.clone() };
        Ok(run.world.machine.app.procs.iter().map(of).collect())
    }

    fn start(&mut self, unit: &str) -> Result<(), ManagerError> {
        let run = &mut *self.0.borrow_mut();
        if unit != UNIT {
            let other = run.world.machine.other(unit).ok_or_else(|| not_found(unit))?;
            other.active = "active";
            run.point(What::Manager("start another"));
            return Ok(());
        }
        run.world.machine.flight = Some(Call::Start);
        run.point(What::Manager("start sent"));
        run.world.machine.land();
        run.point(What::Manager("start"));
        Ok(())
    }

    fn stop(&mut self, unit: &str) -> Result<(), ManagerError> {
        let run = &mut *self.0.borrow_mut();
        if unit != UNIT {
            run.world.machine.commands.retain(|c| c.unit != unit);
            run.point(What::Manager("stop another"));
            return Ok(());
        }
        if !run.world.machine.app.procs.is_empty() {
            run.must_be_announced("a running service was stopped", check::may_stop);
        }
        run.world.machine.flight = Some(Call::Stop);
        run.point(What::Manager("stop sent"));
        run.world.machine.land();
        run.point(What::Manager("stop"));
        Ok(())
    }

    fn cancel_job(&mut self, unit: &str) -> Result<(), ManagerError> {
        let run = &mut *self.0.borrow_mut();
        if unit == UNIT {
            run.world.machine.app.job = None;
        }
        run.point(What::Manager("cancel"));
        Ok(())
    }

    fn reset_failed(&mut self, unit: &str) -> Result<(), ManagerError> {
        let run = &mut *self.0.borrow_mut();
        let machine = &mut run.world.machine;
        let unit = if unit == UNIT { Some(&mut machine.app) } else { machine.other(unit) };
        if let Some(unit) = unit {
            unit.failures = 0;
            if unit.active == "failed" {
                unit.active = "inactive";
                unit.result = "success";
            }
        }
        run.point(What::Manager("reset"));
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
        self.0.borrow_mut().world.machine.land();
        Ok(())
    }

    fn bus_name_alive(&mut self, name: &str) -> Result<bool, ManagerError> {
        Ok(name == bus_name(self.0.borrow().world.machine.worker))
    }

    fn process_alive(&mut self, pid: u32, _: u64) -> bool {
        self.0.borrow().world.machine.worker == pid
    }

    fn wait(&mut self, at_most: Duration) {
        let run = &mut *self.0.borrow_mut();
        run.idle += 1;
        let at_most = u64::try_from(at_most.as_millis()).unwrap_or(u64::MAX).max(1);
        run.world.machine.land();
        if run.world.machine.advance(&run.world.disk, at_most) {
            run.point(What::Wait);
        } else {
            run.activate();
        }
    }

    fn now(&mut self) -> Duration {
        self.0.borrow().world.machine.now()
    }

    fn wall_clock_ms(&mut self) -> u64 {
        self.0.borrow().world.machine.wall_ms()
    }

    fn boot_id(&mut self) -> String {
        self.0.borrow().world.machine.boot_id()
    }

    fn run(&mut self, command: &Command) -> Result<CommandResult, ManagerError> {
        let run = &mut *self.0.borrow_mut();
        if command.purpose == "quiesce" {
            run.must_be_announced("work was parked", check::may_park);
        }
        let unit = run.world.machine.begin_command(&command.purpose);
        run.point(What::Manager("command"));
        while run.world.machine.commands.iter().any(|c| c.unit == unit) {
            run.world.machine.advance(&run.world.disk, 1000);
        }
        run.point(What::Manager("command ended"));
        Ok(CommandResult { status: Some(0), timed_out: false, stdout: vec![] })
    }

    fn running_commands(&mut self, _: &str) -> Result<Vec<String>, ManagerError> {
        Ok(self.0.borrow().world.machine.commands.iter().map(|c| c.unit.clone()).collect())
    }

    fn http_get(&mut self, _: &str, _: &HttpTarget, _: Duration) -> Result<HttpAnswer, ProbeError> {
        use crate::machine::Behaviour;
        let run = &mut *self.0.borrow_mut();
        run.idle += 1;
        let app = &run.world.machine.app;
        let Some(process) = app.procs.first().filter(|_| app.active == "active") else {
            return Err(ProbeError("connection refused".into()));
        };
        let version = match process.behaviour {
            Behaviour::NeverPasses => return Err(ProbeError("connection refused".into())),
            Behaviour::WrongVersion => "0.0.1",
            _ => &process.version,
        };
        let body = format!("{{\"version\":\"{version}\"}}").into_bytes();
        Ok(HttpAnswer { status: 200, body, peers: vec![process.pid] })
    }

    fn process_uses(&mut self, pid: u32, root: &str) -> bool {
        let run = self.0.borrow();
        run.world.machine.app.procs.iter().any(|p| p.pid == pid && p.path.starts_with(&format!("{root}/")))
    }

    fn exe_digest(&mut self, pid: u32) -> Option<Digest> {
        let run = self.0.borrow();
        let process = run.world.machine.app.procs.iter().find(|p| p.pid == pid)?;
        let ino = Ino::try_from(process.exe.ino).ok()?;
        Some(Digest::of(&run.world.disk.read_ino(ino, u64::MAX - 1).ok()?))
    }
}

/// The name on the bus of a worker.
pub(crate) fn bus_name(worker: u32) -> String {
    format!(":1.{worker}")
}

impl Watch for Sim {
    fn step(&self, name: &str, _: Duration) {
        self.0.borrow_mut().notes.push(format!("step {name}"));
    }

    fn progress(&self, _: &str, _: u64, _: u64) {}

    fn note(&self, text: &str) {
        self.0.borrow_mut().notes.push(text.to_owned());
    }

    fn interrupted(&self) -> bool {
        let run = self.0.borrow();
        run.plan.leave_at.is_some_and(|at| run.events >= at)
    }
}
