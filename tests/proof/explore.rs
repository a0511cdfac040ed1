//! Runs a scenario through every interruption, and checks what comes of it.
//!
//! A *path* says what was done to a run: `37c5` crashes the machine after point 37, with the fifth legal subset of what was
//! pending; `37k` kills the worker there; `/` goes on with the recovery that follows. With scenario, seed and limit it
//! is the same every time.

use std::cell::Cell;
use std::collections::{BTreeSet, HashSet};
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use cutover::adapter::Adapter;
use cutover::durable::Step;
use cutover::journal::{self, Journal};
use cutover::operation::{OperationId, State};
use cutover::receipt::Receipt;
use cutover::recovery;
use cutover::release::Release;
use cutover::response::{Observation, Response};
use cutover::scratch::{Answer, Attempt, Scratch};
use cutover::store::Store;
use cutover::way_back;
use cutover::worker::{self, Assignment, Worker};

use crate::check::{self, Before, Case};
use crate::disk::{DiskState, Fault, Kept, crash_states};
use crate::machine::{STATE, UNIT};
use crate::rng::Rng;
use crate::scenario::Setup;
use crate::sim::{Plan, Point, Sim, What, World, bus_name};

thread_local! {
    /// The code under test is running.
    pub(crate) static EXPECTS_PANIC: Cell<bool> = const { Cell::new(false) };
}

/// How an attempt ended.
#[derive(Debug)]
pub(crate) enum Ended {
    Answered(Box<Response>),
    Again(String),
}

/// PID 1 starts a worker so many times for one launch.
const ATTEMPTS: u32 = 3;
/// An operation that so many launches for recovery leave open is not going to be settled.
const LAUNCHES: u32 = 2;

/// One attempt of a worker: the next of its launch.
pub(crate) fn attempt(sim: &Sim, adapter: &Adapter, id: &OperationId, recover: bool) -> Ended {
    sim.stays();
    let (launch, pid, boot_id) = {
        let run = &mut *sim.0.borrow_mut();
        let machine = &mut run.world.machine;
        machine.launch.1 += 1;
        (machine.launch.0, machine.new_worker(), machine.boot_id())
    };
    let assignment =
        Assignment { service: "app".into(), id: id.clone(), launch: launch.to_string(), recover };
    let store = Store::new(sim, Path::new(STATE), "app");
    let scratch = Scratch::of(&store, id);
    let own = Attempt { pid, start_time: pid.into(), bus_name: bus_name(pid), boot_id };
    let mut manager = sim.clone();
    let done = worker::begin_attempt(&scratch, &own, &assignment.launch).and_then(|attempt| {
        let worker =
            Worker { assignment: &assignment, store: &store, scratch: &scratch, watch: sim, attempt, pid };
        let most = adapter.timeouts.attempts;
        worker.respond(&mut manager, most, |worker, manager| worker.under_lock(manager, adapter))
    });
    sim.0.borrow_mut().world.machine.worker = 0;
    if let Err(why) = done {
        return Ended::Again(why.to_string());
    }
    let answer: Option<Answer> = scratch.get(&format!("response-{launch}")).ok().flatten();
    match answer {
        Some(answer) => Ended::Answered(Box::new(answer.response)),
        None => Ended::Again("the answer cannot be read".into()),
    }
}

/// How a run is continued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// The machine crashes; the boot starts the unit after so long.
    Crash(Vec<Kept>, u64),
    /// The worker dies.
    Kill,
}

/// What came of a run.
pub(crate) struct Settled {
    pub(crate) sim: Sim,
    pub(crate) answer: Option<Response>,
    pub(crate) violations: Vec<String>,
}

/// One thing that does not hold.
#[derive(Clone, Debug)]
pub(crate) struct Finding {
    pub(crate) scenario: &'static str,
    pub(crate) what: String,
    pub(crate) command: String,
    /// What it says, without numbers.
    kind: String,
    /// How many states show it.
    pub(crate) count: u64,
}

/// How far to go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    pub(crate) seed: u64,
    /// Crash states at a point.
    pub(crate) limit: usize,
    /// Crash states at a point of a recovery.
    pub(crate) limit_again: usize,
    /// Of so many points of a recovery one is crashed again.
    pub(crate) every: u32,
    /// Points that are cut after a failed call.
    pub(crate) after_fault: u32,
    /// Ends at the first finding.
    pub(crate) first: bool,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stats {
    /// Legal states that were reached and judged.
    pub(crate) states: u64,
    /// Those that had not been seen before: each was recovered by the real code.
    pub(crate) distinct: u64,
    /// Runs of real code.
    pub(crate) runs: u64,
}

