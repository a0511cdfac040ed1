//! Whatever ends the worker, wherever: the operation has one of two results, and one receipt (K63–K81).

#![allow(clippy::disallowed_methods, reason = "nothing here has to survive a power cut")]

mod machine;

use std::time::Duration;

use machine::faults::BROKEN;
use machine::{Answer, Demo, Machine, Service, wait_for};

/// The records of an operation, as failpoints before and after each.
fn around(records: &[&str]) -> Vec<String> {
    records.iter().flat_map(|r| [format!("before:{r}"), format!("after:{r}")]).collect()
}

/// What must hold after an operation that was interrupted: one receipt, the result that it says, and rest.
#[track_caller]
fn assert_one_result(s: &Service, id: &str, answer: &Answer, outcome: &str, stable: &str, case: &str) {
    let code = i32::from(outcome != "promoted");
    assert_eq!(
        (answer.code, answer.receipt("outcome").as_str(), answer.receipt("id").as_str()),
        (code, outcome, id),
        "{case}: {answer}\n{}",
        s.worker_log(id)
    );
    let receipts = s.receipts_of(id);
    assert_eq!(receipts.len(), 1, "{case}: {receipts:?}");
    assert_eq!(
        receipts[0], answer.json["operation"]["operation"],
        "{case}: what was answered is what is kept"
    );
    assert_eq!(s.version().as_deref(), Some(stable), "{case}");
    assert!(!s.m.exists(s.scratch(id)), "{case}: its scratch directory is left");
    s.assert_at_rest(stable);
}

/// Upgrades, with the worker killed at each of these points in turn; each must end as `expected` says of it.
fn killed_at(
    label: &str,
    cases: &[Vec<String>],
    switches: &[&str],
    expected: impl Fn(&[String]) -> &'static str,
) {
    let s = Demo::new(&Machine::shared(), label).managed();
    let mut stable = "1.0".to_owned();
    for (n, points) in cases.iter().enumerate() {
        let (version, id) = (format!("{}.0", n + 2), format!("{}-{n}", s.name));
        s.release(&version, switches);
        let lines: Vec<String> = points.iter().map(|p| format!("{p} kill")).collect();
        s.failpoints(&lines.iter().map(String::as_str).collect::<Vec<_>>());
        let answer = s.broken_upgrade(&version, &["--id", &id]);
        let case = format!("{label}, killed at {points:?}");
        assert_eq!(s.fired(), lines, "{case}: {answer}");
        let outcome = expected(points);
        if outcome == "promoted" {
            stable = version;
        }
        assert_one_result(&s, &id, &answer, outcome, &stable, &case);
    }
}

fn singly(points: Vec<String>) -> Vec<Vec<String>> {
    points.into_iter().map(|p| vec![p]).collect()
}

/// K71–K74: before the promote intent the old version comes back, after it the promotion is finished.
fn forward(points: &[String]) -> &'static str {
    match points[0].as_str() {
        "before:staged" | "after:staged" | "after:experiment" | "before:handing-over" => "failed",
        "after:promoted" | "after:promote" | "before:done" | "after:done" | "before:receipt"
        | "after:receipt" | "before:answer" | "after:answer" => "promoted",
        _ => "rolled-back",
    }
}

#[test]
fn a_worker_killed_around_each_record_before_the_promote_intent_leaves_the_old_version() {
    let mut points = around(&["staged", "handing-over", "running-experiment", "readback"]);
    points.push("before:promoted".into());
    killed_at("kill-before", &singly(points), &[], forward);
}

#[test]
fn a_worker_killed_around_each_record_after_the_promote_intent_leaves_the_new_version() {
    let mut points = vec!["after:promoted".to_owned()];
    points.extend(around(&["done", "receipt", "answer"]));
    killed_at("kill-after", &singly(points), &[], forward);
}

#[test]
fn a_worker_killed_between_the_records_leaves_one_of_two_versions() {
    let points =
        ["after:attempt", "after:experiment", "after:stop", "after:switch", "after:start", "after:promote"];
    killed_at("kill-between", &singly(points.map(str::to_owned).to_vec()), &[], |points| {
        match points[0].as_str() {
            // Killed before anything was recorded: nothing of it is left, and its id is used up.
            "after:attempt" => "failed",
            _ => forward(points),
        }
    });
}

