//! The service that the tests upgrade: it answers its version over HTTP, and misbehaves as its release says.
//!
//! A unit's command line is the same for all versions, so the faults belong to the *release*: they stand, with the
//! version, in a trailer at the end of this executable's own file, one switch a line. See [`SWITCHES`].
//!
//! Trailer: the lines, then their length as eight decimal digits, then `DEMOCONF`.

#![allow(missing_docs, reason = "a program for tests")]
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "nothing here has to survive a power cut"
)]

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::{AsFd, FromRawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, exit};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketType, sockopt};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// What a release may say. Times are milliseconds.
const SWITCHES: &[(&str, &str)] = &[
    ("version V", "its version; the only switch that every release has"),
    ("reports TEXT", "answers TEXT where the version belongs"),
    ("exit CODE", "exits at once"),
    ("exit-after MS CODE", "exits some time after its start, in whatever state it is then"),
    ("listen no | after MS", "never listens, or late"),
    ("ready no | after MS", "never says READY (Type=notify, dbus, forking), or late"),
    ("status CODE COUNT", "the first COUNT answers have this HTTP status"),
    ("status-for CODE MS", "all answers have this status for so long after the start"),
    ("body KIND", "what it answers: see `Body`"),
    ("needs-port PORT", "answers 503 while nothing listens on 127.0.0.1:PORT"),
    ("needs-file PATH", "answers 503 while PATH is not there"),
    ("drain MS", "an orderly stop takes so long"),
    ("ignore-term MS", "SIGTERM does nothing for so long after it came"),
    ("exit-on-term CODE", "an orderly stop ends with this code"),
    ("stop-hangs", "`demo stop` (for ExecStop=) never returns"),
    ("child deaf", "leaves a child in a session of its own, deaf to SIGTERM"),
    ("child answers [V]", "the same, and it answers on the same port, as this version or as V"),
    ("schema N", "needs DATA/schema <= N (exits 78 else), and makes it N at the start"),
];

/// What it answers instead of `{"version": …, "pid": …}`, over HTTP and to `demo report`.
#[derive(Clone, Copy, PartialEq)]
enum Body {
    Json,
    /// The version alone.
    Plain,
    /// The version and a line feed.
    Newline,
    /// Bytes that are no UTF-8.
    Binary,
    /// The version, and 1 MiB behind it.
    Huge,
    Empty,
    /// One byte a second, for ever.
    Drip,
    /// Nothing, for ever.
    Hang,
    /// `demo report` only: on stderr, with exit code 0.
    Stderr,
    /// `demo report` only: on stdout, with exit code 3.
    Exit3,
}

struct Conf(BTreeMap<String, String>);

impl Conf {
    /// The trailer of this process's executable; empty without one.
    fn load() -> io::Result<Self> {
        let mut file = fs::File::open("/proc/self/exe")?;
        let mut tail = [0; 16];
        file.seek(SeekFrom::End(-16))?;
        file.read_exact(&mut tail)?;
        let Some(length) =
            tail.strip_suffix(b"DEMOCONF").and_then(|n| std::str::from_utf8(n).ok()?.parse().ok())
        else {
            return Ok(Self(BTreeMap::new()));
        };
        let length: u64 = length;
        file.seek(SeekFrom::End(-16 - i64::try_from(length).map_err(io::Error::other)?))?;
        let mut text = String::new();
        file.take(length).read_to_string(&mut text)?;
        let mut conf = BTreeMap::new();
        for line in text.lines().filter(|l| !l.is_empty()) {
            let (key, value) = line.split_once(' ').unwrap_or((line, ""));
            if !SWITCHES.iter().any(|(s, _)| s.split(' ').next() == Some(key)) {
                return Err(io::Error::other(format!("unknown switch {key:?}; see SWITCHES in demo.rs")));
            }
            conf.insert(key.to_owned(), value.to_owned());
        }
        Ok(Self(conf))
    }

    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// The numbers after a switch.
    fn numbers(&self, key: &str) -> Option<Vec<u64>> {
        self.get(key).map(|v| v.split(' ').filter_map(|n| n.parse().ok()).collect())
    }

    fn number(&self, key: &str) -> Option<u64> {
        self.numbers(key)?.first().copied()
    }

    fn code(&self, key: &str) -> Option<i32> {
        self.number(key).and_then(|n| i32::try_from(n).ok())
    }

