//! What one operation owes the next: ids, turns, refusals, answers and exit codes (K30–K35, K91–K99).

#![allow(clippy::disallowed_methods, reason = "nothing here has to survive a power cut")]

mod machine;

use std::process::Child;
use std::time::Duration;

use machine::faults::BROKEN;
use machine::{Answer, Demo, Machine, Output, Service, wait_for};
use serde_json::Value;

/// The answer of a command that was spawned.
fn answer(child: Child) -> Answer {
    let out = child.wait_with_output().expect("spawned");
    let text = |b: &[u8]| String::from_utf8_lossy(b).into_owned();
    let output = Output {
        command: "spawned".into(),
        code: out.status.code().unwrap_or(-1),
        stdout: text(&out.stdout),
        stderr: text(&out.stderr),
    };
    let json = serde_json::from_str(&output.stdout).unwrap_or(Value::Null);
    Answer { code: output.code, json, output }
}

fn error(answer: &Answer) -> &str {
    answer.json["error"].as_str().unwrap_or_default()
}

/// The receipts on the disk, the latest apart.
fn archived(s: &Service) -> usize {
    std::fs::read_dir(s.m.path(format!("{}/receipts", s.state))).unwrap().count()
}

#[test]
fn the_same_id_replays_its_receipt_and_touches_nothing() {
    // K34, K69.
    let s = Demo::new(&Machine::shared(), "replay").managed();
    s.release("2.0", &[]);
    s.release("3.0", &["exit 1"]);
    for (version, code, outcome) in [("2.0", 0, "promoted"), ("3.0", 1, "rolled-back"), ("4.0", 2, "held")] {
        let first = s.upgrade(version, &["--id", version]).expect(code, outcome);
        // What it asked for may even come true meanwhile: it was answered.
        s.release("4.0", &[]);
        let before = (s.snapshot(), s.property("InvocationID"), s.log());
        let again = s.upgrade(version, &["--id", version]).expect(code, outcome);
        assert_eq!(again.json, first.json);
        assert_eq!((s.snapshot(), s.property("InvocationID"), s.log()), before);
        let recovered = s.recover(&["--id", version]).expect(code, outcome);
        assert_eq!(recovered.json["operation"], first.json["operation"], "K97");
        s.m.run(&["rm", "-rf", &format!("/srv/{}/4.0", s.name)]).ok();
    }
}

#[test]
fn an_id_is_bound_to_its_target() {
    // K30: also when its operation failed, and also for another kind of operation.
    let s = Demo::new(&Machine::shared(), "bound").managed();
    s.release("2.0", &["exit 1"]);
    s.release("3.0", &[]);
    s.upgrade("2.0", &["--id", "mine"]).expect(1, "rolled-back");
    let before = (s.snapshot(), s.property("InvocationID"));
    let other = s.upgrade("3.0", &["--id", "mine"]);
    assert_eq!((other.code, other.json["result"].as_str()), (1, Some("conflict")), "{other}");
    assert!(error(&other).contains("mine belongs to another operation, to 2.0; use a new id"), "{other}");
    assert_eq!((s.snapshot(), s.property("InvocationID")), before, "a conflict leaves no receipt");
}