/// The candidate answers the wrong version, so that each of these goes back.
fn backward(points: &[String]) -> &'static str {
    match points[0].as_str() {
        "before:staged" | "after:staged" | "before:handing-over" => "failed",
        _ => "rolled-back",
    }
}

#[test]
fn a_worker_killed_around_each_record_of_a_bad_candidate_leaves_the_old_version() {
    let points = around(&["staged", "handing-over", "running-experiment", "readback", "rolling-back"]);
    killed_at("kill-bad", &singly(points), &["reports wrong"], backward);
}

#[test]
fn a_worker_killed_anywhere_on_the_way_back_leaves_the_old_version() {
    let mut points = ["after:stop-back", "after:switch-back", "after:start-back"].map(str::to_owned).to_vec();
    points.extend(around(&["done", "receipt", "answer"]));
    killed_at("kill-back", &singly(points), &["reports wrong"], backward);
}

#[test]
fn a_recovery_that_is_killed_in_turn_is_recovered_to_the_same_result() {
    // K75: any point of the recovery after the deepest point of the way forward; and the same point twice.
    let mut points = around(&["rolling-back", "done", "receipt", "answer"]);
    points.extend(["after:stop-back", "after:switch-back", "after:start-back"].map(str::to_owned));
    let pairs: Vec<_> = points.into_iter().map(|p| vec!["after:start".to_owned(), p]).collect();
    killed_at("kill-again", &pairs, &[], forward);
}

#[test]
fn a_recovery_that_is_killed_after_the_promote_intent_still_promotes() {
    let points = ["after:promote", "before:done", "after:done", "before:receipt", "after:receipt"];
    let pairs = points.map(|p| vec!["after:promoted".to_owned(), p.to_owned()]);
    killed_at("kill-on", &pairs, &[], forward);
}

/// Three workers, each killed: the bound of one launch (K76).
const ALL_DIE: [&str; 2] = ["after:start kill", "after:stop-back kill 2"];

/// An upgrade whose three workers all died, at 1.0.
fn exhausted(label: &str) -> (Service, String, Answer) {
    let s = Demo::new(&Machine::shared(), label).managed();
    s.release("2.0", &[]);
    s.failpoints(&ALL_DIE);
    let id = format!("{}-spent", s.name);
    let answer = s.broken_upgrade("2.0", &["--id", &id]);
    assert_eq!(s.fired().len(), 3, "{answer}");
    (s, id, answer)
}

#[test]
fn when_all_attempts_died_the_answer_is_3_and_what_resumes_it_is_kept_and_named() {
    // K78–K80, K95.
    let (s, id, answer) = exhausted("spent");
    assert_eq!((answer.code, answer.json["result"].as_str()), (3, Some("unresolved")), "{answer}");
    let file = format!("{}/recovery.json", s.scratch(&id));
    assert!(
        answer.json["error"].as_str().unwrap_or_default().contains(&format!("cutover resume {file}")),
        "{answer}"
    );
    let kept: serde_json::Value = serde_json::from_str(&s.m.read(&file)).unwrap();
    let runner = s.m.run(&["sha256sum", &format!("{}/runner", s.scratch(&id)), BROKEN]).ok();
    assert_eq!(runner.matches(kept["runnerSha256"].as_str().unwrap()).count(), 2, "{runner}");
    assert!(s.receipts_of(&id).iter().all(|r| r["outcome"].is_null()), "no success for anything unresolved");
    let status = s.cutover(&["status", &s.name]);
    assert_eq!((status.receipt("id"), status.receipt("outcome")), (id.clone(), String::new()), "{status}");

    // K70, K81: the same recovery, with the release source gone, by the kept runner, which is of another build.
    s.m.run(&["rm", "-r", &format!("/srv/{}/2.0", s.name)]).ok();
    let answer = s.cutover(&["resume", &file]);
    assert_eq!(answer.receipt("cause"), "undetermined", "{answer}");
    assert_one_result(&s, &id, &answer, "rolled-back", "1.0", "resumed");
    assert_eq!(s.timeline(&id).last().map(String::as_str), Some("done"));
    // It was the last word: the file is gone with the runner.
    let gone = s.cutover(&["resume", &file]);
    assert_eq!((gone.code, gone.json["result"].as_str()), (1, Some("error")), "{gone}");
    assert!(gone.json["error"].as_str().unwrap().contains(&file), "{gone}");
}

