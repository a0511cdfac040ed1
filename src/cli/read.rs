//! Commands that only read: they change nothing, need no lock, and work while an operation runs.

use std::fmt::Write as _;
use std::path::Path;

use serde_json::json;

use super::{Printed, text};
use crate::adapter::{self, Adapter};
use crate::durable::RealDisk;
use crate::evidence::Side;
use crate::judge::Judge;
use crate::manager::Manager as _;
use crate::operation::OperationId;
use crate::receipt::Receipt;
use crate::response::{Observation, PROTOCOL, Response, exit, name as outcome_name};
use crate::seal::{self, Depth};
use crate::store::{ADAPTERS, STATE, Slot, Store};
use crate::systemd::Systemd;
use crate::watch::Silent;
use crate::worker::observe;

/// Gives the store of a service to `read`; a service without state is at its genesis.
fn with_store(action: &str, name: &str, read: impl FnOnce(&Store) -> Printed) -> Printed {
    let refuse = |why: String| {
        Printed::from(Response::new(action, "error", exit::NOT_DONE, Observation::Genesis).because(why))
    };
    if let Err(e) = adapter::service_name(name) {
        return refuse(e.to_string());
    }
    let root = Path::new(STATE).join(name);
    match RealDisk::open(&root) {
        Ok(disk) => read(&Store::new(&disk, &root, name)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            match Adapter::load(Path::new(ADAPTERS), name) {
                Ok(_) => Response::new(action, "readable", exit::DONE, Observation::Genesis).into(),
                Err(e) => refuse(e.to_string()),
            }
        }
        Err(e) => refuse(format!("{}: {e}", root.display())),
    }
}

fn readable(action: &str, observation: Observation) -> Printed {
    if let Observation::Unreadable { reason } = &observation {
        let why = format!("{reason}; `cutover recover` does what can be done");
        return Response::new(action, "unresolved", exit::UNRESOLVED, observation).because(why).into();
    }
    Response::new(action, "readable", exit::DONE, observation).into()
}

/// The last receipt, or how far the open operation has come (K98, K99).
pub(crate) fn status(name: &str) -> Printed {
    with_store("status", name, |store| readable("status", observe(store)))
}

/// One receipt.
pub(crate) fn show(name: &str, id: &OperationId) -> Printed {
    with_store("show", name, |store| match find(store, Some(id)) {
        Ok(receipt) => readable("show", Observation::Observed { operation: Box::new(receipt) }),
        Err(why) => not_found("show", why),
    })
}

/// No such operation: no other one is shown in its place.
fn not_found(action: &str, why: String) -> Printed {
    let none = Observation::Unreadable { reason: "no such operation".into() };
    Response::new(action, "error", exit::NOT_DONE, none).because(why).into()
}

/// The receipt of `id`, or of the last operation; open ones too.
fn find(store: &Store, id: Option<&OperationId>) -> Result<Receipt, String> {
    if let Observation::Observed { operation } = observe(store)
        && id.is_none_or(|id| operation.id == *id)
    {
        return Ok(*operation);
    }
    let Some(id) = id else { return Err(format!("{} has no operation yet", store.service())) };
    match store.receipt(id) {
        Ok(Some(receipt)) => Ok(receipt),
        Ok(None) => Err(format!("{} has no operation {id}; `cutover history` lists them", store.service())),
        Err(e) => Err(e.to_string()),
    }
}

/// The timeline of one operation.
pub(crate) fn log(name: &str, id: Option<&OperationId>) -> Printed {
    with_store("log", name, |store| match find(store, id) {
        Ok(receipt) => {
            let plain = text::timeline(&receipt);
            let value = json!({
                "protocolVersion": PROTOCOL, "action": "log", "result": "readable", "exitCode": 0,
                "id": receipt.id, "timeline": receipt.metadata.timeline, "notes": receipt.metadata.notes,
                "outcome": receipt.outcome, "reason": receipt.reason,
            });
            Printed::Value(value, plain)
        }
        Err(why) => not_found("log", why),
    })
}

