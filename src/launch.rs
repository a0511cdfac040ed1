//! Launching a worker and waiting for its answer: what the CLI does today and the daemon will do.
//!
//! The worker is a transient unit of its own: the caller may vanish at any moment, and the operation goes on. The answer
//! is a file, so it outlives both. No answer and no unit means unresolved, and it is said by whoever asks.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::adapter::Adapter;
use crate::durable::{self, RealDisk};
use crate::failpoint;
use crate::journal::Journal;
use crate::manager::{Manager as _, ManagerError};
use crate::mounts::{self, Unfit};
use crate::operation::{OperationId, State};
use crate::receipt::Receipt;
use crate::release::Digest;
use crate::response::{Observation, Response, exit};
use crate::scratch::{self, Answer, FORMAT, Recovery, Request, Scratch, Task, Tidings};
use crate::store::{ADAPTERS, STATE, Store, StoreError};
use crate::supervise::{self, WorkerUnit};
use crate::systemd::Systemd;
use crate::worker::{self, observe};

/// The runner's name in the scratch directory.
const RUNNER: &str = "runner";
/// How often the answer is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(25);
/// How often systemd is asked whether the worker is still there.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// What a launch needs beside its runner: a few small files, and what their directories grow by.
const MARGIN: u64 = 256 * 1024;
/// The largest executable that is taken for a runner.
const RUNNER_MAX: u64 = 512 << 20;