#[test]
fn what_was_kept_is_refused_once_it_is_not_what_was_kept() {
    // K81.
    let (s, id, answer) = exhausted("tampered");
    assert_eq!(answer.code, 3, "{answer}");
    let dir = s.scratch(&id);
    let before = s.snapshot();
    s.m.sh(&format!("cp {dir}/recovery.json /root/{}.json", s.name)).ok();
    let moved = s.cutover(&["resume", &format!("/root/{}.json", s.name)]);
    assert_eq!((moved.code, moved.json["result"].as_str()), (3, Some("unresolved")), "{moved}");
    assert!(moved.json["error"].as_str().unwrap().contains("is not where it was kept"), "{moved}");
    assert_eq!(s.snapshot(), before);
    s.m.sh(&format!("printf x >>{dir}/runner")).ok();
    let before = s.snapshot();
    let bent = s.cutover(&["resume", &format!("{dir}/recovery.json")]);
    assert_eq!((bent.code, bent.json["result"].as_str()), (3, Some("unresolved")), "{bent}");
    let said = bent.json["error"].as_str().unwrap();
    assert!(said.contains("is not the runner that was kept") && said.contains("cutover recover"), "{bent}");
    assert_eq!(s.snapshot(), before);
    // What the message advises works: the installed build recovers.
    let answer = s.recover(&[]);
    assert_one_result(&s, &id, &answer, "rolled-back", "1.0", "recovered by the installed build");
}

#[test]
fn an_unresolved_operation_is_settled_before_another_begins_and_leaves_nothing() {
    // K33, K35, K84: the next request settles it, whoever makes it; and a kept runner is not kept for ever.
    let (s, id, _) = exhausted("next");
    s.release("3.0", &[]);
    s.upgrade("3.0", &["--id", "later"]).expect(0, "promoted");
    let first = s.receipts_of(&id);
    assert_eq!((first.len(), first[0]["outcome"].as_str()), (1, Some("rolled-back")), "{first:?}");
    assert!(!s.m.exists(s.scratch(&id)), "its scratch directory is left");
    s.assert_at_rest("3.0");
}

#[test]
fn the_same_id_again_takes_up_what_was_left_open() {
    // K34, K72: it recovers, and does not begin anew.
    let (s, id, _) = exhausted("same-id");
    let answer = s.upgrade("2.0", &["--id", &id]);
    assert_one_result(&s, &id, &answer, "rolled-back", "1.0", "asked again under the same id");
}

#[test]
fn a_worker_that_is_asked_to_leave_leaves_75_behind_and_is_recovered() {
    // SIGTERM at each step: no verdict, no half step, and PID 1 starts a recovery.
    let hooks = "[quiesce]\ncommand = [\"/bin/true\"]\n[resume]\ncommand = [\"/bin/true\"]";
    let s = Demo::new(&Machine::shared(), "term").adapter(hooks).managed();
    for (n, (step, outcome)) in [
        ("waiting-for-the-lock", "failed"),
        ("fencing", "failed"),
        ("staging", "failed"),
        ("baseline", "failed"),
        ("quiesce", "rolled-back"),
        ("stopping", "rolled-back"),
        ("starting", "rolled-back"),
        ("probing", "rolled-back"),
    ]
    .into_iter()
    .enumerate()
    {
        let (version, id) = (format!("{}.0", n + 2), format!("{}-{step}", s.name));
        s.release(&version, &[]);
        let line = format!("step:{step} term");
        s.failpoints(&[&line]);
        let answer = s.broken_upgrade(&version, &["--id", &id]);
        assert_eq!(s.fired(), std::slice::from_ref(&line), "{answer}");
        let log = s.worker_log(&id);
        assert!(log.contains("code=exited, status=75"), "{step}: {log}");
        assert_one_result(&s, &id, &answer, outcome, "1.0", &line);
    }
}

