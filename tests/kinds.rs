//! Each kind of service and of probe: upgraded, put back, and with the proof that its receipt names. Hooks, and releases of
//! archives.

#![allow(clippy::disallowed_methods, reason = "nothing here has to survive a power cut")]

mod machine;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use machine::{Answer, Demo, Kind, Machine, Service, wait_for};

/// What the receipt says of the proof: kernel, version, peer.
fn proof(answer: &Answer) -> [String; 3] {
    let proof = &answer.json["operation"]["operation"]["proof"];
    ["kernel", "version", "peer"].map(|k| proof[k].as_str().unwrap_or_default().to_owned())
}

/// Forward, and back from one that reports the wrong version and from one that does not start.
fn both_ways(demo: &Service, kernel: &str, peer: &str) {
    demo.release("2.0", &[]);
    let answer = demo.upgrade("2.0", &[]).expect(0, "promoted");
    assert_eq!(proof(&answer), [kernel, "2.0", peer], "{answer}");
    demo.assert_clean("2.0", &["1.0", "2.0"]);
    demo.release("3.0", &["reports 9.9"]);
    let answer =
        demo.upgrade("3.0", &[]).rolled_back("bad-candidate", "it reports version \"9.9\", wanted is 3.0");
    assert_eq!(proof(&answer), [kernel, "2.0", peer], "what runs again is proved, too: {answer}");
    demo.assert_clean("2.0", &["1.0", "2.0"]);
    demo.release("4.0", &["exit 3"]);
    // Of what forks, systemd says no more.
    let reason = if demo.kind == Kind::Forking { "result exit-code" } else { "exited 3" };
    let answer = demo.upgrade("4.0", &[]).rolled_back("bad-candidate", reason);
    assert_eq!(proof(&answer), [kernel, "2.0", peer], "{answer}");
    demo.assert_clean("2.0", &["1.0", "2.0"]);
    assert_eq!(demo.active(), "active");
    assert_eq!(demo.quarantined(), ["3.0", "4.0"]);
}

#[test]
fn simple() {
    both_ways(&Demo::new(&Machine::shared(), "simple").kind(Kind::Simple).managed(), "executable", "proved");
}

#[test]
fn exec() {
    both_ways(&Demo::new(&Machine::shared(), "exec").kind(Kind::Exec).managed(), "executable", "proved");
}

#[test]
fn notify() {
    both_ways(&Demo::new(&Machine::shared(), "notify").kind(Kind::Notify).managed(), "executable", "proved");
}

#[test]
fn dbus() {
    both_ways(&Demo::new(&Machine::shared(), "dbus").kind(Kind::Dbus).managed(), "executable", "proved");
}

#[test]
fn forking_with_a_pid_file() {
    both_ways(
        &Demo::new(&Machine::shared(), "forking").kind(Kind::Forking).managed(),
        "executable",
        "proved",
    );
}

#[test]
fn oneshot_with_a_command_probe() {
    both_ways(&Demo::new(&Machine::shared(), "oneshot").kind(Kind::Oneshot).managed(), "exited", "none");
}

#[test]
fn python_whose_working_directory_is_its_release() {
    both_ways(&Demo::new(&Machine::shared(), "python").kind(Kind::Python).managed(), "open-file", "proved");
}

#[test]
fn python_that_shows_its_release_by_its_answer_alone() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "python-cwd").kind(Kind::Python).first("1.0", &["cwd no"]).managed();
    demo.release("2.0", &["cwd no"]);
    let answer = demo.upgrade("2.0", &[]).expect(0, "promoted");
    assert_eq!(proof(&answer), ["answer-only", "2.0", "proved"], "{answer}");
    demo.assert_clean("2.0", &["1.0", "2.0"]);
    demo.release("3.0", &["cwd no", "reports 2.0"]);
    demo.upgrade("3.0", &[]).rolled_back("bad-candidate", "it reports version \"2.0\"");
    demo.assert_clean("2.0", &["1.0", "2.0"]);
}

/// Nothing is asked: what the kernel shows is the proof, and an interpreter in / shows nothing.
#[test]
fn a_service_that_reports_nothing_is_proved_by_the_kernel_alone() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "kernel").probe("kind = \"kernel\"\n").managed();
    demo.release("2.0", &[]);
    let answer = demo.upgrade("2.0", &[]).expect(0, "promoted");
    assert_eq!(proof(&answer), ["executable", "", "none"], "{answer}");
    demo.assert_clean("2.0", &["1.0", "2.0"]);
    let demo = Demo::new(&m, "kernel-python").kind(Kind::Python).probe("kind = \"kernel\"\n").managed();
    demo.release("2.0", &[]);
    assert_eq!(proof(&demo.upgrade("2.0", &[]).expect(0, "promoted"))[0], "open-file");
    demo.release("3.0", &["cwd no"]);
    demo.upgrade("3.0", &[]).rolled_back("bad-candidate", "is not from release 3.0");
    demo.assert_clean("2.0", &["1.0", "2.0"]);
}