#[test]
fn others_are_told_who_is_at_work_and_in_which_phase() {
    // A33: from a second client, in each phase: another id is busy, the same id attaches, another target conflicts.
    let s = Demo::new(&Machine::shared(), "a33").managed();
    s.release("2.0", &[]);
    s.release("3.0", &[]);
    let points = [
        ("step:staging hold", "before its first record"),
        ("after:staged hold", "in phase staged"),
        ("after:handing-over hold", "in phase handing-over"),
        ("after:running-experiment hold", "in phase running-experiment"),
        ("after:readback hold", "in phase readback"),
        ("after:promoted hold", "in phase promoted"),
    ];
    let lines = points.map(|(line, _)| line);
    s.failpoints(&lines);
    let first = s.m.spawn(&[BROKEN, "upgrade", &s.name, "2.0", "--id", "first"]);
    let mut attached = vec![];
    for (n, (line, phase)) in points.iter().enumerate() {
        s.wait_fired(line);
        let other = s.upgrade("3.0", &[]);
        assert_eq!((other.code, other.json["result"].as_str()), (2, Some("busy")), "{other}");
        assert!(error(&other).contains(&format!("operation first holds it, {phase}")), "{line}: {other}");
        let conflict = s.upgrade("3.0", &["--id", "first"]);
        assert_eq!(
            (conflict.code, conflict.json["result"].as_str()),
            (1, Some("conflict")),
            "{line}: {conflict}"
        );
        // Whoever only looks is not kept waiting.
        let status = s.cutover(&["status", &s.name]);
        let seen = (status.code, status.receipt("id"), status.receipt("phase"), status.receipt("outcome"));
        if n > 0 {
            let phase = phase.trim_start_matches("in phase ");
            assert_eq!(seen, (0, "first".into(), phase.into(), String::new()), "{status}");
        } else {
            assert_eq!((seen.0, seen.3.as_str()), (0, "promoted"), "the operation before: {status}");
        }
        attached.push(s.m.spawn(&["cutover", "upgrade", &s.name, "2.0", "--id", "first"]));
        // It has attached, and waits.
        std::thread::sleep(Duration::from_millis(200));
        s.hold_only(&lines[n + 1..]);
    }
    let first = answer(first).expect(0, "promoted");
    for also in attached {
        assert_eq!(answer(also).json, first.json);
    }
    assert_eq!(s.log(), ["start 1.0", "stop 1.0", "start 2.0"], "one upgrade, and nothing else");
    let all = s.cutover(&["history", &s.name]);
    assert_eq!(all.json["operations"].as_array().map(Vec::len), Some(2), "busy leaves no receipt: {all}");
    s.assert_at_rest("2.0");
}

#[test]
fn of_several_upgrades_at_once_exactly_one_is_carried_out() {
    // A33.
    let s = Demo::new(&Machine::shared(), "at-once").managed();
    let versions = ["2.0", "3.0", "4.0", "5.0"];
    for version in versions {
        s.release(version, &[]);
    }
    s.failpoints(&["step:probing hold"]);
    let mut clients = versions.map(|v| s.m.spawn(&[BROKEN, "upgrade", &s.name, v]));
    // The others need not wait for it.
    wait_for("three answers", Duration::from_secs(60), || {
        clients.iter_mut().filter_map(|c| c.try_wait().unwrap()).count() == 3
    });
    s.failpoints(&[]);
    let answers: Vec<Answer> = clients.into_iter().map(answer).collect();
    let won: Vec<_> = answers.iter().filter(|a| a.code == 0).collect();
    assert_eq!(won.len(), 1, "{}", answers.iter().map(ToString::to_string).collect::<String>());
    let version = won[0].receipt("targetVersion");
    for lost in answers.iter().filter(|a| a.code != 0) {
        assert_eq!((lost.code, lost.json["result"].as_str()), (2, Some("busy")), "{lost}");
    }
    assert_eq!(s.log(), ["start 1.0".to_owned(), "stop 1.0".into(), format!("start {version}")]);
    s.assert_at_rest(&version);
}

#[test]
fn several_requests_under_one_id_are_one_operation() {
    let s = Demo::new(&Machine::shared(), "one-id").managed();
    s.release("2.0", &[]);
    let ask = || s.m.spawn(&["cutover", "upgrade", &s.name, "2.0", "--id", "shared"]);
    let answers: Vec<Answer> = [ask(), ask(), ask(), ask()].map(answer).into_iter().collect();
    for a in &answers {
        assert_eq!((a.code, a.receipt("outcome").as_str()), (0, "promoted"), "{a}");
        assert_eq!(a.json, answers[0].json);
    }
    assert_eq!(s.log(), ["start 1.0", "stop 1.0", "start 2.0"]);
    s.assert_at_rest("2.0");
}

