//! One full example, and one row for each kind of mistake.

use super::*;

const MINIMAL: &str = "unit = 'demo.service'\n[source]\nunsigned = true\n[probe]\nkind = 'kernel'\n";

fn parse(text: &str) -> Result<Adapter, AdapterError> {
    Adapter::parse(Path::new("/etc/cutover/services/demo.toml"), "demo", text)
}

#[test]
fn the_documented_example_is_read_in_full() {
    let hook = |word: &str| Hook {
        command: vec!["/usr/local/bin/demo-ctl".to_owned(), word.to_owned()],
        user: Some("demo".to_owned()),
        timeout: Duration::from_secs(30),
    };
    let expected = Adapter {
        service: "demo".to_owned(),
        unit: "demo.service".to_owned(),
        source: Source {
            directory: Some(PathBuf::from("/srv/releases/demo")),
            artifact: "{version}/demo-{version}-{arch}.tar.gz".to_owned(),
            strip: 1,
            program: Some("bin/demo".to_owned()),
            keys: vec!["RWSCxVbRup5rApzNiH9Vz/wNUvs9isymdpI3s0IP53L27YBirJwyUxoN".to_owned()],
            unsigned: false,
        },
        probe: Probe {
            method: Method::Http(HttpTarget::Tcp {
                address: "127.0.0.1:8080".parse().unwrap(),
                host: "127.0.0.1:8080".to_owned(),
                path: "/health".to_owned(),
            }),
            version: VersionField::Pointer("/version".to_owned()),
            rule: VersionRule::Exact,
            interval: Duration::from_millis(500),
            passes: 3,
            settle: Duration::from_secs(10),
            timeout: Duration::from_secs(60),
            answer: Duration::from_secs(5),
        },
        policy: Policy {
            consent_required: false,
            baseline_must_pass: false,
            accept_killed_stop: false,
            stop_fits_both: false,
        },
        quiesce: Some(hook("pause")),
        resume: Some(hook("resume")),
        timeouts: Timeouts {
            start: Duration::from_secs(90),
            stop: Duration::from_secs(90),
            linger: Duration::from_secs(5),
            stall: Duration::from_secs(60),
            foreign_job: Duration::from_secs(30),
            attempts: 3,
        },
        limits: Limits { bytes: 16 << 30, files: 200_000, depth: 64 },
    };
    let read = parse(include_str!("example.toml")).unwrap();
    assert_eq!(read, expected);
    let path = format!("2.0/demo-2.0-{}.tar.gz", std::env::consts::ARCH);
    assert_eq!(read.source.artifact_of(&"2.0".parse().unwrap()), PathBuf::from(path));
    // What the example calls a default is the default.
    let defaults = parse(MINIMAL).unwrap();
    assert_eq!(
        (defaults.policy, defaults.timeouts, defaults.limits),
        (expected.policy, expected.timeouts, expected.limits)
    );
    let (probe, expected) = (defaults.probe, expected.probe);
    assert_eq!((probe.interval, probe.passes, probe.settle), (expected.interval, 3, expected.settle));
    assert_eq!((probe.timeout, probe.answer, probe.rule), (expected.timeout, expected.answer, expected.rule));
}

/// An adapter in which `from` is replaced by `to`.
fn changed(from: &str, to: &str) -> String {
    let example = include_str!("example.toml");
    assert!(example.contains(from), "the example has no {from:?}");
    example.replacen(from, to, 1)
}