impl Stats {
    pub(crate) fn add(&mut self, other: Self) {
        self.states += other.states;
        self.distinct += other.distinct;
        self.runs += other.runs;
    }
}

pub(crate) struct Explorer<'a> {
    pub(crate) setup: &'a Setup,
    pub(crate) budget: Budget,
    pub(crate) stats: Stats,
    pub(crate) findings: Vec<Finding>,
    pub(crate) plan: Plan,
    pub(crate) plan_args: String,
    pub(crate) verbose: bool,
    /// Every step that occurred.
    pub(crate) steps: BTreeSet<Step>,
    seen: HashSet<u64>,
}

/// What is known of a run before it was cut.
#[derive(Clone, Default)]
struct Known {
    path: String,
    told: Option<Receipt>,
    /// The disk failed before: what it shows may not be what it has.
    failed: bool,
}

/// What happens to a journal.
#[derive(Clone, Copy)]
enum Damage {
    Missing,
    Cut,
}

impl Damage {
    fn letter(self) -> char {
        match self {
            Self::Missing => 'm',
            Self::Cut => 't',
        }
    }
}

impl<'a> Explorer<'a> {
    pub(crate) fn new(setup: &'a Setup, budget: Budget) -> Self {
        let plan = Plan { activation: setup.scenario.activation, seed: budget.seed, ..Plan::default() };
        Self {
            setup,
            budget,
            stats: Stats::default(),
            findings: vec![],
            plan,
            plan_args: String::new(),
            verbose: false,
            steps: BTreeSet::new(),
            seen: HashSet::new(),
        }
    }

    fn enough(&self) -> bool {
        self.findings.len() >= if self.budget.first { 1 } else { 20 }
    }

    fn find(&mut self, path: &str, what: String) {
        let Budget { seed, limit, limit_again, .. } = self.budget;
        let mut command = format!(
            "tests/proof.sh l2 --scenario {} --seed {seed} --limit {limit} --limit-again {limit_again}",
            self.setup.scenario.name
        );
        command += &self.plan_args;
        if !path.is_empty() {
            let _ = write!(command, " --path {path}");
        }
        let kind = kind(&what);
        match self.findings.iter_mut().find(|f| f.kind == kind) {
            Some(known) => known.count += 1,
            None => {
                let scenario = self.setup.scenario.name;
                let start: String = what.chars().take(300).collect();
                println!("found {scenario}: {start}\n      {command}");
                self.findings.push(Finding { scenario, what, command, kind, count: 1 });
            }
        }
    }

    /// The whole scenario: uninterrupted, then cut at every point.
    pub(crate) fn explore(&mut self) {
        let run = self.begin();
        self.uninterrupted(&run);
        let known = Known::default();
        let trace = run.sim.0.borrow().trace.clone();
        self.cut_everywhere(&trace, &known, 1);
    }

    /// The scenario with one call to the disk failing, once and for ever: each call in each way that fits it.
    pub(crate) fn explore_faults(&mut self, faults: &[Fault]) {
        let base = self.begin();
        let trace = std::mem::take(&mut base.sim.0.borrow_mut().trace);
        let calls: Vec<(Step, u32)> = trace
            .iter()
            .filter_map(|p| match p.what {
                What::Disk(step, call) => Some((step, call)),
                _ => None,
            })
            .collect();
        for (step, call) in calls {
            for &fault in faults {
                for forever in [false, true] {
                    let fits = match fault {
                        Fault::Full => forever,
                        Fault::Short => step.contains("write"),
                        Fault::Eio | Fault::EioDone | Fault::Enospc | Fault::Erofs => true,
                    };
                    if fits && !self.enough() {
                        self.fail(call, fault, forever);
                    }
                }
            }
        }
        self.set_fault(None);
    }

    pub(crate) fn set_fault(&mut self, fault: Option<(u32, Fault, bool)>) {
        self.plan.fault = fault;
        self.plan_args = fault.map_or(String::new(), |(call, fault, forever)| {
            format!(" --fault {call}:{}:{}", fault.name(), if forever { "ever" } else { "once" })
        });
    }

