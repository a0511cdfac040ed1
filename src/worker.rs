//! The worker: serves one request and exits. It alone changes units and slots.
//!
//! ```text
//! attempt made durable ─ lock ─ fence ─ settle what is open ─ serve (first attempt only) ─ answer
//! ```
//!
//! PID 1 starts it again when it dies, hangs or exits with [`AGAIN`]; any attempt but the first only recovers (K72). It
//! exits 0 whenever it has written an answer, whatever the answer, and [`AGAIN`] when it leaves something open. The
//! attempts of one launch are bounded by their own count on the disk: beyond it the answer is `unresolved`.

use std::cell::{Cell, RefCell};
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::adapter::Adapter;
use crate::durable::RealDisk;
use crate::journal::Journal;
use crate::lock::Lock;
use crate::manager::{Manager, ManagerError};
use crate::operation::{Action, Done, Event, OperationId, Outcome, Subject};
use crate::receipt::Receipt;
use crate::release::Version;
use crate::response::{Observation, Response, exit};
use crate::scratch::{self, Answer, Attempt, Events, Request, Scratch, Task, Tidings};
use crate::store::{ADAPTERS, STATE, Slot, Store};
use crate::supply::Supply;
use crate::systemd::Systemd;
use crate::transaction::{Source as _, SourceFailure, Stop, Transaction, Upgrade};
use crate::watch::Watch;
use crate::watchdog::Watchdog;
use crate::{failpoint, process, way_back};

/// The exit code that asks PID 1 for another attempt.
pub const AGAIN: i32 = crate::supervise::EXIT_AGAIN;
/// How long a recovery waits for its locks, and for its predecessors to be gone.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two progress lines.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);

/// Who is to be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// The service.
    pub service: String,
    /// The operation.
    pub id: OperationId,
    /// The launch that this attempt belongs to.
    pub launch: String,
    /// Whether the launch is for recovery, so that its first attempt recovers, too.
    pub recover: bool,
}

/// Serves one request. Returns the exit code of the process.
#[must_use]
pub fn run(assignment: &Assignment) -> i32 {
    match serve(assignment) {
        Ok(()) => 0,
        Err(why) => {
            log(&why);
            AGAIN
        }
    }
}

