//! Named points at which a test kills, stops or holds the process, and times that a test makes shorter. Compiled in
//! only with the feature `failpoints`, which nothing that is shipped has; without it, all of this is nothing.
//!
//! A test writes `/run/cutover-test/SERVICE.failpoints`: one line each, `POINT ACTION [TIMES] [@N]`.
//!
//! | action | does |
//! |---|---|
//! | `kill` | SIGKILL to this process |
//! | `term` | SIGTERM to this process, which goes on |
//! | `exit` | ends it with status 9 |
//! | `hold` | waits here for as long as the line is in the file |
//!
//! `TIMES` (default 1) is how often it is done, over all processes; `@N` passes the point N-1 times first in each
//! process. What was done is appended to `SERVICE.fired`. `SERVICE.pace` has lines `NAME MILLISECONDS`: see [`pace`].

#[cfg(feature = "failpoints")]
pub(crate) use self::on::{hit, pace, serve, writable};

/// Says which service this process works on.
#[cfg(not(feature = "failpoints"))]
pub(crate) fn serve(_service: &str) {}

/// Does what the test asked for at this point.
#[cfg(not(feature = "failpoints"))]
pub(crate) fn hit(_point: &str) {}

/// A time that a test may set: `watchdog` is the unit's, `deadline` the most that any step has.
#[cfg(not(feature = "failpoints"))]
pub(crate) fn pace(_name: &str, ordinary: std::time::Duration) -> std::time::Duration {
    ordinary
}

/// What a worker must be able to write for its failpoints.
#[cfg(not(feature = "failpoints"))]
pub(crate) fn writable() -> Option<std::path::PathBuf> {
    None
}

#[cfg(feature = "failpoints")]
#[expect(clippy::disallowed_methods, reason = "test support")]
mod on {
    use std::collections::BTreeMap;
    use std::fs;
    use std::io::Write as _;
    use std::path::{Path, PathBuf};
    use std::sync::{Mutex, OnceLock, PoisonError};
    use std::time::Duration;

    use rustix::process::{Signal, getpid, kill_process};

    const DIR: &str = "/run/cutover-test";

    static SERVICE: OnceLock<String> = OnceLock::new();
    static PASSED: Mutex<BTreeMap<String, usize>> = Mutex::new(BTreeMap::new());

    pub(crate) fn serve(service: &str) {
        let _ = SERVICE.set(service.to_owned());
    }

    fn read(kind: &str) -> String {
        let service = SERVICE.get().map_or("", String::as_str);
        fs::read_to_string(format!("{DIR}/{service}.{kind}")).unwrap_or_default()
    }

    pub(crate) fn writable() -> Option<PathBuf> {
        Path::new(DIR).is_dir().then(|| DIR.into())
    }

    pub(crate) fn pace(name: &str, ordinary: Duration) -> Duration {
        let text = read("pace");
        let set = text.lines().filter_map(|line| line.split_once(' ')).find(|(n, _)| *n == name);
        set.and_then(|(_, ms)| ms.parse().ok()).map_or(ordinary, Duration::from_millis)
    }

    pub(crate) fn hit(point: &str) {
        let passed = {
            let mut all = PASSED.lock().unwrap_or_else(PoisonError::into_inner);
            let passed = all.entry(point.to_owned()).or_default();
            *passed += 1;
            *passed
        };
        for line in read("failpoints").lines() {
            let mut words = line.split_whitespace();
            let (Some(at), Some(action)) = (words.next(), words.next()) else { continue };
            let (mut times, mut from) = (1, 1);
            for word in words {
                match word.strip_prefix('@') {
                    Some(n) => from = n.parse().expect("@N"),
                    None => times = word.parse().expect("TIMES"),
                }
            }
            let done = read("fired").lines().filter(|l| *l == line).count();
            if at == point && passed >= from && done < times {
                record(line);
                act(action, line);
            }
        }
    }

    fn record(line: &str) {
        let service = SERVICE.get().map_or("", String::as_str);
        let path = format!("{DIR}/{service}.fired");
        let mut file = fs::OpenOptions::new().create(true).append(true).open(path).expect("writable");
        file.write_all(format!("{line}\n").as_bytes()).expect("room on /run");
    }

    fn act(action: &str, line: &str) {
        match action {
            "kill" => kill_process(getpid(), Signal::KILL).expect("allowed"),
            "term" => kill_process(getpid(), Signal::TERM).expect("allowed"),
            "exit" => std::process::exit(9),
            "hold" => {
                while read("failpoints").lines().any(|l| l == line) {
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
            other => panic!("unknown action {other:?}"),
        }
    }
}
