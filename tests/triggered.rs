//! Units that others start: by a socket, a timer, a path, a name on the bus, or a unit that upholds them. Between our stop
//! and our start somebody else's start may come in, and it must start what is meant to run; what triggers the unit is
//! as it was afterwards, and nobody who connects is refused.

#![allow(clippy::disallowed_methods, reason = "nothing here has to survive a power cut")]

mod machine;

use std::time::Duration;

use machine::{Demo, Kind, Machine, Service, wait_for};

/// Under management behind its socket.
fn behind_a_socket(m: &Machine, label: &str) -> Service {
    let demo = Demo::new(m, label).kind(Kind::Socket).install();
    demo.adopt();
    demo
}

/// A unit beside the service: `NAME.timer`, started.
fn beside(demo: &Service, unit: &str, content: &str) {
    demo.m.write(format!("/etc/systemd/system/{unit}"), content);
    demo.m.run(&["systemctl", "daemon-reload"]).ok();
    demo.m.run(&["systemctl", "start", unit]).ok();
}

#[track_caller]
fn assert_runs(demo: &Service, version: &str) {
    wait_for("it answers", Duration::from_secs(5), || demo.version().as_deref() == Some(version));
    assert_eq!(demo.active(), "active");
}

#[test]
fn a_socket_refuses_nobody_forward_and_back() {
    let m = Machine::shared();
    let demo = behind_a_socket(&m, "socket");
    demo.release("2.0", &[]);
    demo.release("3.0", &["reports 9"]);
    demo.release("4.0", &["drain 300"]);
    let socket = format!("{}.socket", demo.name);
    let socket_before = m.property(&socket, "InvocationID");
    let load = demo.load(4);
    demo.upgrade("2.0", &[]).expect(0, "promoted");
    demo.upgrade("3.0", &[]).rolled_back("bad-candidate", "it reports version");
    demo.upgrade("4.0", &[]).expect(0, "promoted");
    demo.release("5.0", &[]);
    demo.upgrade("5.0", &[]).expect(0, "promoted");
    let requests = load.stop();
    assert!(requests.answered > 200, "{requests:?}");
    assert_eq!((requests.refused, requests.failed), (0, 0), "{requests:?}");
    assert_eq!(m.property(&socket, "InvocationID"), socket_before, "the socket was never closed");
    assert_runs(&demo, "5.0");
    demo.assert_clean("5.0", &["4.0", "5.0"]);
    assert_eq!(demo.quarantined(), ["3.0"]);
}

#[test]
fn a_candidate_that_fails_its_socket_is_put_back_behind_it() {
    let m = Machine::shared();
    let demo = behind_a_socket(&m, "socket-fails");
    let socket = format!("{}.socket", demo.name);
    demo.release("2.0", &["exit 3"]);
    let load = demo.load(4);
    demo.upgrade("2.0", &[]).rolled_back("bad-candidate", "exited 3");
    assert_eq!(m.property(&socket, "ActiveState"), "active");
    assert_runs(&demo, "1.0");
    drop(load);
    demo.assert_clean("1.0", &["1.0"]);
    assert_eq!(demo.quarantined(), ["2.0"]);
    // The service has the socket's descriptor, not one of its own.
    demo.systemctl("stop");
    assert_runs(&demo, "1.0");
}

/// The socket is gone when we come to put the old version back. It cannot be opened beside a running service, so that it
/// is opened first, or the service would run without.
#[test]
fn a_socket_that_was_closed_meanwhile_is_opened_before_the_service_is_started() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "socket-closed").kind(Kind::Socket).window(300, 1500).install();
    demo.adopt();
    let socket = format!("{}.socket", demo.name);
    demo.release("2.0", &["status-for 503 60000"]);
    let answer = std::thread::scope(|s| {
        let upgrade = s.spawn(|| demo.upgrade("2.0", &[]));
        wait_for("2.0 runs", Duration::from_secs(10), || demo.log().contains(&"start 2.0".to_owned()));
        m.run(&["systemctl", "stop", &socket]).ok();
        upgrade.join().expect("no panic")
    });
    answer.rolled_back("bad-candidate", "HTTP status 503");
    assert_eq!(m.property(&socket, "ActiveState"), "active");
    assert_runs(&demo, "1.0");
    demo.assert_clean("1.0", &["1.0"]);
    demo.systemctl("stop");
    assert_runs(&demo, "1.0");
}

#[test]
fn a_service_that_waits_behind_its_socket_is_left_waiting() {
    let m = Machine::shared();
    let demo = behind_a_socket(&m, "socket-idle");
    demo.systemctl("stop").ok();
    demo.release("2.0", &[]);
    demo.upgrade("2.0", &[]).expect(0, "promoted");
    demo.assert_clean("2.0", &["1.0", "2.0"]);
    assert_eq!(demo.active(), "inactive");
    demo.release("3.0", &["exit 1"]);
    demo.upgrade("3.0", &[]).rolled_back("bad-candidate", "exited 1");
    demo.assert_clean("2.0", &["1.0", "2.0"]);
    assert_eq!(demo.active(), "inactive");
    assert_runs(&demo, "2.0");
}

