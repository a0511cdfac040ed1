//! A real systemd for the tests, and services on it that misbehave as told.
//!
//! ```ignore
//! mod machine;
//! use machine::{Demo, Kind, Machine};
//!
//! let m = Machine::shared();
//! let demo = Demo::new(&m, "good").kind(Kind::Notify).install();
//! demo.adopt();
//! demo.release("2.0", &["exit 1"]);
//! let answer = demo.upgrade("2.0", &[]);
//! assert_eq!(answer.code, 1, "{answer}");
//! ```
//!
//! All tests share one machine, which tests/run.sh boots: names and ports are new for each [`Demo`], and no test may
//! change what others see (reboot it, fill its disk, stop its bus). A test that must takes [`Machine::own`].

#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test file uses a part of this module")]
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "nothing here has to survive a power cut"
)]

pub mod faults;

use std::fmt;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;
use sha2::{Digest, Sha256};

/// Where the scripts are.
const SCRIPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/machine");

/// The first port that a [`Demo`] may have.
const FIRST_PORT: u32 = 20_000;

// --- the machine --------------------------------------------------------------------------------------------------

/// A booted machine; see `boot.sh`.
#[derive(Clone)]
pub struct Machine {
    dir: PathBuf,
    /// Ends it with the last clone, where this process booted it.
    _own: Option<Arc<Own>>,
}

struct Own(PathBuf);

impl Drop for Own {
    fn drop(&mut self) {
        let _ = Command::new(format!("{SCRIPTS}/boot.sh")).arg("stop").arg(&self.0).status();
    }
}

impl Machine {
    /// The one that tests/run.sh booted.
    pub fn shared() -> Self {
        let dir = std::env::var_os("CUTOVER_TEST_MACHINE").map(PathBuf::from).unwrap_or_else(|| {
            panic!(
                "CUTOVER_TEST_MACHINE is not set: these tests need a machine. Run tests/run.sh, or for one test \
                 tests/run.sh NAME"
            )
        });
        let m = Self { dir, _own: None };
        assert!(m.dir.join("ready").exists(), "{}: no machine runs there; run tests/run.sh", m.dir.display());
        m
    }

    /// One of its own, for a test that reboots it, fills it, or looks at all of it. Takes a second or two.
    pub fn own() -> Self {
        Self::own_with(&[])
    }

    /// The same with options of `boot.sh`: `["--storage", "xfs", "--size", "400M"]`.
    pub fn own_with(options: &[&str]) -> Self {
        let mut boot = Command::new(format!("{SCRIPTS}/boot.sh"));
        // Not left behind when this test is killed.
        boot.args(["start", "--until", &std::process::id().to_string()]).args(options).stdin(Stdio::null());
        let out = boot.output().expect("boot.sh");
        assert!(out.status.success(), "boot.sh start: {}", String::from_utf8_lossy(&out.stderr));
        let dir = PathBuf::from(String::from_utf8_lossy(&out.stdout).trim());
        let m = Self { _own: Some(Arc::new(Own(dir.clone()))), dir };
        let installed =
            Command::new(format!("{SCRIPTS}/install.sh")).arg(&m.dir).status().expect("install.sh");
        assert!(installed.success());
        m
    }

    /// The pid of its systemd, seen from here; another one after each boot.
    pub fn pid(&self) -> u32 {
        fs::read_to_string(self.dir.join("pid"))
            .ok()
            .and_then(|p| p.trim().parse().ok())
            .expect("a running machine")
    }

    /// An orderly reboot; returns when it is up again.
    pub fn reboot(&self) {
        self.boot("reboot");
    }

    /// All processes die at once; boots again on the same storage. (What was written is there, synced or not: the
    /// host's page cache lives on.)
    pub fn power_cut(&self) {
        self.boot("power-cut");
    }

    fn boot(&self, how: &str) {
        let out =
            Command::new(format!("{SCRIPTS}/boot.sh")).arg(how).arg(&self.dir).output().expect("boot.sh");
        assert!(out.status.success(), "boot.sh {how}: {}", String::from_utf8_lossy(&out.stderr));
    }