/// Why no worker was started, or could not be waited for.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The state directory.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A file outside of it.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The runner does not fit.
    #[error("{path}: no space: {need} bytes needed, {have} free; free some, then try again", path = path.display())]
    NoSpace {
        /// Where.
        path: PathBuf,
        /// How many are needed.
        need: u64,
        /// How many are free.
        have: u64,
    },
    /// A state directory that a worker could not be executed from.
    #[error(transparent)]
    Place(#[from] Unfit),
    /// systemd.
    #[error(transparent)]
    Manager(#[from] ManagerError),
    /// The id belongs to another operation, which is open.
    #[error("id {id} belongs to another operation, which is open; use a new id")]
    Conflict {
        /// It.
        id: OperationId,
    },
    /// The id belongs to another operation, which is settled.
    #[error("id {} belongs to another operation, to {}; use a new id", .0.id, .0.target_version)]
    Taken(Box<Receipt>),
    /// A kept recovery that cannot be used.
    #[error("{path}: {why}", path = path.display())]
    Recovery {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
}

fn io_at<T>(path: &Path, result: io::Result<T>) -> Result<T, LaunchError> {
    result.map_err(|source| LaunchError::Io { path: path.to_owned(), source })
}

/// A worker that was started, and whose answer is to be waited for.
#[derive(Debug)]
pub struct Launched {
    /// The operation.
    pub id: OperationId,
    /// What it was started for.
    pub action: String,
    unit: String,
    launch: String,
    /// Says that we wait, from before others may launch or remove anything.
    waiting: Option<std::fs::File>,
}

/// Opens the state directory of a service, making it where there is none.
///
/// # Errors
/// The disk's, with the path.
pub fn state_directory(service: &str, make: bool) -> Result<RealDisk, LaunchError> {
    failpoint::serve(service);
    let (state, root) = (Path::new(STATE), Path::new(STATE).join(service));
    if make {
        for (parent, name) in [(state.parent(), "cutover"), (Some(state), service)] {
            let parent = parent.expect("an absolute path");
            let disk = io_at(parent, RealDisk::open(parent))?;
            if durable::Disk::stat(&disk, name).is_err() {
                io_at(&parent.join(name), durable::make_dir(&disk, name, 0o755))?;
            }
        }
    }
    let disk = io_at(&root, RealDisk::open(&root))?;
    if make && durable::Disk::stat(&disk, "run").is_err() {
        io_at(&root.join("run"), durable::make_dir(&disk, "run", 0o700))?;
    }
    Ok(disk)
}

/// Starts a worker for a new request. A request whose operation is running already is attached to instead.
///
/// # Errors
/// [`LaunchError`]: no worker was started.
pub fn launch(
    store: &Store,
    systemd: &mut Systemd,
    id: &OperationId,
    task: Task,
) -> Result<Launched, LaunchError> {
    supervise::run_has_room()?;
    executable_from(store)?;
    let _launching = Launching::begin(store)?;
    let scratch = Scratch::of(store, id);
    let asked = scratch.get::<Request>("request.json").ok().flatten().map(|r| r.task);
    // In this order: once no worker is there, nobody changes what the journal says.
    let running = running(&scratch, systemd, id)?;
    let open = worker::is_open_as(store, id);
    if (open || running.is_some())
        && let Some(asked) = &asked
        && !asked.is_about_the_same_as(&task)
    {
        return Err(LaunchError::Conflict { id: id.clone() });
    }
    if let Some(running) = running {
        return Ok(running);
    }
    // Here, not by a worker: while one answers that, whoever asks for the id's own target would be told the same.
    if let Ok(Some(receipt)) = store.receipt(id)
        && !task.is_about(&receipt)
    {
        return Err(LaunchError::Taken(Box::new(receipt)));
    }
    let action = task.name().to_owned();
    if scratch.exists() {
        if open {
            // What began it is kept until it is settled: the runner, the request, and the attempts to fence off.
            return take_up(store, systemd, &scratch, id, action);
        }
        // What an earlier launch of this id left, which ended without an answer, or whose answer was fetched.
        scratch.remove();
    }
    let recovery = prepare(store, &scratch, id, task).inspect_err(|_| scratch.remove())?;
    start(store, systemd, &scratch, recovery, action)
}

/// Fills a new scratch directory.
fn prepare(store: &Store, scratch: &Scratch, id: &OperationId, task: Task) -> Result<Recovery, LaunchError> {
    let (executable, recovery) = own_runner(store, id)?;
    let (need, free) = (recovery.runner_size + MARGIN, store.disk().space());
    if let Ok(free) = free
        && free.bytes < need
    {
        return Err(LaunchError::NoSpace { path: store.absolute("run"), need, have: free.bytes });
    }
    scratch.make()?;
    scratch.write_new(RUNNER, &executable, 0o700)?;
    let request = Request { format_version: FORMAT, task };
    scratch.write_new("request.json", &scratch::to_bytes(&request), 0o600)?;
    scratch.write_new("recovery.json", &scratch::to_bytes(&recovery), 0o600)?;
    scratch.settle_names()?;
    Ok(recovery)
}

/// Starts a worker for an operation that is open and whose scratch directory is there, by the runner that was kept, or
/// by this executable where that is not what it was.
fn take_up(
    store: &Store,
    systemd: &mut Systemd,
    scratch: &Scratch,
    id: &OperationId,
    action: String,
) -> Result<Launched, LaunchError> {
    match scratch.get::<Recovery>("recovery.json") {
        Ok(Some(kept)) if kept.id == *id && is_kept(scratch, &kept).is_ok() => {
            return start_again(store, systemd, scratch, kept, action);
        }
        _ => {}
    }
    let (executable, recovery) = own_runner(store, id)?;
    scratch.replace(RUNNER, &executable, 0o700)?;
    start_again(store, systemd, scratch, recovery, action)
}

/// This executable as a runner.
fn own_runner(store: &Store, id: &OperationId) -> Result<(Vec<u8>, Recovery), LaunchError> {
    let me = Path::new("/proc/self/exe");
    let executable = io_at(me, std::fs::read(me))?;
    let recovery = Recovery {
        format_version: FORMAT,
        service: store.service().to_owned(),
        id: id.clone(),
        runner_size: executable.len() as u64,
        runner_sha256: Digest::of(&executable),
        unit: supervise::worker_unit(id.as_str()),
    };
    Ok((executable, recovery))
}

/// Held by whoever prepares a launch: between two of them, a scratch directory is whole, and names the unit it was
/// launched as. It is a lock on the directory `run/`, so nothing is left of it.
pub struct Launching(#[expect(dead_code, reason = "held, not used")] std::fs::File);

/// How long another launch is waited for. It copies an executable and calls systemd once.
const LAUNCHING: Duration = Duration::from_secs(30);

impl Launching {
    fn begin(store: &Store) -> Result<Self, LaunchError> {
        let begun = std::time::Instant::now();
        loop {
            match Self::try_begin(store)? {
                Some(launching) => return Ok(launching),
                None if begun.elapsed() > LAUNCHING => {
                    let source = io::Error::other("another launch does not end");
                    return Err(LaunchError::Io { path: store.absolute("run"), source });
                }
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// None while somebody else launches.
    ///
    /// # Errors
    /// The disk's.
    pub fn try_begin(store: &Store) -> Result<Option<Self>, LaunchError> {
        let path = store.absolute("run");
        let dir = io_at(&path, std::fs::File::open(&path))?;
        match dir.try_lock() {
            Ok(()) => Ok(Some(Self(dir))),
            Err(std::fs::TryLockError::WouldBlock) => Ok(None),
            Err(std::fs::TryLockError::Error(source)) => Err(LaunchError::Io { path, source }),
        }
    }
}

/// The worker itself runs from the state directory: where nothing may be executed, it could not even say so.
fn executable_from(store: &Store) -> Result<(), LaunchError> {
    // What else is wrong with the place is the worker's to refuse; what cannot be read will show.
    let report = mounts::examine(&store.absolute("")).unwrap_or_default();
    match report.unfit.into_iter().find(|unfit| matches!(unfit, Unfit::NoExec { .. })) {
        Some(noexec) => Err(noexec.into()),
        None => Ok(()),
    }
}

/// Takes up a kept recovery: the same recovery, by the same runner, offline (K78–K81).
///
/// # Errors
/// [`LaunchError::Recovery`], where the file or its runner is not what was kept.
pub fn resume(
    store: &Store,
    systemd: &mut Systemd,
    path: &Path,
    kept: Recovery,
) -> Result<Launched, LaunchError> {
    let _launching = Launching::begin(store)?;
    let scratch = Scratch::of(store, &kept.id);
    if scratch.absolute("recovery.json") != path {
        let why = format!("is not where it was kept ({})", scratch.absolute("recovery.json").display());
        return Err(LaunchError::Recovery { path: path.to_owned(), why });
    }
    if let Some(running) = running(&scratch, systemd, &kept.id)? {
        return Ok(running);
    }
    start_again(store, systemd, &scratch, kept, "recover".into())
}

/// Reads a `recovery.json`.
///
/// # Errors
/// Where it cannot be read or is of another format.
pub fn read_recovery(path: &Path) -> Result<Recovery, LaunchError> {
    let refuse = |why: String| LaunchError::Recovery { path: path.to_owned(), why };
    let bytes = io_at(path, std::fs::read(path))?;
    let kept: Recovery =
        serde_json::from_slice(&bytes).map_err(|e| refuse(format!("is no recovery: {e}")))?;
    if kept.format_version == FORMAT { Ok(kept) } else { Err(refuse("is of another format".into())) }
}

/// The worker of this operation, where one is at work.
fn running(
    scratch: &Scratch,
    systemd: &mut Systemd,
    id: &OperationId,
) -> Result<Option<Launched>, LaunchError> {
    let Ok(Some(kept)) = scratch.get::<Recovery>("recovery.json") else { return Ok(None) };
    if supervise::unit_gone(systemd, &kept.unit)? {
        return Ok(None);
    }
    let request: Option<Request> = scratch.get("request.json")?;
    let action = request.map_or("recover", |r| r.task.name()).to_owned();
    let launch = launch_of(&kept.unit);
    Ok(Some(Launched { id: id.clone(), action, unit: kept.unit, launch, waiting: scratch.watch() }))
}

/// The launch that a worker's unit belongs to: the random part of its name.
fn launch_of(unit: &str) -> String {
    unit.trim_end_matches(".service").rsplit('-').next().unwrap_or_default().to_owned()
}

/// Whether the runner on the disk is the one that the recovery names.
fn is_kept(scratch: &Scratch, recovery: &Recovery) -> Result<(), LaunchError> {
    let runner = scratch.absolute(RUNNER);
    let actual = io_at(&runner, std::fs::File::open(&runner))
        .and_then(|mut file| io_at(&runner, Digest::of_reader(&mut io::Read::take(&mut file, RUNNER_MAX))))?;
    if actual == (recovery.runner_sha256, recovery.runner_size) {
        return Ok(());
    }
    let why = "is not the runner that was kept; `cutover recover` uses the installed one".into();
    Err(LaunchError::Recovery { path: runner, why })
}

/// Starts a runner that is on the disk already, as a new unit.
fn start_again(
    store: &Store,
    systemd: &mut Systemd,
    scratch: &Scratch,
    mut recovery: Recovery,
    action: String,
) -> Result<Launched, LaunchError> {
    is_kept(scratch, &recovery)?;
    recovery.unit = supervise::worker_unit(recovery.id.as_str());
    scratch.put("recovery.json", &recovery)?;
    start(store, systemd, scratch, recovery, action)
}

/// Starts the worker's unit.
fn start(
    store: &Store,
    systemd: &mut Systemd,
    scratch: &Scratch,
    recovery: Recovery,
    action: String,
) -> Result<Launched, LaunchError> {
    let launch = launch_of(&recovery.unit);
    let mut args = vec!["worker".to_owned()];
    if action == "recover" {
        args.push("--recover".into());
    }
    // An id may begin with a hyphen, and is no option.
    args.push("--".into());
    args.extend([store.service().to_owned(), recovery.id.to_string(), launch.clone()]);
    let request: Option<Request> = scratch.get("request.json")?;
    let adopts = request.is_some_and(|r| matches!(r.task, Task::Adopt { .. }));
    // An adoption that was left open is settled by whatever worker comes next.
    let open = Journal::look(store.disk()).ok().flatten().map(|contents| contents.state);
    let mut writable = vec![store.absolute("")];
    writable.extend(failpoint::writable());
    if adopts || matches!(open, Some(State::Adopting(_))) {
        writable.push(crate::adopt::UNITS.into());
    }
    let worker = WorkerUnit {
        service: store.service().to_owned(),
        operation: recovery.id.to_string(),
        runner: scratch.absolute(RUNNER).display().to_string(),
        args,
        writable,
        // A broken adapter must not keep a recovery from being tried.
        attempts: Adapter::load(Path::new(ADAPTERS), store.service()).map_or(3, |a| a.timeouts.attempts),
    };
    failpoint::hit("before:launch");
    supervise::launch(systemd, &recovery.unit, &worker)?;
    failpoint::hit("after:launch");
    Ok(Launched { id: recovery.id, action, unit: recovery.unit, launch, waiting: scratch.watch() })
}

/// Waits for the answer. `tell` is given what the worker says meanwhile; `detach` is asked whether to stop waiting.
/// `Ok(None)`: detached.
///
/// # Errors
/// systemd's; the operation goes on.
pub fn wait(
    store: &Store,
    systemd: &mut Systemd,
    launched: &mut Launched,
    tell: &mut dyn FnMut(Tidings),
    detach: &dyn Fn() -> bool,
) -> Result<Option<Response>, LaunchError> {
    let scratch = Scratch::of(store, &launched.id);
    let response = format!("response-{}", launched.launch);
    let mut tail = Tail::default();
    let mut asked = systemd.now();
    loop {
        tail.follow(&scratch, &launched.launch, tell);
        if let Some(answer) = scratch.get::<Answer>(&response)? {
            tail.follow(&scratch, &launched.launch, tell);
            return Ok(Some(finish(store, systemd, launched, answer.response)));
        }
        // Not at each look: PID 1 has better things to do while a service is down.
        if systemd.now().saturating_sub(asked) > ASK_EVERY && {
            asked = systemd.now();
            supervise::unit_gone(systemd, &launched.unit)?
        } {
            // It may have answered between the two looks.
            if let Some(answer) = scratch.get::<Answer>(&response)? {
                return Ok(Some(finish(store, systemd, launched, answer.response)));
            }
            return Ok(Some(no_answer(store, &scratch, launched)));
        }
        if detach() {
            return Ok(None);
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Takes the answer; what is settled needs its scratch directory no more.
fn finish(store: &Store, systemd: &mut Systemd, launched: &mut Launched, response: Response) -> Response {
    let scratch = Scratch::of(store, &launched.id);
    // The worker exits right after its answer.
    let patience = systemd.now() + Duration::from_secs(10);
    while !supervise::unit_gone(systemd, &launched.unit).unwrap_or(true) && systemd.now() < patience {
        systemd.wait(Duration::from_millis(20));
    }
    // Others may be waiting for the same answer: the last one removes it, and not while somebody launches.
    launched.waiting = None;
    let Ok(_launching) = Launching::begin(store) else { return response };
    let kept = if response.exit_code == exit::UNRESOLVED {
        scratch::kept(store, &launched.id) == launched.id
    } else {
        worker::is_open_as(store, &launched.id)
    };
    if !kept && scratch.is_unwatched() {
        scratch.remove();
    }
    response
}

fn no_answer(store: &Store, scratch: &Scratch, launched: &Launched) -> Response {
    let observation = observe(store);
    // The receipt may be there although the answer was lost with its writer.
    if let Ok(Some(receipt)) = store.receipt(&launched.id) {
        return Response::of(&launched.action, receipt);
    }
    let file = scratch.absolute("recovery.json");
    let error = format!(
        "the worker ended without an answer; the operation is kept: `cutover resume {}` tries again, and \
         `journalctl -u {}` says what it did",
        file.display(),
        launched.unit
    );
    Response::new(&launched.action, "unresolved", exit::UNRESOLVED, observation).because(error)
}

/// Reads what the attempts of a launch write, line by line.
#[derive(Default)]
struct Tail {
    attempt: u32,
    read: usize,
}

impl Tail {
    fn follow(&mut self, scratch: &Scratch, launch: &str, tell: &mut dyn FnMut(Tidings)) {
        loop {
            let attempt = self.attempt + 1;
            let text = std::fs::read_to_string(scratch.absolute(&format!("events-{launch}-{attempt}")));
            let text = text.unwrap_or_default();
            let fresh = text.get(self.read..).unwrap_or_default();
            let whole = fresh.rfind('\n').map_or(0, |end| end + 1);
            for line in fresh[..whole].lines() {
                if let Ok(tidings) = serde_json::from_str(line) {
                    tell(tidings);
                }
            }
            self.read += whole;
            if !scratch.absolute(&format!("events-{launch}-{}", attempt + 1)).exists() {
                return;
            }
            self.attempt = attempt;
            self.read = 0;
        }
    }
}

/// The answer of a command whose worker could not be started.
#[must_use]
pub fn refused(action: &str, observation: Observation, error: &LaunchError) -> Response {
    let observation = match error {
        LaunchError::Conflict { .. } => observation,
        LaunchError::Taken(receipt) => Observation::Observed { operation: receipt.clone() },
        _ => return not_begun(action, observation, &format!("{error}; nothing was changed")),
    };
    Response::new(action, "conflict", exit::NOT_DONE, observation).because(error.to_string())
}

/// The answer of a command that could not begin. A recovery that could not leaves open what is open.
#[must_use]
pub fn not_begun(action: &str, observation: Observation, why: &str) -> Response {
    let open = match &observation {
        Observation::Observed { operation } => operation.outcome.is_none(),
        Observation::Unreadable { .. } => true,
        Observation::Genesis => false,
    };
    let (result, code) = if open && action == "recover" {
        ("unresolved", exit::UNRESOLVED)
    } else {
        ("error", exit::NOT_DONE)
    };
    Response::new(action, result, code, observation).because(why)
}
