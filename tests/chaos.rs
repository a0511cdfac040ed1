//! systemd, its bus and the network in trouble of their own while an operation runs. Each test has its own machine.

#![allow(clippy::disallowed_methods, reason = "nothing here has to survive a power cut")]

mod machine;

use std::process::Child;
use std::time::Duration;

use machine::faults::BROKEN;
use machine::{Demo, Machine, Service, wait_for};

/// Does it again and again, until dropped.
struct Storm(Child);

impl Storm {
    fn of(m: &Machine, command: &str, pause: &str) -> Self {
        let script = format!("while :; do {command} >/dev/null 2>&1; sleep {pause}; done");
        Self(m.spawn(&["/bin/bash", "-c", &script]))
    }
}

impl Drop for Storm {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Its start limit is not what is tested.
const RESTART_BUS: &str = "systemctl reset-failed dbus && systemctl restart dbus";

/// One good upgrade, one bad, and one whose worker is killed in the middle.
#[track_caller]
fn assert_upgrades(s: &Service, from: u32) {
    let [good, bad, cut] = [0, 1, 2].map(|n| format!("{}.0", from + n));
    s.release(&good, &[]);
    s.release(&bad, &["exit 1"]);
    s.release(&cut, &[]);
    s.failpoints(&["after:readback kill"]);
    s.upgrade(&good, &[]).expect(0, "promoted");
    s.upgrade(&bad, &[]).rolled_back("bad-candidate", "");
    s.broken_upgrade(&cut, &[]).rolled_back("undetermined", "");
    assert_eq!(s.fired().len(), 1);
    assert_eq!(s.version().as_deref(), Some(good.as_str()));
}

#[test]
fn a23_reloads_all_the_time() {
    let m = Machine::own();
    let s = Demo::new(&m, "a23").managed();
    let storm = Storm::of(&m, "systemctl daemon-reload", "0.05");
    assert_upgrades(&s, 2);
    assert_upgrades(&s, 5);
    drop(storm);
    s.assert_at_rest("5.0");
}

#[test]
fn a23_systemd_executes_itself_anew_all_the_time() {
    let m = Machine::own();
    let s = Demo::new(&m, "reexec").managed();
    let storm = Storm::of(&m, "systemctl daemon-reexec", "0.7");
    assert_upgrades(&s, 2);
    drop(storm);
    wait_for("systemd is back", Duration::from_secs(20), || {
        m.run(&["systemctl", "is-system-running"]).code == 0
    });
    s.assert_at_rest("2.0");
}

#[test]
fn the_bus_is_started_again_in_each_phase() {
    let m = Machine::own();
    let s = Demo::new(&m, "bus").managed();
    let points = [
        "after:attempt hold",
        "step:staging hold",
        "after:staged hold",
        "after:running-experiment hold",
        "after:stop hold",
        "after:start hold",
        "step:probing hold",
        "after:promoted hold",
    ];
    s.release("2.0", &[]);
    s.failpoints(&points);
    let client = m.spawn(&[BROKEN, "upgrade", &s.name, "2.0", "--id", "good"]);
    for (n, point) in points.iter().enumerate() {
        s.wait_fired(point);
        m.sh(RESTART_BUS).ok();
        s.hold_only(&points[n + 1..]);
    }
    let out = client.wait_with_output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
    s.assert_at_rest("2.0");

    // A worker that dies just before: its name on the bus may be somebody else's on the next one, and is not waited for.
    s.release("3.0", &[]);
    s.failpoints(&["after:readback hold"]);
    let client = m.spawn(&[BROKEN, "upgrade", &s.name, "3.0", "--id", "cut"]);
    s.wait_fired("after:readback hold");
    let begun = std::time::Instant::now();
    let worker = s.worker_unit("cut");
    m.sh(&format!("systemctl kill -s KILL {worker}; {RESTART_BUS}")).ok();
    s.hold_only(&[]);
    let out = client.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(1), "{}", String::from_utf8_lossy(&out.stdout));
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    assert_eq!(s.receipts_of("cut")[0]["outcome"], "rolled-back");
    s.assert_at_rest("2.0");
}

#[test]
fn a_recovery_uses_no_network() {
    // K25, K70: not even the loopback is up, and the releases are gone.
    let m = Machine::own();
    let s = Demo::new(&m, "offline").probe("kind = \"kernel\"").managed();
    s.release("2.0", &[]);
    s.failpoints(&["after:start kill", "after:stop-back kill 2"]);
    let answer = s.broken_upgrade("2.0", &["--id", "cut"]).unresolved("");
    m.run(&["ip", "link", "set", "lo", "down"]).ok();
    m.run(&["rm", "-r", &format!("/srv/{}/2.0", s.name), &format!("/srv/{}/1.0", s.name)]).ok();
    let resumed = s.cutover(&["resume", &format!("{}/recovery.json", s.scratch("cut"))]);
    assert_eq!((resumed.code, resumed.receipt("outcome").as_str()), (1, "rolled-back"), "{answer}{resumed}");
    s.assert_at_rest("1.0");
}

#[test]
fn who_stops_waiting_is_let_go_though_the_bus_is_away() {
    let m = Machine::own();
    let s = Demo::new(&m, "away").managed();
    s.release("2.0", &[]);
    s.failpoints(&["after:staged hold"]);
    let ask = format!("echo $$ >/root/pid; exec {BROKEN} upgrade {} 2.0 --id cut", s.name);
    let client = m.spawn(&["/bin/bash", "-c", &ask]);
    s.wait_fired("after:staged hold");
    // Without a bus and without a worker, nobody can tell whether one will come back.
    let worker = s.worker_unit("cut");
    m.sh(&format!("systemctl stop dbus.socket dbus.service; systemctl kill -s STOP {worker}")).ok();
    std::thread::sleep(Duration::from_secs(2));
    let begun = std::time::Instant::now();
    m.sh("kill -TERM $(cat /root/pid)").ok();
    let out = client.wait_with_output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&out.stdout).expect("one answer");
    assert_eq!((out.status.code(), json["result"].as_str()), (Some(3), Some("detached")), "{json}");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    m.sh(&format!("systemctl start dbus.socket dbus.service; systemctl kill -s CONT {worker}")).ok();
    s.hold_only(&[]);
    wait_for("its receipt", Duration::from_secs(60), || {
        s.receipts_of("cut").first().is_some_and(|r| r["outcome"] == "promoted")
    });
    wait_for("its end", Duration::from_secs(10), || s.worker_unit("cut").is_empty());
    s.assert_settled("2.0");
}