#[test]
fn whoever_asks_for_the_target_of_an_id_is_not_told_of_a_conflict_of_others() {
    let s = Demo::new(&Machine::shared(), "crossed").managed();
    let first = s.upgrade("2.0", &["--id", "crossed"]).expect(2, "held");
    let ask = |version| s.m.spawn(&["cutover", "upgrade", &s.name, version, "--id", "crossed"]);
    let children: Vec<(bool, Child)> = (0..12).map(|n| (n % 2 == 0, ask(["2.0", "3.0"][n % 2]))).collect();
    for (own, child) in children {
        let a = answer(child);
        let wanted = if own { (2, "held") } else { (1, "conflict") };
        assert_eq!((a.code, a.json["result"].as_str().unwrap_or_default()), wanted, "{a}");
        assert_eq!(a.json["operation"], first.json["operation"]);
    }
}

#[test]
fn an_id_may_look_like_an_option() {
    let s = Demo::new(&Machine::shared(), "hyphen").managed();
    for (version, id) in [("2.0", "--help"), ("3.0", "-x"), ("4.0", "--recover")] {
        s.release(version, &[]);
        let id = format!("--id={id}");
        let first = s.upgrade(version, &[&id]).expect(0, "promoted");
        assert_eq!(s.recover(&[&id]).expect(0, "promoted").json["operation"], first.json["operation"]);
    }
    s.assert_at_rest("4.0");
}

#[test]
fn an_older_target_is_held_and_held_uses_up_its_id() {
    // K94.
    let s = Demo::new(&Machine::shared(), "older").managed();
    s.release("2.0", &[]);
    s.upgrade("2.0", &[]).expect(0, "promoted");
    let running = s.property("InvocationID");
    let held = s.upgrade("1.0", &["--id", "down"]).held("1.0 is older than 2.0");
    assert!(held.receipt("reason").contains("--allow-downgrade"), "{held}");
    assert_eq!(s.property("InvocationID"), running, "nothing changed");
    s.upgrade("1.0", &["--id", "down", "--allow-downgrade"]).held("1.0 is older than 2.0");
    // The same again leaves no further file.
    let files = archived(&s);
    s.upgrade("1.0", &[]).held("1.0 is older than 2.0");
    s.upgrade("1.0", &[]).held("1.0 is older than 2.0");
    assert_eq!(archived(&s), files);
    assert_eq!(s.property("InvocationID"), running);
    s.upgrade("1.0", &["--allow-downgrade"]).expect(0, "promoted");
    s.assert_at_rest("1.0");
}

#[test]
fn no_exact_version_and_no_consent_are_held() {
    // K94.
    let s = Demo::new(&Machine::shared(), "held").policy("consent = \"required\"").genesis().install();
    s.release("1.0", &[]);
    s.upgrade("1.0", &[]).held("--consent");
    s.upgrade("1.0", &["--consent"]).expect(0, "promoted");
    let running = s.property("InvocationID");
    s.upgrade("1.1", &["--consent"]).held("1.1");
    assert_eq!(s.property("InvocationID"), running);
    s.assert_at_rest("1.0");
}

#[test]
fn up_to_date_is_said_only_of_what_runs() {
    // A30, B03.
    let s = Demo::new(&Machine::shared(), "current").managed();
    s.release("2.0", &[]);
    s.upgrade("2.0", &[]).expect(0, "promoted");
    let running = s.property("InvocationID");
    let same = s.upgrade("2.0", &[]).expect(0, "up-to-date");
    assert!(same.receipt("reason").contains("already runs"), "{same}");
    assert_eq!(s.property("InvocationID"), running);
    // The links say 2.0, and a process of 1.0 runs.
    let link = s.link("current");
    let old = s.m.sh(&format!("cd {} && echo releases/1.0-*/tree", s.state)).ok();
    let point = |to: &str| s.m.sh(&format!("ln -sfn {to} {}/current", s.state)).ok();
    point(old.trim());
    s.systemctl("restart").ok();
    point(&link);
    wait_for("1.0 runs", Duration::from_secs(10), || s.version().as_deref() == Some("1.0"));
    let answer = s.upgrade("2.0", &[]).expect(0, "promoted");
    assert!(answer.notes().contains("is not what runs"), "{answer}");
    assert_eq!(s.version().as_deref(), Some("2.0"));
    s.assert_at_rest("2.0");
    // The same bytes that fail now are nobody's bad candidate, and are never quarantined.
    s.m.run(&["systemctl", "stop", &s.unit]).ok();
    let stopped = s.upgrade("2.0", &[]).expect(0, "up-to-date");
    assert!(stopped.receipt("reason").contains("stopped and was left so"), "{stopped}");
    assert_eq!(s.active(), "inactive");
}

