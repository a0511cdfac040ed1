//! Stops that do not end as they should, and outsiders who stop and start: never two generations at once, no verdict
//! over a candidate that was not judged, and a stopped service stays stopped.

#![allow(clippy::disallowed_methods, reason = "nothing here has to survive a power cut")]

mod machine;

use std::fs;
use std::time::{Duration, Instant};

use machine::{Answer, Demo, Machine, Service, wait_for};

/// After the way back from 2.0, whose fault it was not: 1.0 runs and answers, and nothing else is left.
#[track_caller]
fn assert_back(demo: &Service) {
    demo.assert_clean("1.0", &["1.0"]);
    assert_eq!(demo.active(), "active");
    assert_eq!(demo.version().as_deref(), Some("1.0"));
    assert_eq!(demo.quarantined(), [""; 0]);
}

#[track_caller]
fn assert_promoted(demo: &Service) {
    demo.assert_clean("2.0", &["1.0", "2.0"]);
    assert_eq!(demo.active(), "active");
    assert_eq!(demo.version().as_deref(), Some("2.0"));
}

fn starts(demo: &Service, version: &str) -> usize {
    demo.log().iter().filter(|l| **l == format!("start {version}")).count()
}

/// An upgrade to 2.0, and what somebody else does meanwhile.
fn while_upgrading(demo: &Service, act: impl FnOnce()) -> Answer {
    std::thread::scope(|s| {
        let upgrade = s.spawn(|| demo.upgrade("2.0", &[]));
        act();
        upgrade.join().expect("no panic")
    })
}

// ---- A18: a stop that takes longer than it may ----

#[test]
fn a18_a_stop_that_systemd_ended_by_sigkill_goes_back() {
    let m = Machine::shared();
    let demo =
        Demo::new(&m, "a18").first("1.0", &["ignore-term 60000"]).service("TimeoutStopSec=1").managed();
    demo.release("2.0", &[]);
    let answer =
        demo.upgrade("2.0", &[]).rolled_back("undetermined", "systemd killed it, which may have cost data");
    assert!(answer.receipt("reason").contains("stop = \"any\""), "{answer}");
    assert_eq!(starts(&demo, "2.0"), 0, "nothing was switched to");
    assert_back(&demo);
}

#[test]
fn a18_a_killed_stop_is_accepted_by_stop_any() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "a18-any").first("1.0", &["ignore-term 60000"]).service("TimeoutStopSec=1");
    let demo = demo.policy("stop = \"any\"").managed();
    demo.release("2.0", &[]);
    let answer = demo.upgrade("2.0", &[]).expect(0, "promoted");
    assert!(answer.notes().contains("systemd killed it; the adapter accepts that"), "{answer}");
    assert_promoted(&demo);
}

#[test]
fn a18_a_stop_just_before_the_limit_is_clean() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "a18-late")
        .first("1.0", &["ignore-term 1500"])
        .service("TimeoutStopSec=2500ms")
        .managed();
    demo.release("2.0", &[]);
    demo.upgrade("2.0", &[]).expect(0, "promoted");
    assert!(demo.log().contains(&"stop 1.0".to_owned()), "{:?}", demo.log());
    assert_promoted(&demo);
}

#[test]
fn a18_an_exit_code_after_sigterm_is_a_clean_stop() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "a18-code").first("1.0", &["exit-on-term 143"]).managed();
    demo.release("2.0", &[]);
    demo.upgrade("2.0", &[]).expect(0, "promoted");
    assert_promoted(&demo);
}

#[test]
fn a18_a_stop_command_that_hangs_goes_back() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "a18-execstop")
        .first("1.0", &["stop-hangs"])
        .service("TimeoutStopSec=1\nExecStop={state}/current/demo stop $MAINPID --data {data}")
        .managed();
    demo.release("2.0", &[]);
    demo.upgrade("2.0", &[]).rolled_back("undetermined", "did not stop in its time");
    assert_eq!(starts(&demo, "2.0"), 0);
    assert_back(&demo);
}

