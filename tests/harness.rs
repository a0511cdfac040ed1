//! The tests' own machine and service do what the other tests take for granted.

#![allow(clippy::disallowed_methods, reason = "nothing here has to survive a power cut")]

mod machine;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use cutover::adapter::Adapter;
use machine::{Demo, Kind, Machine, wait_for};

/// An upgrade by hand: another program at the same place.
fn replace(demo: &machine::Service, version: &str, switches: &[&str]) {
    let program = demo.payload(version, switches);
    demo.m.run(&["systemctl", "stop", &demo.unit]).ok();
    demo.m.write_program(&demo.program, program);
}

#[test]
fn every_kind_of_unit_runs_and_answers() {
    let m = Machine::shared();
    for kind in [
        Kind::Simple,
        Kind::Exec,
        Kind::Notify,
        Kind::Forking,
        Kind::Dbus,
        Kind::Socket,
        Kind::Python,
        Kind::Oneshot,
    ] {
        let demo = Demo::new(&m, "kind").kind(kind).install();
        assert_eq!(demo.active(), "active", "{kind:?}");
        if let Err(e) = Adapter::load(&m.path("/etc/cutover/services"), &demo.name) {
            panic!("{kind:?}: {e}");
        }
        if kind == Kind::Oneshot {
            let report = m.run(&[&demo.program, "report"]).ok();
            assert!(report.contains("\"1.0\""), "{report}");
        } else {
            assert_eq!(demo.version().as_deref(), Some("1.0"), "{kind:?}");
            assert_eq!(m.processes(&demo.unit).len(), 1, "{kind:?}");
        }
        demo.systemctl("stop").ok();
        assert_eq!(demo.property("Result"), "success", "{kind:?}");
        if !matches!(kind, Kind::Python | Kind::Oneshot) {
            assert_eq!(demo.log(), ["start 1.0", "stop 1.0"], "{kind:?}");
            assert_eq!(m.read(format!("{}/clean", demo.data)), "1.0");
        }
    }
}

#[test]
fn the_kernel_shows_which_file_a_process_executes() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "kernel").stopped().install();
    let program = format!("{}/demo", demo.state);
    m.write_program(&program, demo.payload("1.0", &[]));
    m.write(
        format!("/run/systemd/system/{}.d/program.conf", demo.unit),
        format!("[Service]\nExecStart=\nExecStart={program} --port {}\n", demo.port),
    );
    m.run(&["systemctl", "daemon-reload"]).ok();
    demo.systemctl("start").ok();
    let file = fs::metadata(m.path(&program)).expect("written");
    let exe = fs::metadata(format!("/proc/{}/exe", m.processes(&demo.unit)[0])).expect("running");
    assert_eq!((exe.dev(), exe.ino()), (file.dev(), file.ino()));
}

#[test]
fn a_release_can_misbehave_in_each_way() {
    let m = Machine::shared();
    let demo =
        Demo::new(&m, "faults").kind(Kind::Notify).service("TimeoutStartSec=1\nTimeoutStopSec=1").install();
    let start = || demo.systemctl("start").code;

    replace(&demo, "2.0", &["exit 3"]);
    assert_ne!(start(), 0);
    assert_eq!(demo.property("ExecMainStatus"), "3");

    replace(&demo, "2.0", &["ready no"]);
    assert_ne!(start(), 0);
    assert_eq!(demo.property("Result"), "timeout");

    replace(&demo, "2.0", &["reports 9.9"]);
    assert_eq!(start(), 0);
    assert_eq!(demo.version().as_deref(), Some("9.9"));

    replace(&demo, "2.0", &["status 503 2"]);
    assert_eq!(start(), 0);
    assert_eq!([demo.version(), demo.version(), demo.version()], [None, None, Some("2.0".into())]);

    replace(&demo, "2.0", &["body huge"]);
    assert_eq!(start(), 0);
    assert!(m.get(demo.port, "/version").expect("an answer").len() > 1 << 20);

    replace(&demo, "2.0", &["ignore-term 60000"]);
    assert_eq!(start(), 0);
    demo.systemctl("stop");
    assert_eq!(demo.property("Result"), "timeout");
    assert!(!m.exists(format!("{}/clean", demo.data)));

    replace(&demo, "2.0", &["exit-after 300 7"]);
    assert_eq!(start(), 0);
    wait_for("it exits", Duration::from_secs(5), || demo.property("ExecMainStatus") == "7");

    replace(&demo, "2.0", &["needs-file /srv/needed"]);
    assert_eq!(start(), 0);
    assert_eq!(demo.version(), None);
    m.write("/srv/needed", "");
    assert_eq!(demo.version().as_deref(), Some("2.0"));

    replace(&demo, "2.0", &["schema 16"]);
    assert_eq!(start(), 0);
    replace(&demo, "1.0", &["schema 15"]);
    assert_ne!(start(), 0);
    assert_eq!(demo.property("ExecMainStatus"), "78");
}

#[test]
fn a_leftover_child_outlives_its_unit_and_answers() {
    let m = Machine::shared();
    let demo =
        Demo::new(&m, "leftover").first("1.0", &["child answers"]).service("KillMode=process").install();
    wait_for("the child runs", Duration::from_secs(5), || m.processes(&demo.unit).len() == 2);
    demo.systemctl("stop").ok();
    assert_eq!(demo.active(), "inactive");
    wait_for("the child answers", Duration::from_secs(5), || demo.version().as_deref() == Some("1.0"));
    assert_eq!(demo.systemctl("kill").code, 0);
}

#[test]
fn a_restart_behind_a_socket_refuses_nobody() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "socket").kind(Kind::Socket).install();
    let load = demo.load(4);
    for _ in 0..5 {
        // Five in ten seconds are as many as systemd allows.
        demo.systemctl("reset-failed").ok();
        demo.systemctl("restart").ok();
    }
    let requests = load.stop();
    assert!(requests.answered > 100, "{requests:?}");
    assert_eq!((requests.refused, requests.failed), (0, 0), "{requests:?}");
}

#[test]
fn a_machine_of_its_own_comes_back_from_reboot_and_power_cut() {
    let m = Machine::own();
    m.write("/var/lib/cutover/kept", "1");
    m.write("/run/lost", "1");
    for boot in [Machine::reboot, Machine::power_cut] {
        let before = m.pid();
        boot(&m);
        assert_ne!(m.pid(), before);
        assert_eq!(m.run(&["systemctl", "is-system-running"]).ok().trim(), "running");
        assert!(m.exists("/var/lib/cutover/kept"));
        assert!(!m.exists("/run/lost"));
    }
}
