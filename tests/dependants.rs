//! Units that the stop of a service takes down with it: those that ran are back afterwards, in both directions, and those
//! that are managed themselves are left alone meanwhile.

#![allow(clippy::disallowed_methods, reason = "nothing here has to survive a power cut")]

mod machine;

use std::time::Duration;

use machine::{Demo, Machine, Service, wait_for};

/// A unit that depends on the service as told; its name.
fn dependant(demo: &Service, label: &str, unit: &str, service: &str) -> String {
    let name = format!("{label}-{}.service", demo.name);
    let unit = unit.replace("{}", &demo.unit);
    demo.m.write(
        format!("/etc/systemd/system/{name}"),
        format!("[Unit]\n{unit}\n[Service]\n{service}\nExecStart=/bin/sleep infinity\n"),
    );
    name
}

fn start(demo: &Service, units: &[&String]) {
    demo.m.run(&["systemctl", "daemon-reload"]).ok();
    for unit in units {
        demo.m.run(&["systemctl", "start", unit]).ok();
    }
}

fn states(demo: &Service, units: &[&String]) -> Vec<String> {
    units.iter().map(|u| demo.m.property(u, "ActiveState")).collect()
}

#[test]
fn those_that_ran_come_back_in_both_directions() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "deps").managed();
    let requires = dependant(&demo, "requires", "Requires={}\nAfter={}", "");
    let binds = dependant(&demo, "binds", "BindsTo={}\nAfter={}", "");
    let part = dependant(&demo, "part", "PartOf={}", "");
    let second = dependant(&demo, "second", &format!("Requires={requires}\nAfter={requires}"), "");
    let idle = dependant(&demo, "idle", "Requires={}", "");
    let failed = dependant(&demo, "failed", "PartOf={}", "");
    start(&demo, &[&requires, &binds, &part, &second, &failed]);
    m.run(&["systemctl", "kill", "--signal=KILL", &failed]).ok();
    wait_for("it failed", Duration::from_secs(5), || m.property(&failed, "ActiveState") == "failed");
    let ran = [&requires, &binds, &part, &second];
    let invocations = || ran.map(|u| m.property(u, "InvocationID"));
    let check = |version: &str, kept: &[&str]| {
        demo.assert_clean(version, kept);
        assert_eq!(states(&demo, &ran), ["active"; 4], "{version}");
        assert_eq!(states(&demo, &[&idle, &failed]), ["inactive", "failed"], "they did not run before");
    };
    let mut before = invocations();
    let mut restarted = || {
        let now = invocations();
        let all = before.iter().zip(&now).all(|(b, n)| b != n);
        before = now;
        assert!(all, "the stop takes them all down, or this shows nothing");
    };
    demo.release("2.0", &[]);
    let answer = demo.upgrade("2.0", &[]).expect(0, "promoted");
    assert_eq!(answer.notes(), "");
    check("2.0", &["1.0", "2.0"]);
    restarted();
    demo.release("3.0", &["exit 1"]);
    // It exits before or after its dependants were started, which start it once more: the words differ.
    demo.upgrade("3.0", &[]).rolled_back("bad-candidate", "it is ");
    check("2.0", &["1.0", "2.0"]);
    restarted();
    demo.release("4.0", &["reports 9"]);
    let answer = demo.upgrade("4.0", &[]).rolled_back("bad-candidate", "it reports version");
    assert_eq!(answer.notes(), "");
    check("2.0", &["1.0", "2.0"]);
    restarted();
}

