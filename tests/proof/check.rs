//! The one checker: what must hold of a service once an operation is settled, whatever interrupted it.
//!
//! It asks cutover's own seams alone ([`Disk`] below a [`Store`], and a [`Manager`]), so that every layer of the proof
//! can use it: simulated disks, real file systems, real machines. Each finding begins with the invariant it breaks:
//!
//! | | |
//! |---|---|
//! | I1 | what was acknowledged survives |
//! | I2 | stable is whole, its digest right |
//! | I3 | old or new, never a mix |
//! | I4 | exactly one receipt per finished operation |
//! | I5 | recovery twice, same bytes |
//! | I6 | recovery ends within its bound |
//! | I7 | no running service was stopped without a recorded intent |
//! | I8 | no leftover files, descriptors, locks, processes |
//! | I9 | damage other than a torn tail is reported, not absorbed |
//! | I10 | the unit's process runs from the release that stable names (or the unit is down, as it was before) |
//!
//! I6 and I7 are seen while things happen, by whoever drives the run: [`may_stop`] and [`may_park`] are their rules.

use std::collections::BTreeMap;

use cutover::durable::{Disk, Kind};
use cutover::manager::Manager;
use cutover::operation::{Cause, OperationId, Outcome, State};
use cutover::receipt::Receipt;
use cutover::release::{Digest, Release};
use cutover::seal::{self, Depth};
use cutover::store::{Slot, Store};

/// How the service was before the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Before {
    Passing,
    Failing,
    Stopped,
    /// There was no release.
    Nothing,
}

/// What is known of an operation from outside.
pub(crate) struct Case<'a> {
    pub(crate) id: &'a OperationId,
    /// The release before it.
    pub(crate) from: Option<&'a Release>,
    /// Its candidate.
    pub(crate) target: &'a Release,
    pub(crate) before: Before,
    /// How it may end; not to have begun is always possible where nothing was acknowledged.
    pub(crate) may_end: &'a [Outcome],
    /// Whether its candidate may be found bad.
    pub(crate) may_blame: bool,
    /// The receipts of earlier operations, which must still be there.
    pub(crate) earlier: &'a [Receipt],
    /// What a client was told.
    pub(crate) told: Option<&'a Receipt>,
    /// Its last record before the interruption that cannot be lost.
    pub(crate) recorded: Option<&'a State>,
}

/// Whether the journal's last record allows to stop the running version.
pub(crate) fn may_stop(state: &State) -> bool {
    matches!(state, State::Running(..) | State::Readback(..) | State::Promoted(..) | State::RollingBack(..))
}

/// Whether the journal's last record allows to park work.
pub(crate) fn may_park(state: &State) -> bool {
    matches!(state, State::HandingOver(..))
}

/// Everything that does not hold, once the operation is settled.
pub(crate) fn settled(store: &Store, manager: &mut dyn Manager, unit: &str, case: &Case) -> Vec<String> {
    let mut found = vec![];
    let receipt = one_receipt_each(store, case, &mut found);
    let (stable, outcome) = match &receipt {
        Some(receipt) => (receipt.stable.as_ref(), receipt.outcome),
        None => (case.from, None),
    };
    acknowledged(case, receipt.as_ref(), &mut found);
    one_of_two(case, receipt.as_ref(), stable, &mut found);
    links(store, stable, &mut found);
    if let Some(stable) = stable
        && let Err(why) = seal::verify(store.disk(), stable, Depth::Hashes)
    {
        found.push(format!("I2: stable {stable} {why}"));
    }
    leftovers(store, case, stable, &mut found);
    processes(store, manager, unit, case, stable, outcome, &mut found);
    quarantined(store, case, receipt.as_ref(), &mut found);
    found
}

/// I4.
fn one_receipt_each(store: &Store, case: &Case, found: &mut Vec<String>) -> Option<Receipt> {
    let mut by_id: BTreeMap<OperationId, Vec<Receipt>> = BTreeMap::new();
    let names = store.disk().list("receipts").unwrap_or_default();
    let paths = names.iter().map(|n| format!("receipts/{n}")).chain(["operation.json".to_owned()]);
    for path in paths {
        let Ok(bytes) = store.disk().read(&path, 1 << 20) else { continue };
        match Receipt::parse(&bytes) {
            Ok(receipt) => by_id.entry(receipt.id.clone()).or_default().push(receipt),
            Err(why) if path.ends_with(".new") => found.push(format!("I8: {path} is left ({why})")),
            Err(why) => found.push(format!("I4: {path} {why}")),
        }
    }
    for (id, receipts) in &by_id {
        if receipts.len() > 1 {
            found.push(format!("I4: operation {id} has {} receipts", receipts.len()));
        }
        if receipts.iter().any(|r| r.outcome.is_none()) {
            found.push(format!("I4: the receipt of {id} has no outcome"));
        }
    }
    for earlier in case.earlier {
        if by_id.get(&earlier.id).and_then(|r| r.first()) != Some(earlier) {
            found.push(format!("I1: the receipt of {} is gone or changed", earlier.id));
        }
    }
    by_id.remove(case.id).and_then(|mut r| r.pop())
}