    /// The host's path of one inside. Absolute links on the way would be followed on the host.
    pub fn path(&self, inside: impl AsRef<Path>) -> PathBuf {
        let inside = inside.as_ref();
        let relative =
            inside.strip_prefix("/").unwrap_or_else(|_| panic!("{}: not absolute", inside.display()));
        Path::new(&format!("/proc/{}/root", self.pid())).join(relative)
    }

    /// Writes a file inside, with the directories above it.
    pub fn write(&self, inside: impl AsRef<Path>, content: impl AsRef<[u8]>) {
        let path = self.path(inside);
        fs::create_dir_all(path.parent().expect("not the root"))
            .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        fs::write(&path, content).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    }

    /// The same, executable.
    pub fn write_program(&self, inside: impl AsRef<Path>, content: impl AsRef<[u8]>) {
        self.write(&inside, content);
        fs::set_permissions(self.path(inside), fs::Permissions::from_mode(0o755)).expect("just written");
    }

    pub fn read(&self, inside: impl AsRef<Path>) -> String {
        let path = self.path(inside);
        fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    }

    pub fn exists(&self, inside: impl AsRef<Path>) -> bool {
        self.path(inside).symlink_metadata().is_ok()
    }

    /// A command inside, not yet started; it dies with the process that is started here.
    pub fn command(&self, argv: &[&str]) -> Command {
        let mut command = Command::new(format!("{SCRIPTS}/enter.sh"));
        command.arg(&self.dir).args(argv).stdin(Stdio::null());
        command
    }

    pub fn run(&self, argv: &[&str]) -> Output {
        let out = self.command(argv).output().expect("enter.sh");
        Output {
            command: argv.join(" "),
            code: out.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&out.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&out.stderr).into_owned(),
        }
    }

    /// A shell script.
    pub fn sh(&self, script: &str) -> Output {
        self.run(&["/bin/bash", "-c", script])
    }

    /// Its output piped.
    pub fn spawn(&self, argv: &[&str]) -> Child {
        self.command(argv).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("enter.sh")
    }

    /// `cutover`, with its one JSON answer.
    pub fn cutover(&self, args: &[&str]) -> Answer {
        let out = self.run(&[&["cutover"], args].concat());
        let json = serde_json::from_str(&out.stdout).unwrap_or(Value::Null);
        Answer { code: out.code, json, output: out }
    }

    /// A unit's property, as `systemctl show` has it.
    pub fn property(&self, unit: &str, name: &str) -> String {
        self.run(&["systemctl", "show", "--value", "-p", name, unit]).ok().trim().to_owned()
    }

    /// The processes in a unit's cgroup and below, by the host's pids.
    pub fn processes(&self, unit: &str) -> Vec<u32> {
        let inside = self.property(unit, "ControlGroup");
        let cgroup = PathBuf::from(format!("{}{inside}", self.cgroup()));
        let mut pids = Vec::new();
        let mut todo = vec![cgroup];
        while let Some(dir) = todo.pop().filter(|_| !inside.is_empty()) {
            let procs = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
            pids.extend(procs.lines().filter_map(|l| l.parse::<u32>().ok()));
            let below = fs::read_dir(&dir).into_iter().flatten().flatten();
            todo.extend(below.filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path()));
        }
        pids
    }

    /// The host's path of the machine's root cgroup.
    fn cgroup(&self) -> String {
        let mounts = fs::read_to_string("/proc/mounts").expect("/proc");
        let mount = mounts.lines().find_map(|l| match *l.split(' ').collect::<Vec<_>>() {
            [_, target, "cgroup2", ..] => Some(target.to_owned()),
            _ => None,
        });
        let of_init = fs::read_to_string(format!("/proc/{}/cgroup", self.pid())).expect("/proc");
        let own = of_init.lines().find_map(|l| l.strip_prefix("0::")).expect("a cgroup2 line");
        format!("{}{}", mount.expect("a cgroup2 mount"), own.trim_end_matches("/init.scope"))
    }

    /// A number that no other test on this machine has.
    fn unique(&self) -> u32 {
        let path = self.dir.join("numbers");
        let file =
            fs::OpenOptions::new().create(true).append(true).open(&path).expect("the machine's directory");
        file.lock().expect("flock");
        // One byte for each number given away.
        (&file).write_all(b".").expect("the machine's directory");
        u32::try_from(file.metadata().expect("open").len()).expect("few tests")
    }

    /// Runs `f` on a thread that is in the machine's network.
    fn in_network<T: Send + 'static>(&self, f: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
        let net = fs::File::open(format!("/proc/{}/ns/net", self.pid())).expect("a running machine");
        std::thread::spawn(move || {
            rustix::thread::move_into_link_name_space(
                std::os::fd::AsFd::as_fd(&net),
                Some(rustix::thread::LinkNameSpaceType::Network),
            )
            .expect("setns");
            f()
        })
    }

    /// The body of the answer to a GET on the machine's loopback.
    pub fn get(&self, port: u16, path: &str) -> io::Result<String> {
        let path = path.to_owned();
        self.in_network(move || get(port, &path)).join().expect("no panic")
    }
}