#[test]
fn every_mistake_names_file_line_key_cause_and_next_step() {
    // From, to, what the message must contain. The line is that of `to`.
    let rows: &[(&str, &str, &str)] = &[
        ("strip = 1", "stripp = 1", "unknown key `stripp`"),
        ("[policy]", "[polcy]", "unknown key `polcy`"),
        ("consent =", "consnt =", "unknown key `consnt`"),
        ("linger =", "lingr =", "unknown key `lingr`"),
        ("depth =", "deep =", "unknown key `deep`"),
        ("strip = 1", "strip = \"1\"", "source.strip: invalid type"),
        ("strip = 1", "strip = -1", "source.strip: invalid value"),
        ("strip = 1", "strip = ", "source.strip:"),
        ("kind = \"http\"", "kind = \"htp\"", "probe.kind: unknown variant `htp`"),
        ("rule = \"exact\"", "rule = \"same\"", "probe.rule: unknown variant `same`"),
        ("consent = \"implied\"", "consent = true", "policy.consent:"),
        ("demo.service", "demo.socket", "unit: \"demo.socket\" is not a service unit"),
        ("demo.service", "demo", "unit: \"demo\" is not a service unit"),
        ("demo.service", "demo@.service", "template without an instance"),
        ("demo.service", "a/b.service", "cannot be the name of a unit"),
        ("/srv/releases/demo\"", "releases/demo\"", "source.path: \"releases/demo\" is not absolute"),
        ("/srv/releases/demo\"", "https://example.org/\"", "is not on this machine"),
        ("/srv/releases/demo\"", "file:///a%20b\"", "percent-encoded"),
        ("path = \"/srv/releases/demo\"", "", "source.path: missing"),
        ("artifact = \"{version}/demo-{version}-{arch}.tar.gz\"", "", "source.artifact: missing"),
        ("{version}/demo-{version}-{arch}.tar.gz\"", "demo.tar\"", "does not contain {version}"),
        ("{version}/demo-{version}-{arch}.tar.gz\"", "{version}/{os}.tar\"", "unknown placeholder"),
        ("{version}/demo-{version}-{arch}.tar.gz\"", "../{version}.tar\"", "not a path below source.path"),
        ("{version}/demo-{version}-{arch}.tar.gz\"", "{version}.zip\"", "is a .zip file"),
        ("program = \"bin/demo\"", "program = \"/bin/demo\"", "source.program: \"/bin/demo\""),
        ("RWSCxVbRup5rApzNiH9V", "RWSC", "is not a minisign public key"),
        ("keys = [", "unsigned = true\nkeys = [", "there are keys, and source.unsigned is true"),
        ("keys = [", "# keys = [", "source.keys: missing"),
        ("http://127.0.0.1:8080/health", "https://127.0.0.1/", "is neither http:// nor unix:"),
        ("http://127.0.0.1:8080/health", "http://example.org/", "has no IP address or localhost"),
        ("http://127.0.0.1:8080/health", "unix:run/x.sock:/h", "is not unix:SOCKET:PATH"),
        ("http://127.0.0.1:8080/health", "http://127.0.0.1/a b", "spaces or control characters"),
        ("url = \"http://127.0.0.1:8080/health\"", "", "probe.url: missing"),
        ("kind = \"http\"", "kind = \"http\"\ncommand = [\"/bin/true\"]", "probe.command: has no meaning"),
        ("kind = \"http\"", "kind = \"kernel\"", "probe.url: has no meaning"),
        ("{ pointer = \"/version\" }\n# How", "{ pointer = \"version\" }\n# How", "is not a JSON pointer"),
        ("{ pointer = \"/version\" }\n# How", "{ body = false }\n# How", "false has no meaning"),
        ("{ pointer = \"/version\" }\n# How", "{ header = \"x\" }\n# How", "unknown variant `header`"),
        ("{ pointer = \"/version\" }\n# How", "{ line = \"\" }\n# How", "is not the beginning of a line"),
        ("interval = \"500ms\"", "interval = \"0s\"", "probe.interval: \"0s\" is zero"),
        ("interval = \"500ms\"", "interval = \"-1s\"", "probe.interval: \"-1s\" is negative"),
        ("interval = \"500ms\"", "interval = \"soon\"", "probe.interval: \"soon\" is not a duration"),
        ("interval = \"500ms\"", "interval = 5", "probe.interval: invalid type"),
        ("stall = \"1min\"", "stall = \"25h\"", "timeouts.stall: \"25h\" is longer than a day"),
        ("passes = 3", "passes = 0", "probe.passes: is zero"),
        ("attempts = 3", "attempts = 0", "timeouts.attempts: is zero"),
        (
            "\"/usr/local/bin/demo-ctl\", \"pause\"",
            "\"demo-ctl\"",
            "quiesce.command: \"demo-ctl\" is not absolute",
        ),
        ("\"/usr/local/bin/demo-ctl\", \"resume\"", "", "resume.command: is empty"),
        ("user = \"demo\"", "user = \"-x\"", "quiesce.user: \"-x\" is not a user's name"),
        ("bytes = \"16GiB\"", "bytes = \"16GB\"", "limits.bytes: is not a number of bytes"),
        ("bytes = \"16GiB\"", "bytes = 0", "limits.bytes: is not a number of bytes"),
        ("bytes = \"16GiB\"", "bytes = -1", "limits.bytes:"),
        ("files = 200000", "files = 0", "limits.files: is zero"),
    ];
    for (from, to, message) in rows {
        let text = changed(from, to);
        let error = parse(&text).expect_err(to).to_string();
        assert!(error.contains(message), "{from:?} -> {to:?}\n{error}");
        let (place, rest) = error.split_once(": ").unwrap();
        let line =
            place.strip_prefix("/etc/cutover/services/demo.toml:").unwrap_or_else(|| panic!("{error}"));
        let line: usize = line.parse().unwrap();
        assert!(rest.contains("; "), "no next step: {error}");
        // What is missing, or has no meaning beside something else, is told where that is.
        if !to.is_empty()
            && !to.starts_with("unsigned")
            && !message.contains("missing")
            && !message.contains("has no meaning")
        {
            let example = include_str!("example.toml");
            let at = example[..example.find(from).unwrap()].matches('\n').count() + 1;
            assert_eq!(line, at, "{error}");
        }
    }
}

