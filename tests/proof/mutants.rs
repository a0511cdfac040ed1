//! L15, the test of the tests: every operation that makes something durable is removed, delayed and doubled by its id,
//! and L2 must fail. What survives is listed here with its reason.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::time::Instant;

use cutover::durable::Step;

use crate::Args;
use crate::disk::Fault;
use crate::explore::{Budget, Explorer};
use crate::scenario::{self, Scenario, Setup};
use crate::sim::Mutation;

const MUTATIONS: [(Mutation, &str); 6] = [
    (Mutation::Remove, "remove"),
    (Mutation::AfterNext, "after-next"),
    (Mutation::AfterSync, "after-sync"),
    (Mutation::AfterRecord, "after-record"),
    (Mutation::Double, "double"),
    (Mutation::Toggle, "toggle"),
];

/// The scenarios that a mutant runs through, those that find most first.
const SCENARIOS: [&str; 8] =
    ["good", "bad", "good-parked", "genesis", "triggered", "stopped-bad", "genesis-bad", "up-to-date"];

/// A mutant that may survive, and why that is right.
struct Survivor {
    step: &'static str,
    /// One of the names of [`MUTATIONS`], several with blanks between, or `*`.
    how: &'static str,
    why: &'static str,
}

const SURVIVORS: &[Survivor] = &[];

/// The mutants that stand for bugs which real file systems hide, by name.
const PLANTED: [(&str, Step, Mutation); 3] = [
    ("missing directory sync after the promotion", "promote.sync", Mutation::Remove),
    ("claim before its effect's sync", "promote.sync", Mutation::AfterRecord),
    ("a link toggled instead of set", "promote.rename", Mutation::Toggle),
];

pub(crate) fn parse(args: &Args) -> Option<(Step, Mutation)> {
    let (step, name) = args.value("--mutant")?.split_once(':')?;
    let mutation = MUTATIONS.iter().find(|(_, n)| *n == name)?.0;
    Some((step.to_owned().leak(), mutation))
}

fn name(mutation: Mutation) -> &'static str {
    MUTATIONS.iter().find(|(m, _)| *m == mutation).expect("listed").1
}

fn expected(step: Step, mutation: Mutation) -> Option<&'static str> {
    let fits = |s: &&Survivor| {
        let step_fits = s.step.strip_suffix('*').map_or(s.step == step, |start| step.starts_with(start));
        step_fits && (s.how == "*" || s.how.split(' ').any(|how| how == name(mutation)))
    };
    SURVIVORS.iter().find(fits).map(|s| s.why)
}

/// The first thing that L2 finds in a mutant.
fn hunt(scenarios: &[Scenario], mutant: (Step, Mutation), budget: Budget, sources: &Path) -> Option<String> {
    for scenario in scenarios {
        let setup = Setup::new(*scenario, sources);
        let mut explorer = Explorer::new(&setup, budget);
        explorer.plan.mutation = Some(mutant);
        explorer.explore();
        if explorer.findings.is_empty() {
            explorer.explore_damage();
        }
        if explorer.findings.is_empty() {
            explorer.explore_faults(&[Fault::Full]);
        }
        if let Some(finding) = explorer.findings.first() {
            return Some(format!("{}: {}", finding.scenario, finding.what));
        }
    }
    None
}

pub(crate) fn run(args: &Args, budget: Budget, sources: &Path) -> bool {
    let begun = Instant::now();
    let budget = Budget {
        limit: args.number("--limit", 32),
        limit_again: args.number("--limit-again", 4),
        every: args.number("--every", 8),
        after_fault: 0,
        first: true,
        ..budget
    };
    let scenarios: Vec<Scenario> =
        SCENARIOS.iter().map(|name| scenario::all().find(|s| s.name == *name).expect("listed")).collect();
    // Which steps there are, and where.
    let mut steps: BTreeMap<Step, Vec<Scenario>> = BTreeMap::new();
    for scenario in &scenarios {
        let setup = Setup::new(*scenario, sources);
        let mut explorer =
            Explorer::new(&setup, Budget { limit: 6, every: u32::MAX, first: false, ..budget });
        explorer.explore();
        explorer.explore_damage();
        for step in explorer.steps {
            steps.entry(step).or_default().push(*scenario);
        }
    }
    let mut work: Vec<(Step, Mutation)> = vec![];
    for step in steps.keys() {
        for (mutation, _) in MUTATIONS {
            if mutation != Mutation::Toggle || step.ends_with("rename") {
                work.push((step, mutation));
            }
        }
    }
    if let Some(wanted) = args.value("--mutant") {
        work.retain(|(step, m)| format!("{step}:{}", name(*m)).contains(wanted));
    }
    work.reverse();
    let count = work.len();
    let work = Mutex::new(work);
    let results: Mutex<BTreeMap<(Step, &'static str), Option<String>>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..args.number("--threads", 2u32) {
            scope.spawn(|| {
                loop {
                    let Some((step, mutation)) = work.lock().expect("no panic").pop() else { return };
                    let found = hunt(&steps[step], (step, mutation), budget, sources);
                    results.lock().expect("no panic").insert((step, name(mutation)), found);
                }
            });
        }
    });
    let results = results.into_inner().expect("no panic");
    let mut ok = true;
    let (mut killed, mut harmless) = (0, 0);
    for ((step, how), found) in &results {
        let mutation = MUTATIONS.iter().find(|(_, n)| n == how).expect("listed").0;
        match (found, expected(step, mutation)) {
            (Some(what), None) => {
                killed += 1;
                if args.has("--verbose") {
                    println!("{step:28} {how:13} {what}");
                }
            }
            (None, Some(why)) => {
                harmless += 1;
                println!("{step:28} {how:13} survives: {why}");
            }
            (None, None) => {
                ok = false;
                println!("{step:28} {how:13} SURVIVES, and no reason is known");
                println!("      tests/proof.sh l15 --mutant {step}:{how}");
            }
            (Some(what), Some(_)) => {
                killed += 1;
                println!("{step:28} {how:13} is listed as harmless, but is not: {what}");
            }
        }
    }
    for (bug, step, mutation) in PLANTED {
        let Some(found) = results.get(&(step, name(mutation))) else { continue };
        match found {
            Some(what) => println!("planted: {bug} ({step}, {}): found, {what}", name(mutation)),
            None => {
                ok = false;
                println!("planted: {bug} ({step}, {}): NOT FOUND", name(mutation));
            }
        }
    }
    println!(
        "L15: {} steps, {count} mutants: {killed} killed, {harmless} harmless by design, {} unexplained, in {:.0} s",
        steps.len(),
        count - killed - harmless,
        begun.elapsed().as_secs_f32()
    );
    ok
}
