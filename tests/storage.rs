//! Releases that do not arrive whole, disks that are full, directories on other file systems: the unit is never stopped
//! for them, and nothing of them is left.

#![allow(clippy::disallowed_methods, reason = "nothing here has to survive a power cut")]

mod machine;

use std::fs;
use std::time::Duration;

use machine::faults::BROKEN;
use machine::{Answer, Demo, Machine, Service, wait_for};

fn error(answer: &Answer) -> &str {
    answer.json["error"].as_str().unwrap_or_default()
}

/// What is in `releases/`, by version; what is unsealed or unfinished has its own name.
fn releases(s: &Service) -> Vec<String> {
    let dir = s.m.path(format!("{}/releases", s.state));
    let mut names: Vec<_> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| {
            let name = e.file_name().to_string_lossy().into_owned();
            match name.rsplit_once('-') {
                Some((version, _)) if e.path().join("manifest.json").exists() => version.to_owned(),
                _ => name,
            }
        })
        .collect();
    names.sort();
    names
}

/// An upgrade that must fail, for this reason, with the unit as it was and no trace of the release.
#[track_caller]
fn assert_fails(s: &Service, version: &str, reason: &str) {
    let before = (s.property("InvocationID"), s.log(), releases(s));
    let answer = s.upgrade(version, &[]).failed(reason);
    assert_eq!(before, (s.property("InvocationID"), s.log(), releases(s)), "{answer}");
}

#[test]
fn a04_a_truncated_program_fails_before_any_change() {
    let s = Demo::new(&Machine::shared(), "a04").managed();
    let artifact = s.release("2.0", &[]);
    let path = s.m.path(&artifact);
    let good = fs::read(&path).unwrap();
    let mut zeros = good.clone();
    zeros[good.len() / 2..].fill(0);
    for bad in [&good[..4096], &good[..good.len() - 1], &zeros] {
        fs::write(&path, bad).unwrap();
        assert_fails(&s, "2.0", "SHA-256");
    }
    // "Already there" is answered by reading it back, and what is damaged is staged again.
    fs::write(&path, &good).unwrap();
    assert_eq!(s.cutover(&["stage", &s.name, "2.0"]).code, 0);
    let sealed = s.m.sh(&format!("echo {}/releases/2.0-*/tree/demo", s.state)).ok();
    for bad in [&good[..4096], &zeros] {
        fs::write(s.m.path(sealed.trim()), bad).unwrap();
        assert_eq!(s.cutover(&["verify", &s.name]).code, 1);
        assert_eq!(s.cutover(&["stage", &s.name, "2.0"]).code, 0);
        assert_eq!(s.cutover(&["verify", &s.name]).code, 0, "it is mended");
    }
    fs::write(s.m.path(sealed.trim()), &zeros).unwrap();
    s.upgrade("2.0", &[]).expect(0, "promoted");
    s.assert_at_rest("2.0");
}

#[test]
fn a06_b01_a_worker_killed_while_it_unpacks_leaves_nothing_that_counts() {
    let s = Demo::new(&Machine::shared(), "a06").archive().managed();
    let demo = s.payload("2.0", &[]);
    let files: [(&str, u32, &[u8]); 4] = [
        ("helper", 0o755, b"#!/bin/sh\n"),
        ("demo", 0o755, &demo),
        ("etc/a", 0o644, b"a"),
        ("etc/b", 0o644, b"b"),
    ];
    s.release_tree("2.0", &files);
    let running = s.property("InvocationID");
    for point in
        ["unpacked-file kill @1", "unpacked-file kill @3", "unpacked-file kill @4", "before:seal kill"]
    {
        s.failpoints(&[point]);
        let answer = s.broken_upgrade("2.0", &[]).failed("interrupted before anything was recorded");
        assert_eq!(s.fired(), [point], "{answer}");
        assert_eq!(s.property("InvocationID"), running, "{point}: {answer}");
        assert!(!releases(&s).contains(&"2.0".to_owned()), "{point}: an unfinished release counts");
        assert_eq!(s.link("slots/experiment"), "");
    }
    // Sealed, and then killed: that one counts, and is used.
    s.failpoints(&["after:seal kill"]);
    s.broken_upgrade("2.0", &[]).expect(1, "failed");
    // No manual step: the same version again.
    s.upgrade("2.0", &[]).expect(0, "promoted");
    assert_eq!(releases(&s), ["1.0", "2.0"], "leftovers are swept");
    for (path, _, content) in files {
        assert_eq!(fs::read(s.m.path(format!("{}/{path}", tree(&s)))).unwrap(), content, "{path}");
    }
    assert_eq!(s.cutover(&["verify", &s.name]).code, 0);
    s.assert_at_rest("2.0");
}