#[test]
fn what_may_be_left_out_may_and_what_may_not_is_named() {
    for (gone, key) in [("unit = 'demo.service'\n", "unit"), ("kind = 'kernel'\n", "kind")] {
        let error = parse(&MINIMAL.replace(gone, "")).unwrap_err().to_string();
        assert!(error.contains(&format!("missing key `{key}`; add it")), "{error}");
    }
    let error = parse("unit = 'demo.service'\n[source]\nunsigned = true\n").unwrap_err().to_string();
    assert!(error.contains("missing key `probe`"), "{error}");
    let error = parse("unit = 'a.service'\nunit = 'b.service'\n").unwrap_err().to_string();
    assert!(error.contains("demo.toml:2: unit: duplicate key"), "{error}");
}

#[test]
fn each_kind_of_probe_is_read() {
    let method = |lines: &str| {
        parse(&MINIMAL.replace("kind = 'kernel'", lines)).unwrap_or_else(|e| panic!("{e}")).probe
    };
    assert_eq!(method("kind = 'kernel'").method, Method::Kernel);
    let probe = method(
        "kind = 'command'\ncommand = ['/bin/x', 'a b']\nuser = 'demo'\nanswer = '2s'\nversion = { line = 'v:' }",
    );
    let command = vec!["/bin/x".to_owned(), "a b".to_owned()];
    let hook = Hook { command, user: Some("demo".into()), timeout: Duration::from_secs(2) };
    assert_eq!(probe.method, Method::Command(hook));
    assert_eq!(probe.version, VersionField::Line("v:".into()));
    for (url, address, host, path) in [
        ("http://localhost:81/a?b", "127.0.0.1:81", "localhost:81", "/a?b"),
        ("http://localhost", "127.0.0.1:80", "localhost", "/"),
        ("http://[::1]:8080/", "[::1]:8080", "[::1]:8080", "/"),
        ("http://[::1]/x", "[::1]:80", "[::1]", "/x"),
        ("http://10.0.0.1/x", "10.0.0.1:80", "10.0.0.1", "/x"),
    ] {
        let (host, path) = (host.to_owned(), path.to_owned());
        let target = HttpTarget::Tcp { address: address.parse().unwrap(), host, path };
        assert_eq!(method(&format!("kind = 'http'\nurl = '{url}'")).method, Method::Http(target));
    }
    for (url, path) in [("unix:/run/x.sock:/p:q", "/p:q"), ("unix:/run/x.sock", "/")] {
        let target = HttpTarget::Unix { socket: "/run/x.sock".into(), path: path.into() };
        let probe = method(&format!("kind = 'http'\nurl = '{url}'\nversion = {{ body = true }}"));
        assert_eq!((probe.method, probe.version), (Method::Http(target), VersionField::Body));
    }
    for (rule, value) in [
        ("semver", VersionRule::Semver),
        ("prefix", VersionRule::Prefix),
        ("contained", VersionRule::Contained),
    ] {
        assert_eq!(method(&format!("kind = 'kernel'\nrule = '{rule}'\nsettle = '0s'")).rule, value);
    }
}

