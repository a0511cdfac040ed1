//! Records, releases and links that are damaged, gone or in the way: it is said, never absorbed, and nothing that runs is
//! stopped for it (B7, I9).

#![allow(clippy::disallowed_methods, reason = "nothing here has to survive a power cut")]

mod machine;

use std::fs;
use std::time::Duration;

use cutover::durable::RealDisk;
use cutover::response::Observation;
use cutover::store::Store;
use machine::faults::BROKEN;
use machine::{Answer, Demo, Machine, Service, wait_for};

const BLOCK: usize = 4096;
const COPY: usize = 64 * BLOCK;

fn error(answer: &Answer) -> &str {
    answer.json["error"].as_str().unwrap_or_default()
}

/// A service at 1.0 whose workers have one attempt only: one kill leaves its operation open.
fn brittle(label: &str) -> Service {
    Demo::new(&Machine::shared(), label).adapter("[timeouts]\nattempts = 1").managed()
}

/// Leaves an upgrade to `version` open, its only worker killed at `point`.
#[track_caller]
fn leave_open(s: &Service, version: &str, point: &str) {
    s.failpoints(&[&format!("{point} kill")]);
    let answer = s.broken_upgrade(version, &["--id", version]);
    assert_eq!((answer.code, s.fired().len()), (3, 1), "{answer}");
}

fn journal(s: &Service) -> Vec<u8> {
    fs::read(s.m.path(format!("{}/journal", s.state))).unwrap()
}

fn set_journal(s: &Service, bytes: Option<&[u8]>) {
    let path = s.m.path(format!("{}/journal", s.state));
    match bytes {
        Some(bytes) => fs::write(path, bytes).unwrap(),
        None => fs::remove_file(path).unwrap(),
    }
}

/// The blocks of one copy that hold a record, in order.
fn records(journal: &[u8]) -> Vec<usize> {
    (0..64).filter(|n| journal[n * BLOCK] == b'{').collect()
}

/// Everything that no reader can mistake for an operation, or for none.
fn ruined(bytes: &[u8]) -> Vec<(&'static str, Option<Vec<u8>>)> {
    let full = records(bytes);
    let [.., before, last] = full[..] else { panic!("{full:?}") };
    let mut swapped = bytes.to_vec();
    let mut gap = bytes.to_vec();
    for copy in [0, COPY] {
        for at in 0..BLOCK {
            swapped.swap(copy + before * BLOCK + at, copy + last * BLOCK + at);
        }
        gap[copy + before * BLOCK..][..BLOCK].fill(0);
    }
    vec![
        ("empty", Some(vec![])),
        ("all but one byte", Some(bytes[..bytes.len() - 1].to_vec())),
        ("NUL", Some(vec![0; bytes.len()])),
        ("swapped", Some(swapped)),
        ("a record gone in both copies", Some(gap)),
        ("deleted", None),
    ]
}

/// Each kind of ruin: unresolved, the bytes kept, `current` where the stable slot is, and nothing else touched.
#[track_caller]
fn assert_ruin_is_said(s: &Service, stable: &str, case: &str) {
    let good = journal(s);
    for (kind, bytes) in ruined(&good) {
        // A record in the middle can only be missed where the operation has one.
        if kind.starts_with("a record") && case == "staged" {
            continue;
        }
        let before =
            (s.link("slots/stable"), s.link("slots/experiment"), s.property("InvocationID"), s.active());
        set_journal(s, bytes.as_deref());
        let upgrade = ["NUL", "deleted"].contains(&kind).then_some("upgrade");
        for command in ["status", "recover"].into_iter().chain(upgrade) {
            let mut args = vec![command, &s.name];
            args.extend((command == "upgrade").then_some("9.0"));
            let a = s.cutover(&args);
            assert_eq!((a.code, a.json["result"].as_str()), (3, Some("unresolved")), "{case}, {kind}: {a}");
            assert_eq!(a.json["operation"]["kind"], "unreadable", "{case}, {kind}: {a}");
            assert!(error(&a).contains("journal"), "{case}, {kind}: {a}");
        }
        let verify = s.cutover(&["verify", &s.name]);
        assert_eq!(
            (verify.code, verify.json["result"].as_str()),
            (1, Some("damaged")),
            "{case}, {kind}: {verify}"
        );
        let slot = s.link("slots/stable");
        assert!(slot.starts_with(&format!("../releases/{stable}-")), "{case}, {kind}: {slot}");
        assert_eq!(s.link("current"), slot.replace("../", "") + "/tree", "{case}, {kind}");
        let after =
            (s.link("slots/stable"), s.link("slots/experiment"), s.property("InvocationID"), s.active());
        assert_eq!(before, after, "{case}, {kind}: nothing else was changed");
        match bytes {
            Some(bytes) => assert!(journal(s) == bytes, "{case}, {kind}: the bytes are kept"),
            None => assert!(!s.m.exists(format!("{}/journal", s.state)), "{case}: no new one hides the loss"),
        }
        set_journal(s, Some(&good));
    }
}