/// The tree that `current` leads to, without following links on the host.
fn tree(s: &Service) -> String {
    format!("{}/{}", s.state, s.link("current"))
}

#[test]
fn a07_a_failed_source_poisons_no_later_attempt() {
    let s = Demo::new(&Machine::shared(), "a07").managed();
    let artifact = s.release("2.0", &[]);
    let (path, sums) = (s.m.path(&artifact), s.m.path(format!("/srv/{}/2.0/SHA256SUMS", s.name)));
    let (good, good_sums) = (fs::read(&path).unwrap(), fs::read(&sums).unwrap());
    let html = b"<html>503</html>".as_slice();
    let mut reasons = vec![];
    for (artifact, sums_now) in [
        (Some(b"".as_slice()), Some(&good_sums[..])),
        (Some(&good[..good.len() / 2]), Some(&good_sums)),
        (Some(html), Some(&good_sums)),
        (Some(&good), Some(b"")),
        (Some(&good), Some(html)),
        (Some(&good), None),
    ] {
        let put = |path: &std::path::Path, bytes: Option<&[u8]>| match bytes {
            Some(bytes) => fs::write(path, bytes).unwrap(),
            None => fs::remove_file(path).unwrap(),
        };
        put(&path, artifact);
        put(&sums, sums_now);
        let running = s.property("InvocationID");
        let answer = s.upgrade("2.0", &[]).failed("");
        assert_eq!(s.property("InvocationID"), running, "{answer}");
        assert_eq!(releases(&s), ["1.0"], "{answer}");
        assert!(
            answer.receipt("reason").contains(&format!("/srv/{}/2.0", s.name)),
            "it names the file: {answer}"
        );
        reasons.push(answer.receipt("reason"));
    }
    for other in [1, 2] {
        assert_ne!(reasons[0], reasons[other], "distinct reasons");
    }
    assert_ne!(reasons[2], reasons[3]);
    assert_ne!(reasons[3], reasons[5]);
    fs::write(&path, &good).unwrap();
    fs::write(&sums, &good_sums).unwrap();
    s.upgrade("2.0", &[]).expect(0, "promoted");
    s.assert_at_rest("2.0");
}

#[test]
fn a07_an_empty_signature_is_a_missing_one() {
    let key = "RWSCxVbRup5rApzNiH9Vz/wNUvs9isymdpI3s0IP53L27YBirJwyUxoN";
    let s =
        Demo::new(&Machine::shared(), "unsigned").source(&format!("keys = [\"{key}\"]")).genesis().install();
    s.release("1.0", &[]);
    let signature = format!("/srv/{}/1.0/SHA256SUMS.minisig", s.name);
    s.upgrade("1.0", &[]).failed("SHA256SUMS.minisig");
    s.m.write(&signature, "");
    s.upgrade("1.0", &[]).failed("SHA256SUMS.minisig");
    s.m.write(&signature, "untrusted comment: x\nRWSC\ntrusted comment: y\nabcd\n");
    s.upgrade("1.0", &[]).failed("SHA256SUMS.minisig");
    assert_eq!(releases(&s), Vec::<String>::new());
    assert_ne!(s.active(), "active");
}

/// A file system of its own at the state directory of `s`.
fn small_disk(s: &Service, megabytes: u32) {
    let (image, state) = (format!("/srv/{}.img", s.name), &s.state);
    s.m.sh(&format!(
        "truncate -s {megabytes}M {image} && mkfs.ext4 -q -m 0 {image} && mkdir -p {state} && mount -o loop {image} {state} \
         && chmod 755 {state} && rmdir {state}/lost+found"
    ))
    .ok();
}

/// Fills it, but for so many kilobytes.
fn fill(s: &Service, but: u32) {
    s.m.sh(&format!(
        "rm -f {state}/fill; free=$(df --output=avail -k {state} | tail -1); n=$((free - {but})); \
         fallocate -l ${{n}}K {state}/fill; \
         if [ {but} = 0 ]; then dd if=/dev/zero of={state}/fill2 bs=1k status=none 2>/dev/null; fi; true",
        state = s.state
    ))
    .ok();
}