#[test]
fn policies_units_and_sources_are_read() {
    let policy =
        "[policy]\nconsent = 'required'\nbaseline = 'must-pass'\nstop = 'any'\nstop-commands = 'fit-both'\n";
    let all = Policy {
        consent_required: true,
        baseline_must_pass: true,
        accept_killed_stop: true,
        stop_fits_both: true,
    };
    assert_eq!(parse(&format!("{MINIMAL}{policy}")).unwrap().policy, all);
    for unit in ["a@b.service", "a\\x2db.service", "foo:bar_1.2.service"] {
        assert_eq!(parse(&MINIMAL.replace("demo.service", unit)).unwrap().unit, unit);
    }
    for (path, directory) in [("/a b", "/a b"), ("file:///srv/x", "/srv/x"), ("file://localhost/srv", "/srv")]
    {
        let text = changed("\"/srv/releases/demo\"", &format!("{path:?}"));
        assert_eq!(parse(&text).unwrap().source.directory, Some(PathBuf::from(directory)));
    }
    for (bytes, value) in [("1", 1), ("\"5\"", 5), ("\"3KiB\"", 3 << 10), ("\"7 MiB\"", 7 << 20)] {
        assert_eq!(parse(&changed("\"16GiB\"", bytes)).unwrap().limits.bytes, value);
    }
}

#[test]
fn services_have_names_that_are_safe_in_paths_and_units() {
    for good in ["a", "0", "demo", "demo.web-2_x", &"a".repeat(64)] {
        assert_eq!(service_name(good), Ok(good));
    }
    for bad in ["", ".", "..", "-a", ".a", "A", "a/b", "a b", "a\n", "é", "a@b", &"a".repeat(65)] {
        assert!(service_name(bad).is_err(), "{bad:?}");
        assert!(Adapter::load(Path::new("/nonexistent"), bad).is_err(), "{bad:?}");
    }
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a test's adapter")]
fn a_missing_file_and_an_unreadable_one_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = Adapter::load(dir.path(), "demo").unwrap_err().to_string();
    let path = dir.path().join("demo.toml");
    assert!(error.starts_with(&format!("{}: there is no adapter", path.display())), "{error}");
    std::fs::write(&path, MINIMAL).unwrap();
    assert_eq!(Adapter::load(dir.path(), "demo").unwrap().unit, "demo.service");
    std::fs::write(&path, [0xff, 0xfe]).unwrap();
    assert!(Adapter::load(dir.path(), "demo").unwrap_err().to_string().contains("is not UTF-8"));
    std::fs::write(&path, "#".repeat(2 << 20)).unwrap();
    assert!(Adapter::load(dir.path(), "demo").unwrap_err().to_string().contains("larger than 1 MiB"));
}