/// Writes a line to the log. A log that is gone must not end a worker, as `eprintln!` would.
fn log(line: &dyn std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Why a worker leaves without an answer.
#[derive(Debug, thiserror::Error)]
pub enum Leaving {
    /// The operation is open.
    #[error("left open: {0}")]
    Stop(#[from] Stop),
    /// The state directory.
    #[error(transparent)]
    Store(#[from] crate::store::StoreError),
    /// systemd.
    #[error(transparent)]
    Manager(#[from] ManagerError),
    /// Anything else of this machine, by name.
    #[error("{0}: {1}")]
    Io(String, std::io::Error),
}

fn serve(assignment: &Assignment) -> Result<(), Leaving> {
    failpoint::serve(&assignment.service);
    let root = Path::new(STATE).join(&assignment.service);
    let disk = RealDisk::open(&root).map_err(|e| Leaving::Io(root.display().to_string(), e))?;
    let store = Store::new(&disk, &root, &assignment.service);
    let scratch = Scratch::of(&store, &assignment.id);
    let mut systemd = Systemd::new().map_err(|e| Leaving::Io("systemd".into(), e))?;
    let watchdog = Watchdog::start(PATIENCE).map_err(|e| Leaving::Io("watchdog".into(), e))?;
    let pid = std::process::id();
    let own = Attempt {
        pid,
        start_time: process::start_time(pid).unwrap_or_default(),
        bus_name: systemd.own_name()?,
        boot_id: systemd.boot_id(),
    };
    let adapter = Adapter::load(Path::new(ADAPTERS), &assignment.service);
    let attempt = begin_attempt(&scratch, &own, &assignment.launch).inspect_err(|_| {
        if let Ok(adapter) = &adapter {
            way_back::keep_up_unrecorded(&store, &mut systemd, &adapter.unit);
        }
    })?;
    let watch = Reporter::new(scratch.events(&assignment.launch, attempt), watchdog)?;
    systemd.give_up_when(Arc::clone(&watch.asked_to_leave));
    let worker = Worker { assignment, store: &store, scratch: &scratch, watch: &watch, attempt, pid };
    match adapter {
        Ok(adapter) => {
            let most = adapter.timeouts.attempts;
            worker.respond(&mut systemd, most, |worker, manager| worker.answer(manager, &adapter))
        }
        Err(e) => worker.respond(&mut systemd, 3, |worker, _| match e.to_string() {
            why if is_open(&store) => Err(Stop::Unresolved(why).into()),
            why => Ok(worker.refusal("error", exit::NOT_DONE, why)),
        }),
    }
}

/// Counts this attempt, durably, before anything is done in its name.
///
/// # Errors
/// The disk's.
pub fn begin_attempt(scratch: &Scratch, own: &Attempt, launch: &str) -> Result<u32, Leaving> {
    let number = scratch.attempts(launch)?.1 + 1;
    scratch.put(&format!("attempt-{launch}-{number}"), own)?;
    failpoint::hit("after:attempt");
    Ok(number)
}

/// One attempt, whatever the process around it: its disk and its manager may be simulated.
pub struct Worker<'a> {
    /// Who is to be served.
    pub assignment: &'a Assignment,
    /// The service's state directory.
    pub store: &'a Store<'a>,
    /// The operation's scratch directory.
    pub scratch: &'a Scratch<'a>,
    /// Where to report.
    pub watch: &'a dyn Watch,
    /// Its number.
    pub attempt: u32,
    /// Its process, as its own attempt says.
    pub pid: u32,
}

impl Worker<'_> {
    /// Has the question answered, within the bound of `most` attempts, and writes the answer.
    ///
    /// # Errors
    /// [`Leaving`]: another attempt may answer.
    pub fn respond(
        &self,
        manager: &mut dyn Manager,
        most: u32,
        answer: impl FnOnce(&Self, &mut dyn Manager) -> Result<Response, Leaving>,
    ) -> Result<(), Leaving> {
        let response = if self.attempt > most {
            self.unresolved("its attempts are used up")
        } else {
            match answer(self, manager) {
                Ok(response) => response,
                Err(Leaving::Stop(Stop::Unresolved(why))) => self.unresolved(&why),
                Err(Leaving::Stop(Stop::Leave(why))) => return Err(Stop::Leave(why).into()),
                // Another attempt may settle it, while there is one.
                Err(again) if self.attempt < most => return Err(again),
                Err(last) => self.unresolved(&last.to_string()),
            }
        };
        let answer = Answer { at_ms: manager.wall_clock_ms(), response };
        failpoint::hit("before:answer");
        self.scratch.put(&format!("response-{}", self.assignment.launch), &answer)?;
        failpoint::hit("after:answer");
        Ok(())
    }

    /// What is to be done, and whether this attempt may begin it: any but the first only recovers.
    fn task(&self) -> Result<(Task, bool), Leaving> {
        let task = match self.scratch.get::<Request>("request.json")? {
            Some(request) if !self.assignment.recover => request.task,
            _ => Task::Recover,
        };
        let first = self.attempt == 1 && task != Task::Recover;
        Ok((task, first))
    }

    fn answer(&self, manager: &mut dyn Manager, adapter: &Adapter) -> Result<Response, Leaving> {
        let (task, first) = self.task()?;
        match self.locks(manager, adapter, &task, first)? {
            Some(_locks) => self.under_lock(manager, adapter),
            None => Ok(self.busy(manager, &task)),
        }
    }

    /// Fences, settles and serves. The caller holds the locks.
    ///
    /// # Errors
    /// [`Leaving`]: nothing was answered.
    pub fn under_lock(&self, manager: &mut dyn Manager, adapter: &Adapter) -> Result<Response, Leaving> {
        let (task, first) = self.task()?;
        self.store.lay_out()?;
        let journal = way_back::open_journal(self.store)?;
        for damage in journal.damage() {
            self.watch.note(damage);
        }
        self.fence(manager, adapter, &journal, first)?;
        let response = self.settle_and_serve(manager, adapter, journal, &task, first)?;
        let now = manager.wall_clock_ms();
        let mut gone = |unit: &str| {
            let state = manager.state(unit);
            state.is_ok_and(|s| s.load == "not-found" || s.is_down())
        };
        scratch::clean_up(self.store, &self.assignment.id, &mut gone, now);
        Ok(response)
    }

    /// Settles what is open, then serves the task, unless it is settled by that.
    fn settle_and_serve(
        &self,
        manager: &mut dyn Manager,
        adapter: &Adapter,
        journal: Journal,
        task: &Task,
        first: bool,
    ) -> Result<Response, Leaving> {
        let id = &self.assignment.id;
        let open = journal.records().last().map(|r| r.id.clone());
        let mut transaction = Transaction::new(
            self.store,
            journal,
            manager,
            adapter,
            self.watch,
            open.unwrap_or_else(|| id.clone()),
        );
        if let Some(receipt) = transaction.settle()?
            && *task == Task::Recover
        {
            return Ok(Response::of(task.name(), receipt));
        }
        if let Some(response) = self.replay(task)? {
            return Ok(response);
        }
        transaction.take(id.clone());
        match task {
            Task::Recover => Ok(self.nothing_open()),
            _ if !first => self.never_began(&mut transaction, task),
            Task::Upgrade { target, file, consent, allow_downgrade, retry_quarantined } => {
                let wanted = Upgrade {
                    target: target.clone(),
                    consent: *consent,
                    allow_downgrade: *allow_downgrade,
                    retry_quarantined: *retry_quarantined,
                };
                let mut supply = Supply::new(adapter, file.clone());
                let receipt = transaction.upgrade(&wanted, &mut supply)?;
                Ok(Response::of(task.name(), receipt))
            }
            Task::Stage { target, file } => Ok(self.stage(target, Supply::new(adapter, file.clone()))),
            Task::Adopt { version, from, take_over } => {
                let wanted = crate::adopt::Adopt {
                    version: version.clone(),
                    from: from.clone(),
                    take_over: *take_over,
                };
                let receipt = crate::adopt::adopt(&mut transaction, &wanted)?;
                Ok(Response::of(task.name(), receipt))
            }
        }
    }

    /// The same id again: its receipt, and nothing else; for another target, a conflict.
    fn replay(&self, task: &Task) -> Result<Option<Response>, Leaving> {
        let Some(receipt) = self.store.receipt(&self.assignment.id)? else { return Ok(None) };
        if task.is_about(&receipt) {
            return Ok(Some(Response::of(task.name(), receipt)));
        }
        let id = &self.assignment.id;
        let error =
            format!("id {id} belongs to another operation, to {}; use a new id", receipt.target_version);
        let observed = Observation::Observed { operation: Box::new(receipt) };
        Ok(Some(Response::new(task.name(), "conflict", exit::NOT_DONE, observed).because(error)))
    }

    /// A recovery that finds nothing of its id: the first attempt ended before it recorded anything.
    fn never_began(&self, transaction: &mut Transaction, task: &Task) -> Result<Response, Leaving> {
        let (target, action) = match task {
            Task::Upgrade { target, .. } => (target, Action::Upgrade),
            Task::Adopt { version, .. } => (version, Action::Adopt),
            Task::Stage { .. } | Task::Recover => {
                let error = "the worker was interrupted; nothing was changed, try again";
                return Ok(self.refusal("failed", exit::NOT_DONE, error.into()));
            }
        };
        let from = self.stable().map(|m| m.release);
        let done = Done {
            subject: Subject {
                action,
                from: from.clone(),
                target_version: target.clone(),
                target_digest: None,
                artifact_sha256: None,
                provenance: String::new(),
                started_at_ms: transaction.manager.wall_clock_ms(),
            },
            outcome: Outcome::Failed,
            cause: None,
            reason: "interrupted before anything was recorded".into(),
            stable: from,
            proof: None,
            notes: vec![],
        };
        Ok(Response::of(task.name(), transaction.close(done)?))
    }

    fn stable(&self) -> Option<crate::release::Manifest> {
        self.store.slot(Slot::Stable).and_then(|dir| self.store.manifest(&dir).ok())
    }

    fn stage(&self, target: &Version, mut supply: Supply) -> Response {
        let carry = self.stable().map(|m| m.release);
        self.watch.step("staging", crate::stage::STAGING_TIME);
        let staged = supply
            .resolve(target)
            .and_then(|_| supply.stage(self.store, target, carry.as_ref(), self.watch))
            .and_then(|manifest| {
                let kept = self.store.set_staged(&manifest.release, true);
                kept.map_err(|e| SourceFailure::Unusable(e.to_string()))
            });
        match staged {
            Ok(()) => Response::new("stage", "staged", exit::DONE, observe(self.store)),
            Err(SourceFailure::NoSuchVersion(why)) => self.refusal("held", exit::HELD, why),
            Err(SourceFailure::Unusable(why)) => self.refusal("failed", exit::NOT_DONE, why),
        }
    }

    fn nothing_open(&self) -> Response {
        Response::new("recover", "settled", exit::DONE, observe(self.store))
    }

    fn refusal(&self, result: &str, code: i32, why: String) -> Response {
        let action = if self.assignment.recover { "recover" } else { self.task_name() };
        Response::new(action, result, code, observe(self.store)).because(why)
    }

    fn task_name(&self) -> &'static str {
        let request: Option<Request> = self.scratch.get("request.json").ok().flatten();
        request.map_or("recover", |r| r.task.name())
    }

    fn unresolved(&self, why: &str) -> Response {
        let kept = scratch::kept(self.store, &self.assignment.id);
        let file = Scratch::of(self.store, &kept).absolute("recovery.json");
        let error =
            format!("{why}; the operation is kept open: `cutover resume {}` tries again", file.display());
        let action = if self.assignment.recover { "recover" } else { self.task_name() };
        Response::new(action, "unresolved", exit::UNRESOLVED, observe(self.store)).because(error)
    }

    // ---- lock and fence ----

    /// The lock of this service, and those of managed services that stopping it pulls down.
    fn locks(
        &self,
        manager: &mut dyn Manager,
        adapter: &Adapter,
        task: &Task,
        first: bool,
    ) -> Result<Option<Vec<Lock>>, Leaving> {
        let begun = manager.now();
        self.watch.step("waiting for the lock", PATIENCE);
        loop {
            let own = Lock::take(self.store)
                .map_err(|e| Leaving::Io(self.store.absolute(crate::lock::FILE).display().to_string(), e))?;
            if let Some(own) = own {
                if matches!(task, Task::Stage { .. }) {
                    return Ok(Some(vec![own]));
                }
                if let Some(mut locks) = self.related_locks(manager, adapter)? {
                    locks.push(own);
                    return Ok(Some(locks));
                }
            }
            if first {
                return Ok(None);
            }
            if manager.now().saturating_sub(begun) > PATIENCE {
                return Err(Stop::Again("the lock is held by another worker".into()).into());
            }
            self.leave_if_asked()?;
            manager.wait(Duration::from_millis(200));
        }
    }

    /// The locks of other managed services that are concerned; none where one of them is busy.
    fn related_locks(
        &self,
        manager: &mut dyn Manager,
        adapter: &Adapter,
    ) -> Result<Option<Vec<Lock>>, Leaving> {
        let settings = manager.settings(&adapter.unit)?;
        if settings.pulls_down.is_empty() && settings.requires.is_empty() {
            return Ok(Some(vec![]));
        }
        let mut names: Vec<String> = std::fs::read_dir(ADAPTERS)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.strip_suffix(".toml").map(str::to_owned))
            .collect();
        names.sort();
        let mut locks = vec![];
        for name in names.into_iter().filter(|n| *n != self.assignment.service) {
            let Ok(other) = Adapter::load(Path::new(ADAPTERS), &name) else { continue };
            let dir = Path::new(STATE).join(&name);
            let failed = |e| Leaving::Io(dir.display().to_string(), e);
            if settings.pulls_down.contains(&other.unit) {
                match Lock::take_other(&dir).map_err(failed)? {
                    Some(None) => return Ok(None),
                    Some(Some(lock)) => locks.push(lock),
                    None => {}
                }
            } else if settings.requires.contains(&other.unit)
                && let Ok(disk) = RealDisk::open(&dir)
                && (Lock::is_held(&disk, &dir) || is_open(&Store::new(&disk, &dir, &name)))
            {
                return Ok(None);
            }
        }
        Ok(Some(locks))
    }

    /// Who is busy: this service's own holder, as far as its files tell.
    fn busy(&self, manager: &mut dyn Manager, task: &Task) -> Response {
        let journal = Journal::look(self.store.disk()).ok().flatten();
        let open = journal.filter(|j| j.state.subject().is_some());
        let holder = match open.as_ref().and_then(|j| j.records.last()) {
            Some(record) => format!("operation {} holds it, in phase {}", record.id, record.event.phase()),
            None => match self.living(manager) {
                Some(id) => format!("operation {id} holds it, before its first record"),
                None => "a related managed service has an operation open".into(),
            },
        };
        let observation = open
            .and_then(|j| Receipt::of(self.store.service(), &j.records))
            .map_or_else(|| observe(self.store), |r| Observation::Observed { operation: Box::new(r) });
        let service = &self.assignment.service;
        Response::new(task.name(), "busy", exit::HELD, observation)
            .because(format!("{service} is busy: {holder}; nothing was changed, try again later"))
    }

    /// An operation other than ours whose worker is alive.
    fn living(&self, manager: &mut dyn Manager) -> Option<OperationId> {
        let names = self.store.disk().list("run").unwrap_or_default();
        let ids = names.iter().filter_map(|n| n.parse().ok()).filter(|id| *id != self.assignment.id);
        for id in ids {
            let attempts = Scratch::of(self.store, &id).attempts("").unwrap_or_default().0;
            if attempts.iter().any(|a| manager.process_alive(a.pid, a.start_time)) {
                return Some(id);
            }
        }
        None
    }

    /// Nothing that an earlier worker sent can land any more (K36, K65, K67–K68): its process and its bus name are gone,
    /// and one round trip has passed since. What it left at systemd is cancelled, in a recovery, or waited for, at boot.
    fn fence(
        &self,
        manager: &mut dyn Manager,
        adapter: &Adapter,
        journal: &Journal,
        first: bool,
    ) -> Result<(), Leaving> {
        self.watch.step("fencing", PATIENCE);
        let boot = manager.boot_id();
        let last = journal.records().last().filter(|r| !matches!(r.event, Event::Done(_)));
        let mut ids = vec![self.assignment.id.clone()];
        ids.extend(last.map(|r| r.id.clone()).filter(|id| *id != self.assignment.id));
        let begun = manager.now();
        for id in ids {
            for earlier in Scratch::of(self.store, &id).attempts("").unwrap_or_default().0 {
                if earlier.boot_id != boot || earlier.pid == self.pid {
                    continue;
                }
                while manager.process_alive(earlier.pid, earlier.start_time)
                    || manager.bus_name_alive(&earlier.bus_name)?
                {
                    if manager.now().saturating_sub(begun) > PATIENCE {
                        let why = format!("an earlier worker, process {}, does not end", earlier.pid);
                        return Err(Stop::Again(why).into());
                    }
                    self.leave_if_asked()?;
                    manager.wait(Duration::from_millis(100));
                }
            }
        }
        manager.barrier()?;
        let Some(last) = last else { return Ok(()) };
        let recovering = !first || last.id != self.assignment.id;
        self.end_commands(manager)?;
        if last.boot_id == boot {
            if recovering && manager.state(&adapter.unit)?.job.is_some() {
                self.watch.note("cancelled a job that an earlier worker left");
                manager.cancel_job(&adapter.unit)?;
            }
            return Ok(());
        }
        // The boot's own start job is joined: deciding while it runs would be deciding too early.
        let settings = manager.settings(&adapter.unit)?;
        let patience = settings.timeout_start.unwrap_or(adapter.timeouts.start);
        self.watch.step("waiting for the boot's own job", patience + PATIENCE);
        let begun = manager.now();
        while manager.state(&adapter.unit)?.job.is_some() && manager.now().saturating_sub(begun) < patience {
            self.leave_if_asked()?;
            manager.wait(Duration::from_millis(200));
        }
        Ok(())
    }

    /// Stops the commands of the adapter that still run, and waits for their end: a quiesce must not land after our
    /// resume.
    fn end_commands(&self, manager: &mut dyn Manager) -> Result<(), Leaving> {
        let found = manager.running_commands(&self.assignment.service)?;
        for unit in &found {
            manager.stop(unit)?;
        }
        let begun = manager.now();
        while !found.is_empty() {
            let left = manager.running_commands(&self.assignment.service)?;
            // Those that came since are not an earlier worker's.
            let Some(unit) = found.iter().find(|unit| left.contains(unit)) else { break };
            if manager.now().saturating_sub(begun) > PATIENCE {
                let why = format!("{unit}, a command of an earlier worker, does not end");
                return Err(Stop::Again(why).into());
            }
            self.leave_if_asked()?;
            manager.wait(Duration::from_millis(50));
        }
        Ok(())
    }

    fn leave_if_asked(&self) -> Result<(), Leaving> {
        if self.watch.interrupted() { Err(Stop::Leave("asked to leave".into()).into()) } else { Ok(()) }
    }
}