/// Every receipt, newest first.
pub(crate) fn history(name: &str) -> Printed {
    with_store("history", name, |store| match store.receipts() {
        Ok(receipts) => {
            let mut plain = String::new();
            for receipt in &receipts {
                let _ = writeln!(
                    plain,
                    "{}  {}  {}",
                    text::when(receipt.updated_at_ms),
                    text::headline(receipt),
                    receipt.id
                );
            }
            if receipts.is_empty() {
                plain = format!("{name}: no operation was ever recorded\n");
            }
            let value = json!({
                "protocolVersion": PROTOCOL, "action": "history", "result": "readable", "exitCode": 0,
                "operations": receipts,
            });
            Printed::Value(value, plain)
        }
        Err(e) => {
            Response::new("history", "error", exit::NOT_DONE, observe(store)).because(e.to_string()).into()
        }
    })
}

/// Every service that has an adapter.
pub(crate) fn list() -> Printed {
    let mut names: Vec<String> = match std::fs::read_dir(ADAPTERS) {
        Ok(entries) => entries
            .flatten()
            .filter_map(|e| e.file_name().to_str()?.strip_suffix(".toml").map(str::to_owned))
            .collect(),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => vec![],
        Err(e) => {
            let why = format!("{ADAPTERS}: {e}");
            return Response::new("list", "error", exit::NOT_DONE, Observation::Genesis).because(why).into();
        }
    };
    names.sort();
    let mut plain = format!("{:<20} {:<28} {:<28} {}\n", "SERVICE", "UNIT", "STABLE", "LAST OPERATION");
    let mut services = vec![];
    for name in &names {
        let adapter = Adapter::load(Path::new(ADAPTERS), name);
        let root = Path::new(STATE).join(name);
        let observation = RealDisk::open(&root)
            .map_or(Observation::Genesis, |disk| observe(&Store::new(&disk, &root, name)));
        let (unit, error) = match &adapter {
            Ok(a) => (a.unit.clone(), None),
            Err(e) => ("-".into(), Some(e.to_string())),
        };
        let (stable, last) = match &observation {
            Observation::Observed { operation } => (
                operation.stable.as_ref().map_or("-".into(), ToString::to_string),
                operation.outcome.map_or("open", outcome_name).to_owned(),
            ),
            Observation::Genesis => ("-".into(), "genesis".into()),
            Observation::Unreadable { .. } => ("?".into(), "unreadable".into()),
        };
        let last = error.clone().unwrap_or(last);
        let _ = writeln!(plain, "{name:<20} {unit:<28} {stable:<28} {last}");
        services.push(json!({
            "service": name, "unit": adapter.as_ref().ok().map(|a| &a.unit), "operation": observation, "error": error,
        }));
    }
    if names.is_empty() {
        plain = format!("no services: write {ADAPTERS}/NAME.toml, then `cutover adopt NAME --version V`\n");
    }
    let value = json!({
        "protocolVersion": PROTOCOL, "action": "list", "result": "readable", "exitCode": 0, "services": services,
    });
    Printed::Value(value, plain)
}

