//! The scenarios: a machine with a history, a wish, and how it may end.

use std::path::{Path, PathBuf};

use cutover::adapter::Adapter;
use cutover::operation::{OperationId, Outcome};
use cutover::receipt::Receipt;
use cutover::release::{Digest, Release};
use cutover::scratch::{Request, Scratch, Task};
use cutover::store::{Slot, Store};

use crate::check::Before;
use crate::explore::{Ended, attempt};
use crate::machine::{Behaviour, Machine, STATE, program};
use crate::sim::{Activation, Plan, Sim, World};

/// What a scenario is made of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// What the candidate does.
    candidate: Behaviour,
    /// The version asked for.
    target: &'static str,
    /// No release before it.
    genesis: bool,
    stopped: bool,
    enabled: bool,
    pub(crate) activation: Activation,
    dependant: bool,
    /// Stable behaves so, once the scenario begins.
    stable: Option<Behaviour>,
    /// Its adapter has commands that park work and take it up again.
    hooks: bool,
    pub(crate) ends: Outcome,
}

const PLAIN: Scenario = Scenario {
    name: "good",
    candidate: Behaviour::Good,
    target: "2.0",
    genesis: false,
    stopped: false,
    enabled: true,
    activation: Activation::Never,
    dependant: false,
    stable: None,
    hooks: false,
    ends: Outcome::Promoted,
};
const BAD: Scenario =
    Scenario { name: "bad", candidate: Behaviour::NeverPasses, ends: Outcome::RolledBack, ..PLAIN };

/// All of them.
pub(crate) const SCENARIOS: [Scenario; 17] = [
    PLAIN,
    BAD,
    Scenario { name: "good-parked", hooks: true, dependant: true, ..PLAIN },
    Scenario { name: "bad-parked", hooks: true, dependant: true, ..BAD },
    Scenario { name: "exits-at-once", candidate: Behaviour::ExitsAtOnce, ..BAD },
    Scenario { name: "exits-later", candidate: Behaviour::ExitsLater, ..BAD },
    Scenario { name: "wrong-version", candidate: Behaviour::WrongVersion, ..BAD },
    Scenario { name: "hung-start", candidate: Behaviour::HungStart, ..BAD },
    Scenario { name: "deaf-old", stable: Some(Behaviour::DeafToStop), ends: Outcome::RolledBack, ..PLAIN },
    Scenario { name: "triggered", activation: Activation::Always, ..PLAIN },
    Scenario { name: "triggered-bad", activation: Activation::Always, ..BAD },
    Scenario { name: "stopped", stopped: true, enabled: false, ..PLAIN },
    Scenario { name: "stopped-bad", stopped: true, enabled: true, ..BAD },
    Scenario { name: "failing", stable: Some(Behaviour::ExitsLater), ..PLAIN },
    Scenario { name: "failing-bad", stable: Some(Behaviour::ExitsLater), ..BAD },
    Scenario { name: "genesis", genesis: true, ..PLAIN },
    Scenario { name: "genesis-bad", genesis: true, ..BAD },
];

/// Answers without an upgrade.
pub(crate) const SHORT: [Scenario; 2] = [
    Scenario { name: "up-to-date", target: "1.0", ends: Outcome::UpToDate, ..PLAIN },
    Scenario { name: "held", target: "0.8", ends: Outcome::Held, ..PLAIN },
];

pub(crate) fn all() -> impl Iterator<Item = Scenario> {
    SCENARIOS.into_iter().chain(SHORT)
}

/// A scenario, ready to be run.
pub(crate) struct Setup {
    pub(crate) scenario: Scenario,
    pub(crate) adapter: Adapter,
    pub(crate) id: OperationId,
    pub(crate) world: World,
    pub(crate) from: Option<Release>,
    pub(crate) target: Release,
    pub(crate) earlier: Vec<Receipt>,
    pub(crate) before: Before,
    pub(crate) may_end: Vec<Outcome>,
    pub(crate) may_blame: bool,
}

fn adapter(scenario: &Scenario, source: &Path) -> Adapter {
    let hooks = if scenario.hooks {
        "[quiesce]\ncommand = [\"/bin/park\"]\n[resume]\ncommand = [\"/bin/unpark\"]\n"
    } else {
        ""
    };
    let text = format!(
        r#"
unit = "app.service"
[source]
path = "{}"
artifact = "{{version}}/app.tar"
unsigned = true
[probe]
kind = "http"
url = "http://127.0.0.1:80/"
version = {{ pointer = "/version" }}
interval = "200ms"
passes = 2
settle = "400ms"
timeout = "1s"
answer = "1s"
{hooks}
[timeouts]
linger = "1s"
foreign-job = "2s"
"#,
        source.display()
    );
    Adapter::parse(Path::new("app.toml"), "app", &text).expect("a good adapter")
}

/// Publishes versions as a source has them: one directory for each behaviour of the candidate.
#[allow(clippy::disallowed_methods, reason = "the source is no part of what is proved")]
pub(crate) fn publish(dir: &Path) {
    for (behaviour, name) in Behaviour::ALL {
        for version in ["0.9", "1.0", "2.0"] {
            let behaviour = if version == "2.0" { behaviour } else { Behaviour::Good };
            let place = dir.join(name).join(version);
            std::fs::create_dir_all(&place).expect("a directory for the test");
            let tar = artifact(version, behaviour);
            let sums = format!("{}  app.tar\n", Digest::of(&tar));
            std::fs::write(place.join("app.tar"), tar).expect("written");
            std::fs::write(place.join("SHA256SUMS"), sums).expect("written");
        }
    }
}