/// Whether an operation is open: it is until a receipt says how it ended.
#[must_use]
pub fn is_open(store: &Store) -> bool {
    match Journal::look(store.disk()) {
        Ok(contents) => match contents.as_ref().and_then(|c| c.records.last()) {
            Some(last) => store.ended(&last.id).is_none(),
            None => store.has_history(),
        },
        Err(_) => true,
    }
}

/// Whether the journal has this operation open.
#[must_use]
pub fn is_open_as(store: &Store, id: &OperationId) -> bool {
    match Journal::look(store.disk()) {
        Ok(Some(contents)) => contents.records.last().is_some_and(|r| r.id == *id) && is_open(store),
        Ok(None) => false,
        // It may be: nothing of it is given up.
        Err(_) => true,
    }
}

/// What the records say: the open operation, else the latest receipt (K98, K99).
#[must_use]
pub fn observe(store: &Store) -> Observation {
    let unreadable = |reason: String| Observation::Unreadable { reason };
    let of = |receipt| Observation::Observed { operation: Box::new(receipt) };
    match Journal::look(store.disk()) {
        Ok(Some(contents)) if !contents.records.is_empty() => {
            let records = &contents.records;
            let last = records.last().expect("not empty");
            // The journal decides as long as no receipt says how it ended. Nobody is told of an end that is not yet
            // recorded for good: until then, it has come as far as the record before.
            let shown = match last.event {
                Event::Done(_) => &records[..records.len() - 1],
                _ => records,
            };
            if store.ended(&last.id).is_none()
                && store.latest().is_ok()
                && let Some(receipt) = Receipt::of(store.service(), shown)
            {
                return of(receipt);
            }
        }
        Err(crate::journal::Unreadable::Io(why)) if why.contains("Permission denied") => {}
        Err(why) => {
            let path = store.absolute(crate::journal::FILE);
            return unreadable(format!("{} {why}", path.display()));
        }
        // Receipts or slots, and no record of any operation: what was going on cannot be told.
        Ok(contents) if store.has_history() => {
            let path = store.absolute(crate::journal::FILE);
            let what = if contents.is_none() { "is missing" } else { "is blank" };
            return unreadable(format!("{} {what}", path.display()));
        }
        Ok(_) => {}
    }
    match store.latest() {
        Ok(Some(receipt)) => of(receipt),
        Ok(None) if store.has_history() => {
            unreadable("there are slots or receipts, but no latest receipt".into())
        }
        Ok(None) => Observation::Genesis,
        Err(e) => unreadable(e.to_string()),
    }
}