#[test]
fn one_that_does_not_come_back_is_a_note() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "deps-note").managed();
    let guard = format!("ExecStartPre=/usr/bin/test ! -e {}/broken", demo.data);
    let broken = dependant(&demo, "broken", "Requires={}\nAfter={}", &guard);
    let whole = dependant(&demo, "whole", "Requires={}\nAfter={}", "");
    start(&demo, &[&broken, &whole]);
    m.write(format!("{}/broken", demo.data), "");
    demo.release("2.0", &[]);
    let note = format!("{broken} was running before and is now failed");
    let answer = demo.upgrade("2.0", &[]).expect(0, "promoted");
    assert!(answer.notes().contains(&note), "{answer}");
    demo.assert_clean("2.0", &["1.0", "2.0"]);
    assert_eq!(states(&demo, &[&broken, &whole]), ["failed", "active"]);

    m.run(&["rm", &format!("{}/broken", demo.data)]).ok();
    start(&demo, &[&broken]);
    m.write(format!("{}/broken", demo.data), "");
    demo.release("3.0", &["exit 1"]);
    let answer = demo.upgrade("3.0", &[]).rolled_back("bad-candidate", "exited 1");
    assert!(answer.notes().contains(&note), "{answer}");
    demo.assert_clean("2.0", &["1.0", "2.0"]);
    assert_eq!(states(&demo, &[&broken, &whole]), ["failed", "active"]);
}

/// The service is stopped, and what belongs to it runs all the same: it ran before, so it runs afterwards.
#[test]
fn those_of_a_stopped_service_come_back_without_it() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "deps-stopped").managed();
    let part = dependant(&demo, "part", "PartOf={}", "");
    let requires = dependant(&demo, "requires", "Requires={}", "");
    demo.systemctl("stop").ok();
    start(&demo, &[&part]);
    demo.release("2.0", &[]);
    let answer = demo.upgrade("2.0", &[]).expect(0, "promoted");
    assert!(
        answer
            .notes()
            .lines()
            .eq(["the service was stopped before: the candidate ran for its proof, and was stopped again"])
    );
    demo.assert_clean("2.0", &["1.0", "2.0"]);
    assert_eq!((demo.active(), m.property(&part, "ActiveState")), ("inactive".into(), "active".into()));
    demo.release("3.0", &["exit 1"]);
    demo.upgrade("3.0", &[]).rolled_back("bad-candidate", "exited 1");
    demo.assert_clean("2.0", &["1.0", "2.0"]);
    assert_eq!((demo.active(), m.property(&part, "ActiveState")), ("inactive".into(), "active".into()));

    // What would start it is not started again: the service was stopped on purpose.
    start(&demo, &[&requires]);
    m.run(&["systemctl", "kill", "--signal=KILL", &demo.unit]).ok();
    wait_for("it failed", Duration::from_secs(5), || demo.active() == "failed");
    demo.systemctl("reset-failed").ok();
    assert_eq!(states(&demo, &[&part, &requires]), ["active"; 2]);
    demo.release("4.0", &[]);
    let answer = demo.upgrade("4.0", &[]).expect(0, "promoted");
    assert!(
        answer.notes().contains(&format!("{requires} was running before, and was not started again")),
        "{answer}"
    );
    demo.assert_clean("4.0", &["2.0", "4.0"]);
    assert_eq!((demo.active(), m.property(&part, "ActiveState")), ("inactive".into(), "active".into()));
}

/// Two managed services, and the second requires the first.
fn pair(m: &Machine, label: &str) -> (Service, Service) {
    let first = Demo::new(m, label).window(2500, 5000).managed();
    let second = Demo::new(m, &format!("{label}-on"))
        .unit(&format!("Requires={}\nAfter={}", first.unit, first.unit))
        .window(2500, 5000)
        .managed();
    for demo in [&first, &second] {
        demo.release("2.0", &[]);
    }
    (first, second)
}