#[test]
fn status_is_the_last_receipt_and_not_the_service() {
    // K98, K99.
    let m = Machine::shared();
    let running = Demo::new(&m, "unmanaged").install();
    let status = running.cutover(&["status", &running.name]);
    assert_eq!((status.code, &status.json["operation"]["kind"]), (0, &"genesis".into()), "K99: {status}");
    assert!(!m.exists(&running.state), "asking leaves nothing");
    let settled = running.recover(&[]);
    assert_eq!((settled.code, settled.json["result"].as_str()), (0, Some("settled")), "K92: {settled}");

    let s = Demo::new(&m, "status").managed();
    s.systemctl("stop").ok();
    let status = s.cutover(&["status", &s.name]);
    assert_eq!((status.code, status.receipt("outcome").as_str()), (0, "promoted"), "K98: {status}");
    let probe = s.cutover(&["probe", &s.name]);
    assert_eq!((probe.code, probe.json["result"].as_str()), (1, Some("failing")), "{probe}");
    s.systemctl("start").ok();
    wait_for("it passes", Duration::from_secs(10), || s.cutover(&["probe", &s.name]).code == 0);
}

/// Keys that an answer about operations always has.
const RESPONSE: [&str; 6] = ["protocolVersion", "action", "result", "exitCode", "operation", "error"];
const RECEIPT: [&str; 19] = [
    "formatVersion",
    "id",
    "service",
    "action",
    "fromVersion",
    "fromDigest",
    "targetVersion",
    "targetDigest",
    "artifactSha256",
    "stable",
    "phase",
    "outcome",
    "cause",
    "reason",
    "proof",
    "startedAtMs",
    "updatedAtMs",
    "provenance",
    "metadata",
];

#[track_caller]
fn assert_keys(json: &Value, keys: &[&str]) {
    for key in keys {
        assert!(json.get(key).is_some(), "{key} is missing: {json}");
    }
}

#[test]
fn in_a_pipe_each_command_answers_by_one_json_document() {
    // K91, K100: every key, always, whatever the answer.
    let s = Demo::new(&Machine::shared(), "json").managed();
    s.release("2.0", &["exit 1"]);
    let name = s.name.as_str();
    for (code, args) in [
        (1, vec!["upgrade", name, "2.0"]),
        (2, vec!["upgrade", name, "9.9"]),
        (0, vec!["upgrade", name, "1.0", "--id", "same"]),
        (1, vec!["upgrade", name, "2.0", "--id", "same"]),
        (1, vec!["upgrade", "nobody", "1.0"]),
        (1, vec!["upgrade", "../etc", "1.0"]),
        (0, vec!["recover", name]),
        (1, vec!["resume", "/nowhere/recovery.json"]),
        (0, vec!["status", name]),
        (1, vec!["status", "nobody"]),
        (0, vec!["show", name, "same"]),
        (1, vec!["show", name, "never"]),
        (1, vec!["log", name, "never"]),
        (1, vec!["probe", "nobody"]),
        (1, vec!["history", "nobody"]),
        (1, vec!["verify", "nobody"]),
        (1, vec!["stage", "nobody", "1.0"]),
        (1, vec!["adopt", "nobody", "--version", "1.0"]),
        (0, vec!["stage", name, "1.0"]),
    ] {
        let a = s.cutover(&args);
        assert_eq!((a.code, a.json["exitCode"].as_i64()), (code, Some(i64::from(code))), "{args:?}: {a}");
        assert_keys(&a.json, &RESPONSE);
        assert_eq!(a.json["action"], args[0].replace("resume", "recover").as_str(), "{a}");
        match a.json["operation"]["kind"].as_str() {
            Some("observed") => assert_keys(&a.json["operation"]["operation"], &RECEIPT),
            Some("genesis") => {}
            Some("unreadable") => assert_eq!(args.last(), Some(&"never"), "{a}"),
            other => panic!("{other:?}: {a}"),
        }
    }
    for (args, keys) in [
        (vec!["status"], vec!["services"]),
        (vec!["list"], vec!["services"]),
        (vec!["history", name], vec!["operations"]),
        (vec!["log", name], vec!["id", "timeline", "notes", "outcome", "reason"]),
        (
            vec!["probe", name],
            vec!["service", "unit", "activeState", "mainPid", "invocation", "stable", "proof", "error"],
        ),
        (vec!["verify", name], vec!["releases", "links", "journal"]),
        (vec!["version"], vec!["cutover"]),
    ] {
        let a = s.cutover(&args);
        assert_eq!((a.code, a.json["exitCode"].as_i64()), (0, Some(0)), "{args:?}: {a}");
        assert_keys(&a.json, &["protocolVersion", "action", "result", "exitCode"]);
        assert_keys(&a.json, &keys);
    }
}