/// Tells the watchdog, the log and those who wait; listens to SIGTERM.
struct Reporter {
    events: RefCell<Events>,
    watchdog: Watchdog,
    asked_to_leave: Arc<AtomicBool>,
    last_progress: Cell<Option<std::time::Instant>>,
}

impl Reporter {
    fn new(events: Events, watchdog: Watchdog) -> Result<Self, Leaving> {
        let asked_to_leave = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT, signal_hook::consts::SIGHUP]
        {
            signal_hook::flag::register(signal, Arc::clone(&asked_to_leave))
                .map_err(|e| Leaving::Io("signals".into(), e))?;
        }
        let (events, last_progress) = (RefCell::new(events), Cell::new(None));
        Ok(Self { events, watchdog, asked_to_leave, last_progress })
    }
}

impl Watch for Reporter {
    fn step(&self, name: &str, at_most: Duration) {
        self.watchdog.deadline(at_most);
        self.events.borrow_mut().tell(&Tidings::Step { name: name.into() });
        failpoint::hit(&format!("step:{}", name.replace(' ', "-")));
    }

    fn progress(&self, name: &str, done: u64, total: u64) {
        let recent = self.last_progress.get().is_some_and(|at| at.elapsed() < PROGRESS_EVERY);
        if !recent || done == total {
            self.last_progress.set(Some(std::time::Instant::now()));
            self.events.borrow_mut().tell(&Tidings::Progress { name: name.into(), done, total });
        }
    }

    fn note(&self, text: &str) {
        log(&text);
        self.events.borrow_mut().tell(&Tidings::Note { text: text.into() });
    }

    fn interrupted(&self) -> bool {
        self.asked_to_leave.load(Ordering::Relaxed)
    }
}