fn artifact(version: &str, behaviour: Behaviour) -> Vec<u8> {
    let mut tar = tar::Builder::new(vec![]);
    let mut add = |path: &str, bytes: &[u8], mode| {
        let mut header = tar::Header::new_ustar();
        header.set_size(bytes.len() as u64);
        header.set_mode(mode);
        tar.append_data(&mut header, path, bytes).expect("in memory");
    };
    add("bin/app", &program(version, behaviour), 0o755);
    add("share/data", format!("data of {version}\n").repeat(50).as_bytes(), 0o644);
    let mut header = tar::Header::new_ustar();
    header.set_entry_type(tar::EntryType::Symlink);
    header.set_size(0);
    header.set_mode(0o777);
    tar.append_link(&mut header, "share/link", "data").expect("in memory");
    tar.into_inner().expect("in memory")
}

/// Writes down what is asked, as the launcher does before a worker starts.
fn ask(sim: &Sim, id: &OperationId, target: &str) {
    let store = Store::new(sim, Path::new(STATE), "app");
    let scratch = Scratch::of(&store, id);
    let task = Task::Upgrade {
        target: target.parse().expect("a version"),
        file: None,
        consent: false,
        allow_downgrade: false,
        retry_quarantined: false,
    };
    let request = Request { format_version: cutover::scratch::FORMAT, task };
    scratch.make().expect("no fault");
    scratch.put("request.json", &request).expect("no fault");
}

impl Setup {
    /// Builds the machine's history by real upgrades, then what the scenario says.
    pub(crate) fn new(scenario: Scenario, sources: &Path) -> Self {
        let source: PathBuf = sources.join(scenario.candidate.name());
        let adapter = adapter(&scenario, &source);
        let triggered = scenario.activation != Activation::Never;
        let machine = Machine::new(scenario.enabled, triggered, scenario.dependant);
        let mut world = World { disk: crate::disk::DiskState::new(), machine };
        let mut earlier = vec![];
        let history: &[(&str, &str)] =
            if scenario.genesis { &[] } else { &[("first", "0.9"), ("second", "1.0")] };
        for dir in ["releases", "slots", "receipts", "run"] {
            world.disk.mkdir(dir, 0o755).expect("an empty disk");
        }
        for (id, version) in history {
            let id: OperationId = id.parse().expect("an id");
            let plan = Plan::default();
            let sim = Sim::new(world, plan, false);
            ask(&sim, &id, version);
            match attempt(&sim, &adapter, &id, false) {
                Ended::Answered(response) => assert_eq!(response.result, "promoted", "{response:?}"),
                Ended::Again(why) => panic!("the history of {} failed: {why}", scenario.name),
            }
            let store = Store::new(&sim, Path::new(STATE), "app");
            earlier.push(store.receipt(&id).expect("readable").expect("there"));
            world = sim.world();
            world.machine.launch = (0, 0);
        }
        let sim = Sim::new(world, Plan::default(), false);
        let id: OperationId = "op".parse().expect("an id");
        ask(&sim, &id, scenario.target);
        let store = Store::new(&sim, Path::new(STATE), "app");
        let release = |dir: String| store.manifest(&dir).expect("sealed").release;
        let from = store.slot(Slot::Stable).map(release);
        world = sim.world();
        world.disk.settle();
        if let Some(behaviour) = scenario.stable {
            world.machine.broken = Some(("1.0", behaviour));
            world.machine.restart(&world.disk);
            world.machine.pass(&world.disk, 1000);
        }
        if scenario.stopped {
            world.machine.call(crate::machine::Call::Stop);
            world.machine.pass(&world.disk, 1000);
        }
        let target = target_of(&scenario, &adapter, &world);
        let before = match (from.is_some(), scenario.stopped, scenario.stable) {
            (false, ..) => Before::Nothing,
            (_, true, _) => Before::Stopped,
            (.., Some(Behaviour::ExitsLater)) => Before::Failing,
            _ => Before::Passing,
        };
        let mut may_end = vec![scenario.ends, Outcome::Failed];
        if scenario.ends == Outcome::Promoted {
            may_end.push(Outcome::RolledBack);
        }
        let may_blame = scenario.candidate != Behaviour::Good;
        Self { scenario, adapter, id, world, from, target, earlier, before, may_end, may_blame }
    }
}

/// What the target's release will be called, by staging it aside.
fn target_of(scenario: &Scenario, adapter: &Adapter, world: &World) -> Release {
    use cutover::transaction::Source as _;
    let sim = Sim::new(world.clone(), Plan::default(), false);
    let store = Store::new(&sim, Path::new(STATE), "app");
    let version = scenario.target.parse().expect("a version");
    let mut supply = cutover::supply::Supply::new(adapter, None);
    match supply.resolve(&version) {
        Ok(_) => {
            let silent = cutover::watch::Silent;
            supply.stage(&store, &version, None, &silent).expect("the candidate can be staged").release
        }
        Err(_) => Release { version, digest: Digest::of(b"nothing") },
    }
}