    /// `no` → never returns; `after MS` → returns later.
    fn hold(&self, key: &str) {
        match self.get(key).map(|v| v.split_once(' ').unwrap_or((v, ""))) {
            Some(("no", _)) => loop {
                sleep(Duration::from_secs(3600));
            },
            Some(("after", ms)) => sleep(Duration::from_millis(ms.parse().unwrap_or(0))),
            _ => {}
        }
    }

    fn version(&self) -> &str {
        self.get("version").unwrap_or("0")
    }

    fn reports(&self) -> &str {
        self.get("reports").unwrap_or(self.version())
    }

    fn body(&self) -> Body {
        match self.get("body") {
            None | Some("json") => Body::Json,
            Some("plain") => Body::Plain,
            Some("newline") => Body::Newline,
            Some("binary") => Body::Binary,
            Some("huge") => Body::Huge,
            Some("empty") => Body::Empty,
            Some("drip") => Body::Drip,
            Some("hang") => Body::Hang,
            Some("stderr") => Body::Stderr,
            Some("exit3") => Body::Exit3,
            Some(other) => fail(64, &format!("unknown body {other:?}")),
        }
    }

    fn answer(&self) -> Vec<u8> {
        let v = self.reports();
        match self.body() {
            Body::Plain | Body::Stderr | Body::Exit3 => v.into(),
            Body::Newline => format!("{v}\n").into(),
            Body::Binary => [v.as_bytes(), b"\xff\xfe\x80\n"].concat(),
            Body::Huge => [v.as_bytes(), b"\n", &[b'x'; 1 << 20]].concat(),
            Body::Empty => Vec::new(),
            Body::Json | Body::Drip | Body::Hang => {
                format!("{{\"version\": \"{v}\", \"pid\": {}}}\n", std::process::id()).into()
            }
        }
    }
}

fn fail(code: i32, why: &str) -> ! {
    eprintln!("demo: {why}");
    exit(code)
}

/// `demo [ACTION] [--port N] [--unix PATH] [--data DIR] [--pid-file PATH] [--bus-name NAME]`
#[derive(Default)]
struct Args {
    /// `serve` (default), `once` (for Type=oneshot), `report` (for command probes), `stop PID`, and, for this program
    /// itself, `forked` and `leftover`.
    action: String,
    pid: Option<i32>,
    port: Option<u16>,
    unix: Option<PathBuf>,
    data: Option<PathBuf>,
    pid_file: Option<PathBuf>,
    bus_name: Option<String>,
}

impl Args {
    fn parse() -> Self {
        let mut args = Self { action: "serve".into(), ..Self::default() };
        let mut given = std::env::args().skip(1);
        while let Some(arg) = given.next() {
            let mut value = || given.next().unwrap_or_else(|| fail(64, &format!("{arg} needs a value")));
            match arg.as_str() {
                "--port" => args.port = value().parse().ok(),
                "--unix" => args.unix = Some(value().into()),
                "--data" => args.data = Some(value().into()),
                "--pid-file" => args.pid_file = Some(value().into()),
                "--bus-name" => args.bus_name = Some(value()),
                "stop" => {
                    args.action = arg.clone();
                    args.pid = value().parse().ok();
                }
                "serve" | "once" | "report" | "forked" | "leftover" => args.action = arg,
                other => fail(64, &format!("unknown argument {other:?}")),
            }
        }
        args
    }
}

fn main() {
    let args = Args::parse();
    let conf = Conf::load().unwrap_or_else(|e| fail(64, &format!("/proc/self/exe: {e}")));
    let done = match args.action.as_str() {
        "report" => report(&conf),
        "stop" => stop(&conf, &args),
        "leftover" => leftover(conf, &args),
        "serve" if args.pid_file.is_some() => fork(&conf, &args),
        _ => start(conf, args),
    };
    if let Err(e) = done {
        let in_use = e.kind() == io::ErrorKind::AddrInUse;
        fail(if in_use { 98 } else { 1 }, &e.to_string());
    }
}

/// For command probes.
fn report(conf: &Conf) -> io::Result<()> {
    match conf.body() {
        Body::Hang | Body::Drip => loop {
            sleep(Duration::from_secs(3600));
        },
        Body::Stderr => io::stderr().write_all(&conf.answer()),
        Body::Exit3 => {
            io::stdout().write_all(&conf.answer())?;
            exit(3)
        }
        _ => io::stdout().write_all(&conf.answer()),
    }
}

