//! The adapter: what the administrator says of one service, in `/etc/cutover/services/NAME.toml`.
//!
//! It is trusted (root writes it) and never chosen by a request. Every error names the file, the line, the key and
//! what to do next. Unknown keys are errors. All of it, with the defaults where a key may be left out:
//!
//! ```toml
#![doc = include_str!("adapter/example.toml")]
//! ```

mod parse;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::manager::HttpTarget;
use crate::release::{InvalidName, Version};

/// The largest adapter that is read.
const ADAPTER_MAX: u64 = 1024 * 1024;
/// The longest name of a service: it becomes part of unit names, which end at 255 bytes.
const SERVICE_MAX: usize = 64;

/// A service's configuration, checked: nothing in it is optional by accident.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapter {
    /// The service's name: the file's name without `.toml`.
    pub service: String,
    /// The systemd unit, with its suffix.
    pub unit: String,
    /// Where releases come from.
    pub source: Source,
    /// How a running version is proved.
    pub probe: Probe,
    /// What stops an upgrade.
    pub policy: Policy,
    /// Run before the stop, to park work.
    pub quiesce: Option<Hook>,
    /// Run when the operation is over, to take work up again.
    pub resume: Option<Hook>,
    /// Our own bounds.
    pub timeouts: Timeouts,
    /// The most an archive may hold.
    pub limits: Limits,
}

/// Where releases come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The directory that holds `VERSION/…`; none where artifacts only ever come by `--file`.
    pub directory: Option<PathBuf>,
    /// The artifact's path below it, with `{version}` and `{arch}`: `{version}/demo-{version}-{arch}.tar.gz`.
    /// Empty without a directory. `{arch}` is this build's, as `uname -m` writes it: `x86_64`, `aarch64`.
    pub artifact: String,
    /// How many leading directories of an archive's paths fall away.
    pub strip: u32,
    /// For a single executable: its path in the release.
    pub program: Option<String>,
    /// minisign public keys, any of which may have signed `SHA256SUMS`.
    pub keys: Vec<String>,
    /// Whether an unsigned `SHA256SUMS` is accepted.
    pub unsigned: bool,
}

/// How a running version is proved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Whom to ask.
    pub method: Method,
    /// Where in the answer the version stands.
    pub version: VersionField,
    /// How the answer is compared with the version wanted.
    pub rule: VersionRule,
    /// Between two tries. Default 0.5 s.
    pub interval: Duration,
    /// How many must pass in a row. Default 3.
    pub passes: u32,
    /// For how long it must go on passing. Default 10 s.
    pub settle: Duration,
    /// Within which it must begin to pass, from the start. Default 60 s.
    pub timeout: Duration,
    /// For a single answer. Default 5 s.
    pub answer: Duration,
}

/// Whom a probe asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Method {
    /// Nobody: what the kernel shows is the proof.
    Kernel,
    /// The application, over HTTP.
    Http(HttpTarget),
    /// A command.
    Command(Hook),
}

/// Where the version stands in an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VersionField {
    /// It does not: a success is enough.
    None,
    /// It is the whole answer, without white space around it.
    Body,
    /// At this JSON pointer.
    Pointer(String),
    /// Behind this prefix of a line.
    Line(String),
}

/// How a version that was reported is compared with the one wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VersionRule {
    /// Letter by letter.
    Exact,
    /// Equal as semantic versions; a leading `v` and build data count for nothing.
    Semver,
    /// What was reported begins with the wanted version, and no digit or dot follows it.
    Prefix,
    /// The wanted version contains what was reported, and no digit or dot touches it there: for packaged versions such
    /// as `5:7.0.15-1`.
    Contained,
}

/// A command with the user it runs as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hook {
    /// Program (absolute) and arguments.
    pub command: Vec<String>,
    /// Who runs it; none for root.
    pub user: Option<String>,
    /// When it is killed. Default 30 s.
    pub timeout: Duration,
}

/// What stops an upgrade.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Whether each upgrade must be consented to by `--consent`.
    pub consent_required: bool,
    /// Whether the running version must pass its probe before it is stopped.
    pub baseline_must_pass: bool,
    /// Whether a stop that systemd had to end with SIGKILL is accepted (`stop = "any"`).
    pub accept_killed_stop: bool,
    /// Whether stop commands that go through `current` fit both versions.
    pub stop_fits_both: bool,
}