/// I1.
fn acknowledged(case: &Case, receipt: Option<&Receipt>, found: &mut Vec<String>) {
    if let Some(told) = case.told
        && receipt != Some(told)
    {
        let now = receipt.map(|r| (r.outcome, r.updated_at_ms));
        found.push(format!(
            "I1: a client was told {:?} of {}, now it is {now:?}",
            told.outcome, told.updated_at_ms
        ));
    }
    let outcome = receipt.and_then(|r| r.outcome);
    let broken = match case.recorded {
        Some(State::Promoted(..)) => outcome != Some(Outcome::Promoted),
        Some(State::RollingBack(..)) => outcome != Some(Outcome::RolledBack),
        Some(State::Done(done)) => outcome != Some(done.outcome),
        Some(state) if state.subject().is_some() => outcome.is_none(),
        _ => false,
    };
    if broken {
        let name = case.recorded.map_or("", State::name);
        found.push(format!("I1: {name} was recorded, and it ended as {outcome:?}"));
    }
    if let (Some(State::RollingBack(.., verdict)), Some(receipt)) = (case.recorded, receipt)
        && verdict.cause == Cause::BadCandidate
        && receipt.cause != Some(Cause::BadCandidate)
    {
        found.push("I1: the candidate was found bad, and the verdict is lost".into());
    }
}

/// I3, by the receipt.
fn one_of_two(case: &Case, receipt: Option<&Receipt>, stable: Option<&Release>, found: &mut Vec<String>) {
    let Some(receipt) = receipt else { return };
    let Some(outcome) = receipt.outcome else { return };
    if !case.may_end.contains(&outcome) {
        found.push(format!("I3: it ended as {outcome:?}: {}", receipt.reason));
    }
    let expected = if outcome == Outcome::Promoted { Some(case.target) } else { case.from };
    if stable != expected {
        found.push(format!("I3: {outcome:?}, and the receipt says that stable is {stable:?}"));
    }
    if receipt.cause == Some(Cause::BadCandidate) && !case.may_blame {
        found.push(format!("I3: a good candidate was blamed: {}", receipt.reason));
    }
}

/// I3, by the links.
fn links(store: &Store, stable: Option<&Release>, found: &mut Vec<String>) {
    let stable = stable.map(Release::dir_name);
    let (slot, current) = (store.slot(Slot::Stable), store.current());
    if slot != stable {
        found.push(format!("I3: slots/stable names {slot:?}, should {stable:?}"));
    }
    if current != stable {
        found.push(format!("I3: current names {current:?}, should {stable:?}"));
    }
    if store.disk().stat("slots/experiment").is_ok() {
        found.push("I8: slots/experiment is left".into());
    }
}

/// I8, on the disk.
fn leftovers(store: &Store, case: &Case, stable: Option<&Release>, found: &mut Vec<String>) {
    const ROOT: [&str; 12] = [
        "lock",
        "journal",
        "operation.json",
        "receipts",
        "releases",
        "slots",
        "current",
        "run",
        "incoming",
        "quarantine.json",
        "past.json",
        "staged.json",
    ];
    let list = |path: &str| store.disk().list(path).unwrap_or_default();
    for name in list("") {
        if !ROOT.contains(&name.as_str()) {
            found.push(format!("I8: {name} is left"));
        }
    }
    for name in list("receipts") {
        if !name.ends_with(".json") {
            found.push(format!("I8: receipts/{name} is left"));
        }
    }
    for name in list("slots") {
        if name != "stable" && name != "experiment" {
            found.push(format!("I8: slots/{name} is left"));
        }
    }
    for name in list("run") {
        if store.disk().stat(&format!("run/{name}")).is_ok_and(|s| s.kind != Kind::Dir) {
            found.push(format!("I8: run/{name} is left"));
        }
    }
    let known: Vec<String> = case
        .earlier
        .iter()
        .filter_map(|r| r.stable.as_ref())
        .chain(stable)
        .chain(case.from)
        .map(Release::dir_name)
        .collect();
    for name in list("releases") {
        if !known.contains(&name) {
            found.push(format!("I8: releases/{name} is left"));
        }
    }
}