/// What a command did.
#[derive(Debug)]
pub struct Output {
    pub command: String,
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Output {
    /// What it printed; it must have succeeded.
    pub fn ok(self) -> String {
        assert_eq!(self.code, 0, "{self}");
        self.stdout
    }
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "`{}` exited {}\n--- stdout\n{}--- stderr\n{}",
            self.command, self.code, self.stdout, self.stderr
        )
    }
}

/// What `cutover` answered.
pub struct Answer {
    pub code: i32,
    /// Null where it was no JSON.
    pub json: Value,
    pub output: Output,
}

impl Answer {
    /// A field of the receipt in the answer, as text; empty where there is none.
    pub fn receipt(&self, key: &str) -> String {
        match &self.json["operation"]["operation"][key] {
            Value::String(s) => s.clone(),
            Value::Null => String::new(),
            other => other.to_string(),
        }
    }

    /// Checks exit code and outcome in one go.
    #[track_caller]
    pub fn expect(self, code: i32, outcome: &str) -> Self {
        assert_eq!((self.code, self.receipt("outcome").as_str()), (code, outcome), "{self}");
        self
    }

    /// What else it says, a line each.
    pub fn notes(&self) -> String {
        let notes = self.json["operation"]["operation"]["metadata"]["notes"].as_array();
        notes.into_iter().flatten().filter_map(Value::as_str).collect::<Vec<_>>().join("\n")
    }

    /// Rolled back, with this cause, and these words in the reason.
    #[track_caller]
    pub fn rolled_back(self, cause: &str, reason: &str) -> Self {
        let answer = self.expect(1, "rolled-back");
        assert_eq!(answer.receipt("cause"), cause, "{answer}");
        assert!(answer.receipt("reason").contains(reason), "wanted {reason:?}: {answer}");
        answer
    }

    /// Left open, with these words in the error.
    #[track_caller]
    pub fn unresolved(self, error: &str) -> Self {
        assert_eq!((self.code, self.json["result"].as_str()), (3, Some("unresolved")), "{self}");
        let said = self.json["error"].as_str().unwrap_or_default();
        assert!(said.contains(error) && said.contains("cutover resume "), "wanted {error:?}: {self}");
        self
    }

    /// Held, with these words in the reason.
    #[track_caller]
    pub fn held(self, reason: &str) -> Self {
        let answer = self.expect(2, "held");
        assert!(answer.receipt("reason").contains(reason), "wanted {reason:?}: {answer}");
        answer
    }

    /// Failed before any change, with these words in the reason.
    #[track_caller]
    pub fn failed(self, reason: &str) -> Self {
        let answer = self.expect(1, "failed");
        assert!(answer.receipt("reason").contains(reason), "wanted {reason:?}: {answer}");
        answer
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.output.fmt(f)
    }
}

/// Polls until it holds; panics after `at_most`.
#[track_caller]
pub fn wait_for(what: &str, at_most: Duration, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + at_most;
    while !holds() {
        assert!(Instant::now() < deadline, "not within {at_most:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn get(port: u16, path: &str) -> io::Result<String> {
    let limit = Duration::from_secs(5);
    let mut stream = TcpStream::connect_timeout(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)), limit)?;
    stream.set_read_timeout(Some(limit))?;
    stream.write_all(
        format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").as_bytes(),
    )?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let answer = String::from_utf8_lossy(&answer).into_owned();
    match answer.split_once("\r\n\r\n") {
        Some((head, body)) if head.starts_with("HTTP/1.1 200 ") => Ok(body.to_owned()),
        _ => Err(io::Error::other(format!("answered {answer:?}"))),
    }
}