#[test]
fn a_managed_service_is_busy_while_the_one_that_it_requires_is_upgraded() {
    let m = Machine::shared();
    let (first, second) = pair(&m, "pair");
    let answer = std::thread::scope(|s| {
        let upgrade = s.spawn(|| first.upgrade("2.0", &["--id", "one"]));
        wait_for("2.0 runs", Duration::from_secs(10), || first.version().as_deref() == Some("2.0"));
        let busy = second.upgrade("2.0", &["--id", "two"]);
        assert_eq!((busy.code, busy.json["result"].as_str()), (2, Some("busy")), "{busy}");
        upgrade.join().expect("no panic")
    });
    answer.expect(0, "promoted");
    first.assert_clean("2.0", &["1.0", "2.0"]);
    wait_for("it came back", Duration::from_secs(5), || second.version().as_deref() == Some("1.0"));
    second.assert_clean("1.0", &["1.0"]);
    // The id was not used up.
    second.upgrade("2.0", &["--id", "two"]).expect(0, "promoted");
    second.assert_clean("2.0", &["1.0", "2.0"]);
    first.assert_clean("2.0", &["1.0", "2.0"]);
}

#[test]
fn a_managed_service_is_busy_while_one_that_requires_it_is_upgraded() {
    let m = Machine::shared();
    let (first, second) = pair(&m, "pair-back");
    let invocation = first.property("InvocationID");
    let answer = std::thread::scope(|s| {
        let upgrade = s.spawn(|| second.upgrade("2.0", &[]));
        wait_for("2.0 runs", Duration::from_secs(10), || second.version().as_deref() == Some("2.0"));
        let busy = first.upgrade("2.0", &[]);
        assert_eq!((busy.code, busy.json["result"].as_str()), (2, Some("busy")), "{busy}");
        upgrade.join().expect("no panic")
    });
    answer.expect(0, "promoted");
    assert_eq!(first.property("InvocationID"), invocation, "the one that is required was not touched");
    second.assert_clean("2.0", &["1.0", "2.0"]);
    first.upgrade("2.0", &[]).expect(0, "promoted");
    first.assert_clean("2.0", &["1.0", "2.0"]);
    wait_for("it came back", Duration::from_secs(5), || second.version().as_deref() == Some("2.0"));
    second.assert_clean("2.0", &["1.0", "2.0"]);
}

/// An operation that is left open holds up those that concern it, too.
#[test]
fn a_managed_service_is_busy_while_the_one_that_it_requires_is_unresolved() {
    let m = Machine::shared();
    let first = Demo::new(&m, "pair-open").first("1.0", &["schema 1"]).managed();
    let second = Demo::new(&m, "pair-open-on")
        .unit(&format!("Wants={0}\nRequires={0}\nAfter={0}", first.unit))
        .managed();
    first.release("2.0", &["schema 2", "exit 1"]);
    second.release("2.0", &[]);
    first.upgrade("2.0", &[]).unresolved("does not pass");
    let busy = second.upgrade("2.0", &[]);
    assert_eq!((busy.code, busy.json["result"].as_str()), (2, Some("busy")), "{busy}");
    m.write(format!("{}/schema", first.data), "1\n");
    first.recover(&[]).rolled_back("undetermined", "exited 1");
    wait_for("it came back", Duration::from_secs(5), || second.version().as_deref() == Some("1.0"));
    second.upgrade("2.0", &[]).expect(0, "promoted");
    second.assert_clean("2.0", &["1.0", "2.0"]);
    first.assert_clean("1.0", &["1.0"]);
}

#[test]
fn more_dependants_than_a_record_holds_are_refused_with_that_reason() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "crowd").managed();
    let long = "n".repeat(150);
    let crowd: Vec<String> =
        (0..40).map(|n| dependant(&demo, &format!("{long}{n}"), "Requires={}\nAfter={}", "")).collect();
    start(&demo, &crowd.iter().collect::<Vec<_>>());
    demo.release("2.0", &[]);
    demo.upgrade("2.0", &[]).failed("the names of the 40 units");
    assert_eq!(demo.log(), ["start 1.0"], "nothing was stopped");
    demo.assert_clean("1.0", &["1.0"]);
    let names: Vec<&str> = crowd.iter().map(String::as_str).collect();
    m.run(&[&["systemctl", "stop"], &names[..]].concat()).ok();
    demo.upgrade("2.0", &[]).expect(0, "promoted");
}
