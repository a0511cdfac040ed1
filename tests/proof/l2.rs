//! L2 of the proof: the real transaction, recovery and boot decision on a simulated disk and machine. And L15, its own
//! test: each operation that makes things durable is removed, delayed and doubled, and L2 must notice.
//!
//! `tests/proof.sh` runs it; see `docs/testing.md`.
#![allow(unreachable_pub, missing_docs, reason = "a test")]

mod check;
mod disk;
mod explore;
mod machine;
mod mutants;
mod rng;
mod scenario;
mod sim;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use disk::Fault;
use explore::{Budget, Explorer, Finding, Stats};
use scenario::{Scenario, Setup};

/// The command line.
pub(crate) struct Args(Vec<String>);

impl Args {
    fn has(&self, name: &str) -> bool {
        self.0.iter().any(|a| a == name)
    }

    fn value(&self, name: &str) -> Option<&str> {
        self.0.iter().position(|a| a == name).and_then(|i| self.0.get(i + 1)).map(String::as_str)
    }

    fn number<T: std::str::FromStr>(&self, name: &str, default: T) -> T {
        self.value(name).map_or(default, |v| v.parse().unwrap_or_else(|_| panic!("{name} takes a number")))
    }
}

/// What is explored of a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Cuts,
    Faults,
    Leaving,
    Damage,
}

const PARTS: [(Part, &str); 4] = [
    (Part::Cuts, "crashes, kills, and again in the recovery"),
    (Part::Faults, "failing calls, then crashes and kills"),
    (Part::Leaving, "asked to leave"),
    (Part::Damage, "crashes, and the journal is lost"),
];

fn main() {
    let args = Args(std::env::args().skip(1).collect());
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        // A panic of the code under test is a finding, and is shown as one.
        if !explore::EXPECTS_PANIC.get() {
            usual(info);
        }
    }));
    let dir = tempfile::tempdir().expect("a directory");
    scenario::publish(dir.path());
    let full = args.has("--full");
    let budget = Budget {
        seed: args.number("--seed", 1),
        limit: args.number("--limit", if full { 2000 } else { 96 }),
        limit_again: args.number("--limit-again", if full { 256 } else { 12 }),
        every: args.number("--every", if full { 1 } else { 2 }),
        after_fault: args.number("--after-fault", if full { 8 } else { 2 }),
        first: args.has("--first"),
    };
    let ok = if args.0.first().is_some_and(|a| a == "l15") {
        mutants::run(&args, budget, dir.path())
    } else if args.value("--scenario").is_some()
        && (args.has("--path") || args.has("--fault") || args.has("--leave-at"))
    {
        replay(&args, budget, dir.path())
    } else {
        explore_all(&args, budget, dir.path())
    };
    std::process::exit(i32::from(!ok));
}

fn replay(args: &Args, budget: Budget, sources: &Path) -> bool {
    let name = args.value("--scenario");
    let scenario = scenario::all().find(|s| Some(s.name) == name).expect("a scenario of that name");
    let setup = Setup::new(scenario, sources);
    let mut explorer = Explorer::new(&setup, budget);
    if let Some(fault) = args.value("--fault") {
        let mut parts = fault.split(':');
        let mut next = || parts.next().expect("CALL:FAULT:once or CALL:FAULT:ever");
        let (call, name, ever) = (next().parse().expect("a number"), next(), next() == "ever");
        let fault = Fault::ALL.into_iter().find(|f| f.name() == name).expect("a fault");
        explorer.set_fault(Some((call, fault, ever)));
    }
    if let Some(at) = args.value("--leave-at") {
        explorer.plan.leave_at = Some(at.parse().expect("an event"));
    }
    explorer.plan.mutation = mutants::parse(args);
    explorer.replay(args.value("--path").unwrap_or_default());
    report(&explorer.findings);
    explorer.findings.is_empty()
}

fn report(findings: &[Finding]) {
    for finding in findings {
        let Finding { scenario, what, command, count, .. } = finding;
        println!("FOUND {scenario} ({count} states): {what}\n      {command}");
    }
}

fn explore_all(args: &Args, budget: Budget, sources: &Path) -> bool {
    let begun = Instant::now();
    let only = args.value("--scenario");
    let part = args.value("--part");
    let mut work: Vec<(Scenario, Part)> = vec![];
    for (p, _) in PARTS {
        for scenario in scenario::all() {
            let wanted = only.is_none_or(|name| name == scenario.name)
                && part.is_none_or(|name| format!("{p:?}").to_lowercase() == name);
            if wanted {
                work.push((scenario, p));
            }
        }
    }
    work.reverse();
    let work = Mutex::new(work);
    let done: Mutex<BTreeMap<Part, (Stats, Duration)>> = Mutex::default();
    let findings: Mutex<Vec<Finding>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..args.number("--threads", 2u32) {
            scope.spawn(|| {
                loop {
                    let Some((scenario, part)) = work.lock().expect("no panic").pop() else { return };
                    let begun = Instant::now();
                    let setup = Setup::new(scenario, sources);
                    let mut explorer = Explorer::new(&setup, budget);
                    match part {
                        Part::Cuts => explorer.explore(),
                        Part::Faults => explorer.explore_faults(&Fault::ALL),
                        Part::Leaving => explorer.explore_leaving(),
                        Part::Damage => explorer.explore_damage(),
                    }
                    let took = begun.elapsed();
                    let Stats { states, distinct, runs } = explorer.stats;
                    println!(
                        "{:14} {:8} {states:9} states, {distinct:8} distinct, {runs:8} runs, {:6.1} s, {} findings",
                        scenario.name,
                        format!("{part:?}").to_lowercase(),
                        took.as_secs_f32(),
                        explorer.findings.len()
                    );
                    let mut done = done.lock().expect("no panic");
                    let (stats, time) = done.entry(part).or_default();
                    stats.add(explorer.stats);
                    *time += took;
                    findings.lock().expect("no panic").append(&mut explorer.findings);
                }
            });
        }
    });
    let mut total = Stats::default();
    println!();
    for (part, (stats, time)) in done.into_inner().expect("no panic") {
        let name = PARTS.iter().find(|(p, _)| *p == part).expect("listed").1;
        let Stats { states, distinct, runs } = stats;
        println!(
            "{name:44} {states:10} states, {distinct:9} distinct, {runs:9} runs, {:7.1} s",
            time.as_secs_f32()
        );
        total.add(stats);
    }
    let findings = findings.into_inner().expect("no panic");
    report(&findings);
    println!(
        "L2: {} states ({} distinct, {} runs) in {:.0} s with seed {}: {} findings",
        total.states,
        total.distinct,
        total.runs,
        begun.elapsed().as_secs_f32(),
        budget.seed,
        findings.len()
    );
    findings.is_empty()
}
