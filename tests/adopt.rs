//! Adopting existing services on a real systemd.

#![allow(clippy::disallowed_methods, reason = "nothing here has to survive a power cut")]

mod machine;

use std::time::Duration;

use machine::{Demo, Kind, Machine, Service, wait_for};
use serde_json::Value;

/// The effective lines of a setting, as systemd gives them over D-Bus: path, argv, flags.
fn lines(s: &Service, setting: &str) -> Vec<(String, Vec<String>, Vec<String>)> {
    let object =
        s.m.run(&[
            "busctl",
            "--json=short",
            "call",
            "org.freedesktop.systemd1",
            "/org/freedesktop/systemd1",
            "org.freedesktop.systemd1.Manager",
            "LoadUnit",
            "s",
            &s.unit,
        ])
        .ok();
    let object: Value = serde_json::from_str(&object).expect("JSON");
    let object = object["data"][0].as_str().expect("a path").to_owned();
    let property = format!("{setting}Ex");
    let answer =
        s.m.run(&[
            "busctl",
            "--json=short",
            "get-property",
            "org.freedesktop.systemd1",
            &object,
            "org.freedesktop.systemd1.Service",
            &property,
        ])
        .ok();
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    let strings = |list: &Value| {
        list.as_array().expect("a list").iter().map(|t| t.as_str().expect("text").to_owned()).collect()
    };
    answer["data"]
        .as_array()
        .expect("lines")
        .iter()
        .map(|line| (line[0].as_str().expect("a path").to_owned(), strings(&line[1]), strings(&line[2])))
        .collect()
}

fn drop_in(s: &Service) -> String {
    format!("/etc/systemd/system/{}.d/60-cutover.conf", s.unit)
}

/// Nothing of an adoption is left.
#[track_caller]
fn assert_untouched(s: &Service) {
    assert!(!s.m.exists(drop_in(s)));
    assert!(!s.m.exists(format!("{}.new", drop_in(s))));
    assert_eq!((s.link("slots/stable"), s.link("current")), (String::new(), String::new()));
    let releases = s.m.sh(&format!("ls -A {}/releases", s.state)).stdout;
    assert_eq!(releases, "");
}

#[test]
fn a_running_service_is_adopted_without_a_restart_and_then_upgraded() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "adopt").kind(Kind::Notify).install();
    let before = (demo.property("InvocationID"), demo.property("MainPID"));
    let answer = demo.adopt();
    assert_eq!(before, (demo.property("InvocationID"), demo.property("MainPID")));
    assert_eq!(answer.json["operation"]["operation"]["metadata"]["notes"], serde_json::json!([]), "{answer}");
    assert_eq!(answer.json["operation"]["operation"]["proof"]["version"], "1.0", "{answer}");
    assert_eq!(lines(&demo, "ExecStart")[0].0, format!("{}/current/demo", demo.state));
    assert!(demo.link("slots/stable").starts_with("../releases/1.0-"));

    // Running it again changes nothing; anything else is refused with the conflict named.
    let text = m.read(drop_in(&demo));
    demo.adopt_as("1.0").expect(0, "up-to-date");
    let other = demo.adopt_as("2.0").expect(2, "held");
    assert!(other.receipt("reason").contains("under management at 1.0"), "{other}");
    let from =
        demo.cutover(&["adopt", &demo.name, "--version", "1.0", "--from", "/bin/true"]).expect(2, "held");
    assert!(from.receipt("reason").contains("under management at 1.0"), "{from}");
    assert_eq!(m.read(drop_in(&demo)), text);

    demo.release("2.0", &[]);
    demo.upgrade("2.0", &[]).expect(0, "promoted");
    assert_eq!(demo.version().as_deref(), Some("2.0"));
    demo.assert_settled("2.0");
}

