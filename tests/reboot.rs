//! The machine goes down in the middle (K82–K86). Until the boot hook does it, a person asks for the recovery.

#![allow(clippy::disallowed_methods, reason = "nothing here has to survive a power cut")]

mod machine;

use machine::faults::BROKEN;
use machine::{Demo, Machine, Service};

/// The steps of a receipt's timeline that say a boot lay before them.
fn after_reboot(receipt: &serde_json::Value) -> Vec<String> {
    let steps = receipt["metadata"]["timeline"].as_array().unwrap();
    let after = steps.iter().filter(|s| s["afterReboot"] == true);
    after.map(|s| s["phase"].as_str().unwrap().to_owned()).collect()
}

/// Settles what the boot found open.
#[track_caller]
fn assert_recovered(s: &Service, code: i32, outcome: &str, stable: &str, case: &str) {
    let open = s.cutover(&["status", &s.name]);
    assert_eq!(
        (open.code, open.receipt("id"), open.receipt("outcome")),
        (0, "cut".into(), String::new()),
        "{case}: {open}"
    );
    let answer = s.recover(&[]).expect(code, outcome);
    let receipts = s.receipts_of("cut");
    assert_eq!(receipts.len(), 1, "{case}: {answer}");
    // Where the end itself was recorded before the boot, nothing is recorded after it.
    let boots = usize::from(case != "before:receipt");
    assert_eq!(after_reboot(&receipts[0]).len(), boots, "{case}: one boot lay in between: {answer}");
    assert_eq!(s.version().as_deref(), Some(stable), "{case}: {answer}");
    assert!(!s.m.exists(s.scratch("cut")), "{case}: its scratch directory is left");
    s.assert_at_rest(stable);
}

#[test]
fn after_a_power_cut_at_each_record_a_recovery_settles_it() {
    let m = Machine::own();
    let cases = [
        ("after:staged", &[] as &[&str], 1, "failed"),
        ("after:handing-over", &[], 1, "rolled-back"),
        ("after:running-experiment", &[], 1, "rolled-back"),
        ("after:stop", &[], 1, "rolled-back"),
        ("after:readback", &[], 1, "rolled-back"),
        ("after:promoted", &[], 0, "promoted"),
        ("after:promote", &[], 0, "promoted"),
        ("before:receipt", &[], 0, "promoted"),
        ("after:rolling-back", &["exit 1"], 1, "rolled-back"),
        ("after:start-back", &["exit 1"], 1, "rolled-back"),
    ];
    let services: Vec<Service> = cases
        .iter()
        .map(|(point, switches, ..)| {
            let s = Demo::new(&m, &point.replace(':', "-")).managed();
            s.release("2.0", switches);
            s
        })
        .collect();
    let mut clients = vec![];
    for (s, (point, ..)) in services.iter().zip(&cases) {
        let line = format!("{point} hold");
        s.failpoints(&[&line]);
        clients.push(m.spawn(&[BROKEN, "upgrade", &s.name, "2.0", "--id", "cut"]));
    }
    for (s, (point, ..)) in services.iter().zip(&cases) {
        s.wait_fired(&format!("{point} hold"));
    }
    m.power_cut();
    for mut client in clients {
        client.wait().unwrap();
    }
    for (s, (point, _, code, outcome)) in services.iter().zip(&cases) {
        assert_ne!(s.active(), "active", "nothing starts it at boot: that is the recovery's to do");
        let stable = if *outcome == "promoted" { "2.0" } else { "1.0" };
        if matches!(*point, "after:staged" | "before:receipt") {
            // Nothing that ran had changed, or the operation was over: nothing is started, as after any boot.
            s.systemctl("start").ok();
        }
        assert_recovered(s, *code, outcome, stable, point);
    }
}

#[test]
fn an_orderly_shutdown_gives_no_verdict_and_the_next_boot_goes_back() {
    // Its workers are told to leave, and leave: nothing that happens while the machine goes down says anything.
    let m = Machine::own();
    let demo = |label| Demo::new(&m, label).window(20_000, 5_000);
    let [probing, next] = ["probing", "next"].map(|label| {
        let s = demo(label).genesis().install();
        s.release("1.0", &[]);
        s.release("2.0", &[]);
        // The first version need not wait so long.
        let file = format!("/etc/cutover/services/{}.toml", s.name);
        let slow = m.read(&file);
        m.write(&file, slow.replace("20000ms", "300ms"));
        s.upgrade("1.0", &[]).expect(0, "promoted");
        m.write(&file, slow);
        s
    });
    let clients = [&probing, &next].map(|s| m.spawn(&[BROKEN, "upgrade", &s.name, "2.0", "--id", "cut"]));
    for s in [&probing, &next] {
        machine::wait_for("the candidate runs", std::time::Duration::from_secs(20), || {
            s.version().as_deref() == Some("2.0")
                && s.cutover(&["status", &s.name]).receipt("phase") == "readback"
        });
    }
    m.reboot();
    for mut client in clients {
        client.wait().unwrap();
    }
    // The window is short again, so that the way back takes no longer than it must.
    for s in [&probing, &next] {
        let file = format!("/etc/cutover/services/{}.toml", s.name);
        m.write(&file, m.read(&file).replace("20000ms", "300ms"));
    }
    let receipt = probing.cutover(&["status", &probing.name]);
    assert_eq!(receipt.receipt("phase"), "readback", "no verdict: {receipt}");
    assert_recovered(&probing, 1, "rolled-back", "1.0", "probing");
    assert_eq!(probing.receipts_of("cut")[0]["cause"], "undetermined");
    // K84: the next request settles it first, whoever makes it.
    next.release("3.0", &[]);
    next.upgrade("3.0", &[]).expect(0, "promoted");
    let first = next.receipts_of("cut");
    assert_eq!((first.len(), first[0]["outcome"].as_str()), (1, Some("rolled-back")), "{first:?}");
    assert_eq!(after_reboot(&first[0]).len(), 1, "{first:?}");
    assert!(!m.exists(next.scratch("cut")), "its scratch directory is left");
    next.assert_at_rest("3.0");
}
