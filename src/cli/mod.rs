//! The command line. On a terminal people read text, and long work shows its progress on stderr; otherwise, and with
//! `--json`, stdout carries exactly one JSON answer (K91).

mod args;
#[cfg(test)]
mod documents;
mod read;
mod text;

use std::io::IsTerminal as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::{CommandFactory as _, Parser as _};

use self::args::{Args, Verb};
use crate::adapter::{self, Adapter};
use crate::journal::Journal;
use crate::launch::{self, LaunchError, Launched};
use crate::operation::OperationId;
use crate::response::{Observation, Response, exit};
use crate::scratch::{Recovery, Task, Tidings};
use crate::store::{ADAPTERS, STATE, Store};
use crate::systemd::Systemd;
use crate::worker::{self, Assignment};

/// The command line's grammar: what the man page, the completions and the checked documents are made from.
#[must_use]
pub fn command() -> clap::Command {
    Args::command()
}

/// Runs the command line; returns the exit code.
#[must_use]
pub fn main() -> i32 {
    // Every mode is given explicitly. A mask would make the files first, and with these modes only by a second call.
    rustix::process::umask(rustix::fs::Mode::empty());
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(e) => {
            let _ = e.print();
            return if e.use_stderr() { exit::USAGE } else { exit::DONE };
        }
    };
    if let Verb::Worker { service, id, launch, recover } = args.verb {
        return worker::run(&Assignment { service, id, launch, recover });
    }
    let json = args.json || !std::io::stdout().is_terminal();
    match run(&args.verb, json) {
        Printed::Response(response) => {
            if json {
                println!("{}", serde_json::to_string_pretty(&*response).expect("plain data"));
            } else {
                print!("{}", text::response(&response));
            }
            response.exit_code
        }
        Printed::Value(value, plain) => {
            if json {
                println!("{}", serde_json::to_string_pretty(&value).expect("plain data"));
            } else {
                print!("{plain}");
            }
            value.get("exitCode").and_then(serde_json::Value::as_i64).map_or(exit::DONE, |c| c as i32)
        }
    }
}

/// What a command has to say.
pub(crate) enum Printed {
    /// The answer of an operation.
    Response(Box<Response>),
    /// Something that was read, as JSON and as text.
    Value(serde_json::Value, String),
}

impl From<Response> for Printed {
    fn from(response: Response) -> Self {
        Self::Response(Box::new(response))
    }
}

fn run(verb: &Verb, json: bool) -> Printed {
    match verb {
        Verb::Worker { .. } => unreachable!("served above"),
        Verb::Upgrade { name, version, id, file, consent, allow_downgrade, retry_quarantined } => {
            let task = Task::Upgrade {
                target: version.clone(),
                file: file.as_deref().map(absolute),
                consent: *consent,
                allow_downgrade: *allow_downgrade,
                retry_quarantined: *retry_quarantined,
            };
            operate(name, id.as_ref(), task, json)
        }
        Verb::Stage { name, version, file } => {
            let task = Task::Stage { target: version.clone(), file: file.as_deref().map(absolute) };
            operate(name, None, task, json)
        }
        Verb::Adopt { name, unit, version, from, take_over, id } => {
            match Adapter::load(Path::new(ADAPTERS), name) {
                Ok(adapter) if unit.as_ref().is_some_and(|u| *u != adapter.unit) => {
                    let path = Path::new(ADAPTERS).join(format!("{name}.toml"));
                    let why = format!(
                        "{} names unit {}; give that one, or mend the adapter",
                        path.display(),
                        adapter.unit
                    );
                    Response::new("adopt", "error", exit::NOT_DONE, Observation::Genesis).because(why).into()
                }
                _ => {
                    let from = from.as_deref().map(absolute);
                    operate(
                        name,
                        id.as_ref(),
                        Task::Adopt { version: version.clone(), from, take_over: *take_over },
                        json,
                    )
                }
            }
        }
        Verb::Recover { name, id } => operate(name, id.as_ref(), Task::Recover, json),
        Verb::Resume { file } => resume(&absolute(file), json),
        Verb::Status { name: Some(name) } => read::status(name),
        Verb::Status { name: None } | Verb::List => read::list(),
        Verb::Probe { name } => read::probe(name),
        Verb::History { name } => read::history(name),
        Verb::Show { name, id } => read::show(name, id),
        Verb::Log { name, id } => read::log(name, id.as_ref()),
        Verb::Verify { name } => read::verify(name),
        Verb::Version => read::version(),
    }
}