#[test]
fn a02_b15_a_ruined_journal_of_an_open_operation_is_unresolved() {
    let s = brittle("a02-open");
    for (n, (phase, outcome, slot)) in [
        ("staged", "failed", "1.0"),
        ("running-experiment", "rolled-back", "1.0"),
        ("readback", "rolled-back", "1.0"),
    ]
    .into_iter()
    .enumerate()
    {
        let version = format!("{}.0", n + 2);
        s.release(&version, &[]);
        leave_open(&s, &version, &format!("after:{phase}"));
        assert_ruin_is_said(&s, slot, phase);
        // And with its bytes back, it is settled as if nothing had been.
        s.recover(&[]).expect(1, outcome);
        s.assert_at_rest("1.0");
    }
}

#[test]
fn a02_b15_a_ruined_journal_around_the_promotion_is_unresolved() {
    // `slots/stable` is the commit: old before the rename, new after it.
    let s = brittle("a02-promoted");
    for (version, point, slot) in [("2.0", "after:promoted", "1.0"), ("3.0", "after:promote", "3.0")] {
        s.release(version, &[]);
        leave_open(&s, version, point);
        assert_ruin_is_said(&s, slot, point);
        s.recover(&[]).expect(0, "promoted");
        s.assert_at_rest(version);
    }
    assert_ruin_is_said(&s, "3.0", "closed");
    s.assert_at_rest("3.0");
}

#[test]
fn b15_one_damaged_copy_takes_nothing_away() {
    // B5: every record of the operation, in either copy.
    let s = brittle("b15");
    for (n, copy) in [0, COPY].into_iter().enumerate() {
        let version = format!("{}.0", n + 2);
        s.release(&version, &[]);
        leave_open(&s, &version, "after:promoted");
        let mut bytes = journal(&s);
        for block in records(&bytes) {
            bytes[copy + block * BLOCK + 700] ^= 1 << (block % 8);
        }
        set_journal(&s, Some(&bytes));
        let verify = s.cutover(&["verify", &s.name]);
        assert_eq!(verify.code, 1, "damage is reported, not absorbed (I9): {verify}");
        s.recover(&[]).expect(0, "promoted");
        s.assert_settled(&version);
    }
}

#[test]
fn b15_a_torn_last_record_is_dropped_and_the_one_before_decides() {
    let s = brittle("torn");
    for (version, point, outcome) in [
        ("2.0", "after:readback", "rolled-back"),
        ("3.0", "after:promoted", "rolled-back"),
        ("4.0", "after:staged", "failed"),
    ] {
        s.release(version, &[]);
        leave_open(&s, version, point);
        let mut bytes = journal(&s);
        let last = *records(&bytes).last().unwrap();
        for copy in [0, COPY] {
            bytes[copy + last * BLOCK + 512..][..512].fill(0);
        }
        set_journal(&s, Some(&bytes));
        let settled = s.recover(&[]);
        if point == "after:staged" {
            // Its only record: nothing had begun.
            assert_eq!((settled.code, settled.json["result"].as_str()), (0, Some("settled")), "{settled}");
        } else {
            settled.expect(1, outcome);
        }
        s.assert_at_rest("1.0");
    }
}