#[test]
fn odd_lines_mean_to_systemd_what_they_meant_before() {
    let m = Machine::shared();
    let odd = r#"
ExecReload=-PROGRAM plain "a b" 'it''s' "say \"hi\"" back\\slash "" 100%% %% %n "%%n x" $MAINPID ${HOME} "$A b" $$ \; a;b "; ;" "tab\there" "new\nline" \x01\x7f größe '#x' -- --opt=" v" "\\" "\\n"
ExecReload=/bin/true untouched "x y"
ExecReload=:+PROGRAM $A
ExecReload=@PROGRAM "another name" x ; /bin/echo second \; "%%"
ExecStop=!PROGRAM stop
ExecStopPost=-!!PROGRAM a
ExecStopPost=-:@sleep %N 0
ExecStartPre=/bin/true %n
Environment=A=b
"#;
    let demo = Demo::new(&m, "odd").service(odd).stopped().install();
    // The program's own path is in a directory with odd characters.
    let program = format!("/opt/{} %h $x/demo", demo.name);
    m.write_program(&program, demo.payload("1.0", &[]));
    let unit = format!("/etc/systemd/system/{}", demo.unit);
    let escaped = program.replace('%', "%%");
    let text: String = m
        .read(&unit)
        .lines()
        .map(|l| {
            if let Some((setting, rest)) = l.split_once("PROGRAM") {
                let (setting, prefixes) = setting.split_once('=').expect("a setting");
                return format!("{setting}={prefixes}\"{escaped}\"{rest}\n");
            }
            format!("{l}\n")
                .replace(&format!("ExecStart={}", demo.program), &format!("ExecStart=\"{escaped}\""))
        })
        .collect();
    m.write(&unit, text);
    m.run(&["systemctl", "daemon-reload"]).ok();
    let settings = ["ExecStartPre", "ExecStart", "ExecReload", "ExecStop", "ExecStopPost"];
    let before: Vec<_> = settings.iter().map(|s| lines(&demo, s)).collect();
    assert_eq!(before[2].len(), 5, "{before:?}");
    demo.adopt();
    let after: Vec<_> = settings.iter().map(|s| lines(&demo, s)).collect();
    let current = format!("{}/current/demo", demo.state);
    let mut changed = 0;
    for (before, after) in before.iter().flatten().zip(after.iter().flatten()) {
        let mut wanted = before.clone();
        if wanted.0 == program {
            changed += 1;
            if wanted.1[0] == wanted.0 {
                wanted.1[0].clone_from(&current);
            }
            wanted.0.clone_from(&current);
        }
        assert_eq!(*after, wanted);
    }
    assert_eq!(changed, 6);
    assert_eq!(
        before.iter().map(Vec::len).collect::<Vec<_>>(),
        after.iter().map(Vec::len).collect::<Vec<_>>()
    );
    let text = m.read(drop_in(&demo));
    assert!(!text.contains("ExecStartPre"), "what has no line of ours is left alone: {text}");
    assert_eq!(demo.active(), "inactive");
}

#[test]
fn an_override_that_sorts_later_undoes_the_adoption_and_is_named() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "override").install();
    let file = format!("/etc/systemd/system/{}.d/override.conf", demo.unit);
    m.write(
        &file,
        format!(
            "[Service]\nExecStart=\nExecStart={} --port {} --data {}\n",
            demo.program, demo.port, demo.data
        ),
    );
    m.run(&["systemctl", "daemon-reload"]).ok();
    let answer = demo.adopt_as("1.0").expect(1, "failed");
    assert!(answer.receipt("reason").starts_with(&file), "{answer}");
    assert_untouched(&demo);
    assert!(m.exists(&file));
    assert_eq!(lines(&demo, "ExecStart")[0].0, demo.program);

    // Taken out as the answer says, it is adopted; put back, it is seen.
    let text = m.read(&file);
    m.sh(&format!("rm {file} && systemctl daemon-reload")).ok();
    demo.adopt();
    m.write(&file, text);
    m.run(&["systemctl", "daemon-reload"]).ok();
    let answer = demo.adopt_as("1.0").expect(2, "held");
    assert!(answer.receipt("reason").contains(&format!("since {file} wins")), "{answer}");
}