/// The unit has no limit of its own: ours applies, and we stop waiting without killing.
#[test]
fn a18_an_endless_stop_is_waited_for_by_our_own_bound() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "a18-inf")
        .first("1.0", &["ignore-term 60000"])
        .service("TimeoutStopSec=infinity")
        .adapter("[timeouts]\nstop = \"300ms\"")
        .managed();
    demo.release("2.0", &[]);
    let pid = m.processes(&demo.unit)[0];
    demo.upgrade("2.0", &[]).unresolved("did not stop within 600ms");
    assert_eq!(m.processes(&demo.unit), [pid], "it was not killed");
    assert_eq!((starts(&demo, "1.0"), starts(&demo, "2.0")), (1, 0), "nothing was started beside it");
    // It ends in the end.
    demo.m.run(&["systemctl", "kill", "--signal=KILL", &demo.unit]).ok();
    demo.recover(&[]).rolled_back("undetermined", "did not stop within 600ms");
    assert_back(&demo);
}

#[test]
fn a18_an_endless_stop_that_ends_after_our_bound_goes_back() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "a18-inf-late")
        .first("1.0", &["ignore-term 1200"])
        .service("TimeoutStopSec=infinity")
        .adapter("[timeouts]\nstop = \"400ms\"")
        .managed();
    demo.release("2.0", &[]);
    demo.upgrade("2.0", &[]).rolled_back("undetermined", "did not stop within 800ms");
    assert_back(&demo);
}

// ---- A17: what is left when systemd is done ----

fn with_leftover(m: &Machine, label: &str, service: &str, linger: &str) -> Service {
    let demo = Demo::new(m, label)
        .first("1.0", &["child deaf"])
        .service(service)
        .adapter(&format!("[timeouts]\nlinger = \"{linger}\""))
        .managed();
    wait_for("the child runs", Duration::from_secs(5), || m.processes(&demo.unit).len() == 2);
    demo.release("2.0", &[]);
    demo
}

fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid.try_into().expect("a pid")).expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it is ours");
}

#[test]
fn a17_nothing_is_started_beside_a_leftover_child() {
    let m = Machine::shared();
    for (label, service) in
        [("a17-process", "KillMode=process"), ("a17-nosigkill", "SendSIGKILL=no\nTimeoutStopSec=500ms")]
    {
        let demo = with_leftover(&m, label, service, "200ms");
        let answer =
            demo.upgrade("2.0", &[]).unresolved("is left in its cgroup; nothing was started beside it");
        let left = m.processes(&demo.unit);
        assert_eq!(left.len(), 1, "{label}: the child");
        // Named by its pid inside.
        let status = fs::read_to_string(format!("/proc/{}/status", left[0])).expect("it lives");
        let inside =
            status.lines().find_map(|l| l.strip_prefix("NSpid:")).and_then(|l| l.split('\t').next_back());
        let named = format!("process {} (", inside.expect("a pid namespace"));
        assert!(answer.json["error"].as_str().is_some_and(|e| e.contains(&named)), "{named}: {answer}");
        assert_eq!((starts(&demo, "1.0"), starts(&demo, "2.0")), (1, 0), "{label}: never two generations");
        kill(left[0]);
        demo.recover(&[]).rolled_back("undetermined", "left in its cgroup");
        wait_for("the child runs", Duration::from_secs(5), || m.processes(&demo.unit).len() == 2);
        assert_back(&demo);
    }
}

#[test]
fn a17_a_leftover_that_goes_away_in_time_is_waited_for() {
    let m = Machine::shared();
    let demo = with_leftover(&m, "a17-brief", "KillMode=process", "5s");
    let answer = while_upgrading(&demo, || {
        wait_for("the old version is down", Duration::from_secs(10), || demo.active() == "inactive");
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!((starts(&demo, "1.0"), starts(&demo, "2.0")), (1, 0), "never two generations");
        kill(m.processes(&demo.unit)[0]);
    });
    answer.expect(0, "promoted");
    assert_promoted(&demo);
}

#[test]
fn a17_a_leftover_that_goes_away_later_ends_in_the_old_version() {
    let m = Machine::shared();
    let demo = with_leftover(&m, "a17-later", "KillMode=process", "1s");
    let answer = while_upgrading(&demo, || {
        wait_for("the old version is down", Duration::from_secs(10), || demo.active() == "inactive");
        std::thread::sleep(Duration::from_millis(1500));
        kill(m.processes(&demo.unit)[0]);
    });
    answer.rolled_back("undetermined", "left in its cgroup");
    wait_for("the child runs", Duration::from_secs(5), || m.processes(&demo.unit).len() == 2);
    assert_eq!((starts(&demo, "1.0"), starts(&demo, "2.0")), (2, 0));
    assert_back(&demo);
}