#[test]
fn a_receipt_that_is_there_decides_although_its_last_record_is_lost() {
    // Authority: an operation is over when its receipt says so; I1: what was acknowledged survives, to the byte.
    let s = Demo::new(&Machine::shared(), "authority").managed();
    for (version, switches, code, outcome) in [
        ("2.0", &[] as &[&str], 0, "promoted"),
        ("3.0", &["exit 1"], 1, "rolled-back"),
        ("1.0", &[], 2, "held"),
    ] {
        s.release(version, switches);
        s.upgrade(version, &["--id", version]).expect(code, outcome);
        let before = (s.m.read(format!("{}/operation.json", s.state)), s.property("InvocationID"), s.log());
        let mut bytes = journal(&s);
        let last = *records(&bytes).last().unwrap();
        for copy in [0, COPY] {
            bytes[copy + last * BLOCK..][..512].fill(0);
        }
        set_journal(&s, Some(&bytes));
        let status = s.cutover(&["status", &s.name]);
        assert_eq!(
            (status.receipt("id"), status.receipt("outcome")),
            (version.into(), outcome.into()),
            "{status}"
        );
        let settled = s.recover(&[]);
        assert!(["settled", outcome].contains(&settled.json["result"].as_str().unwrap()), "{settled}");
        let after = (s.m.read(format!("{}/operation.json", s.state)), s.property("InvocationID"), s.log());
        assert_eq!(before, after, "{outcome}");
        s.assert_at_rest("2.0");
    }
    s.release("4.0", &[]);
    s.upgrade("4.0", &[]).expect(0, "promoted");
}

#[test]
fn a_damaged_latest_receipt_is_rebuilt_from_the_journal() {
    let s = Demo::new(&Machine::shared(), "receipt").managed();
    let file = s.m.path(format!("{}/operation.json", s.state));
    let good = fs::read(&file).unwrap();
    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 1;
    let bad: [Option<&[u8]>; 5] =
        [Some(&flipped), Some(&good[..good.len() / 2]), Some(b""), Some(&[0; 900]), None];
    for (n, bytes) in bad.into_iter().enumerate() {
        match bytes {
            Some(bytes) => fs::write(&file, bytes).unwrap(),
            None => fs::remove_file(&file).unwrap(),
        }
        let status = s.cutover(&["status", &s.name]);
        if bytes.is_some() {
            let seen = (status.code, &status.json["operation"]["kind"]);
            assert_eq!(seen, (3, &"unreadable".into()), "{n}: {status}");
        } else {
            // Without a receipt it is open, as far as anybody can tell.
            let seen = (status.receipt("phase"), status.receipt("outcome"));
            assert_eq!(seen, ("promoted".into(), String::new()), "{status}");
        }
        let rebuilt = s.recover(&[]).expect(0, "promoted");
        assert!(fs::read(&file).unwrap() == good, "{n}: {rebuilt}");
        s.assert_at_rest("1.0");
    }
    let kept = s.m.sh(&format!("ls {}/receipts | grep -c unreadable", s.state)).ok();
    assert!(kept.trim().parse::<u32>().unwrap() >= 1, "what was damaged is kept aside");
    // In the middle of an operation it vetoes nothing (F4).
    s.release("2.0", &[]);
    s.failpoints(&["after:readback hold"]);
    let client = s.m.spawn(&[BROKEN, "upgrade", &s.name, "2.0"]);
    s.wait_fired("after:readback hold");
    fs::write(&file, &flipped).unwrap();
    s.failpoints(&[]);
    let out = client.wait_with_output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
    s.assert_at_rest("2.0");
}