#[test]
fn http_over_a_unix_socket() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "unix")
        .service("ExecStart=\nExecStart={state}/current/demo --unix /run/{name}.sock --data {data}")
        .probe("kind = \"http\"\nurl = \"unix:/run/{name}.sock:/version\"\nversion = { pointer = \"/version\" }\n")
        .managed();
    both_ways(&demo, "executable", "proved");
}

#[test]
fn a_probe_command_runs_as_its_user() {
    let m = Machine::shared();
    let script = "test $(id -un) = nobody && test $CUTOVER_VERSION && exec {state}/current/demo report";
    let demo = Demo::new(&m, "probe-user")
        .probe(&format!(
            "kind = \"command\"\ncommand = [\"/bin/sh\", \"-c\", \"{script}\"]\nuser = \"nobody\"\n\
             version = {{ pointer = \"/version\" }}\nanswer = \"1s\"\n"
        ))
        .window(200, 1500)
        .managed();
    both_ways(&demo, "executable", "none");
    for (version, body, reason) in [
        ("5.0", "exit3", "the probe command exited with 3"),
        ("6.0", "stderr", "not JSON"),
        ("7.0", "hang", "the probe command took longer than 1s"),
    ] {
        demo.release(version, &[&format!("body {body}")]);
        demo.upgrade(version, &[]).rolled_back("bad-candidate", reason);
        demo.assert_clean("2.0", &["1.0", "2.0"]);
    }
}

// ---- quiesce and resume ----

/// Adopted, with hooks that write to the service's own log, as nobody.
fn hooked(m: &Machine, label: &str) -> Service {
    let line = |what: &str| {
        format!(
            "[{what}]\nuser = \"nobody\"\ncommand = [\"/bin/sh\", \"-c\", \
             \"echo {what} $(id -un) $CUTOVER_SERVICE $CUTOVER_FROM-$CUTOVER_TARGET >> {{data}}/log; test ! -e {{data}}/no-{what}\"]\n"
        )
    };
    let demo = Demo::new(m, label).adapter(&line("quiesce")).adapter(&line("resume")).install();
    demo.adopt();
    demo.systemctl("restart").ok();
    wait_for("it runs from its release", Duration::from_secs(5), || demo.version().is_some());
    let log = m.path(format!("{}/log", demo.data));
    fs::write(&log, "").expect("the machine's");
    fs::set_permissions(log, fs::Permissions::from_mode(0o666)).expect("the machine's");
    demo
}

fn hook_lines(demo: &Service, versions: &str) -> [String; 2] {
    ["quiesce", "resume"].map(|what| format!("{what} nobody {} {versions}", demo.name))
}

#[test]
fn work_is_parked_before_the_stop_and_taken_up_when_all_is_over() {
    let m = Machine::shared();
    let demo = hooked(&m, "hooks");
    demo.release("2.0", &[]);
    demo.upgrade("2.0", &[]).expect(0, "promoted");
    let [quiesce, resume] = hook_lines(&demo, "1.0-2.0");
    assert_eq!(demo.log(), [&quiesce, "stop 1.0", "start 2.0", &resume]);
    demo.release("3.0", &["reports 9"]);
    demo.upgrade("3.0", &[]).rolled_back("bad-candidate", "it reports version");
    let [quiesce, resume] = hook_lines(&demo, "2.0-3.0");
    assert_eq!(demo.log()[4..], [&quiesce, "stop 2.0", "start 3.0", "stop 3.0", "start 2.0", &resume]);
    demo.assert_clean("2.0", &["1.0", "2.0"]);
}

#[test]
fn work_that_cannot_be_parked_leaves_the_service_untouched() {
    let m = Machine::shared();
    let demo = hooked(&m, "hooks-park");
    demo.release("2.0", &[]);
    let before = [demo.property("InvocationID"), demo.property("MainPID")];
    m.write(format!("{}/no-quiesce", demo.data), "");
    demo.upgrade("2.0", &[]).rolled_back("undetermined", "the quiesce command exited with 1");
    assert_eq!([demo.property("InvocationID"), demo.property("MainPID")], before);
    let [quiesce, resume] = hook_lines(&demo, "1.0-2.0");
    assert_eq!(demo.log(), [quiesce, resume], "half-parked work is taken up again");
    assert_eq!(demo.quarantined(), [""; 0]);
    demo.assert_clean("1.0", &["1.0"]);
}