// --- the service --------------------------------------------------------------------------------------------------

/// How systemd runs a [`Demo`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Simple,
    Exec,
    Notify,
    /// With a PID file.
    Forking,
    /// Owns `org.cutover.test.NAME`.
    Dbus,
    /// With `RemainAfterExit=yes` and a command probe (`demo report`).
    Oneshot,
    /// `Type=notify` behind a socket unit of the same name.
    Socket,
    /// `Type=exec`, run by /usr/bin/python3, from an archive.
    Python,
}

/// A service to be: a unit, an adapter and a release source, all named after it.
pub struct Demo {
    m: Machine,
    name: String,
    port: u16,
    kind: Kind,
    version: String,
    switches: Vec<String>,
    unit: String,
    service: String,
    adapter: String,
    probe: String,
    policy: String,
    source: String,
    archive: bool,
    genesis: bool,
    start: bool,
    pace: String,
    files: Vec<(String, String)>,
}

impl Demo {
    /// `label` names the case: `good`, `a17-leftover`.
    pub fn new(m: &Machine, label: &str) -> Self {
        let n = m.unique();
        Self {
            m: m.clone(),
            name: format!("{label}-{n}"),
            port: u16::try_from(FIRST_PORT + n).expect("few tests"),
            kind: Kind::Exec,
            version: "1.0".into(),
            switches: Vec::new(),
            unit: String::new(),
            service: String::new(),
            adapter: String::new(),
            probe: String::new(),
            policy: String::new(),
            source: "unsigned = true\n".into(),
            archive: false,
            genesis: false,
            start: true,
            pace: pace(300, 5000),
            files: Vec::new(),
        }
    }

    /// How long the probe wants it to pass, and within which it must begin to, in milliseconds.
    pub fn window(mut self, settle: u64, timeout: u64) -> Self {
        self.pace = pace(settle, timeout);
        self
    }

    /// A file in its data directory, there from the beginning.
    pub fn file(mut self, name: &str, content: &str) -> Self {
        self.files.push((name.into(), content.into()));
        self
    }

    fn fill(&self, text: &str) -> String {
        fill(text, &self.name, self.port)
    }

    /// Installs it and brings it under management by a first upgrade, from nothing, to its first version.
    #[track_caller]
    pub fn managed(self) -> Service {
        let (version, switches) = (self.version.clone(), self.switches.clone());
        let switches: Vec<&str> = switches.iter().map(String::as_str).collect();
        let s = self.genesis().install();
        s.release(&version, &switches);
        s.upgrade(&version, &[]).expect(0, "promoted");
        s
    }