#[test]
fn a01_a_damaged_candidate_goes_back_and_a_damaged_stable_leaves_it_as_it_is() {
    let demo = Demo::new(&Machine::shared(), "a01").archive().adapter("[timeouts]\nattempts = 1");
    let s = demo.managed();
    let zero = |release: &str, files: &str| {
        let dir = format!("{}/releases/{release}-*", s.state);
        s.m.sh(&format!(
            "cd {dir} && for f in {files}; do dd if=/dev/zero of=$f bs=$(stat -c %s $f) count=1 conv=notrunc status=none; done"
        ))
        .ok();
    };
    for version in ["2.0", "3.0"] {
        let demo = s.payload(version, &[]);
        s.release_tree(
            version,
            &[("demo", 0o755, &demo), ("etc/id", 0o644, b"active"), ("etc/hash", 0o644, b"abcdef")],
        );
        leave_open(&s, version, "after:switch");
        zero(version, "tree/etc/id tree/etc/hash manifest.json");
        if version == "3.0" {
            let seal = s.m.sh(&format!("cat {}/releases/1.0-*/manifest.json", s.state)).ok();
            zero("1.0", "manifest.json");
            let links = (s.link("current"), s.link("slots/stable"));
            let answer = s.recover(&[]).unresolved("the release to go back to, 1.0");
            assert_eq!(links, (s.link("current"), s.link("slots/stable")), "{answer}");
            // Killed between stop and start, so it was down: it is started as the links stand.
            wait_for("it runs", Duration::from_secs(10), || s.active() == "active");
            s.m.write("/root/a01-seal", &seal);
            s.m.sh(&format!("cat /root/a01-seal >$(echo {}/releases/1.0-*/manifest.json)", s.state)).ok();
        }
        let answer = s.recover(&[]).rolled_back("undetermined", "");
        assert_eq!(s.version().as_deref(), Some("1.0"), "{answer}");
        s.assert_at_rest("1.0");
    }
}

#[test]
fn a10_a_stable_release_that_is_gone_is_not_gone_back_to() {
    let s = Demo::new(&Machine::shared(), "a10").managed();
    s.release("2.0", &["reports wrong"]);
    s.failpoints(&["step:probing hold"]);
    let client = s.m.spawn(&[BROKEN, "upgrade", &s.name, "2.0"]);
    s.wait_fired("step:probing hold");
    let tree = s.m.sh(&format!("echo {}/releases/1.0-*/tree", s.state)).ok();
    let tree = tree.trim();
    s.m.run(&["mv", tree, &format!("{tree}.gone")]).ok();
    s.failpoints(&[]);
    let out = client.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(3), "{}", String::from_utf8_lossy(&out.stdout));
    // The candidate runs on, and `current` leads to it.
    assert_eq!(s.active(), "active");
    assert_eq!(s.version().as_deref(), Some("wrong"));
    assert!(s.link("current").starts_with("releases/2.0-"), "{}", s.link("current"));
    assert!(s.m.sh(&format!("test -x {}/current/demo", s.state)).code == 0, "a dangling link");
    s.recover(&[]).unresolved("the release to go back to, 1.0");
    assert_eq!(s.version().as_deref(), Some("wrong"));
    s.m.run(&["mv", &format!("{tree}.gone"), tree]).ok();
    s.recover(&[]).rolled_back("bad-candidate", "wrong");
    s.assert_at_rest("1.0");
}

#[test]
fn a13_what_cannot_be_cleaned_up_undoes_no_promotion() {
    let s = Demo::new(&Machine::shared(), "a13").managed();
    let stuck = s.m.sh(&format!("echo {}/releases/1.0-*/tree/demo", s.state)).ok();
    let stuck = stuck.trim();
    s.m.run(&["chattr", "+i", stuck]).ok();
    for version in ["2.0", "3.0"] {
        s.release(version, &[]);
        s.upgrade(version, &[]).expect(0, "promoted");
        s.assert_at_rest(version);
    }
    assert!(s.m.exists(stuck), "the case");
    // A later upgrade goes on, or says what is in its way.
    s.release("4.0", &[]);
    let next = s.upgrade("4.0", &[]);
    let version = if next.code == 0 { "4.0" } else { "3.0" };
    if next.code != 0 {
        next.failed("releases/1.0-");
    }
    s.assert_at_rest(version);
    s.m.run(&["chattr", "-i", stuck]).ok();
    s.release("5.0", &[]);
    s.upgrade("5.0", &[]).expect(0, "promoted");
    assert!(!s.m.exists(stuck), "it is cleaned up as soon as that is possible");
    s.assert_at_rest("5.0");
}