#[test]
fn parking_that_does_not_end_is_ended() {
    let m = Machine::shared();
    let hook = "[quiesce]\ntimeout = \"500ms\"\ncommand = [\"/bin/sh\", \"-c\", \"test $CUTOVER_TARGET = 1.0 || sleep 1000\"]";
    let demo = Demo::new(&m, "hooks-hang").adapter(hook).managed();
    demo.release("2.0", &[]);
    let before = demo.property("InvocationID");
    demo.upgrade("2.0", &[]).rolled_back("undetermined", "the quiesce command took longer than 500ms");
    assert_eq!(demo.property("InvocationID"), before);
    demo.assert_clean("1.0", &["1.0"]);
}

#[test]
fn work_that_cannot_be_taken_up_leaves_it_open_until_it_can() {
    let m = Machine::shared();
    let demo = hooked(&m, "hooks-resume");
    let no_resume = format!("{}/no-resume", demo.data);
    // Forward: promoted, and that stays.
    demo.release("2.0", &[]);
    m.write(&no_resume, "");
    let answer = demo.upgrade("2.0", &["--id", "up"]).unresolved("the resume command exited with 1");
    assert_eq!(answer.receipt("phase"), "promoted", "{answer}");
    assert_eq!(demo.version().as_deref(), Some("2.0"));
    let invocation = demo.property("InvocationID");
    demo.recover(&[]).unresolved("the resume command exited with 1");
    m.run(&["rm", &no_resume]).ok();
    let answer = demo.recover(&[]).expect(0, "promoted");
    assert_eq!(answer.receipt("id"), "up", "{answer}");
    assert_eq!(demo.property("InvocationID"), invocation, "the service ran all the time");
    demo.assert_clean("2.0", &["1.0", "2.0"]);
    // Back: the old version runs, and that stays.
    demo.release("3.0", &["exit 1"]);
    m.write(&no_resume, "");
    let answer = demo.upgrade("3.0", &["--id", "back"]).unresolved("the resume command exited with 1");
    assert_eq!(answer.receipt("phase"), "rolling-back", "{answer}");
    assert_eq!(demo.version().as_deref(), Some("2.0"));
    let invocation = demo.property("InvocationID");
    m.run(&["rm", &no_resume]).ok();
    let answer = demo.recover(&[]).rolled_back("bad-candidate", "exited 1");
    assert_eq!(answer.receipt("id"), "back", "{answer}");
    assert_eq!(demo.property("InvocationID"), invocation, "the service ran all the time");
    demo.assert_clean("2.0", &["1.0", "2.0"]);
}

// ---- archives ----

#[test]
fn releases_of_archives_lose_their_first_directory() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "archive").archive().managed();
    let program = demo.payload("2.0", &[]);
    let files: [(&str, u32, &[u8]); 3] = [
        ("demo", 0o755, &program),
        ("share/doc/read me", 0o644, b"text"),
        // A27: what a release carries has no effect outside its tree.
        ("lib/systemd/system/demo.service", 0o644, b"[Service]\nExecStart=/nonexistent\n"),
    ];
    demo.release_tree("2.0", &files);
    demo.upgrade("2.0", &[]).expect(0, "promoted");
    demo.assert_clean("2.0", &["1.0", "2.0"]);
    for (path, mode, content) in files {
        let file = m.path(format!("{}/{}/{path}", demo.state, demo.link("current")));
        assert_eq!(fs::read(&file).expect("it was in the archive"), content);
        assert_eq!(file.metadata().expect("it is there").permissions().mode() & 0o7777, mode, "{path}");
    }
    assert_eq!(demo.property("NeedDaemonReload"), "no");
    demo.release("3.0", &["exit 1"]);
    demo.upgrade("3.0", &[]).rolled_back("bad-candidate", "exited 1");
    demo.assert_clean("2.0", &["1.0", "2.0"]);
}

#[test]
fn an_archive_without_the_units_program_fails_before_any_change() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "archive-bad").archive().managed();
    let before = demo.property("InvocationID");
    demo.release_tree("2.0", &[("other", 0o755, b"#!/bin/sh\n")]);
    demo.upgrade("2.0", &[]).failed("has no executable demo, which ExecStart of ");
    demo.release_tree("3.0", &[("demo", 0o644, b"#!/bin/sh\n")]);
    demo.upgrade("3.0", &[]).failed("has no executable demo, which ExecStart of ");
    assert_eq!(demo.property("InvocationID"), before);
    assert_eq!(demo.quarantined(), [""; 0]);
    demo.assert_clean("1.0", &["1.0"]);
    // What is no program for this machine is seen when it is started.
    demo.release_tree("4.0", &[("demo", 0o755, b"\x7fELF, it says")]);
    demo.upgrade("4.0", &[]).rolled_back("bad-candidate", "exited 203");
    demo.assert_clean("1.0", &["1.0"]);
}