/// I10.
fn processes(
    store: &Store,
    manager: &mut dyn Manager,
    unit: &str,
    case: &Case,
    stable: Option<&Release>,
    outcome: Option<Outcome>,
    found: &mut Vec<String>,
) {
    let (state, processes) = match (manager.state(unit), manager.processes(unit)) {
        (Ok(state), Ok(processes)) => (state, processes),
        (Err(e), _) | (_, Err(e)) => return found.push(format!("I10: {e}")),
    };
    let tree = stable.map(|r| format!("{}/", store.tree(r).display()));
    for process in &processes {
        if tree.as_ref().is_none_or(|tree| !process.exe_path.starts_with(tree)) {
            found.push(format!("I10: process {} executes {}", process.pid, process.exe_path));
        }
    }
    let up = state.is_up() && !processes.is_empty();
    let expected = match (case.before, outcome) {
        (Before::Passing, _) | (Before::Failing | Before::Nothing, Some(Outcome::Promoted)) => Some(true),
        // A boot starts what is enabled; only an operation that had changed something leaves it as it was.
        (Before::Stopped, None | Some(Outcome::Failed)) => None,
        (Before::Stopped, _) if matches!(case.recorded, Some(State::Done(_) | State::HandingOver(..))) => {
            None
        }
        (Before::Stopped | Before::Nothing, _) => Some(false),
        (Before::Failing, _) => None,
    };
    if expected.is_some_and(|expected| expected != up) {
        found.push(format!("I10: the unit is {}, was {:?} before", state.active, case.before));
    }
    if state.job.is_some() {
        found.push("I8: a job is left".into());
    }
}

/// What must hold when the journal is lost: `slots/stable` is the commit, and what was told is what it says.
pub(crate) fn without_journal(
    store: &Store,
    manager: &mut dyn Manager,
    unit: &str,
    releases: &[&Release],
    told: Option<&Receipt>,
) -> Vec<String> {
    let mut found = vec![];
    let slot = store.slot(Slot::Stable);
    if let Some(told) = told {
        let expected = told.stable.as_ref().map(Release::dir_name);
        if slot != expected {
            found.push(format!("I1: {:?} was told, and slots/stable names {slot:?}", told.outcome));
        }
        if store.receipt(&told.id).ok().flatten().as_ref() != Some(told) {
            found.push("I1: the receipt that was told is gone or changed".into());
        }
    }
    let Some(slot) = slot else { return found };
    let Some(release) = releases.iter().find(|r| r.dir_name() == slot) else {
        found.push(format!("I3: slots/stable names {slot}"));
        return found;
    };
    if let Err(why) = seal::verify(store.disk(), release, Depth::Hashes) {
        found.push(format!("I2: stable {release} {why}"));
    }
    if store.current().as_ref() != Some(&slot) {
        found.push(format!("I3: current names {:?}, slots/stable {slot}", store.current()));
    }
    let tree = format!("{}/", store.tree(release).display());
    for process in manager.processes(unit).unwrap_or_default() {
        if !process.exe_path.starts_with(&tree) {
            found.push(format!("I10: process {} executes {}", process.pid, process.exe_path));
        }
    }
    found
}

/// A bad candidate is remembered, a good one is not.
fn quarantined(store: &Store, case: &Case, receipt: Option<&Receipt>, found: &mut Vec<String>) {
    let known = store.quarantine().iter().any(|q| q.digest == case.target.digest);
    let bad = receipt.is_some_and(|r| r.cause == Some(Cause::BadCandidate));
    if bad != known && receipt.is_some() && case.may_end != [Outcome::Held] {
        found.push(format!("I3: quarantined is {known}, should be {bad}"));
    }
}

/// What a recovery must not change when it is run again: every path outside of `run/`, with its mode and contents.
pub(crate) fn fingerprint(disk: &dyn Disk) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    walk(disk, "", &mut found);
    found
}

fn walk(disk: &dyn Disk, dir: &str, found: &mut BTreeMap<String, String>) {
    for name in disk.list(dir).unwrap_or_default() {
        let path = if dir.is_empty() { name } else { format!("{dir}/{name}") };
        if path == "run" {
            continue;
        }
        let Ok(stat) = disk.stat(&path) else { continue };
        let contents = match stat.kind {
            Kind::File => {
                disk.read(&path, u64::MAX - 1).map_or_else(|e| e.to_string(), |b| Digest::of(&b).to_string())
            }
            Kind::Link => disk.read_link(&path).unwrap_or_default(),
            _ => String::new(),
        };
        found.insert(path.clone(), format!("{:?} {:o} {contents}", stat.kind, stat.mode));
        if stat.kind == Kind::Dir {
            walk(disk, &path, found);
        }
    }
}

/// What differs between two fingerprints.
pub(crate) fn difference(one: &BTreeMap<String, String>, other: &BTreeMap<String, String>) -> Option<String> {
    if one == other {
        return None;
    }
    let names = one.keys().chain(other.keys());
    let changed = names.filter(|name| one.get(*name) != other.get(*name)).next()?;
    Some(changed.clone())
}