/// For `ExecStop=`.
fn stop(conf: &Conf, args: &Args) -> io::Result<()> {
    note(args, &format!("stop-command {}", conf.version()))?;
    while conf.get("stop-hangs").is_some() {
        sleep(Duration::from_secs(3600));
    }
    let pid = args
        .pid
        .and_then(rustix::process::Pid::from_raw)
        .ok_or_else(|| io::Error::other("stop needs a pid"))?;
    rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
    while Path::new(&format!("/proc/{}", pid.as_raw_nonzero())).exists() {
        sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// For `Type=forking`: the parent leaves when the child has written the PID file.
fn fork(conf: &Conf, args: &Args) -> io::Result<()> {
    let file = args.pid_file.as_ref().expect("this action is taken for --pid-file only");
    let _ = fs::remove_file(file);
    let mut child = Command::new("/proc/self/exe").args(std::env::args().skip(1)).arg("forked").spawn()?;
    while fs::read_to_string(file).ok().and_then(|s| s.trim().parse().ok()) != Some(child.id()) {
        if let Some(status) = child.try_wait()? {
            exit(status.code().unwrap_or(1));
        }
        sleep(Duration::from_millis(2));
    }
    conf.hold("ready");
    Ok(())
}

/// A line in DATA/log, so that a test sees what was started and stopped, and in which order.
fn note(args: &Args, what: &str) -> io::Result<()> {
    let Some(data) = &args.data else { return Ok(()) };
    let mut log = fs::OpenOptions::new().create(true).append(true).open(data.join("log"))?;
    log.write_all(format!("{what}\n").as_bytes())
}

fn migrate(conf: &Conf, args: &Args) -> io::Result<()> {
    let (Some(mine), Some(data)) = (conf.number("schema"), &args.data) else { return Ok(()) };
    let file = data.join("schema");
    let found = fs::read_to_string(&file).ok().and_then(|s| s.trim().parse().ok()).unwrap_or(0);
    if mine < found {
        fail(
            78,
            &format!("{}: schema {found} is newer than {mine}, which this version knows", file.display()),
        );
    }
    fs::write(file, format!("{mine}\n"))
}

/// The service itself.
fn start(conf: Conf, args: Args) -> io::Result<()> {
    let started = Instant::now();
    // Before anything else: a stop may come at any time.
    let (term, signal) = UnixStream::pair()?;
    for s in [SIGTERM, SIGINT] {
        signal_hook::low_level::pipe::register(s, signal.try_clone()?)?;
    }
    if args.action == "forked" {
        rustix::process::setsid()?;
    }
    note(&args, &format!("start {}", conf.version()))?;
    if let Some(data) = &args.data {
        let _ = fs::remove_file(data.join("clean"));
    }
    migrate(&conf, &args)?;
    if let Some(code) = conf.code("exit") {
        fail(code, "exits as its release says");
    }
    if let Some(&[ms, code]) = conf.numbers("exit-after").as_deref() {
        thread::spawn(move || {
            sleep(Duration::from_millis(ms));
            fail(i32::try_from(code).unwrap_or(1), "exits as its release says");
        });
    }
    if args.action == "once" {
        return Ok(());
    }
    let conf = Arc::new(conf);
    let args = Arc::new(args);
    let served = Arc::new(Served { started, answers: AtomicU64::new(0), open: AtomicUsize::new(0) });
    let closing = Arc::new(AtomicBool::new(false));
    {
        let (conf, args, served, closing) = (conf.clone(), args.clone(), served.clone(), closing.clone());
        let main = move || -> io::Result<()> {
            if let Some(kind) = conf.get("child") {
                leave_child(kind, &args)?;
            }
            if let Some(file) = &args.pid_file {
                fs::write(file, format!("{}\n", std::process::id()))?;
            }
            conf.hold("listen");
            let listeners = listeners(&args)?;
            if args.pid_file.is_none() {
                conf.hold("ready");
            }
            let _bus = args.bus_name.as_deref().map(own_name);
            notify("READY=1")?;
            accept(&conf, &served, &closing, &listeners)
        };
        thread::spawn(move || {
            if let Err(e) = main() {
                fail(if e.kind() == io::ErrorKind::AddrInUse { 98 } else { 1 }, &e.to_string());
            }
        });
    }

    let _ = (&term).read(&mut [0]);
    if let Some(ms) = conf.number("ignore-term") {
        sleep(Duration::from_millis(ms));
    }
    notify("STOPPING=1")?;
    closing.store(true, SeqCst);
    sleep(Duration::from_millis(conf.number("drain").unwrap_or(0)));
    // What was accepted is answered.
    let deadline = Instant::now() + Duration::from_secs(5);
    while served.open.load(SeqCst) > 0 && Instant::now() < deadline {
        sleep(Duration::from_millis(1));
    }
    if let Some(data) = &args.data {
        fs::write(data.join("clean"), conf.version())?;
    }
    note(&args, &format!("stop {}", conf.version()))?;
    exit(conf.code("exit-on-term").unwrap_or(0))
}

struct Served {
    started: Instant,
    answers: AtomicU64,
    /// Connections accepted and not yet closed.
    open: AtomicUsize,
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

trait Stream: Read + Write + Send {
    fn limit(&self) -> io::Result<()>;
}

impl Stream for TcpStream {
    fn limit(&self) -> io::Result<()> {
        self.set_read_timeout(Some(Duration::from_secs(2)))
    }
}

impl Stream for UnixStream {
    fn limit(&self) -> io::Result<()> {
        self.set_read_timeout(Some(Duration::from_secs(2)))
    }
}

/// Those that systemd hands over, else its own.
#[expect(unsafe_code, reason = "descriptors that are inherited have no owner but a number")]
fn listeners(args: &Args) -> io::Result<Vec<Listener>> {
    let mine = std::env::var("LISTEN_PID").is_ok_and(|p| p == std::process::id().to_string());
    let count: i32 =
        std::env::var("LISTEN_FDS").ok().and_then(|n| n.parse().ok()).filter(|_| mine).unwrap_or(0);
    if count > 0 {
        // SAFETY: systemd opened 3… for this process, and nothing else here uses them.
        return Ok((3..3 + count).map(|fd| Listener::Tcp(unsafe { TcpListener::from_raw_fd(fd) })).collect());
    }
    let mut all = Vec::new();
    if let Some(port) = args.port {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
        sockopt::set_socket_reuseaddr(&socket, true)?;
        // So that a child of the other version can go on answering here.
        sockopt::set_socket_reuseport(&socket, true)?;
        rustix::net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, port))?;
        rustix::net::listen(&socket, 128)?;
        all.push(Listener::Tcp(socket.into()));
    }
    if let Some(path) = &args.unix {
        let _ = fs::remove_file(path);
        all.push(Listener::Unix(UnixListener::bind(path)?));
    }
    Ok(all)
}

fn accept(
    conf: &Arc<Conf>,
    served: &Arc<Served>,
    closing: &AtomicBool,
    listeners: &[Listener],
) -> io::Result<()> {
    for l in listeners {
        match l {
            Listener::Tcp(l) => l.set_nonblocking(true)?,
            Listener::Unix(l) => l.set_nonblocking(true)?,
        }
    }
    loop {
        let mut fds: Vec<PollFd<'_>> = listeners
            .iter()
            .map(|l| match l {
                Listener::Tcp(l) => PollFd::from_borrowed_fd(l.as_fd(), PollFlags::IN),
                Listener::Unix(l) => PollFd::from_borrowed_fd(l.as_fd(), PollFlags::IN),
            })
            .collect();
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => continue,
            other => other?,
        };
        for l in listeners {
            // Counted before it is accepted, so that an orderly stop cannot miss it.
            served.open.fetch_add(1, SeqCst);
            let stream: Option<Box<dyn Stream>> = match l {
                _ if closing.load(SeqCst) => None,
                Listener::Tcp(l) => l.accept().ok().map(|(s, _)| Box::new(s) as Box<dyn Stream>),
                Listener::Unix(l) => l.accept().ok().map(|(s, _)| Box::new(s) as Box<dyn Stream>),
            };
            let Some(stream) = stream else {
                served.open.fetch_sub(1, SeqCst);
                if closing.load(SeqCst) {
                    // Whoever connects now waits for the next version (a socket unit's) or is refused.
                    return Ok(());
                }
                // What is handed over and is no listener is always ready, and never accepted from.
                sleep(Duration::from_millis(1));
                continue;
            };
            let (conf, served) = (conf.clone(), served.clone());
            thread::spawn(move || {
                let _ = serve(&conf, &served, stream);
                served.open.fetch_sub(1, SeqCst);
            });
        }
    }
}