    fn fail(&mut self, call: u32, fault: Fault, forever: bool) {
        self.set_fault(Some((call, fault, forever)));
        self.stats.states += 1;
        self.stats.distinct += 1;
        let run = self.begin();
        let trace = std::mem::take(&mut run.sim.0.borrow_mut().trace);
        self.judge_failed(&run, fault, forever);
        let after: Vec<usize> = (0..trace.len())
            .filter(|n| matches!(trace[*n].what, What::Disk(_, c) if c >= call) || n + 1 == trace.len())
            .collect();
        let mut rng = Rng::of(&[self.budget.seed, call.into(), fault as u64, forever.into()]);
        let chosen: Vec<usize> = (0..self.budget.after_fault)
            .map(|_| after[rng.below(u32::try_from(after.len()).expect("few")) as usize])
            .chain(after.first().copied())
            .chain(after.last().copied())
            .collect();
        let known = Known { failed: true, ..Known::default() };
        for n in chosen {
            if !self.enough() {
                self.cut_at(n, &trace[n], &known, 0);
            }
        }
    }

    /// What must hold at the end of a run in which the disk failed: no false success, no healthy service kept down.
    fn judge_failed(&mut self, run: &Settled, fault: Fault, forever: bool) {
        let mut found = run.violations.clone();
        let result = run.answer.as_ref().map(|a| a.result.as_str());
        let settled = !matches!(result, None | Some("unresolved"));
        {
            let sim = &mut *run.sim.0.borrow_mut();
            sim.world.machine.pass(&sim.world.disk, 5_000);
        }
        let world = run.sim.world();
        if settled {
            let known = Known { told: told(&world, self.setup), ..Known::default() };
            // What could not be removed is left to the next clean-up, which the runs that follow look at.
            found.extend(self.settled(&run.sim, &known, None).into_iter().filter(|f| !f.starts_with("I8")));
        } else if !forever {
            // PID 1 and the daemon start workers until it is settled: a single error must not end in "unresolved".
            found.push(format!(
                "I3: one failed call, and it ended as {result:?}: {:?}",
                run.answer.as_ref().and_then(|a| a.error.clone())
            ));
        }
        let _ = fault;
        let machine = &world.machine;
        let startable = crate::machine::would_run(&world.disk, machine.broken);
        if self.setup.before == Before::Passing && machine.app.active != "active" && startable {
            found.push(format!("I10: the disk failed, and the service is {}", machine.app.active));
        }
        self.report(found, &Known::default(), run);
    }

    /// The worker is asked to leave (SIGTERM) from each event on.
    pub(crate) fn explore_leaving(&mut self) {
        let base = self.begin();
        let events = base.sim.0.borrow().events;
        for at in 1..=events {
            if self.enough() {
                break;
            }
            self.plan.leave_at = Some(at);
            self.plan_args = format!(" --leave-at {at}");
            self.stats.states += 1;
            self.stats.distinct += 1;
            let run = self.begin();
            self.judge(&run, &Known::default(), None, true);
        }
        self.plan.leave_at = None;
        self.plan_args.clear();
    }

    /// The machine crashes at each point, and the journal is gone or cut: `slots/stable` is then the commit.
    pub(crate) fn explore_damage(&mut self) {
        let base = self.begin();
        let trace = std::mem::take(&mut base.sim.0.borrow_mut().trace);
        for (n, point) in trace.iter().enumerate() {
            if !matches!(point.what, What::Disk(..)) {
                continue;
            }
            for (c, kept) in self.crashes(n, point, &Known::default()).into_iter().enumerate() {
                for damage in [Damage::Missing, Damage::Cut] {
                    if self.enough() {
                        return;
                    }
                    let path = format!("{n}{}{c}", damage.letter());
                    let known = Known { path, told: told(&point.world, self.setup), failed: false };
                    self.damaged(point, &kept, damage, &known);
                }
            }
        }
    }