#[test]
fn what_cannot_be_adopted_is_refused_by_name_and_left_untouched() {
    let m = Machine::shared();
    for (lines, words) in [
        ("RootDirectory=/srv", "RootDirectory= or RootImage="),
        ("InaccessiblePaths=/var/lib", "/var/lib is hidden from it"),
        ("TemporaryFileSystem=/var", "/var is hidden from it"),
        ("Type=forking\nPIDFile=", "Type=forking without PIDFile="),
        ("Type=oneshot", "Type=oneshot without RemainAfterExit="),
        ("ExecStart=\nExecStart=/opt/no-such", "has no /opt/no-such, which ExecStart names"),
        ("ExecStart=\nExecStart=/usr/bin/sleep infinity", "belongs to the package coreutils"),
        ("ExecStart=\nExecStart=/bin/sleep infinity", "belongs to the package coreutils"),
        ("ExecStart=\nExecStart=/var/lib/cutover/other/current/x", "managed as another service"),
    ] {
        let demo = Demo::new(&m, "refused").service(lines).stopped().install();
        let answer = demo.adopt_as("1.0").expect(2, "held");
        assert!(answer.receipt("reason").contains(words), "{lines}: {answer}");
        assert_untouched(&demo);
    }
    let demo = Demo::new(&m, "refused").unit("RefuseManualStop=yes").stopped().install();
    let answer = demo.adopt_as("1.0").expect(2, "held");
    assert!(answer.receipt("reason").contains("RefuseManualStart=, RefuseManualStop="), "{answer}");

    let demo = Demo::new(&m, "masked").stopped().install();
    m.sh(&format!("cd /etc/systemd/system && mv {0} /run/{0} && systemctl daemon-reload", demo.unit)).ok();
    let answer = demo.adopt_as("1.0").expect(2, "held");
    assert!(answer.receipt("reason").contains("is not-found"), "{answer}");
    m.sh(&format!("mkdir -p /etc/systemd/user && cp /run/{} /etc/systemd/user", demo.unit)).ok();
    let answer = demo.adopt_as("1.0").expect(2, "held");
    assert!(answer.receipt("reason").contains("is a user unit"), "{answer}");
    m.sh(&format!("systemctl mask {}", demo.unit)).ok();
    let answer = demo.adopt_as("1.0").expect(2, "held");
    assert!(answer.receipt("reason").contains("is masked"), "{answer}");

    let demo = Demo::new(&m, "shipped").genesis().install();
    let answer = demo.adopt_as("1.0").expect(2, "held");
    assert!(answer.receipt("reason").contains("already goes through"), "{answer}");
}

#[test]
fn instances_are_adopted_and_templates_and_instances_for_one_connection_are_not() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "template").stopped().install();
    let adapter = format!("/etc/cutover/services/{}.toml", demo.name);
    let name_unit = |unit: &str| {
        let text = m.read(&adapter).replace(&demo.unit, unit);
        m.write(&adapter, text);
    };
    let rename = |from: &str, to: &str| m.write(&adapter, m.read(&adapter).replace(from, to));
    let template = format!("{}@.service", demo.name);
    m.sh(&format!("cd /etc/systemd/system && mv {} {template}", demo.unit)).ok();
    m.write(
        format!("/etc/systemd/system/{}.socket", demo.name),
        format!("[Socket]\nListenStream=/run/{}.sock\nAccept=yes\n", demo.name),
    );
    m.run(&["systemctl", "daemon-reload"]).ok();
    name_unit(&template);
    let answer = demo.cutover(&["adopt", &demo.name, "--version", "1.0"]);
    assert_eq!(answer.code, 1, "{answer}");
    assert!(answer.json["error"].to_string().contains("is a template without an instance"), "{answer}");

    m.run(&["systemctl", "start", &format!("{}.socket", demo.name)]).ok();
    let client = format!("/proc/{}/root/run/{}.sock", m.pid(), demo.name);
    let _connection = std::os::unix::net::UnixStream::connect(client).expect("the socket");
    let pattern = format!("{}@*", demo.name);
    let list = || m.run(&["systemctl", "list-units", "--all", "--plain", "--no-legend", &pattern]).ok();
    wait_for("an instance", Duration::from_secs(5), || !list().is_empty());
    let listed = list();
    let instance = listed.split_whitespace().next().expect("an instance").to_owned();
    rename(&template, &instance);
    let answer = demo.cutover(&["adopt", &demo.name, "--version", "1.0"]).expect(2, "held");
    assert!(answer.receipt("reason").contains("Accept=yes"), "{answer}");
    m.sh(&format!("systemctl stop {}.socket '{}@*'", demo.name, demo.name)).ok();

    let one = format!("{}@one.service", demo.name);
    rename(&instance, &one);
    m.run(&["systemctl", "start", &one]).ok();
    demo.cutover(&["adopt", &demo.name, "--version", "1.0"]).expect(0, "adopted");
    assert!(m.exists(format!("/etc/systemd/system/{one}.d/60-cutover.conf")));
    m.run(&["systemctl", "restart", &one]).ok();
    wait_for("it answers", Duration::from_secs(5), || demo.version().as_deref() == Some("1.0"));
}

#[test]
fn a_unit_that_may_execute_nothing_else_is_opened_for_its_releases() {
    let m = Machine::shared();
    let sandbox = "NoExecPaths=/\nExecPaths=/usr/lib /lib /lib64 /opt";
    let demo = Demo::new(&m, "noexec").service(sandbox).install();
    demo.adopt();
    demo.systemctl("restart").ok();
    demo.release("2.0", &[]);
    demo.upgrade("2.0", &[]).expect(0, "promoted");
    demo.assert_settled("2.0");
}