/// Our own bounds, where systemd has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Stands for an infinite `TimeoutStartSec=`. Default 90 s.
    pub start: Duration,
    /// Stands for an infinite `TimeoutStopSec=`. Default 90 s.
    pub stop: Duration,
    /// How long a stopped unit's processes may linger after systemd is done. Default 5 s.
    pub linger: Duration,
    /// Staging gives up after so long without a byte. Default 60 s.
    pub stall: Duration,
    /// How long a foreign job may take before the operation fails. Default 30 s.
    pub foreign_job: Duration,
    /// How many attempts a launch has, the first included. Default 3.
    pub attempts: u32,
}

/// The most an archive may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes when unpacked. Default 16 GiB.
    pub bytes: u64,
    /// Files, directories and links. Default 200,000.
    pub files: u64,
    /// Directories inside each other. Default 64.
    pub depth: u32,
}

/// An adapter that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{path}{at}: {why}; {next}", path = path.display())]
pub struct AdapterError {
    /// The file.
    pub path: PathBuf,
    /// `:LINE`, or empty.
    pub at: String,
    /// What is wrong, naming the key.
    pub why: String,
    /// What to do.
    pub next: String,
}

impl Adapter {
    /// Reads the adapter of `service` from `dir`.
    ///
    /// # Errors
    /// [`AdapterError`], for a missing file, too.
    pub fn load(dir: &Path, service: &str) -> Result<Self, AdapterError> {
        let path = dir.join(format!("{service}.toml"));
        let fail = |why: &dyn fmt::Display, next: &str| AdapterError {
            path: path.clone(),
            at: String::new(),
            why: why.to_string(),
            next: next.to_owned(),
        };
        // Before the name becomes part of a path.
        service_name(service).map_err(|e| AdapterError {
            path: dir.to_owned(),
            at: String::new(),
            why: e.to_string(),
            next: "give the name of a service".to_owned(),
        })?;
        let text = read(&path).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => fail(
                &format!("there is no adapter for the service {service}"),
                "write one, or give the name of a service that has one",
            ),
            io::ErrorKind::InvalidData => fail(&"is not UTF-8", "write it anew as text"),
            _ => fail(&format!("cannot be read: {e}"), "correct that, then try again"),
        })?;
        Self::parse(&path, service, &text)
    }

    /// Reads the text of an adapter; `path` is for messages alone.
    ///
    /// # Errors
    /// [`AdapterError`].
    pub fn parse(path: &Path, service: &str, text: &str) -> Result<Self, AdapterError> {
        parse::parse(path, service, text)
    }
}

impl Source {
    /// The artifact's path of `version`, below the directory.
    #[must_use]
    pub fn artifact_of(&self, version: &Version) -> PathBuf {
        let path = self.artifact.replace("{version}", version.as_str());
        PathBuf::from(path.replace("{arch}", std::env::consts::ARCH))
    }
}

/// Checks that `name` can be the name of a service.
///
/// # Errors
/// [`InvalidName`] says what a name may be.
pub fn service_name(name: &str) -> Result<&str, InvalidName> {
    let first = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let legal = |c: char| first(c) || "._-".contains(c);
    if name.starts_with(first) && name.chars().all(legal) && name.len() <= SERVICE_MAX {
        return Ok(name);
    }
    Err(InvalidName {
        what: "service name",
        rule: "1 to 64 of [a-z0-9._-], beginning with a letter or a digit",
        given: name.to_owned(),
    })
}

fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    let file = std::fs::File::open(path)?;
    // It says which commands run as root: whoever may write it may do anything.
    let meta = file.metadata()?;
    if meta.uid() != rustix::process::geteuid().as_raw() && meta.uid() != 0 || meta.mode() & 0o022 != 0 {
        let why = "is not root's, or others may write it (chown root, chmod go-w)";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    file.take(ADAPTER_MAX + 1).read_to_string(&mut text)?;
    if text.len() as u64 > ADAPTER_MAX {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "is larger than 1 MiB"));
    }
    Ok(text)
}