/// The path as the worker, which has another working directory, has to be told it.
fn absolute(path: &Path) -> std::path::PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Starts a worker, and waits for its answer.
fn operate(name: &str, id: Option<&OperationId>, task: Task, json: bool) -> Printed {
    let action = task.name();
    if let Err(response) = usable(name, action) {
        return (*response).into();
    }
    let disk = match launch::state_directory(name, true) {
        Ok(disk) => disk,
        Err(e) => return launch::refused(action, Observation::Genesis, &e).into(),
    };
    let root = Path::new(STATE).join(name);
    let store = Store::new(&disk, &root, name);
    // A recovery is bound to the operation that is open, unless another is named.
    let open = || Journal::look(&disk).ok().flatten().and_then(|c| c.records.last().map(|r| r.id.clone()));
    let id = match (id, &task) {
        (Some(id), _) => id.clone(),
        (None, Task::Recover) if worker::is_open(&store) => open().unwrap_or_else(OperationId::generate),
        (None, _) => OperationId::generate(),
    };
    attend(&store, json, action, |systemd| launch::launch(&store, systemd, &id, task))
}

fn resume(path: &Path, json: bool) -> Printed {
    let refused = |e: &LaunchError| launch::refused("recover", Observation::Genesis, e).into();
    let kept: Recovery = match launch::read_recovery(path) {
        Ok(kept) => kept,
        Err(e) => return refused(&e),
    };
    if let Err(response) = usable(&kept.service, "recover") {
        return (*response).into();
    }
    let disk = match launch::state_directory(&kept.service, false) {
        Ok(disk) => disk,
        Err(e) => return refused(&e),
    };
    let root = Path::new(STATE).join(&kept.service);
    let store = Store::new(&disk, &root, &kept.service);
    attend(&store, json, "recover", |systemd| launch::resume(&store, systemd, path, kept))
}

/// Launches, shows what the worker tells, and takes its answer.
fn attend(
    store: &Store,
    json: bool,
    action: &str,
    launch: impl FnOnce(&mut Systemd) -> Result<Launched, LaunchError>,
) -> Printed {
    let refused = |e: &LaunchError| launch::refused(action, worker::observe(store), e).into();
    let mut systemd = match Systemd::new() {
        Ok(systemd) => systemd,
        Err(source) => return refused(&LaunchError::Io { path: "/run/dbus".into(), source }),
    };
    let mut launched = match launch(&mut systemd) {
        Ok(launched) => launched,
        Err(e) => return refused(&e),
    };
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        let _ = signal_hook::flag::register(signal, Arc::clone(&interrupted));
    }
    // A bus that is away is waited for longer than somebody who stops waiting has time.
    systemd.give_up_when(Arc::clone(&interrupted));
    let mut bar = text::Bar::new(!json && std::io::stderr().is_terminal());
    let mut tell = |tidings: Tidings| bar.tell(tidings);
    let waited =
        launch::wait(store, &mut systemd, &mut launched, &mut tell, &|| interrupted.load(Ordering::Relaxed));
    match waited {
        Ok(Some(response)) => response.into(),
        Err(e) if !interrupted.load(Ordering::Relaxed) => {
            let error = format!("{e}; the operation goes on, with id {}", launched.id);
            let observation = worker::observe(store);
            Response::new(action, "unresolved", exit::UNRESOLVED, observation).because(error).into()
        }
        // Not known yet is no success: the code is that of what is not resolved.
        Ok(None) | Err(_) => {
            let why = format!(
                "stopped waiting; the operation goes on, with id {}: `cutover status {}` shows it",
                launched.id,
                store.service()
            );
            Response::new(action, "detached", exit::UNRESOLVED, worker::observe(store)).because(why).into()
        }
    }
}

/// Says what keeps a command from being run at all.
fn usable(name: &str, action: &str) -> Result<(), Box<Response>> {
    let refuse = |why: String| {
        Err(Box::new(Response::new(action, "error", exit::NOT_DONE, Observation::Genesis).because(why)))
    };
    if let Err(e) = adapter::service_name(name) {
        return refuse(e.to_string());
    }
    if !rustix::process::geteuid().is_root() {
        return refuse(format!("`cutover {action}` changes the system: run it as root"));
    }
    let pid1 = std::fs::read_to_string("/proc/1/comm").unwrap_or_default();
    if pid1.trim() != "systemd" || !Path::new("/run/systemd/system").is_dir() {
        return refuse("systemd is not running this machine: cutover upgrades units of systemd".into());
    }
    match Adapter::load(Path::new(ADAPTERS), name) {
        Ok(_) => Ok(()),
        Err(e) => {
            let root = Path::new(STATE).join(name);
            let observation = crate::durable::RealDisk::open(&root)
                .map_or(Observation::Genesis, |disk| worker::observe(&Store::new(&disk, &root, name)));
            Err(Box::new(launch::not_begun(action, observation, &e.to_string())))
        }
    }
}