/// One request: `/slow/MS` answers late, all else at once.
fn serve(conf: &Conf, served: &Served, mut stream: Box<dyn Stream>) -> io::Result<()> {
    stream.limit()?;
    let mut request = Vec::new();
    let mut part = [0; 1024];
    while !request.windows(4).any(|w| w == b"\r\n\r\n") && request.len() < 16 << 10 {
        let n = stream.read(&mut part)?;
        if n == 0 {
            return Ok(());
        }
        request.extend_from_slice(&part[..n]);
    }
    let text = String::from_utf8_lossy(&request);
    let path = text.split(' ').nth(1).unwrap_or("/");
    if let Some(ms) = path.strip_prefix("/slow/").and_then(|ms| ms.parse().ok()) {
        sleep(Duration::from_millis(ms));
    }
    let nth = served.answers.fetch_add(1, SeqCst);
    let status = match (conf.numbers("status").as_deref(), conf.numbers("status-for").as_deref()) {
        (Some(&[code, count]), _) if nth < count => code,
        (_, Some(&[code, ms])) if served.started.elapsed() < Duration::from_millis(ms) => code,
        _ if !dependencies(conf) => 503,
        _ => 200,
    };
    if conf.body() == Body::Hang {
        sleep(Duration::from_secs(3600));
    }
    let answer = conf.answer();
    let head = format!(
        "HTTP/1.1 {status} {}\r\nContent-Length: {}\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n",
        if status == 200 { "OK" } else { "No" },
        answer.len()
    );
    if conf.body() == Body::Drip {
        for byte in [head.as_bytes(), &answer].concat() {
            stream.write_all(&[byte])?;
            sleep(Duration::from_secs(1));
        }
    }
    stream.write_all(&[head.as_bytes(), &answer].concat())
}