    pub fn kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self.archive |= kind == Kind::Python;
        self
    }

    /// The version that is installed at first (1.0), and its switches.
    pub fn first(mut self, version: &str, switches: &[&str]) -> Self {
        self.version = version.into();
        self.switches = switches.iter().map(|&s| s.into()).collect();
        self
    }

    /// Lines for the unit's `[Service]`: `Restart=always`.
    pub fn service(mut self, lines: &str) -> Self {
        self.service += &format!("{lines}\n");
        self
    }

    /// Lines for the unit's `[Unit]`: `Requires=x.service`.
    pub fn unit(mut self, lines: &str) -> Self {
        self.unit += &format!("{lines}\n");
        self
    }

    /// More of the adapter, tables of its own: `[quiesce]\ncommand = […]`.
    pub fn adapter(mut self, toml: &str) -> Self {
        self.adapter += &format!("{toml}\n");
        self
    }

    /// Keys for `[policy]`: `stop = "any"`.
    pub fn policy(mut self, toml: &str) -> Self {
        self.policy += &format!("{toml}\n");
        self
    }

    /// The `[probe]` but for its pace, instead of the one over HTTP.
    pub fn probe(mut self, toml: &str) -> Self {
        self.probe = format!("{toml}\n");
        self
    }

    /// Keys for `[source]` instead of `unsigned = true`: `keys = ["RW…"]`.
    pub fn source(mut self, toml: &str) -> Self {
        self.source = format!("{toml}\n");
        self
    }

    /// Releases are `.tar.gz` with a directory `NAME-VERSION/` (so `strip = 1`) instead of single executables.
    pub fn archive(mut self) -> Self {
        self.archive = true;
        self
    }

    /// The unit is shipped to go through `current/`, and is not started: a first upgrade without an adoption.
    pub fn genesis(mut self) -> Self {
        self.genesis = true;
        self.start = false;
        self
    }

    /// Installed, not started.
    pub fn stopped(mut self) -> Self {
        self.start = false;
        self
    }

    /// Writes it all, loads the unit and, unless told otherwise, starts it and waits for its answer.
    pub fn install(self) -> Service {
        let home = format!("/opt/{}", self.name);
        let s = Service {
            unit: format!("{}.service", self.name),
            data: format!("/srv/{}/data", self.name),
            state: format!("/var/lib/cutover/{}", self.name),
            program: format!("{home}/{}", if self.kind == Kind::Python { "demo.py" } else { "demo" }),
            m: self.m.clone(),
            name: self.name.clone(),
            port: self.port,
            kind: self.kind,
            archive: self.archive,
        };
        let m = &s.m;
        fs::create_dir_all(m.path(&s.data)).expect("/srv");
        for (file, content) in &self.files {
            m.write(format!("{}/{file}", s.data), content);
        }
        let switches: Vec<&str> = self.switches.iter().map(String::as_str).collect();
        m.write_program(&s.program, s.payload(&self.version, &switches));
        m.write(format!("/etc/systemd/system/{}", s.unit), self.unit_file(&s));
        if self.kind == Kind::Socket {
            m.write(
                format!("/etc/systemd/system/{}.socket", s.name),
                format!("[Socket]\nListenStream=127.0.0.1:{}\nBacklog=4096\n", s.port),
            );
        }
        m.write(format!("/etc/cutover/services/{}.toml", s.name), self.adapter_file(&s));
        m.run(&["systemctl", "daemon-reload"]).ok();
        if self.start {
            if self.kind == Kind::Socket {
                m.run(&["systemctl", "start", &format!("{}.socket", s.name)]).ok();
            }
            m.run(&["systemctl", "start", &s.unit]).ok();
            if self.kind != Kind::Oneshot && self.switches.is_empty() {
                wait_for("the first version answers", Duration::from_secs(10), || s.version().is_some());
            }
        }
        s
    }

    fn unit_file(&self, s: &Service) -> String {
        let program = match (self.genesis, self.kind) {
            (true, Kind::Python) => format!("{}/current/demo.py", s.state),
            (true, _) => format!("{}/current/demo", s.state),
            _ => s.program.clone(),
        };
        let exec = match self.kind {
            Kind::Oneshot => format!("{program} once"),
            Kind::Forking => format!("{program} --pid-file /run/{}.pid", s.name),
            Kind::Dbus => format!("{program} --bus-name {}", s.bus_name()),
            Kind::Python => format!("/usr/bin/python3 {program}"),
            _ => program,
        };
        let arguments = match self.kind {
            Kind::Python => format!("--port {}", s.port),
            Kind::Oneshot => format!("--data {}", s.data),
            _ => format!("--port {} --data {}", s.port, s.data),
        };
        let type_ = match self.kind {
            Kind::Simple => "Type=simple".into(),
            Kind::Exec | Kind::Python => "Type=exec".into(),
            Kind::Notify | Kind::Socket => "Type=notify".into(),
            Kind::Forking => format!("Type=forking\nPIDFile=/run/{}.pid", s.name),
            Kind::Dbus => format!("Type=dbus\nBusName={}", s.bus_name()),
            Kind::Oneshot => "Type=oneshot\nRemainAfterExit=yes".into(),
        };
        let (unit, service) = (self.fill(&self.unit), self.fill(&self.service));
        // Short bounds first, so that the lines of a test win.
        format!(
            "[Unit]\nDescription=Demo {name}\n{unit}\n[Service]\n{type_}\nExecStart={exec} {arguments}\n\
             TimeoutStartSec=10\nTimeoutStopSec=5\n{service}",
            name = s.name,
        )
    }

    fn adapter_file(&self, s: &Service) -> String {
        let name = &s.name;
        let artifact = if self.archive {
            format!("artifact = \"{{version}}/{name}-{{version}}.tar.gz\"\nstrip = 1\n")
        } else {
            format!("artifact = \"{{version}}/{name}-{{version}}\"\nprogram = \"demo\"\n")
        };
        let pace = &self.pace;
        let probe = match self.kind {
            _ if !self.probe.is_empty() => format!("{}{pace}", self.fill(&self.probe)),
            Kind::Oneshot => {
                let command = format!("command = [\"{}/current/demo\", \"report\"]", s.state);
                format!("kind = \"command\"\n{command}\nversion = {{ pointer = \"/version\" }}\n{pace}")
            }
            _ => format!(
                "kind = \"http\"\nurl = \"http://127.0.0.1:{}/version\"\nversion = {{ pointer = \"/version\" }}\n\
                 rule = \"exact\"\n{pace}",
                s.port
            ),
        };
        let policy =
            if self.policy.is_empty() { String::new() } else { format!("[policy]\n{}", self.policy) };
        format!(
            "unit = \"{}\"\n\n[source]\npath = \"/srv/{name}\"\n{artifact}{}\n[probe]\n{probe}\n{policy}\n{}",
            s.unit,
            self.source,
            self.fill(&self.adapter)
        )
    }
}