#[test]
fn an_alias_in_the_adapter_leads_to_the_units_own_drop_in() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "aliased").install();
    let alias = format!("also-{}", demo.unit);
    m.sh(&format!("ln -s {0} /etc/systemd/system/{alias} && systemctl daemon-reload", demo.unit)).ok();
    let adapter = format!("/etc/cutover/services/{}.toml", demo.name);
    m.write(&adapter, m.read(&adapter).replace(&demo.unit, &alias));
    demo.cutover(&["adopt", &demo.name, "--version", "1.0"]).expect(0, "adopted");
    assert!(m.exists(drop_in(&demo)));
    demo.systemctl("restart").ok();
    demo.assert_settled("1.0");
}

#[test]
fn a_directory_is_adopted_for_an_interpreted_service() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "interpreted").kind(Kind::Python).install();
    demo.adopt();
    let line = &lines(&demo, "ExecStart")[0];
    assert_eq!(
        (line.0.as_str(), line.1[1].as_str()),
        ("/usr/bin/python3", &*format!("{}/current/demo.py", demo.state))
    );
    demo.release("2.0", &[]);
    demo.upgrade("2.0", &[]).expect(0, "promoted");
    demo.assert_settled("2.0");
}

#[test]
fn the_version_that_is_said_is_compared_with_the_one_that_answers() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "said").install();
    let answer = demo.adopt_as("1.5").expect(0, "adopted");
    let notes = answer.json["operation"]["operation"]["metadata"]["notes"].to_string();
    assert!(notes.contains("does not pass as 1.5"), "{answer}");
}

#[test]
fn what_a_package_owns_or_replaced_is_not_sealed_by_accident() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "owned").install();
    m.write("/var/lib/dpkg/info/cutover-demo.list", format!("/.\n{}\n", demo.program));
    let answer = demo.adopt_as("1.0").expect(2, "held");
    assert!(answer.receipt("reason").contains("belongs to the package cutover-demo"), "{answer}");
    assert_untouched(&demo);

    // dpkg puts a new file in the place of the one that runs.
    m.write_program(format!("{}.dpkg-new", demo.program), demo.payload("1.1", &[]));
    m.sh(&format!("mv {0}.dpkg-new {0}", demo.program)).ok();
    let taken = ["adopt", &demo.name, "--version", "1.0", "--take-over"];
    let answer = demo.cutover(&taken).expect(2, "held");
    assert!(answer.receipt("reason").contains("was replaced since"), "{answer}");
    demo.systemctl("restart").ok();
    let answer = demo.cutover(&["adopt", &demo.name, "--version", "1.1", "--take-over"]).expect(0, "adopted");
    assert!(answer.output.stdout.contains("taken over from the package cutover-demo"), "{answer}");
}

#[test]
fn a_stop_command_of_a_triggered_unit_must_fit_both_versions() {
    let m = Machine::shared();
    let make = || Demo::new(&m, "stops").kind(Kind::Socket);
    let with_stop = |demo: Demo| {
        let demo = demo.install();
        let stop = format!("[Service]\nExecStop={} stop --data {}\n", demo.program, demo.data);
        m.write(format!("/etc/systemd/system/{}.d/50-stop.conf", demo.unit), stop);
        m.run(&["systemctl", "daemon-reload"]).ok();
        demo
    };
    let demo = with_stop(make());
    let answer = demo.adopt_as("1.0").expect(2, "held");
    assert!(answer.receipt("reason").contains("policy.stop-commands = \"fit-both\""), "{answer}");
    assert_untouched(&demo);
    let demo = with_stop(make().policy("stop-commands = \"fit-both\""));
    demo.adopt();
    assert_eq!(lines(&demo, "ExecStop")[0].0, format!("{}/current/demo", demo.state));
}

#[test]
fn a_service_has_one_unit_and_can_be_adopted_again_after_it_was_undone_by_hand() {
    let m = Machine::shared();
    let demo = Demo::new(&m, "again").install();
    demo.adopt();
    let other = Demo::new(&m, "again").install();
    let adapter = format!("/etc/cutover/services/{}.toml", demo.name);
    let text = m.read(&adapter);
    m.write(&adapter, text.replace(&demo.unit, &other.unit));
    let answer = demo.cutover(&["adopt", &demo.name, "--version", "1.0"]).expect(2, "held");
    assert!(answer.receipt("reason").contains(&format!("manages {}", demo.unit)), "{answer}");
    m.write(&adapter, text);

    m.sh(&format!("rm {} && systemctl daemon-reload", drop_in(&demo))).ok();
    assert_eq!(lines(&demo, "ExecStart")[0].0, demo.program);
    demo.adopt();
    demo.systemctl("restart").ok();
    demo.assert_settled("1.0");
}