    fn damaged(&mut self, point: &Point, kept: &[Kept], damage: Damage, known: &Known) -> Option<Settled> {
        self.stats.states += 1;
        let mut rng = Rng::of(&[self.budget.seed, text_hash(&known.path)]);
        let mut world = point.world.clone();
        world.disk = world.disk.crash(kept, &mut rng);
        match damage {
            Damage::Missing => drop(world.disk.unlink(journal::FILE)),
            Damage::Cut => world.disk.cut(journal::FILE),
        }
        world.disk.settle();
        let told = known.told.as_ref().map_or(0, |t| t.updated_at_ms + 1);
        if !self.seen.insert(Rng::of(&[world.disk.hash_shown(), told, 3]).next()) {
            return None;
        }
        self.stats.distinct += 1;
        let run = self.boot(world, 0, true);
        let mut found = run.violations.clone();
        let store = Store::new(&run.sim, Path::new(STATE), "app");
        let unresolved = run.answer.as_ref().is_some_and(|a| a.result == "unresolved");
        // Without any history a missing journal is a service that never had one.
        if !unresolved && store.has_history() {
            let result = run.answer.as_ref().map(|a| a.result.clone());
            found.push(format!("I9: the journal is damaged, and the answer is {result:?}"));
        }
        let releases: Vec<&Release> = self.setup.from.iter().chain([&self.setup.target]).collect();
        found.extend(check::without_journal(
            &store,
            &mut run.sim.clone(),
            UNIT,
            &releases,
            known.told.as_ref(),
        ));
        self.report(found, known, &run);
        Some(run)
    }

    /// From the wish to the answer.
    pub(crate) fn begin(&mut self) -> Settled {
        let mut world = self.setup.world.clone();
        world.machine.launch = (1, 0);
        world.machine.recovers = false;
        let sim = Sim::new(world, self.plan, true);
        self.drive(sim)
    }

    fn uninterrupted(&mut self, run: &Settled) {
        for what in run.violations.clone() {
            self.find("", what);
        }
        let result = run.answer.as_ref().map(|a| a.result.clone());
        let expected = cutover::response::name(self.setup.scenario.ends);
        if self.plan.fault.is_none() && result.as_deref() != Some(expected) {
            let why = run.answer.as_ref().map(|a| format!("{:?} {:?}", a.error, reason(a)));
            let what = format!("I3: uninterrupted, it ended as {result:?}, should as {expected}: {why:?}");
            self.find("", what);
        }
        if self.plan.fault.is_none() {
            self.judge(run, &Known::default(), None, true);
        }
    }

    /// Attempts, as PID 1 and whoever watches start them, until there is an answer.
    fn drive(&mut self, sim: Sim) -> Settled {
        self.stats.runs += 1;
        let mut violations = vec![];
        let (begun, launches) = {
            let machine = &sim.0.borrow().world.machine;
            (machine.now, machine.launch.0 + LAUNCHES)
        };
        let answer = loop {
            let machine = sim.0.borrow().world.machine.clone();
            if machine.launch.1 >= ATTEMPTS {
                if machine.launch.0 >= launches {
                    break None;
                }
                let machine = &mut sim.0.borrow_mut().world.machine;
                machine.launch = (machine.launch.0 + 1, 0);
                machine.recovers = true;
                continue;
            }
            let recovers = machine.recovers;
            EXPECTS_PANIC.set(true);
            let ended = catch_unwind(AssertUnwindSafe(|| {
                attempt(&sim, &self.setup.adapter, &self.setup.id, recovers)
            }));
            EXPECTS_PANIC.set(false);
            match ended {
                Ok(Ended::Answered(response)) => break Some(*response),
                Ok(Ended::Again(why)) => {
                    let run = &mut *sim.0.borrow_mut();
                    run.notes.push(format!("left: {why}"));
                    // RestartSec of the worker's unit.
                    run.world.machine.pass(&run.world.disk, 100);
                }
                Err(panic) => {
                    let text = panic
                        .downcast_ref::<String>()
                        .cloned()
                        .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
                    violations.push(format!("a panic: {}", text.unwrap_or_default()));
                    break None;
                }
            }
        };
        {
            let run = &mut *sim.0.borrow_mut();
            violations.append(&mut run.violations);
            self.steps.extend(run.steps.keys());
            // TimeoutStop and TimeoutStart twice, the probe, and what the fence waits.
            if run.world.machine.now - begun > 300_000 {
                violations.push("I6: it took more than five minutes".into());
            }
        }
        Settled { sim, answer, violations }
    }

    /// Cuts a run at each of its points. `depth` says how many recoveries may be cut as well.
    fn cut_everywhere(&mut self, trace: &[Point], known: &Known, depth: u32) {
        let skip = |n: usize, me: &Self| {
            let mut rng = Rng::of(&[me.budget.seed, text_hash(&known.path), n as u64]);
            !known.path.is_empty() && rng.below(me.budget.every) != 0
        };
        for (n, point) in trace.iter().enumerate() {
            if self.enough() {
                return;
            }
            if skip(n, self) {
                continue;
            }
            self.cut_at(n, point, known, depth);
        }
    }