#[test]
fn on_a_terminal_people_read_text() {
    // K91.
    let s = Demo::new(&Machine::shared(), "tty").managed();
    let on_a_terminal = |args: &str| s.m.sh(&format!("script -qec 'cutover {args}' /dev/null </dev/null"));
    let text = on_a_terminal(&format!("status {}", s.name)).ok();
    assert!(
        text.contains(&format!("{}: from nothing to 1.0: promoted", s.name)) && !text.contains('{'),
        "{text}"
    );
    let json = on_a_terminal(&format!("status {} --json", s.name)).ok();
    let json: Value = serde_json::from_str(&json).expect("one document");
    assert_keys(&json, &RESPONSE);
    let held = on_a_terminal(&format!("upgrade {} 9.9", s.name));
    assert_eq!(held.code, 2, "{held}");
    assert!(held.stdout.contains("to 9.9: held") && held.stdout.contains("why"), "{held}");
}

#[test]
fn what_cannot_be_used_is_64_and_prints_no_answer() {
    let m = Machine::shared();
    for args in [
        vec![],
        vec!["frobnicate"],
        vec!["upgrade"],
        vec!["upgrade", "demo"],
        vec!["upgrade", "demo", "1.0", "--id", "a/b"],
        vec!["upgrade", "demo", "1.0", "--id", ""],
        vec!["upgrade", "demo", "../1.0"],
        vec!["upgrade", "demo", "1.0", "--force"],
        vec!["show", "demo"],
    ] {
        let a = m.cutover(&args);
        assert_eq!((a.code, a.output.stdout.as_str()), (64, ""), "{args:?}: {a}");
        assert!(!a.output.stderr.is_empty(), "{args:?}");
    }
    assert_eq!(m.cutover(&["--help"]).code, 0);
}

#[test]
fn a_broken_adapter_is_named_with_file_line_key_and_what_to_do() {
    let m = Machine::shared();
    let s = Demo::new(&m, "adapter").genesis().install();
    let file = format!("/etc/cutover/services/{}.toml", s.name);
    let good = m.read(&file);
    for (from, to, says) in [
        ("unit = ", "unti = ", "unti"),
        ("settle = \"300ms\"", "settle = \"soon\"", "settle"),
        ("unsigned = true", "keys = [\"junk\"]", "keys"),
        ("kind = \"http\"", "kind = \"magic\"", "kind"),
        ("[source]", "[source", "]"),
    ] {
        let bad = good.replacen(from, to, 1);
        assert_ne!(bad, good);
        m.write(&file, &bad);
        let line = 1 + good[..good.find(from).unwrap()].lines().count();
        let a = s.upgrade("1.0", &[]);
        assert_eq!((a.code, a.json["result"].as_str()), (1, Some("error")), "{a}");
        let (place, next) = error(&a).split_once(": ").unwrap_or_default();
        assert!(place == format!("{file}:{line}"), "{to}: {a}");
        assert!(next.contains(says) && next.contains("; "), "{to}: {a}");
    }
    m.run(&["rm", &file]).ok();
    let a = s.upgrade("1.0", &[]);
    assert!(error(&a).contains(&file) && error(&a).contains("write one"), "{a}");
    assert!(!m.exists(&s.state), "nothing was made for it");
}