#[test]
fn a09_no_clean_up_takes_the_version_that_was_put_back() {
    let s = brittle("a09");
    s.release("2.0", &["exit 1"]);
    leave_open(&s, "2.0", "before:done");
    assert_eq!(
        s.version().as_deref(),
        Some("1.0"),
        "stable was restarted, and the journal does not say so yet"
    );
    s.recover(&[]).rolled_back("bad-candidate", "");
    s.assert_at_rest("1.0");
    // Each of these ends with a clean-up.
    for _ in 0..3 {
        s.upgrade("2.0", &[]).held("quarantined");
        s.upgrade("1.0", &[]).expect(0, "up-to-date");
    }
    s.systemctl("restart").ok();
    wait_for("1.0 runs", Duration::from_secs(10), || s.version().as_deref() == Some("1.0"));
    s.assert_at_rest("1.0");
}

#[test]
fn a03_whoever_looks_during_an_upgrade_never_sees_a_mix() {
    // As `cutover status` does, as fast as it goes.
    let s = Demo::new(&Machine::shared(), "a03").managed();
    s.release("2.0", &[]);
    s.release("3.0", &["exit 1"]);
    for (version, outcome) in [("2.0", "promoted"), ("3.0", "rolled-back")] {
        let client = s.m.spawn(&["cutover", "upgrade", &s.name, version, "--id", version]);
        let root = s.m.path(&s.state);
        let disk = RealDisk::open(&root).unwrap();
        let store = Store::new(&disk, &root, &s.name);
        let mut seen: Vec<(String, String)> = vec![];
        let mut looks = 0;
        let deadline = std::time::Instant::now() + Duration::from_secs(30);
        loop {
            looks += 1;
            let Observation::Observed { operation } = cutover::worker::observe(&store) else {
                panic!("unreadable, after {seen:?}: {:?}", cutover::worker::observe(&store));
            };
            let this = (operation.id.to_string(), operation.phase.to_string());
            if seen.last() != Some(&this) {
                seen.push(this);
            }
            if operation.id.as_str() == version && operation.outcome.is_some() {
                break;
            }
            assert!(std::time::Instant::now() < deadline, "{seen:?}");
        }
        client.wait_with_output().unwrap();
        let phases: Vec<&str> =
            seen.iter().filter(|(id, _)| id == version).map(|(_, p)| p.as_str()).collect();
        let order =
            ["staged", "handing-over", "running-experiment", "readback", "rolling-back", "promoted", "done"];
        let places: Vec<_> = phases.iter().map(|p| order.iter().position(|o| o == p).unwrap()).collect();
        assert!(places.is_sorted(), "{seen:?}");
        let first = seen.iter().position(|(id, _)| id == version).unwrap();
        assert!(seen[first..].iter().all(|(id, _)| id == version), "back to the one before: {seen:?}");
        assert!(looks > 20 && phases.len() > 2, "{looks} looks at {seen:?}");
        assert_eq!(s.receipts_of(version)[0]["outcome"], outcome);
    }
}

#[test]
fn a_recovery_touches_no_unit_that_is_not_its_own() {
    // The adapter was edited while the operation was open: what it names now belongs to somebody else.
    let s = brittle("renamed");
    let other = Demo::new(&s.m, "bystander").install();
    let adapter = format!("/etc/cutover/services/{}.toml", s.name);
    let right = s.m.read(&adapter);
    for (version, point, closed, runs) in
        [("2.0", "after:readback", 1, "1.0"), ("3.0", "after:promoted", 0, "3.0")]
    {
        s.release(version, &[]);
        leave_open(&s, version, point);
        s.m.write(&adapter, right.replace(&s.unit, &other.unit));
        let before = (other.property("InvocationID"), s.property("InvocationID"));
        s.recover(&[]).unresolved(&format!("the effective ExecStart of {} does not go through", other.unit));
        other.systemctl("stop").ok();
        s.recover(&[]).unresolved("or the adapter names the wrong unit");
        assert_eq!(other.active(), "inactive", "nor is it started");
        other.systemctl("start").ok();
        assert_eq!(s.property("InvocationID"), before.1);
        s.m.write(&adapter, &right);
        assert_eq!(s.recover(&[]).code, closed);
        s.assert_settled(runs);
    }
}
