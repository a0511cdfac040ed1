//! The adapter's text, checked: a file as it is written, in which everything may be wrong, becomes an [`Adapter`],
//! in which nothing is. Pure.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::SignedDuration;
use minisign_verify::PublicKey;
use serde::Deserialize;
use toml::Spanned;

use super::{
    Adapter, AdapterError, Hook, Limits, Method, Policy, Probe, Source, Timeouts, VersionField, VersionRule,
};
use crate::archive;
use crate::manager::HttpTarget;
use crate::release::is_plain_path;

/// No duration may be longer: it would be a slip of the pen, and sums of durations must not overflow.
const DURATION_MAX: Duration = Duration::from_secs(24 * 3600);
/// As systemd limits unit names (`UNIT_NAME_MAX`).
const UNIT_MAX: usize = 255;
/// The longest path of a Unix socket (`sun_path`, without its final NUL).
const SOCKET_PATH_MAX: usize = 107;

const KIB: u64 = 1024;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    unit: Spanned<String>,
    source: Spanned<SourceTable>,
    probe: Spanned<ProbeTable>,
    #[serde(default)]
    policy: PolicyTable,
    quiesce: Option<HookTable>,
    resume: Option<HookTable>,
    #[serde(default)]
    timeouts: TimeoutsTable,
    #[serde(default)]
    limits: LimitsTable,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct SourceTable {
    path: Option<Spanned<String>>,
    artifact: Option<Spanned<String>>,
    #[serde(default)]
    strip: u32,
    program: Option<Spanned<String>>,
    #[serde(default)]
    keys: Vec<Spanned<String>>,
    #[serde(default)]
    unsigned: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct ProbeTable {
    kind: Spanned<ProbeKind>,
    url: Option<Spanned<String>>,
    command: Option<Spanned<Vec<String>>>,
    user: Option<Spanned<String>>,
    version: Option<Spanned<VersionTable>>,
    rule: Option<RuleName>,
    interval: Option<Spanned<String>>,
    passes: Option<Spanned<u32>>,
    settle: Option<Spanned<String>>,
    timeout: Option<Spanned<String>>,
    answer: Option<Spanned<String>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum ProbeKind {
    Kernel,
    Http,
    Command,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum VersionTable {
    Body(bool),
    Pointer(String),
    Line(String),
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum RuleName {
    Exact,
    Semver,
    Prefix,
    Contained,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct PolicyTable {
    consent: Consent,
    baseline: Baseline,
    stop: Stop,
    stop_commands: StopCommands,
}

#[derive(Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Consent {
    #[default]
    Implied,
    Required,
}

#[derive(Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Baseline {
    #[default]
    Recorded,
    MustPass,
}

#[derive(Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Stop {
    #[default]
    Clean,
    Any,
}

#[derive(Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum StopCommands {
    #[default]
    SameVersion,
    FitBoth,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct HookTable {
    command: Spanned<Vec<String>>,
    user: Option<Spanned<String>>,
    timeout: Option<Spanned<String>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct TimeoutsTable {
    start: Option<Spanned<String>>,
    stop: Option<Spanned<String>>,
    linger: Option<Spanned<String>>,
    stall: Option<Spanned<String>>,
    foreign_job: Option<Spanned<String>>,
    attempts: Option<Spanned<u32>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct LimitsTable {
    bytes: Option<Spanned<Bytes>>,
    files: Option<Spanned<u64>>,
    depth: Option<Spanned<u32>>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "a number of bytes, or a text such as \"16GiB\"")]
enum Bytes {
    Number(u64),
    Text(String),
}

/// Reads the text of an adapter; `path` is for messages alone.
pub(super) fn parse(path: &Path, service: &str, text: &str) -> Result<Adapter, AdapterError> {
    let check = Check { path, text };
    let file: File = toml::from_str(text).map_err(|e| check.syntax(&e))?;
    check.unit(&file.unit)?;
    Ok(Adapter {
        service: service.to_owned(),
        unit: file.unit.into_inner(),
        source: check.source(file.source)?,
        probe: check.probe(file.probe)?,
        policy: Policy {
            consent_required: file.policy.consent == Consent::Required,
            baseline_must_pass: file.policy.baseline == Baseline::MustPass,
            accept_killed_stop: file.policy.stop == Stop::Any,
            stop_fits_both: file.policy.stop_commands == StopCommands::FitBoth,
        },
        quiesce: file.quiesce.map(|hook| check.hook("quiesce", hook)).transpose()?,
        resume: file.resume.map(|hook| check.hook("resume", hook)).transpose()?,
        timeouts: check.timeouts(&file.timeouts)?,
        limits: check.limits(&file.limits)?,
    })
}

/// Whether zero makes sense.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Zero {
    Allowed,
    Senseless,
}

/// The checks, with what their messages need.
struct Check<'a> {
    path: &'a Path,
    text: &'a str,
}

impl Check<'_> {
    fn error(&self, at: Option<Range<usize>>, why: String, next: &str) -> AdapterError {
        let line = at.map(|at| 1 + self.text[..at.start.min(self.text.len())].matches('\n').count());
        let at = line.map(|line| format!(":{line}")).unwrap_or_default();
        AdapterError { path: self.path.to_owned(), at, why, next: next.to_owned() }
    }

    fn refuse<T>(&self, at: Range<usize>, why: String, next: &str) -> Result<T, AdapterError> {
        Err(self.error(Some(at), why, next))
    }

    /// What the TOML reader found. Its messages do not name the key that a bad value belongs to.
    fn syntax(&self, error: &toml::de::Error) -> AdapterError {
        let message = error.message();
        let key = error.span().and_then(|span| key_at(self.text, span.start));
        let (why, next) = if message.starts_with("unknown field") {
            (message.replacen("unknown field", "unknown key", 1), "remove it, or correct its name")
        } else if message.starts_with("missing field") {
            (message.replacen("missing field", "missing key", 1), "add it")
        } else {
            let named = key.map(|key| format!("{key}: {message}"));
            (named.unwrap_or_else(|| message.to_owned()), "correct it")
        };
        self.error(error.span(), why, next)
    }

    fn unit(&self, unit: &Spanned<String>) -> Result<(), AdapterError> {
        let name = unit.get_ref();
        let refuse = |why: &str, next: &str| self.refuse(unit.span(), format!("unit: {name:?} {why}"), next);
        let Some(stem) = name.strip_suffix(".service") else {
            return refuse("is not a service unit", "give its full name, ending in .service");
        };
        let legal = |c: char| c.is_ascii_alphanumeric() || ":-_.\\@".contains(c);
        if stem.is_empty() || !stem.chars().all(legal) || name.len() > UNIT_MAX {
            return refuse("cannot be the name of a unit", "give it as systemctl prints it");
        }
        if stem.ends_with('@') || stem.starts_with('@') {
            return refuse("is a template without an instance", "name the instance: NAME@INSTANCE.service");
        }
        Ok(())
    }

    fn source(&self, table: Spanned<SourceTable>) -> Result<Source, AdapterError> {
        let at = table.span();
        let table = table.into_inner();
        match (table.keys.is_empty(), table.unsigned) {
            (true, true) | (false, false) => {}
            (true, false) => {
                let why = "source.keys: missing, and source.unsigned is not true".to_owned();
                return self.refuse(at, why, "add the publisher's minisign keys, or unsigned = true");
            }
            (false, true) => {
                let why = "source.keys: there are keys, and source.unsigned is true".to_owned();
                return self.refuse(table.keys[0].span(), why, "remove one of the two");
            }
        }
        for key in &table.keys {
            if PublicKey::from_base64(key.get_ref()).is_err() {
                let why = format!("source.keys: {:?} is not a minisign public key", key.get_ref());
                return self.refuse(key.span(), why, "give the second line of the publisher's .pub file");
            }
        }
        let program = table.program.as_ref();
        if let Some(program) = program.filter(|p| !is_plain_path(p.get_ref())) {
            let why = format!("source.program: {:?} is not a path in a release", program.get_ref());
            return self.refuse(program.span(), why, "make it relative, without `.` and `..`");
        }
        let (directory, artifact) = match (&table.path, &table.artifact) {
            (None, None) => (None, String::new()),
            (Some(path), Some(artifact)) => {
                let directory = self.directory(path)?;
                self.artifact(artifact, program.is_some())?;
                (Some(directory), artifact.get_ref().clone())
            }
            (Some(path), None) => {
                let why = "source.artifact: missing, and there is source.path".to_owned();
                return self.refuse(path.span(), why, "add artifact = \"{version}/NAME-{version}.tar.gz\"");
            }
            (None, Some(artifact)) => {
                let why = "source.path: missing, and there is source.artifact".to_owned();
                return self.refuse(artifact.span(), why, "add it, or remove both and use --file");
            }
        };
        Ok(Source {
            directory,
            artifact,
            strip: table.strip,
            program: table.program.map(Spanned::into_inner),
            keys: table.keys.into_iter().map(Spanned::into_inner).collect(),
            unsigned: table.unsigned,
        })
    }

    fn directory(&self, path: &Spanned<String>) -> Result<PathBuf, AdapterError> {
        let given = path.get_ref();
        let refuse =
            |why: &str, next: &str| self.refuse(path.span(), format!("source.path: {given:?} {why}"), next);
        let plain = match given.strip_prefix("file://") {
            Some(rest) if rest.contains('%') => {
                return refuse("is percent-encoded", "give the path itself");
            }
            Some(rest) => rest.strip_prefix("localhost").unwrap_or(rest),
            None if given.contains("://") => {
                return refuse("is not on this machine", "give a directory, as a path or a file:// URL");
            }
            None => given,
        };
        if !plain.starts_with('/') || plain.contains('\0') {
            return refuse("is not absolute", "give an absolute path or a file:///PATH URL");
        }
        Ok(PathBuf::from(plain))
    }

    fn artifact(&self, artifact: &Spanned<String>, has_program: bool) -> Result<(), AdapterError> {
        let given = artifact.get_ref();
        let refuse = |why: String, next: &str| {
            self.refuse(artifact.span(), format!("source.artifact: {given:?} {why}"), next)
        };
        if !given.contains("{version}") {
            return refuse("does not contain {version}".into(), "add it, so that each version has its own");
        }
        let filled = given.replace("{version}", "1").replace("{arch}", "a");
        if filled.contains(['{', '}']) {
            return refuse("has an unknown placeholder".into(), "use {version} and {arch} alone");
        }
        if !is_plain_path(&filled) {
            return refuse(
                "is not a path below source.path".into(),
                "make it relative, without `.` and `..`",
            );
        }
        match archive::Kind::of(&filled) {
            Err(e) => refuse(e.to_string(), "publish one of these"),
            Ok(archive::Kind::Program) if !has_program => refuse(
                "is a single executable, and there is no source.program".into(),
                "add its path in the release",
            ),
            Ok(_) => Ok(()),
        }
    }

    fn probe(&self, table: Spanned<ProbeTable>) -> Result<Probe, AdapterError> {
        let at = table.span();
        let table = table.into_inner();
        let kind = *table.kind.get_ref();
        let surplus = |key: &str, at: Range<usize>, kinds: &str| {
            let why = format!("probe.{key}: has no meaning for this kind of probe");
            self.refuse(at, why, &format!("remove it, or set kind = {kinds}"))
        };
        if kind != ProbeKind::Http
            && let Some(url) = &table.url
        {
            return surplus("url", url.span(), "\"http\"");
        }
        if kind != ProbeKind::Command {
            if let Some(command) = &table.command {
                return surplus("command", command.span(), "\"command\"");
            }
            if let Some(user) = &table.user {
                return surplus("user", user.span(), "\"command\"");
            }
        }
        if kind == ProbeKind::Kernel
            && let Some(version) = &table.version
        {
            return surplus("version", version.span(), "\"http\" or \"command\"");
        }
        let answer = self.duration("probe.answer", table.answer.as_ref(), 5_000, Zero::Senseless)?;
        let missing = |key: &str| self.error(Some(at.clone()), format!("probe.{key}: missing"), "add it");
        let method = match kind {
            ProbeKind::Kernel => Method::Kernel,
            ProbeKind::Http => Method::Http(self.url(table.url.as_ref().ok_or_else(|| missing("url"))?)?),
            ProbeKind::Command => {
                let command = table.command.as_ref().ok_or_else(|| missing("command"))?;
                Method::Command(Hook {
                    command: self.command("probe.command", command)?,
                    user: self.user("probe.user", table.user.as_ref())?,
                    timeout: answer,
                })
            }
        };
        Ok(Probe {
            method,
            version: self.version(table.version.as_ref())?,
            rule: match table.rule {
                None | Some(RuleName::Exact) => VersionRule::Exact,
                Some(RuleName::Semver) => VersionRule::Semver,
                Some(RuleName::Prefix) => VersionRule::Prefix,
                Some(RuleName::Contained) => VersionRule::Contained,
            },
            interval: self.duration("probe.interval", table.interval.as_ref(), 500, Zero::Senseless)?,
            passes: self.at_least_one("probe.passes", table.passes.as_ref(), 3)?,
            settle: self.duration("probe.settle", table.settle.as_ref(), 10_000, Zero::Allowed)?,
            timeout: self.duration("probe.timeout", table.timeout.as_ref(), 60_000, Zero::Senseless)?,
            answer,
        })
    }

    fn version(&self, field: Option<&Spanned<VersionTable>>) -> Result<VersionField, AdapterError> {
        let Some(field) = field else { return Ok(VersionField::None) };
        let refuse = |why: &str, next: &str| self.refuse(field.span(), format!("probe.version.{why}"), next);
        match field.get_ref() {
            VersionTable::Body(true) => Ok(VersionField::Body),
            VersionTable::Body(false) => refuse("body: false has no meaning", "remove probe.version"),
            VersionTable::Pointer(p) if p.is_empty() || p.starts_with('/') => {
                Ok(VersionField::Pointer(p.clone()))
            }
            VersionTable::Pointer(p) => {
                refuse(&format!("pointer: {p:?} is not a JSON pointer"), "begin it with /")
            }
            VersionTable::Line(l) if !l.is_empty() && !l.contains(['\n', '\r']) => {
                Ok(VersionField::Line(l.clone()))
            }
            VersionTable::Line(l) => {
                refuse(&format!("line: {l:?} is not the beginning of a line"), "give some text of one line")
            }
        }
    }

    fn url(&self, url: &Spanned<String>) -> Result<HttpTarget, AdapterError> {
        let given = url.get_ref();
        let refuse =
            |why: &str, next: &str| self.refuse(url.span(), format!("probe.url: {given:?} {why}"), next);
        if given.contains(|c: char| c.is_control() || c == ' ') {
            return refuse("has spaces or control characters", "remove or percent-encode them");
        }
        if let Some(rest) = given.strip_prefix("unix:") {
            let (socket, path) = rest.split_once(':').unwrap_or((rest, "/"));
            if !socket.starts_with('/') || !path.starts_with('/') || socket.len() > SOCKET_PATH_MAX {
                return refuse("is not unix:SOCKET:PATH with absolute paths", "write unix:/run/x.sock:/path");
            }
            return Ok(HttpTarget::Unix { socket: socket.to_owned(), path: path.to_owned() });
        }
        let Some(rest) = given.strip_prefix("http://") else {
            return refuse(
                "is neither http:// nor unix:",
                "write http://HOST:PORT/PATH or unix:/run/x.sock:/path",
            );
        };
        let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let address = match host.strip_prefix("localhost") {
            Some("") => Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 80)),
            Some(port) => port
                .strip_prefix(':')
                .and_then(|p| p.parse().ok())
                .map(|port| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)),
            None => host.parse().ok().or_else(|| {
                let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
                bare.parse().ok().map(|ip| SocketAddr::new(ip, 80))
            }),
        };
        let Some(address) = address else {
            return refuse("has no IP address or localhost as its host", "write http://127.0.0.1:PORT/PATH");
        };
        let path = if path.is_empty() { "/" } else { path };
        Ok(HttpTarget::Tcp { address, host: host.to_owned(), path: path.to_owned() })
    }

    fn hook(&self, name: &str, table: HookTable) -> Result<Hook, AdapterError> {
        let timeout = format!("{name}.timeout");
        Ok(Hook {
            command: self.command(&format!("{name}.command"), &table.command)?,
            user: self.user(&format!("{name}.user"), table.user.as_ref())?,
            timeout: self.duration(&timeout, table.timeout.as_ref(), 30_000, Zero::Senseless)?,
        })
    }

    fn command(&self, key: &str, command: &Spanned<Vec<String>>) -> Result<Vec<String>, AdapterError> {
        let words = command.get_ref();
        let refuse = |why: &str, next: &str| self.refuse(command.span(), format!("{key}: {why}"), next);
        match words.first() {
            None => refuse("is empty", "give a program and its arguments"),
            Some(program) if !program.starts_with('/') => {
                refuse(&format!("{program:?} is not absolute"), "give the program's whole path")
            }
            _ if words.iter().any(|w| w.contains('\0')) => refuse("contains a NUL", "remove it"),
            _ => Ok(words.clone()),
        }
    }

    fn user(&self, key: &str, user: Option<&Spanned<String>>) -> Result<Option<String>, AdapterError> {
        let Some(user) = user else { return Ok(None) };
        let name = user.get_ref();
        let legal = |c: char| c.is_ascii_alphanumeric() || "_-.$".contains(c);
        if name.is_empty() || name.starts_with('-') || !name.chars().all(legal) {
            return self.refuse(user.span(), format!("{key}: {name:?} is not a user's name"), "correct it");
        }
        Ok(Some(name.clone()))
    }

    fn timeouts(&self, table: &TimeoutsTable) -> Result<Timeouts, AdapterError> {
        let get = |key: &str, value: &Option<Spanned<String>>, default, zero| {
            self.duration(&format!("timeouts.{key}"), value.as_ref(), default, zero)
        };
        Ok(Timeouts {
            start: get("start", &table.start, 90_000, Zero::Senseless)?,
            stop: get("stop", &table.stop, 90_000, Zero::Senseless)?,
            linger: get("linger", &table.linger, 5_000, Zero::Allowed)?,
            stall: get("stall", &table.stall, 60_000, Zero::Senseless)?,
            foreign_job: get("foreign-job", &table.foreign_job, 30_000, Zero::Allowed)?,
            attempts: self.at_least_one("timeouts.attempts", table.attempts.as_ref(), 3)?,
        })
    }

    fn limits(&self, table: &LimitsTable) -> Result<Limits, AdapterError> {
        let bytes = table.bytes.as_ref().map(|b| self.bytes(b)).transpose()?;
        Ok(Limits {
            bytes: bytes.unwrap_or(16 * KIB * KIB * KIB),
            files: self.at_least_one("limits.files", table.files.as_ref(), 200_000)?,
            depth: self.at_least_one("limits.depth", table.depth.as_ref(), 64)?,
        })
    }

    fn bytes(&self, bytes: &Spanned<Bytes>) -> Result<u64, AdapterError> {
        let value = match bytes.get_ref() {
            Bytes::Number(n) => Some(*n),
            Bytes::Text(text) => {
                let units = [("KiB", KIB), ("MiB", KIB * KIB), ("GiB", KIB * KIB * KIB), ("", 1)];
                units.iter().find_map(|(suffix, factor)| {
                    let number: u64 = text.strip_suffix(suffix)?.trim_end().parse().ok()?;
                    number.checked_mul(*factor)
                })
            }
        };
        match value {
            Some(n) if n > 0 => Ok(n),
            _ => {
                let why = "limits.bytes: is not a number of bytes above zero".to_owned();
                self.refuse(bytes.span(), why, "write a number, or a text such as \"16GiB\"")
            }
        }
    }

    /// `default` is in milliseconds.
    fn duration(
        &self,
        key: &str,
        value: Option<&Spanned<String>>,
        default: u64,
        zero: Zero,
    ) -> Result<Duration, AdapterError> {
        let Some(value) = value else { return Ok(Duration::from_millis(default)) };
        let given = value.get_ref();
        let refuse =
            |why: &str, next: &str| self.refuse(value.span(), format!("{key}: {given:?} {why}"), next);
        let Ok(signed) = given.parse::<SignedDuration>() else {
            return refuse("is not a duration", "write it as \"500ms\", \"10s\" or \"2min\"");
        };
        match Duration::try_from(signed) {
            Err(_) => refuse("is negative", "make it positive"),
            Ok(d) if d.is_zero() && zero == Zero::Senseless => refuse("is zero", "make it positive"),
            Ok(d) if d > DURATION_MAX => refuse("is longer than a day", "make it shorter"),
            Ok(d) => Ok(d),
        }
    }

    fn at_least_one<N: Copy + PartialEq + From<u8>>(
        &self,
        key: &str,
        value: Option<&Spanned<N>>,
        default: N,
    ) -> Result<N, AdapterError> {
        match value {
            Some(zero) if *zero.get_ref() == N::from(0) => {
                self.refuse(zero.span(), format!("{key}: is zero"), "make it at least 1")
            }
            Some(n) => Ok(*n.get_ref()),
            None => Ok(default),
        }
    }
}

/// The key whose value is at `offset`, with its table: `probe.interval`. Only for messages, so by line.
fn key_at(text: &str, offset: usize) -> Option<String> {
    let mut table = "";
    let mut key = None;
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        if start > offset {
            break;
        }
        start += line.len();
        let line = line.trim();
        if let Some(name) =
            line.strip_prefix('[').and_then(|l| l.split(']').next()).filter(|_| !line.contains('='))
        {
            (table, key) = (name.trim(), None);
        } else if let Some((name, _)) = line.split_once('=').filter(|_| !line.starts_with('#')) {
            key = Some(name.trim());
        }
    }
    key.map(|key| if table.is_empty() { key.to_owned() } else { format!("{table}.{key}") })
}