/// In lines for the unit, the adapter and a release, `{name}`, `{port}`, `{state}` and `{data}` stand for what differs
/// from one service to the next.
fn fill(text: &str, name: &str, port: u16) -> String {
    text.replace("{name}", name)
        .replace("{port}", &port.to_string())
        .replace("{state}", &format!("/var/lib/cutover/{name}"))
        .replace("{data}", &format!("/srv/{name}/data"))
}

fn pace(settle: u64, timeout: u64) -> String {
    format!("interval = \"50ms\"\npasses = 2\nsettle = \"{settle}ms\"\ntimeout = \"{timeout}ms\"\n")
}

/// An installed [`Demo`].
pub struct Service {
    pub m: Machine,
    pub name: String,
    pub unit: String,
    pub port: u16,
    pub kind: Kind,
    /// Its data directory: `log` (what started and stopped, in order), `clean`, `schema`.
    pub data: String,
    /// Its state directory: `/var/lib/cutover/NAME`.
    pub state: String,
    /// Where the program was before the adoption.
    pub program: String,
    archive: bool,
}

impl Service {
    pub fn bus_name(&self) -> String {
        format!("org.cutover.test.{}", self.name.replace('-', "_"))
    }

    /// The program of a release.
    pub fn payload(&self, version: &str, switches: &[&str]) -> Vec<u8> {
        let conf = [&[format!("version {version}").as_str()], switches].concat().join("\n");
        let conf = fill(&conf, &self.name, self.port);
        if self.kind == Kind::Python {
            let script = fs::read_to_string(format!("{SCRIPTS}/demo.py")).expect("in the repository");
            return script.replace("\"\"\"version 0\"\"\"", &format!("\"\"\"{conf}\"\"\"")).into_bytes();
        }
        let base = self.m.path("/usr/lib/cutover-tests/demo");
        let mut program =
            fs::read(&base).unwrap_or_else(|e| panic!("{}: {e}; tests/run.sh installs it", base.display()));
        program.extend_from_slice(format!("{conf}{:08}DEMOCONF", conf.len()).as_bytes());
        program
    }

    /// Publishes a release with its faults; see the table in demo.rs. Returns the artifact's path inside.
    pub fn release(&self, version: &str, switches: &[&str]) -> String {
        let program = self.payload(version, switches);
        if !self.archive {
            return self.publish(version, &program);
        }
        let file = if self.kind == Kind::Python { "demo.py" } else { "demo" };
        self.release_tree(version, &[(file, 0o755, &program)])
    }