/// What runs now.
pub(crate) fn probe(name: &str) -> Printed {
    let refuse = |why: String| {
        Printed::from(Response::new("probe", "error", exit::NOT_DONE, Observation::Genesis).because(why))
    };
    let adapter = match Adapter::load(Path::new(ADAPTERS), name) {
        Ok(adapter) => adapter,
        Err(e) => return refuse(e.to_string()),
    };
    let mut systemd = match Systemd::new() {
        Ok(systemd) => systemd,
        Err(e) => return refuse(format!("systemd cannot be reached: {e}")),
    };
    let state = match systemd.state(&adapter.unit) {
        Ok(state) => state,
        Err(e) => return refuse(e.to_string()),
    };
    with_store("probe", name, |store| {
        let stable = store.slot(Slot::Stable).and_then(|dir| store.manifest(&dir).ok()).map(|m| m.release);
        let looked = match stable.as_ref().and_then(|release| Side::of(store, release)) {
            _ if !state.is_up() => Err(format!("{} is {}", adapter.unit, crate::unit::describe(&state))),
            None => Err("no release is stable yet".to_owned()),
            Some(side) => Judge {
                manager: &mut systemd,
                watch: &Silent,
                adapter: &adapter,
                side: &side,
                same_bytes_count: true,
            }
            .look(&state),
        };
        let passing = looked.is_ok();
        let (proof, why) = match looked {
            Ok(proof) => (Some(proof), None),
            Err(why) => (None, Some(why)),
        };
        let plain = format!(
            "{name}: {} is {}{}\n  stable    {}\n  {}\n",
            adapter.unit,
            crate::unit::describe(&state),
            if state.main_pid > 0 { format!(", process {}", state.main_pid) } else { String::new() },
            stable.as_ref().map_or("none".into(), ToString::to_string),
            why.clone().unwrap_or_else(|| {
                "passing   it is the stable release; `cutover verify` reads its bytes back".into()
            }),
        );
        let code = if passing { exit::DONE } else { exit::NOT_DONE };
        let value = json!({
            "protocolVersion": PROTOCOL, "action": "probe", "result": if passing { "passing" } else { "failing" },
            "exitCode": code, "service": name, "unit": adapter.unit, "activeState": state.active,
            "subState": state.sub, "mainPid": state.main_pid, "invocation": state.invocation,
            "restarts": state.restarts, "stable": stable, "proof": proof, "error": why,
        });
        Printed::Value(value, plain)
    })
}

/// Reads every release back, and looks where the links lead.
pub(crate) fn verify(name: &str) -> Printed {
    with_store("verify", name, |store| {
        let mut plain = String::new();
        let mut releases = vec![];
        let mut bad = false;
        for dir in store.disk().list(seal::RELEASES).unwrap_or_default() {
            let checked = store
                .manifest(&dir)
                .and_then(|manifest| seal::verify(store.disk(), &manifest.release, Depth::Hashes));
            let why = checked.err().map(|e| e.to_string());
            bad |= why.is_some();
            let _ = writeln!(plain, "release {dir}: {}", why.as_deref().unwrap_or("whole"));
            releases.push(json!({ "release": dir, "whole": why.is_none(), "reason": why }));
        }
        let mut links = vec![];
        for (link, target) in [
            ("slots/stable", store.slot(Slot::Stable)),
            ("slots/experiment", store.slot(Slot::Experiment)),
            ("current", store.current()),
        ] {
            let there = store.disk().stat(link).is_ok();
            let sound = match &target {
                Some(dir) => store.manifest(dir).is_ok(),
                None => !there,
            };
            bad |= !sound;
            let says =
                target.clone().unwrap_or_else(|| if there { "elsewhere".into() } else { "nothing".into() });
            let _ =
                writeln!(plain, "{link} -> {says}{}", if sound { "" } else { ": names no sealed release" });
            links.push(json!({ "link": link, "release": target, "sound": sound }));
        }
        let journal = crate::journal::Journal::look(store.disk());
        let damage = match &journal {
            Ok(Some(contents)) if contents.records.is_empty() && store.has_history() => {
                vec!["the journal is blank".to_owned()]
            }
            Ok(Some(contents)) => contents.damage.clone(),
            Ok(None) if store.has_history() => vec!["the journal is missing".to_owned()],
            Ok(None) => vec![],
            Err(why) => vec![format!("the journal {why}")],
        };
        bad |= !damage.is_empty();
        for line in &damage {
            let _ = writeln!(plain, "{line}");
        }
        let code = if bad { exit::NOT_DONE } else { exit::DONE };
        let value = json!({
            "protocolVersion": PROTOCOL, "action": "verify", "result": if bad { "damaged" } else { "whole" },
            "exitCode": code, "releases": releases, "links": links, "journal": damage,
        });
        Printed::Value(value, plain)
    })
}

/// The version of this build.
pub(crate) fn version() -> Printed {
    let version = env!("CARGO_PKG_VERSION");
    let value = json!({
        "protocolVersion": PROTOCOL, "action": "version", "result": "readable", "exitCode": 0, "cutover": version,
    });
    Printed::Value(value, format!("cutover {version}\n"))
}