// ---- stop commands ----

#[test]
fn a_stop_command_through_current_is_of_the_version_that_is_stopped() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "stop-command")
        .service("ExecStop={state}/current/demo stop $MAINPID --data {data}")
        .managed();
    demo.release("2.0", &["reports 9"]);
    demo.upgrade("2.0", &[]).rolled_back("bad-candidate", "it reports version");
    demo.assert_clean("1.0", &["1.0"]);
    let expected = [
        "start 1.0",
        "stop-command 1.0",
        "stop 1.0",
        "start 2.0",
        "stop-command 2.0",
        "stop 2.0",
        "start 1.0",
    ];
    assert_eq!(demo.log(), expected);
    demo.release("3.0", &[]);
    demo.upgrade("3.0", &[]).expect(0, "promoted");
    demo.assert_clean("3.0", &["1.0", "3.0"]);
    assert_eq!(demo.log()[expected.len()..], ["stop-command 1.0", "stop 1.0", "start 3.0"]);
}

// ---- services that are stopped ----

#[test]
fn a_stopped_service_is_proved_and_left_stopped() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "stopped").managed();
    demo.systemctl("stop").ok();
    demo.release("2.0", &[]);
    demo.upgrade("2.0", &[]).expect(0, "promoted");
    demo.assert_clean("2.0", &["1.0", "2.0"]);
    assert_eq!((demo.active(), m.processes(&demo.unit)), ("inactive".into(), vec![]));
    assert_eq!(demo.log(), ["start 1.0", "stop 1.0", "start 2.0", "stop 2.0"]);
    demo.systemctl("start").ok();
    wait_for("it answers", Duration::from_secs(5), || demo.version().as_deref() == Some("2.0"));
}

#[test]
fn a_stopped_service_whose_candidate_is_bad_is_left_stopped() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "stopped-bad").managed();
    demo.systemctl("stop").ok();
    demo.release("2.0", &["exit 4"]);
    demo.upgrade("2.0", &[]).rolled_back("bad-candidate", "exited 4");
    demo.assert_clean("1.0", &["1.0"]);
    assert_eq!((demo.active(), m.processes(&demo.unit)), ("inactive".into(), vec![]));
    assert_eq!(demo.log(), ["start 1.0", "stop 1.0", "start 2.0"], "the old version was not run");
    assert_eq!(demo.quarantined(), ["2.0"]);
}

#[test]
fn a_stopped_service_is_left_as_it_is_where_its_release_is_up_to_date() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "stopped-same").managed();
    demo.systemctl("stop").ok();
    let answer = demo.upgrade("1.0", &[]).expect(0, "up-to-date");
    assert!(answer.receipt("reason").contains("is stopped and was left so"), "{answer}");
    demo.assert_clean("1.0", &["1.0"]);
    assert_eq!(demo.active(), "inactive");
}

/// How it ended stands in the unit's state until its next start, and is no end of ours.
#[test]
fn a_service_that_had_been_killed_before_is_upgraded_and_put_back() {
    let m = Machine::shared();
    for reset in [false, true] {
        let demo = Demo::new(&m, "killed-before").managed();
        let killed = || {
            m.run(&["systemctl", "kill", "--signal=KILL", &demo.unit]).ok();
            wait_for("it failed", Duration::from_secs(5), || demo.active() == "failed");
            if reset {
                demo.systemctl("reset-failed").ok();
            }
        };
        killed();
        demo.release("2.0", &[]);
        demo.upgrade("2.0", &[]).expect(0, "promoted");
        demo.assert_clean("2.0", &["1.0", "2.0"]);
        assert_eq!(demo.active(), if reset { "inactive" } else { "active" });
        demo.systemctl("start").ok();
        killed();
        demo.release("3.0", &["exit 5"]);
        let cause = if reset { "bad-candidate" } else { "undetermined" };
        let answer = demo.upgrade("3.0", &[]).rolled_back(cause, "exited 5");
        assert!(!answer.notes().contains("killed while stopping"), "{answer}");
        demo.assert_clean("2.0", &["1.0", "2.0"]);
    }
}

// ---- outsiders ----