    fn cut_at(&mut self, n: usize, point: &Point, known: &Known, depth: u32) {
        let told = told(&point.world, self.setup).or_else(|| known.told.clone());
        let recorded = recorded(&point.world, &self.setup.id);
        if matches!(point.what, What::Disk(..) | What::Begin) {
            for (c, kept) in self.crashes(n, point, known).into_iter().enumerate() {
                let path = format!("{}{n}c{c}", prefix(&known.path));
                let delay = if c % 2 == 0 { 0 } else { 60_000 };
                let known = Known { path, told: told.clone(), failed: known.failed };
                self.go_on(point, &Cut::Crash(kept, delay), &known, recorded.as_ref(), depth);
                if self.enough() {
                    return;
                }
            }
        }
        let path = format!("{}{n}k", prefix(&known.path));
        // A kill loses nothing: what was recorded is what is shown, unless the disk lies.
        let recorded = if known.failed { recorded } else { recorded_shown(&point.world, &self.setup.id) };
        let known = Known { path, told, failed: known.failed };
        self.go_on(point, &Cut::Kill, &known, recorded.as_ref(), depth);
    }

    fn crashes(&self, n: usize, point: &Point, known: &Known) -> Vec<Vec<Kept>> {
        let limit = if known.path.is_empty() { self.budget.limit } else { self.budget.limit_again };
        let mut rng = Rng::of(&[self.budget.seed, text_hash(&known.path), n as u64]);
        crash_states(&point.world.disk, limit, &mut rng)
    }

    /// One state: what follows the cut, and whether all holds then.
    fn go_on(
        &mut self,
        point: &Point,
        cut: &Cut,
        known: &Known,
        recorded: Option<&State>,
        depth: u32,
    ) -> Option<Settled> {
        self.stats.states += 1;
        let mut rng = Rng::of(&[self.budget.seed, text_hash(&known.path)]);
        let mut world = point.world.clone();
        let told = known.told.as_ref().map_or(0, |t| t.updated_at_ms + 1);
        let key = match cut {
            Cut::Crash(kept, delay) => {
                world.disk = world.disk.crash(kept, &mut rng);
                let parked = u64::from(world.machine.parked);
                Rng::of(&[world.disk.hash_shown(), parked, told, *delay, depth.into(), 1]).next()
            }
            Cut::Kill => {
                let flight = world.machine.flight.map_or(0, |c| 1 + c as u64);
                Rng::of(&[world.disk.hash_all(), world.machine.hash(), flight, told, depth.into(), 2]).next()
            }
        };
        if !self.seen.insert(key) {
            return None;
        }
        self.stats.distinct += 1;
        let outcome = match cut {
            Cut::Crash(_, delay) => self.boot(world, *delay, depth > 0),
            Cut::Kill => self.after_kill(world, known.failed, depth > 0),
        };
        self.judge(&outcome, known, recorded, depth > 0);
        if depth > 0 {
            let trace = std::mem::take(&mut outcome.sim.0.borrow_mut().trace);
            self.cut_everywhere(&trace, known, depth - 1);
        }
        Some(outcome)
    }

    /// What a run is given after the first one: no fault but the same mutation.
    fn later_plan(&self) -> Plan {
        Plan { fault: None, leave_at: None, ..self.plan }
    }

    fn boot(&mut self, mut world: World, delay: u64, tracing: bool) -> Settled {
        world.machine.reboot();
        world.machine.launch = (world.machine.launch.0 + 1, 0);
        world.machine.recovers = true;
        world.machine.in_hook = true;
        let sim = Sim::new(world, self.later_plan(), tracing);
        let mut violations = vec![];
        if let Err(why) = boot_hook(&sim) {
            violations.push(format!("the boot hook failed: {why}"));
        }
        self.boot_on(sim, delay, violations)
    }

    fn boot_on(&mut self, sim: Sim, delay: u64, mut violations: Vec<String>) -> Settled {
        {
            let run = &mut *sim.0.borrow_mut();
            run.world.machine.in_hook = false;
            run.world.machine.start_enabled(delay.min(400));
            if delay == 0 {
                run.world.machine.pass(&run.world.disk, 200);
            }
        }
        let mut outcome = self.drive(sim);
        violations.append(&mut outcome.violations);
        Settled { violations, ..outcome }
    }