/// Adopts with workers that are killed at these points, in turn; each must end as it should, and can then be adopted.
fn killed_at(label: &str, cases: &[(&[&str], &str)]) {
    let m = Machine::shared();
    for (points, outcome) in cases {
        let demo = Demo::new(&m, label).install();
        let before = (demo.property("InvocationID"), demo.property("MainPID"));
        let lines: Vec<String> = points.iter().map(|p| format!("{p} kill")).collect();
        demo.failpoints(&lines.iter().map(String::as_str).collect::<Vec<_>>());
        let answer = demo
            .broken(&["adopt", &demo.name, "--version", "1.0", "--id", "cut"])
            .expect(i32::from(*outcome == "failed"), outcome);
        assert_eq!(demo.fired(), lines, "{answer}");
        assert_eq!(before, (demo.property("InvocationID"), demo.property("MainPID")), "{points:?}");
        assert_eq!(demo.receipts_of("cut").len(), 1, "{points:?}");
        demo.assert_recovery_changes_nothing();
        if *outcome == "failed" {
            assert_untouched(&demo);
            assert!(!m.exists(format!("/etc/systemd/system/{}.d", demo.unit)), "{points:?}");
            assert_eq!(lines_of_start(&demo), demo.program);
            demo.adopt();
        }
        assert_eq!(lines_of_start(&demo), format!("{}/current/demo", demo.state));
        demo.systemctl("restart").ok();
        demo.assert_settled("1.0");
    }
}

fn lines_of_start(s: &Service) -> String {
    lines(s, "ExecStart")[0].0.clone()
}

#[test]
fn a_worker_killed_before_the_drop_in_leaves_the_service_as_it_was() {
    killed_at(
        "cut-before",
        &[
            (&["before:adopting"], "failed"),
            (&["after:adopting"], "failed"),
            (&["after:links"], "failed"),
            (&["after:links", "after:reload"], "failed"),
        ],
    );
}

#[test]
fn a_worker_killed_after_the_drop_in_leaves_it_adopted() {
    killed_at(
        "cut-after",
        &[
            (&["after:drop-in"], "adopted"),
            (&["after:reload"], "adopted"),
            (&["after:drop-in", "after:reload"], "adopted"),
            (&["before:done"], "adopted"),
            (&["after:done"], "adopted"),
        ],
    );
}

#[test]
fn an_adoption_that_nobody_could_finish_is_settled_by_a_later_recovery() {
    let m = Machine::shared();
    for overridden in [false, true] {
        let demo = Demo::new(&m, "cut-late").install();
        let file = format!("/etc/systemd/system/{}.d/override.conf", demo.unit);
        if overridden {
            m.write(
                &file,
                format!("[Service]\nExecStart=\nExecStart={} --port {}\n", demo.program, demo.port),
            );
            m.run(&["systemctl", "daemon-reload"]).ok();
        }
        demo.failpoints(&["after:reload kill 3"]);
        let answer = demo.broken(&["adopt", &demo.name, "--version", "1.0", "--id", "cut"]);
        assert_eq!((answer.code, answer.json["result"].as_str()), (3, Some("unresolved")), "{answer}");
        // In doubt, the unit has something to start: its drop-in and the links are there.
        assert!(m.exists(drop_in(&demo)) && !demo.link("current").is_empty());
        let (code, outcome) = if overridden { (1, "failed") } else { (0, "adopted") };
        let answer = demo.recover(&[]).expect(code, outcome);
        assert_eq!(answer.receipt("id"), "cut");
        if overridden {
            assert!(answer.receipt("reason").starts_with(&file), "{answer}");
            assert_untouched(&demo);
        } else {
            demo.systemctl("restart").ok();
            demo.assert_settled("1.0");
        }
    }
}

#[test]
fn a_state_directory_that_cannot_hold_or_run_anything_is_refused_by_name() {
    let m = Machine::shared();
    for (mount, code, words) in [
        ("mount -t tmpfs tmpfs DIR", 2, "is on tmpfs (in memory)"),
        ("mount --bind DIR DIR && mount -o remount,bind,noexec DIR", 1, "is mounted noexec"),
    ] {
        let demo = Demo::new(&m, "place").stopped().install();
        m.sh(&format!("mkdir -p {0} && {1}", demo.state, mount.replace("DIR", &demo.state))).ok();
        let answer = demo.adopt_as("1.0");
        assert!(answer.code == code && answer.output.stdout.contains(words), "{answer}");
        assert!(!m.exists(drop_in(&demo)));
        m.run(&["umount", &demo.state]).ok();
        demo.adopt();
    }
}