#[test]
fn a_worker_that_hangs_is_killed_by_its_watchdog_and_recovered() {
    // K63–K66: the budget is the step's, PID 1 ends it, sees the end, and only then starts the recovery.
    let s = Demo::new(&Machine::shared(), "hang").managed();
    s.release("2.0", &[]);
    s.pace(&["watchdog 1000", "deadline 3000"]);
    s.failpoints(&["step:probing hold"]);
    let id = format!("{}-hung", s.name);
    let answer = s.broken_upgrade("2.0", &["--id", &id]);
    assert_eq!(s.fired(), ["step:probing hold"]);
    let log = s.worker_log(&id);
    let killed = log.find("Watchdog timeout").unwrap_or_else(|| panic!("{log}"));
    let again = log.find("settling: restore the stable version").unwrap_or_else(|| panic!("{log}"));
    assert!(killed < again, "{log}");
    assert_one_result(&s, &id, &answer, "rolled-back", "1.0", "hung");
}

#[test]
fn the_operation_outlives_whoever_asked_for_it() {
    // K9, K10: the caller is killed as soon as the worker is launched.
    let s = Demo::new(&Machine::shared(), "caller").managed();
    for (version, line) in [("2.0", "after:launch kill"), ("3.0", "after:staged hold")] {
        s.release(version, &[]);
        s.failpoints(&[line]);
        let id = format!("{}-{version}", s.name);
        let mut caller = s.m.spawn(&[BROKEN, "upgrade", &s.name, version, "--id", &id]);
        s.wait_fired(line);
        if line.ends_with("hold") {
            caller.kill().unwrap();
        }
        caller.wait().unwrap();
        s.failpoints(&[]);
        wait_for("its receipt", Duration::from_secs(20), || {
            s.receipts_of(&id).first().is_some_and(|r| r["outcome"] == "promoted")
        });
        wait_for("its end", Duration::from_secs(10), || s.worker_unit(&id).is_empty());
        s.assert_settled(version);
    }
}

#[test]
fn a_caller_that_was_killed_before_it_launched_left_nothing_that_matters() {
    let s = Demo::new(&Machine::shared(), "unlaunched").managed();
    s.release("2.0", &[]);
    s.failpoints(&["before:launch kill"]);
    let killed = s.broken_upgrade("2.0", &["--id", "begun"]);
    assert_eq!((s.fired().len(), killed.output.stdout.as_str()), (1, ""), "{killed}");
    assert!(s.receipts_of("begun").is_empty());
    // The same id is as good as new.
    s.upgrade("2.0", &["--id", "begun"]).expect(0, "promoted");
    s.failpoints(&["before:launch kill"]);
    s.broken_upgrade("2.0", &["--id", "never"]);
    s.upgrade("2.0", &["--id", "other"]).expect(0, "up-to-date");
    assert!(!s.m.exists(s.scratch("never")), "what it had prepared is left");
    s.assert_at_rest("2.0");
}

#[test]
fn a_shell_inside_the_service_can_upgrade_it() {
    // A15: the stop kills the shell, and not the upgrade.
    let s = Demo::new(&Machine::shared(), "a15").managed();
    s.release("2.0", &[]);
    s.release("3.0", &["exit 101"]);
    for (version, outcome) in [("2.0", "promoted"), ("3.0", "rolled-back")] {
        let script = format!(
            "echo $$ >/sys/fs/cgroup/system.slice/{}/cgroup.procs && exec cutover upgrade {name} {version} --id {name}-{version}",
            s.unit,
            name = s.name
        );
        let id = format!("{}-{version}", s.name);
        let shell = s.m.sh(&script);
        // It was told to end, so it stopped waiting, which is no success; or it was killed.
        assert!(shell.stdout.is_empty() || shell.stdout.contains("\"detached\""), "{shell}");
        assert_ne!(shell.code, 0, "{shell}");
        wait_for("its receipt", Duration::from_secs(20), || {
            s.receipts_of(&id).first().is_some_and(|r| r["outcome"] == outcome)
        });
        wait_for("its end", Duration::from_secs(10), || s.worker_unit(&id).is_empty());
    }
    s.assert_settled("2.0");
}