    fn after_kill(&mut self, mut world: World, mended: bool, tracing: bool) -> Settled {
        world.machine.worker = 0;
        if mended {
            // Somebody mended the disk, and the daemon's hourly look starts a recovery.
            world.disk.make_room();
            world.machine.launch = (world.machine.launch.0 + 1, 0);
            world.machine.recovers = true;
        }
        let in_hook = world.machine.in_hook;
        let sim = Sim::new(world, self.later_plan(), tracing);
        if in_hook {
            // The boot goes on without its hook.
            return self.boot_on(sim, 0, vec![]);
        }
        self.drive(sim)
    }

    fn judge(&mut self, outcome: &Settled, known: &Known, recorded: Option<&State>, twice: bool) {
        let mut found = outcome.violations.clone();
        match &outcome.answer {
            None => found.push("I6: it was never answered".into()),
            Some(answer) if answer.result == "unresolved" => {
                found.push(format!("I3: unresolved: {}", answer.error.clone().unwrap_or_default()));
            }
            Some(_) => {}
        }
        {
            let run = &mut *outcome.sim.0.borrow_mut();
            run.world.machine.pass(&run.world.disk, 1_000);
        }
        found.extend(self.settled(&outcome.sim, known, recorded));
        if twice && found.is_empty() {
            found.extend(self.again(&outcome.sim));
        }
        self.report(found, known, outcome);
    }

    fn report(&mut self, found: Vec<String>, known: &Known, run: &Settled) {
        if found.is_empty() {
            return;
        }
        if self.verbose {
            println!("---- {} {}", self.setup.scenario.name, known.path);
            for note in &run.sim.0.borrow().notes {
                println!("     {note}");
            }
        }
        for what in found {
            self.find(&known.path, what);
        }
    }

    fn settled(&self, sim: &Sim, known: &Known, recorded: Option<&State>) -> Vec<String> {
        let setup = self.setup;
        let store = Store::new(sim, Path::new(STATE), "app");
        let case = Case {
            id: &setup.id,
            from: setup.from.as_ref(),
            target: &setup.target,
            before: setup.before,
            may_end: &setup.may_end,
            may_blame: setup.may_blame,
            earlier: &setup.earlier,
            told: known.told.as_ref(),
            recorded,
        };
        let mut found = check::settled(&store, &mut sim.clone(), UNIT, &case);
        let machine = &sim.0.borrow().world.machine;
        if machine.parked {
            found.push("I10: work is parked still".into());
        }
        if !machine.commands.is_empty() {
            found.push("I8: a command of the adapter is left".into());
        }
        let was_up = machine.dependant.as_ref().is_none_or(|d| d.active == "active");
        if !was_up {
            found.push("I10: the dependant unit is down".into());
        }
        found
    }

    /// I5.
    fn again(&mut self, sim: &Sim) -> Vec<String> {
        let before = sim.world();
        let mut world = before.clone();
        world.machine.launch = (world.machine.launch.0 + 1, 0);
        world.machine.recovers = true;
        let second = Sim::new(world, self.later_plan(), false);
        let outcome = self.drive(second);
        let after = outcome.sim.world();
        let mut found = outcome.violations;
        if before.disk.hash_without("run") != after.disk.hash_without("run") {
            let changed = check::difference(&check::fingerprint(sim), &check::fingerprint(&outcome.sim));
            found.push(format!("I5: recovered again, it changed {changed:?}"));
        }
        if before.machine.app.invocation != after.machine.app.invocation {
            found.push("I5: recovered again, it restarted the unit".into());
        }
        found
    }