/// Whoever connects while the candidate is run for its proof starts it again after our stop.
#[test]
fn a_service_that_waits_behind_its_socket_is_called_meanwhile() {
    let m = Machine::shared();
    let demo = behind_a_socket(&m, "socket-called");
    demo.systemctl("stop").ok();
    demo.release("2.0", &[]);
    let (answer, requests) = std::thread::scope(|s| {
        let upgrade = s.spawn(|| demo.upgrade("2.0", &[]));
        wait_for("2.0 runs", Duration::from_secs(10), || demo.log().contains(&"start 2.0".to_owned()));
        let load = demo.load(4);
        (upgrade.join().expect("no panic"), load.stop())
    });
    answer.expect(0, "promoted");
    assert_eq!((requests.refused, requests.failed), (0, 0), "{requests:?}");
    assert_runs(&demo, "2.0");
    demo.assert_clean("2.0", &["1.0", "2.0"]);
}

/// Forward, back from one that answers wrongly, and back from one that crashes at once.
fn both_ways(demo: &Service) {
    demo.release("2.0", &[]);
    demo.upgrade("2.0", &[]).expect(0, "promoted");
    assert_runs(demo, "2.0");
    demo.assert_clean("2.0", &["1.0", "2.0"]);
    demo.release("3.0", &["reports 9"]);
    demo.upgrade("3.0", &[]).rolled_back("bad-candidate", "it reports version");
    assert_runs(demo, "2.0");
    demo.release("4.0", &["exit 3"]);
    demo.upgrade("4.0", &[]).rolled_back("bad-candidate", "");
    assert_runs(demo, "2.0");
    demo.assert_clean("2.0", &["1.0", "2.0"]);
    assert_eq!(demo.quarantined(), ["3.0", "4.0"]);
    // Nothing ran from what current did not name: whoever started it, started what was meant to run.
    let log = demo.log();
    let at = |line: &str| log.iter().position(|l| l == line);
    assert!(at("start 2.0") > at("stop 1.0"), "{log:?}");
    assert_eq!(log.iter().filter(|l| *l == "start 1.0").count(), 1, "{log:?}");
}

#[test]
fn upheld_by_another_unit() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "upheld").managed();
    let upholder = format!("upholder-{}.service", demo.name);
    let content = format!("[Unit]\nUpholds={}\n[Service]\nExecStart=/bin/sleep infinity\n", demo.unit);
    beside(&demo, &upholder, &content);
    assert_eq!(demo.property("UpheldBy"), upholder);
    both_ways(&demo);
    m.run(&["systemctl", "stop", &upholder]).ok();
}

#[test]
fn triggered_by_a_timer() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "timer").managed();
    let timer = format!("{}.timer", demo.name);
    beside(&demo, &timer, "[Timer]\nOnActiveSec=10ms\nOnUnitInactiveSec=10ms\nAccuracySec=1ms\n");
    both_ways(&demo);
    assert_eq!(m.property(&timer, "ActiveState"), "active");
    m.run(&["systemctl", "stop", &timer]).ok();
}

#[test]
fn triggered_by_a_path() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "path").file("there", "").managed();
    let path = format!("{}.path", demo.name);
    beside(&demo, &path, &format!("[Path]\nPathExists={}/there\n", demo.data));
    both_ways(&demo);
    assert_eq!(m.property(&path, "ActiveState"), "active");
    m.run(&["systemctl", "stop", &path]).ok();
}

#[test]
fn activated_by_its_name_on_the_bus() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "bus").kind(Kind::Dbus).managed();
    let name = demo.bus_name();
    m.write(
        format!("/usr/share/dbus-1/system-services/{name}.service"),
        format!("[D-BUS Service]\nName={name}\nExec=/bin/false\nUser=root\nSystemdService={}\n", demo.unit),
    );
    m.sh("busctl call org.freedesktop.DBus / org.freedesktop.DBus ReloadConfig").ok();
    // Whoever calls starts it.
    let call = format!(
        "while :; do busctl --timeout=2 call {name} / org.freedesktop.DBus.Peer Ping; sleep 0.01; done"
    );
    let mut calls = m
        .command(&["/bin/bash", "-c", &call])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("busctl");
    both_ways(&demo);
    calls.kill().expect("it runs");
    calls.wait().expect("it was killed");
}

#[test]
fn stop_commands_through_current_are_refused_unless_they_fit_both_versions() {
    let m = Machine::shared();
    let line = "ExecStop=/opt/{name}/demo stop $MAINPID --data {data}";
    let demo = Demo::new(&m, "stop-refused").kind(Kind::Socket).service(line).install();
    demo.adopt_as("1.0").held("fit-both");
    assert_eq!(demo.version().as_deref(), Some("1.0"));

    let demo = Demo::new(&m, "stop-fits")
        .kind(Kind::Socket)
        .service(line)
        .policy("stop-commands = \"fit-both\"")
        .install();
    demo.adopt();
    demo.release("2.0", &[]);
    let load = demo.load(2);
    demo.upgrade("2.0", &[]).expect(0, "promoted");
    let requests = load.stop();
    assert_eq!((requests.refused, requests.failed), (0, 0), "{requests:?}");
    demo.assert_clean("2.0", &["1.0", "2.0"]);
    // Its line goes through `current`, which has switched before.
    assert!(demo.log().contains(&"stop-command 2.0".to_owned()), "{:?}", demo.log());
}