#[test]
fn somebody_stops_or_restarts_the_candidate_while_it_is_probed() {
    let m = Machine::shared();
    for verb in ["stop", "restart"] {
        let demo = Demo::new(&m, "outsider").window(3000, 5000).managed();
        demo.release("2.0", &[]);
        let begun = Instant::now();
        let answer = while_upgrading(&demo, || {
            wait_for("2.0 answers", Duration::from_secs(10), || demo.version().as_deref() == Some("2.0"));
            demo.systemctl(verb).ok();
        });
        let answer = answer.rolled_back("undetermined", "by a job that is not ours");
        assert!(begun.elapsed() < Duration::from_secs(12), "{verb}: {:?}: {answer}", begun.elapsed());
        assert_back(&demo);
    }
}

/// logrotate, say: a job on the unit, which leaves it up.
#[test]
fn somebody_reloads_the_candidate_while_it_is_probed() {
    let m = Machine::shared();
    let demo =
        Demo::new(&m, "outsider-reload").service("ExecReload=/bin/sleep 1").window(2000, 5000).managed();
    demo.release("2.0", &[]);
    let answer = while_upgrading(&demo, || {
        wait_for("2.0 answers", Duration::from_secs(10), || demo.version().as_deref() == Some("2.0"));
        demo.systemctl("reload").ok();
    });
    answer.expect(0, "promoted");
    assert_promoted(&demo);
}

#[test]
fn somebody_stops_or_restarts_the_old_version_just_before_we_do() {
    let m = Machine::shared();
    for verb in ["restart", "stop"] {
        let quiesce = format!(
            "[quiesce]\ncommand = [\"/bin/sh\", \"-c\", \"test $CUTOVER_TARGET = 1.0 || systemctl {verb} {{name}}\"]"
        );
        let demo = Demo::new(&m, "outsider-before").adapter(&quiesce).managed();
        demo.release("2.0", &[]);
        demo.upgrade("2.0", &[]).rolled_back("undetermined", "by somebody else just before the stop");
        assert_eq!(starts(&demo, "2.0"), 0, "{verb}");
        assert_back(&demo);
    }
}

#[test]
fn a_job_of_somebody_else_is_waited_for_and_then_given_up() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "foreign-job")
        .service("ExecReload=/bin/sleep $RELOAD_TIME\nEnvironmentFile={data}/reload")
        .file("reload", "RELOAD_TIME=6\n")
        .adapter("[timeouts]\nforeign-job = \"1s\"")
        .managed();
    demo.release("2.0", &[]);
    let before = demo.property("InvocationID");
    let reload = || m.run(&["systemctl", "reload", "--no-block", &demo.unit]).ok();
    reload();
    demo.upgrade("2.0", &[]).failed("a job that is not ours is queued on ");
    assert_eq!(demo.property("InvocationID"), before);
    wait_for("it is over", Duration::from_secs(10), || demo.property("SubState") == "running");
    assert_back(&demo);
    m.write(format!("{}/reload", demo.data), "RELOAD_TIME=0.7\n");
    // Read at the start.
    demo.systemctl("restart").ok();
    reload();
    demo.upgrade("2.0", &[]).expect(0, "promoted");
    assert_promoted(&demo);
}

/// A23: signals are lost while systemd reloads. What happened is read from the unit all the same.
#[test]
fn a23_reloads_of_systemd_change_no_verdict() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "a23").window(1500, 5000).managed();
    // Bounded, because it would outlive a test that fails.
    let script = "for _ in {1..200}; do systemctl daemon-reload; sleep 0.2; done";
    let mut reloads = m.spawn(&["/bin/bash", "-c", script]);
    demo.release("2.0", &[]);
    demo.upgrade("2.0", &[]).expect(0, "promoted");
    demo.release("3.0", &["exit-after 700 1"]);
    demo.upgrade("3.0", &[]).rolled_back("bad-candidate", "did not stay up");
    for n in 4..7 {
        let version = format!("{n}.0");
        demo.release(&version, &[]);
        let answer = std::thread::scope(|s| {
            let upgrade = s.spawn(|| demo.upgrade(&version, &[]));
            wait_for("it answers", Duration::from_secs(20), || demo.version().as_ref() == Some(&version));
            demo.systemctl("restart").ok();
            upgrade.join().expect("no panic")
        });
        answer.rolled_back("undetermined", "by a job that is not ours");
    }
    reloads.kill().expect("it runs");
    reloads.wait().expect("it was killed");
    demo.assert_clean("2.0", &["1.0", "2.0"]);
    assert_eq!(demo.quarantined(), ["3.0"]);
}
