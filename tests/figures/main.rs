//! Measures what docs/benchmarks.md states, on the throw-away machine of `tests/figures.sh`, and prints it as a table.
//!
//! With 0 pairs, only the staging is measured. Each figure is a ratio or a difference within one run: these machines, and most others, are noisy.

#![allow(missing_docs, reason = "a program for measurements")]
#![allow(clippy::disallowed_methods, reason = "nothing here has to survive a power cut")]

#[path = "../machine/mod.rs"]
mod machine;

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use machine::{Demo, Kind, Machine, Service};

fn main() {
    let pairs: usize = std::env::args().nth(1).map_or(200, |n| n.parse().expect("a number of pairs"));
    let m = Machine::shared();
    println!("| figure | measured |\n|---|---|");
    if pairs > 0 {
        downtime(&m, pairs);
        syncs(&m);
    }
    staging(&m);
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// How long the unit was not active the last time, in milliseconds, by PID 1's own clock.
fn was_down(demo: &Service) -> f64 {
    let at = |name: &str| -> f64 { demo.property(name).parse().expect("microseconds") };
    (at("ActiveEnterTimestampMonotonic") - at("ActiveExitTimestampMonotonic")) / 1000.0
}

fn downtime(m: &Machine, pairs: usize) {
    let demo = Demo::new(m, "downtime").kind(Kind::Notify).window(50, 5_000).genesis().install();
    for version in ["1.0", "2.0"] {
        demo.release(version, &["drain 50"]);
    }
    demo.upgrade("1.0", &[]).expect(0, "promoted");
    let (mut restarts, mut upgrades) = (vec![], vec![]);
    for n in 0..pairs {
        let pair = |restarts: &mut Vec<f64>, upgrades: &mut Vec<f64>, restart: bool| {
            if restart {
                demo.systemctl("reset-failed").ok();
                demo.systemctl("restart").ok();
                restarts.push(was_down(&demo));
            } else {
                let version = if n % 2 == 0 { "2.0" } else { "1.0" };
                demo.upgrade(version, &["--allow-downgrade"]).expect(0, "promoted");
                upgrades.push(was_down(&demo));
            }
        };
        // The order alternates, so that what drifts hits both.
        for first in [n % 2 == 0, n % 2 != 0] {
            pair(&mut restarts, &mut upgrades, first);
        }
        if n % 20 == 0 {
            eprintln!("{n} of {pairs} pairs");
        }
    }
    let added: Vec<f64> = upgrades.iter().zip(&restarts).map(|(u, r)| u - r).collect();
    println!("| downtime of `systemctl restart`, median of {pairs} | {:.2} ms |", median(restarts));
    println!("| downtime of `cutover upgrade`, median of {pairs} | {:.2} ms |", median(upgrades));
    println!("| time added to the downtime, median of {pairs} interleaved pairs | {:.2} ms |", median(added));
}

/// A trace of PID 1 and of all that it starts, or of one command.
struct Trace {
    child: Child,
    file: std::path::PathBuf,
}

const CALLS: &str = "trace=fsync,fdatasync,syncfs,sync,sendmsg,renameat,execve,kill,exit_group";

impl Trace {
    fn of_pid(pid: u32) -> Self {
        let file = std::env::temp_dir().join(format!("cutover-trace-{}", std::process::id()));
        let child = Command::new("strace")
            .args(["-f", "-q", "-s", "4096", "-e", CALLS, "-o"])
            .arg(&file)
            .args(["-p", &pid.to_string()])
            .stderr(Stdio::null())
            .spawn()
            .expect("strace");
        std::thread::sleep(Duration::from_millis(500));
        Self { child, file }
    }

    fn end(mut self) -> String {
        let _ = Command::new("kill").arg("-INT").arg(self.child.id().to_string()).status();
        let _ = self.child.wait();
        let text = String::from_utf8_lossy(&std::fs::read(&self.file).expect("a trace")).into_owned();
        let _ = std::fs::remove_file(&self.file);
        text
    }
}

fn is_sync(line: &str) -> bool {
    [" fsync(", " fdatasync(", " syncfs(", " sync("].iter().any(|call| line.contains(call))
}

fn syncs(m: &Machine) {
    let demo = Demo::new(m, "syncs").genesis().install();
    for version in ["1.0", "2.0", "3.0"] {
        demo.release(version, &[]);
    }
    demo.upgrade("1.0", &[]).expect(0, "promoted");
    demo.upgrade("2.0", &[]).expect(0, "promoted");
    let trace = Trace::of_pid(m.pid());
    demo.upgrade("3.0", &[]).expect(0, "promoted");
    let trace = trace.end();
    // The worker is the process that executes the runner; its threads are its own.
    let started: Vec<&str> =
        trace.lines().skip_while(|l| !(l.contains("execve(") && l.contains("/runner"))).collect();
    let pid = started.first().and_then(|l| l.split_whitespace().next()).expect("a worker").to_owned();
    let worker: Vec<&str> =
        started.into_iter().filter(|l| l.split_whitespace().next() == Some(&pid)).collect();
    let total = worker.iter().filter(|l| is_sync(l)).count();
    let from = worker.iter().position(|l| l.contains("StopUnit")).expect("a stop");
    let to = worker.iter().position(|l| l.contains("StartUnit")).expect("a start");
    assert!(from < to, "the stop comes before the start");
    let between = worker[from..to].iter().filter(|l| is_sync(l)).count();
    println!("| syncs of one upgrade by the worker | {total} |");
    println!("| of these between the stop and the start | {between} |");

    // Everything that the launching process does: traced from its own start.
    let file = std::env::temp_dir().join(format!("cutover-trace-{}", std::process::id()));
    let inside = [
        "nsenter",
        "-t",
        &m.pid().to_string(),
        "-a",
        "cutover",
        "upgrade",
        &demo.name,
        "2.0",
        "--allow-downgrade",
    ];
    let status = Command::new("strace")
        .args(["-f", "-q", "-s", "4096", "-e", CALLS, "-o"])
        .arg(&file)
        .args(inside)
        .stdout(Stdio::null())
        .status()
        .expect("strace");
    assert!(status.success(), "the traced upgrade: {status}");
    let text = String::from_utf8_lossy(&std::fs::read(&file).expect("a trace")).into_owned();
    let _ = std::fs::remove_file(&file);
    println!(
        "| syncs of one upgrade by what launches the worker | {} |",
        text.lines().filter(|l| is_sync(l)).count()
    );
}

fn staging(m: &Machine) {
    let demo = Demo::new(m, "staging").archive().genesis().install();
    let (mut ours, mut theirs) = (vec![], vec![]);
    let mut peak = 0;
    m.sh("mkdir -p /var/lib/cutover/.figures/big-1 && cd /var/lib/cutover/.figures && for n in $(seq 50); do head -c \
          10000000 /dev/urandom > big-1/$n; done")
        .ok();
    for n in 0..5 {
        let version = format!("{}.0", n + 1);
        let dir = format!("/srv/{}/{version}", demo.name);
        let file = format!("{}-{version}.tar", demo.name);
        // Each time other bytes, so that nothing is recognised.
        m.sh(&format!(
            "mkdir -p {dir} && cd /var/lib/cutover/.figures && echo {n} > big-1/n && tar -cf {dir}/{file} big-1 && cd {dir} \
             && sha256sum {file} > SHA256SUMS && sync"
        ))
        .ok();
        let adapter = format!("/etc/cutover/services/{}.toml", demo.name);
        m.sh(&format!("sed -i 's/[.]tar[.]gz/.tar/' {adapter}")).ok();
        let theirs_now = |theirs: &mut Vec<f64>| {
            let begun = Instant::now();
            m.sh(&format!(
                "mkdir -p /var/lib/cutover/.figures/out && openssl dgst -sha256 {dir}/{file} && tar -xf {dir}/{file} -C \
                 /var/lib/cutover/.figures/out && sync -f /var/lib/cutover/.figures/out"
            ))
            .ok();
            theirs.push(begun.elapsed().as_secs_f64());
            m.sh("rm -rf /var/lib/cutover/.figures/out && sync").ok();
        };
        if n % 2 == 0 {
            theirs_now(&mut theirs);
        }
        let begun = Instant::now();
        let mut child = m.spawn(&["cutover", "stage", &demo.name, &version]);
        while child.try_wait().expect("a child").is_none() {
            peak = peak.max(peak_of_workers(&demo.name));
            std::thread::sleep(Duration::from_millis(5));
        }
        ours.push(begun.elapsed().as_secs_f64());
        let verified = m.cutover(&["verify", &demo.name]);
        let releases = verified.json["releases"].as_array().cloned().unwrap_or_default();
        let whole = !releases.is_empty() && releases.iter().all(|r| r["whole"] == true);
        assert!(whole, "what was staged is whole: {verified}");
        m.sh(&format!(
            "rm -rf /var/lib/cutover/{}/releases/* /var/lib/cutover/{}/staged.json; sync",
            demo.name, demo.name
        ))
        .ok();
        if n % 2 != 0 {
            theirs_now(&mut theirs);
        }
        m.sh(&format!("rm -rf {dir}")).ok();
    }
    m.sh("rm -rf /var/lib/cutover/.figures").ok();
    let ratio: Vec<f64> = ours.iter().zip(&theirs).map(|(o, t)| o / t).collect();
    println!("| staging 500 MB, median of 5 | {:.2} s |", median(ours));
    println!(
        "| `openssl dgst -sha256` + `tar -x` + `sync` of the same bytes, median of 5 | {:.2} s |",
        median(theirs)
    );
    println!("| ratio, median of 5 pairs | {:.2} |", median(ratio));
    println!("| peak memory of the worker while staging (VmHWM) | {:.1} MB |", peak as f64 / 1024.0);
}

/// VmHWM in KiB of the processes that run a runner of this service.
fn peak_of_workers(service: &str) -> u64 {
    let of = |pid: &std::path::Path| -> Option<u64> {
        let exe = std::fs::read_link(pid.join("exe")).ok()?;
        if !exe.to_str()?.contains(&format!("/{service}/run/")) {
            return None;
        }
        let status = std::fs::read_to_string(pid.join("status")).ok()?;
        let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
        line.trim().trim_end_matches(" kB").parse().ok()
    };
    let pids = std::fs::read_dir("/proc").expect("/proc").flatten();
    pids.filter_map(|e| of(&e.path())).max().unwrap_or(0)
}