    /// The same from files: path, mode, content.
    pub fn release_tree(&self, version: &str, files: &[(&str, u32, &[u8])]) -> String {
        let mut tar =
            tar::Builder::new(flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast()));
        for (path, mode, content) in files {
            let mut header = tar::Header::new_gnu();
            header.set_mode(*mode);
            header.set_size(content.len() as u64);
            tar.append_data(&mut header, format!("{}-{version}/{path}", self.name), *content)
                .expect("in memory");
        }
        self.publish(
            version,
            &tar.into_inner().and_then(flate2::write::GzEncoder::finish).expect("in memory"),
        )
    }

    /// The same from the artifact's bytes, whatever they are.
    pub fn publish(&self, version: &str, artifact: &[u8]) -> String {
        let file = format!("{}-{version}{}", self.name, if self.archive { ".tar.gz" } else { "" });
        let dir = format!("/srv/{}/{version}", self.name);
        self.m.write_program(format!("{dir}/{file}"), artifact);
        self.m.write(format!("{dir}/SHA256SUMS"), format!("{}  {file}\n", hex(&Sha256::digest(artifact))));
        format!("{dir}/{file}")
    }

    pub fn cutover(&self, args: &[&str]) -> Answer {
        self.m.cutover(args)
    }

    /// Adopts it at version 1.0; must succeed.
    #[track_caller]
    pub fn adopt(&self) -> Answer {
        self.adopt_as("1.0").expect(0, "adopted")
    }

    pub fn adopt_as(&self, version: &str) -> Answer {
        let mut args = vec!["adopt", &self.name, "--unit", &self.unit, "--version", version];
        // The program of its unit is the interpreter's.
        let home = self.program.strip_suffix("/demo.py").unwrap_or_default();
        if self.kind == Kind::Python {
            args.extend(["--from", home]);
        }
        self.m.cutover(&args)
    }

    pub fn upgrade(&self, version: &str, options: &[&str]) -> Answer {
        self.m.cutover(&[&["upgrade", &self.name, version], options].concat())
    }

    pub fn recover(&self, options: &[&str]) -> Answer {
        self.m.cutover(&[&["recover", &self.name], options].concat())
    }

    pub fn property(&self, name: &str) -> String {
        self.m.property(&self.unit, name)
    }

    pub fn active(&self) -> String {
        self.property("ActiveState")
    }

    pub fn systemctl(&self, verb: &str) -> Output {
        self.m.run(&["systemctl", verb, &self.unit])
    }

    /// What it answers now; none where it does not.
    pub fn version(&self) -> Option<String> {
        let body = self.m.get(self.port, "/version").ok()?;
        serde_json::from_str::<Value>(&body).ok()?["version"].as_str().map(str::to_owned)
    }

    /// `start 1.0`, `stop 1.0`, … in order.
    pub fn log(&self) -> Vec<String> {
        let log = fs::read_to_string(self.m.path(format!("{}/log", self.data))).unwrap_or_default();
        log.lines().map(str::to_owned).collect()
    }

    /// Where a link in the state directory leads; empty without one.
    pub fn link(&self, name: &str) -> String {
        let link = fs::read_link(self.m.path(format!("{}/{name}", self.state)));
        link.map(|p| p.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// What must hold after every case, whatever it was: no operation is open, stable names a sealed release,
    /// `current` leads to it, each process of the unit executes a file of it, and another recovery changes nothing.
    #[track_caller]
    pub fn assert_settled(&self, version: &str) {
        let release = self.link("slots/stable").replace("../", "");
        let context = format!("{}: stable is {release:?}, current {:?}", self.name, self.link("current"));
        assert!(release.starts_with(&format!("releases/{version}-")), "{context}; wanted {version}");
        assert_eq!(self.link("slots/experiment"), "", "{context}");
        assert_eq!(self.link("current"), format!("{release}/tree"), "{context}");
        assert!(self.m.exists(format!("{}/{release}/manifest.json", self.state)), "{context}: not sealed");
        if self.kind != Kind::Python {
            let file =
                self.m.path(format!("{}/{release}/tree/demo", self.state)).metadata().expect("its program");
            for pid in self.m.processes(&self.unit) {
                let Ok(exe) = fs::metadata(format!("/proc/{pid}/exe")) else { continue };
                assert_eq!(
                    (exe.dev(), exe.ino()),
                    (file.dev(), file.ino()),
                    "{context}; process {pid} is not from it"
                );
            }
        }
        let before = (self.links(), self.property("InvocationID"), self.property("MainPID"));
        let again = self.recover(&[]);
        assert_eq!((again.code, again.json["result"].as_str()), (0, Some("settled")), "{again}");
        assert_eq!(
            before,
            (self.links(), self.property("InvocationID"), self.property("MainPID")),
            "{again}"
        );
    }

    /// [`Self::assert_settled`], that these releases and no others are on the disk, and that nothing else is left:
    /// no scratch directory, no half of a file, no unit of ours, no process.
    #[track_caller]
    pub fn assert_clean(&self, version: &str, releases: &[&str]) {
        self.assert_settled(version);
        let list = |dir: &str| {
            let entries = fs::read_dir(self.m.path(format!("{}/{dir}", self.state))).into_iter().flatten();
            let mut names: Vec<_> =
                entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
            names.sort();
            names
        };
        let versions: Vec<_> = list("releases")
            .iter()
            .map(|n| n.rsplit_once('-').expect("VERSION-DIGEST").0.to_owned())
            .collect();
        assert_eq!(versions, releases, "{}", self.name);
        assert_eq!((list("run"), list("incoming")), (vec![], vec![]), "{}", self.name);
        let odd: Vec<_> = list("").into_iter().filter(|n| n.contains(".new") || n.contains(".to-")).collect();
        assert!(odd.is_empty(), "{}: {odd:?}", self.name);
        let units =
            self.m.run(&["systemctl", "list-units", "--all", "--plain", "--no-legend", "cutover-*"]).ok();
        let ours = format!("{} ", self.name);
        let units: Vec<_> = units.lines().filter(|l| format!("{l} ").contains(&ours)).collect();
        assert!(units.is_empty(), "{units:?}");
    }

    /// The versions in quarantine.
    pub fn quarantined(&self) -> Vec<String> {
        let file = self.m.path(format!("{}/quarantine.json", self.state));
        let Ok(text) = fs::read_to_string(file) else { return vec![] };
        let json: Value = serde_json::from_str(&text).expect("JSON");
        let list = json.as_array().or_else(|| json["entries"].as_array()).expect("a list");
        list.iter().map(|q| q["version"].as_str().expect("a version").to_owned()).collect()
    }

    fn links(&self) -> [String; 3] {
        ["slots/stable", "slots/experiment", "current"].map(|l| self.link(l))
    }

    /// Requests one after another on `threads` connections, until [`Load::stop`].
    pub fn load(&self, threads: usize) -> Load {
        let stop = Arc::new(AtomicBool::new(false));
        let port = self.port;
        let workers = (0..threads).map(|_| {
            let stop = stop.clone();
            self.m.in_network(move || {
                let mut seen = Requests::default();
                while !stop.load(Ordering::SeqCst) {
                    match get(port, "/version") {
                        Ok(_) => seen.answered += 1,
                        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => seen.refused += 1,
                        Err(e) => {
                            seen.failed += 1;
                            seen.failure = e.to_string();
                        }
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                seen
            })
        });
        Load { stop: stop.clone(), workers: workers.collect() }
    }
}

/// Requests in flight.
pub struct Load {
    stop: Arc<AtomicBool>,
    workers: Vec<JoinHandle<Requests>>,
}

/// What became of them.
#[derive(Clone, Debug, Default)]
pub struct Requests {
    pub answered: u64,
    pub refused: u64,
    /// Connected, and then no whole answer.
    pub failed: u64,
    /// The last failure.
    pub failure: String,
}

impl Load {
    pub fn stop(mut self) -> Requests {
        self.stop.store(true, Ordering::SeqCst);
        self.workers.drain(..).map(|w| w.join().expect("no panic")).fold(Requests::default(), |a, b| {
            Requests {
                answered: a.answered + b.answered,
                refused: a.refused + b.refused,
                failed: a.failed + b.failed,
                failure: if b.failure.is_empty() { a.failure } else { b.failure },
            }
        })
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