fn unfill(s: &Service) {
    s.m.sh(&format!("rm -f {0}/fill {0}/fill2", s.state)).ok();
}

#[test]
fn b07_without_room_it_fails_before_the_stop_and_says_what_is_needed() {
    let s = Demo::new(&Machine::shared(), "b07").genesis().install();
    small_disk(&s, 96);
    s.release("1.0", &[]);
    s.release("2.0", &[]);
    s.upgrade("1.0", &[]).expect(0, "promoted");
    // Room for a runner and its records, and not for a release and what must stay free beside it.
    fill(&s, 24 << 10);
    for _ in 0..2 {
        let before = (s.property("InvocationID"), releases(&s), s.log());
        let full = s.upgrade("2.0", &[]).failed("no space: ");
        let reason = full.receipt("reason");
        assert!(
            reason.contains("releases") && reason.contains("bytes needed") && reason.contains("free"),
            "{full}"
        );
        assert_eq!(before, (s.property("InvocationID"), releases(&s), s.log()), "{full}");
        let left = s.m.sh(&format!("ls -A {0}/run {0}/releases", s.state)).ok();
        assert!(!left.contains("staging") && !left.contains("reserve"), "{left}");
    }
    // To the last block: whoever only reads needs no room, and an upgrade says what it lacks.
    fill(&s, 0);
    let status = s.cutover(&["status", &s.name]).expect(0, "failed");
    assert_eq!(s.cutover(&["history", &s.name]).code, 0, "{status}");
    let before = (s.snapshot(), s.property("InvocationID"));
    let full = s.upgrade("2.0", &[]);
    assert_eq!((full.code, full.json["result"].as_str()), (1, Some("error")), "{full}");
    assert!(error(&full).contains("no space: ") && error(&full).contains(&s.state), "{full}");
    assert_eq!(before, (s.snapshot(), s.property("InvocationID")), "nothing of it is left");
    unfill(&s);
    s.upgrade("2.0", &[]).expect(0, "promoted");
    s.assert_at_rest("2.0");
}

#[test]
fn b07_a_disk_that_fills_up_after_the_stop_keeps_no_operation_from_its_receipt() {
    let s = Demo::new(&Machine::shared(), "filling").genesis().install();
    small_disk(&s, 128);
    s.release("1.0", &[]);
    s.upgrade("1.0", &[]).expect(0, "promoted");
    for (version, switches, code, outcome, stable) in
        [("2.0", &[] as &[&str], 0, "promoted", "2.0"), ("3.0", &["exit 1"], 1, "rolled-back", "2.0")]
    {
        s.release(version, switches);
        s.failpoints(&["after:stop hold"]);
        let client = s.m.spawn(&[BROKEN, "upgrade", &s.name, version, "--id", version]);
        s.wait_fired("after:stop hold");
        fill(&s, 0);
        s.failpoints(&[]);
        let out = client.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&out.stdout);
        assert_eq!(out.status.code(), Some(code), "{version}: {said}");
        let receipts = s.receipts_of(version);
        assert_eq!((receipts.len(), receipts[0]["outcome"].as_str()), (1, Some(outcome)), "{said}");
        unfill(&s);
        s.assert_at_rest(stable);
    }
}

#[test]
fn s3_a_part_of_the_state_directory_on_another_mount_is_refused_by_name() {
    let s = Demo::new(&Machine::shared(), "s3").managed();
    s.release("2.0", &[]);
    for dir in ["releases", "slots", "receipts", "run"] {
        let path = format!("{}/{dir}", s.state);
        // With the same contents, so that nothing but the mount is wrong.
        s.m.sh(&format!("cp -a {path} /srv/{0}-{dir} && mount --bind /srv/{0}-{dir} {path}", s.name)).ok();
        let before = (s.property("InvocationID"), s.log());
        let refused = s.upgrade("2.0", &[]);
        let said = format!("{} {}", error(&refused), refused.receipt("reason"));
        assert!(refused.code != 0 && said.contains(dir), "{dir}: {refused}");
        assert!(said.contains("another file system"), "{dir}: {refused}");
        assert_eq!(before, (s.property("InvocationID"), s.log()), "{dir}: {refused}");
        s.m.run(&["umount", &path]).ok();
    }
    s.upgrade("2.0", &[]).expect(0, "promoted");
    wait_for("it answers", Duration::from_secs(5), || s.version().as_deref() == Some("2.0"));
}