    /// The same state as an exploration found, alone.
    pub(crate) fn replay(&mut self, path: &str) {
        self.verbose = true;
        let mut run = self.begin();
        let mut known = Known::default();
        if path.is_empty() {
            match self.plan.fault {
                Some((_, fault, forever)) => self.judge_failed(&run, fault, forever),
                None if self.plan.leave_at.is_some() => self.judge(&run, &known, None, true),
                None => self.uninterrupted(&run),
            }
        }
        for (i, part) in path.split('/').filter(|p| !p.is_empty()).enumerate() {
            let trace = run.sim.0.borrow().trace.clone();
            let digits = part.find(|c: char| !c.is_ascii_digit()).expect("POINTcSTATE or POINTk");
            let n: usize = part[..digits].parse().expect("a point");
            let point = trace[n].clone();
            println!("point {n} of {}: after {:?}", trace.len(), point.what);
            for line in point.world.disk.describe_pending() {
                println!("    pending: {line}");
            }
            let told = told(&point.world, self.setup).or_else(|| known.told.clone());
            let path = format!("{}{part}", prefix(&known.path));
            let (cut, recorded) = match &part[digits..] {
                "k" => (Cut::Kill, recorded_shown(&point.world, &self.setup.id)),
                state => {
                    let c: usize = state[1..].parse().expect("a state");
                    let kept = self.crashes(n, &point, &known)[c].clone();
                    println!("    {kept:?}");
                    let damage = [Damage::Missing, Damage::Cut].into_iter();
                    if let Some(damage) = damage.into_iter().find(|d| state.starts_with(d.letter())) {
                        let known = Known { path, told, failed: false };
                        run = self.damaged(&point, &kept, damage, &known).expect("not seen before");
                        continue;
                    }
                    let delay = if c % 2 == 0 { 0 } else { 60_000 };
                    (Cut::Crash(kept, delay), recorded(&point.world, &self.setup.id))
                }
            };
            known = Known { path, told, failed: self.plan.fault.is_some() };
            let depth = if i == 0 { 1 } else { 0 };
            let mut world = point.world.clone();
            let mut rng = Rng::of(&[self.budget.seed, text_hash(&known.path)]);
            run = match &cut {
                Cut::Crash(kept, delay) => {
                    world.disk = world.disk.crash(kept, &mut rng);
                    self.boot(world, *delay, true)
                }
                Cut::Kill => self.after_kill(world, known.failed, true),
            };
            self.judge(&run, &known, recorded.as_ref(), depth > 0);
        }
        let sim = run.sim.0.borrow();
        for (n, point) in sim.trace.iter().enumerate() {
            println!("  {n} {} {}", point.what.name(), point.world.machine.app.active);
        }
        for note in &sim.notes {
            println!("  {note}");
        }
        println!("  answer: {:?}", run.answer);
    }
}

/// A finding without its numbers and names: the same for every state that shows the same mistake.
fn kind(what: &str) -> String {
    what.split(|c: char| !c.is_ascii_alphabetic())
        .filter(|word| !word.chars().all(|c| c.is_ascii_hexdigit()))
        .collect::<Vec<_>>()
        .join(" ")
}

fn prefix(path: &str) -> String {
    if path.is_empty() { String::new() } else { format!("{path}/") }
}

fn text_hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

fn reason(answer: &Response) -> Option<String> {
    match &answer.operation {
        Observation::Observed { operation } => Some(operation.reason.clone()),
        _ => None,
    }
}

/// What the boot hook does: files only.
pub(crate) fn boot_hook(sim: &Sim) -> Result<(), String> {
    let store = Store::new(sim, Path::new(STATE), "app");
    let journal = way_back::journaled(Journal::look(sim));
    let facts = way_back::facts_on_disk(&store, journal);
    let decision = recovery::decide(&facts);
    store.aim(&decision.links).map_err(|e| e.to_string())
}

/// What a client could read by now: an answer with a result.
fn told(world: &World, setup: &Setup) -> Option<Receipt> {
    let dir = format!("run/{}", setup.id);
    for name in world.disk.list(&dir).ok()? {
        if !name.starts_with("response-") || name.ends_with(".new") {
            continue;
        }
        let bytes = world.disk.read(&format!("{dir}/{name}"), 1 << 20).ok()?;
        let Ok(answer) = serde_json::from_slice::<Answer>(&bytes) else { continue };
        if let Observation::Observed { operation } = answer.response.operation
            && operation.id == setup.id
            && operation.outcome.is_some()
        {
            return Some(*operation);
        }
    }
    None
}

fn state_in(disk: &DiskState, id: &OperationId) -> Option<State> {
    let bytes = disk.read(journal::FILE, u64::MAX - 1).ok()?;
    let contents = journal::parse(&bytes).ok()?;
    (contents.records.last()?.id == *id).then_some(contents.state)
}

/// The last record of the operation that no crash can take away.
fn recorded(world: &World, id: &OperationId) -> Option<State> {
    state_in(&world.disk.crash_losing_all(), id)
}

/// The last record that a worker which dies leaves.
fn recorded_shown(world: &World, id: &OperationId) -> Option<State> {
    state_in(&world.disk, id)
}