fn dependencies(conf: &Conf) -> bool {
    let port = conf.number("needs-port").and_then(|p| u16::try_from(p).ok());
    port.is_none_or(|p| TcpStream::connect((Ipv4Addr::LOCALHOST, p)).is_ok())
        && conf.get("needs-file").is_none_or(|f| Path::new(f).exists())
}

fn notify(state: &str) -> io::Result<()> {
    let Some(name) = std::env::var("NOTIFY_SOCKET").ok() else { return Ok(()) };
    let address = match name.strip_prefix('@') {
        Some(abstract_name) => SocketAddr::from_abstract_name(abstract_name)?,
        None => SocketAddr::from_pathname(name)?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(drop)
}

/// Owns the name for as long as what it returns lives.
fn own_name(name: &str) -> (tokio::runtime::Runtime, zbus::Connection) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.unwrap_or_else(|e| fail(1, &e.to_string()));
    let connection =
        runtime.block_on(async { zbus::connection::Builder::system().name(name.to_owned()).build().await });
    match connection {
        Ok(c) => (runtime, c),
        Err(e) => fail(1, &format!("bus name {name}: {e}")),
    }
}

fn leave_child(kind: &str, args: &Args) -> io::Result<()> {
    let mut child = Command::new("/proc/self/exe");
    child.arg("leftover").env_remove("NOTIFY_SOCKET").env_remove("LISTEN_FDS");
    if let Some(v) = kind.strip_prefix("answers") {
        child.args(["--port", &args.port.unwrap_or(0).to_string()]).env("DEMO_REPORTS", v.trim());
    }
    // Its parent never waits: whoever is init does.
    child.spawn().map(drop)
}

/// A child that will not go.
fn leftover(mut conf: Conf, args: &Args) -> io::Result<()> {
    // One that systemd started itself leads a session already.
    let _ = rustix::process::setsid();
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)))?;
    }
    if args.port.is_some() {
        if let Some(v) = std::env::var("DEMO_REPORTS").ok().filter(|v| !v.is_empty()) {
            conf.0.insert("reports".into(), v);
        }
        let served =
            Served { started: Instant::now(), answers: AtomicU64::new(0), open: AtomicUsize::new(0) };
        let listeners = listeners(args)?;
        return accept(&Arc::new(conf), &Arc::new(served), &AtomicBool::new(false), &listeners);
    }
    loop {
        sleep(Duration::from_secs(3600));
    }
}
