//! An operation's scratch directory, `run/ID/`: what the launcher, the worker and whoever waits tell each other.
//!
//! ```text
//! runner               the verified copy of the executable that the worker runs
//! recovery.json        what a recovery needs: service, id, the runner's size and digest (K79)
//! request.json         what was asked
//! attempt-LAUNCH-N     one for each worker that was started, made durable before it acts
//! response-LAUNCH      its answer
//! events-LAUNCH-N      what it is doing, as JSON lines; not synced
//! ```
//!
//! It lies on the state directory's own file system, so that an answer outlives the daemon and the boot.

use std::fs::File;
use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::durable::{self, DiskFile};
use crate::journal::{Contents, Journal};
use crate::launch::Launching;
use crate::operation::{Action, OperationId};
use crate::receipt::Receipt;
use crate::release::{Digest, Version};
use crate::response::{Response, exit};
use crate::store::{Store, StoreError};

/// The format of these files.
pub const FORMAT: u32 = 1;
/// The largest of these files that is read.
const SMALL: u64 = 256 * 1024;
/// An events file stops growing here: it is for those who watch, not a record.
const EVENTS_MAX: u64 = 1 << 20;
/// How long an answer is kept for a caller that went away.
const ANSWER_KEPT_MS: u64 = 10 * 60 * 1000;

/// What a worker is asked to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Request {
    /// The format.
    pub format_version: u32,
    /// What.
    pub task: Task,
}

/// A worker's task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "action", rename_all = "kebab-case", rename_all_fields = "camelCase", deny_unknown_fields)]
pub enum Task {
    /// To another version.
    Upgrade {
        /// The exact version.
        target: Version,
        /// An artifact given by hand.
        file: Option<PathBuf>,
        /// The administrator consents.
        consent: bool,
        /// An older version is wanted on purpose.
        allow_downgrade: bool,
        /// A quarantined digest is wanted on purpose.
        retry_quarantined: bool,
    },
    /// Seal a release and change nothing else.
    Stage {
        /// The exact version.
        target: Version,
        /// An artifact given by hand.
        file: Option<PathBuf>,
    },
    /// Put an existing service under management.
    Adopt {
        /// What it calls itself now.
        version: Version,
        /// Where its files are, if not just the unit's program.
        from: Option<PathBuf>,
        /// Take over files that dpkg or rpm owns.
        take_over: bool,
    },
    /// Settle what is open.
    Recover,
}

impl Task {
    /// Whether both are for the same target, so that one may stand for the other under one id (K30).
    #[must_use]
    pub fn is_about_the_same_as(&self, other: &Self) -> bool {
        match (self.target(), other.target()) {
            (Some(one), Some(other)) => one == other,
            _ => true,
        }
    }

    /// Whether a receipt of its id answers it.
    #[must_use]
    pub fn is_about(&self, receipt: &Receipt) -> bool {
        self.target().is_none_or(|target| target == (&receipt.target_version, receipt.action))
    }

    /// What an id is bound to; a recovery takes whatever it finds.
    #[must_use]
    pub fn target(&self) -> Option<(&Version, Action)> {
        match self {
            Self::Upgrade { target, .. } | Self::Stage { target, .. } => Some((target, Action::Upgrade)),
            Self::Adopt { version, .. } => Some((version, Action::Adopt)),
            Self::Recover => None,
        }
    }

    /// Its name, as in the answer.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Upgrade { .. } => "upgrade",
            Self::Stage { .. } => "stage",
            Self::Adopt { .. } => "adopt",
            Self::Recover => "recover",
        }
    }
}

/// What a recovery needs to be taken up again, by whoever finds the file (K79–K81).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Recovery {
    /// The format.
    pub format_version: u32,
    /// The service.
    pub service: String,
    /// The operation.
    pub id: OperationId,
    /// The runner's length.
    pub runner_size: u64,
    /// The runner's SHA-256.
    pub runner_sha256: Digest,
    /// The unit that was started last.
    pub unit: String,
}

/// One start of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Attempt {
    /// Its process.
    pub pid: u32,
    /// When that process was started, in the kernel's ticks since the boot.
    pub start_time: u64,
    /// Its name on the bus.
    pub bus_name: String,
    /// Its boot.
    pub boot_id: String,
}

/// The scratch directory of one operation.
pub struct Scratch<'a> {
    store: &'a Store<'a>,
    dir: String,
}

impl<'a> Scratch<'a> {
    /// The scratch directory of `id`, which may not exist.
    #[must_use]
    pub fn of(store: &'a Store<'a>, id: &OperationId) -> Self {
        Self { store, dir: format!("run/{id}") }
    }

    fn path(&self, name: &str) -> String {
        format!("{}/{name}", self.dir)
    }

    /// The absolute path of a file in it.
    #[must_use]
    pub fn absolute(&self, name: &str) -> PathBuf {
        self.store.absolute(&self.path(name))
    }

    /// Whether it exists.
    #[must_use]
    pub fn exists(&self) -> bool {
        self.store.disk().stat(&self.dir).is_ok()
    }

    /// Makes it, without a sync: [`Scratch::settle_names`] follows when its files are written.
    ///
    /// # Errors
    /// The disk's.
    pub fn make(&self) -> Result<(), StoreError> {
        match self.store.disk().mkdir("scratch.mkdir", &self.dir, 0o700) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => self.store.at(&self.dir, other),
        }
    }

    /// Writes a new file and syncs it; its name is synced by [`Scratch::settle_names`].
    ///
    /// # Errors
    /// The disk's.
    pub fn write_new(&self, name: &str, bytes: &[u8], mode: u32) -> Result<(), StoreError> {
        let path = self.path(name);
        let written = self.store.disk().create("scratch.create", &path, mode).and_then(|mut file| {
            file.write_at("scratch.write", 0, bytes)?;
            file.sync("scratch.sync-file")
        });
        self.store.at(&path, written)
    }

    /// Makes the names of the files, and of the directory, durable.
    ///
    /// # Errors
    /// The disk's.
    pub fn settle_names(&self) -> Result<(), StoreError> {
        self.store.at(&self.dir, self.store.disk().sync_dir("scratch.sync-dir", &self.dir))?;
        self.store.at("run", self.store.disk().sync_dir("scratch.sync-run", "run"))
    }

    /// Replaces a file by this value as JSON.
    ///
    /// # Errors
    /// The disk's.
    pub fn put<T: Serialize>(&self, name: &str, value: &T) -> Result<(), StoreError> {
        let path = self.path(name);
        self.store.at(&path, durable::replace(self.store.disk(), &path, &json(value), 0o600))
    }

    /// Reads a file that holds a value as JSON; none where it does not exist.
    ///
    /// # Errors
    /// The disk's, and anything that is no such value.
    pub fn get<T: for<'de> Deserialize<'de>>(&self, name: &str) -> Result<Option<T>, StoreError> {
        let path = self.path(name);
        let read = self.store.disk().read(&path, SMALL).and_then(|bytes| Ok(serde_json::from_slice(&bytes)?));
        match read {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            other => self.store.at(&path, other).map(Some),
        }
    }

    /// Replaces a file by these bytes.
    ///
    /// # Errors
    /// The disk's.
    pub fn replace(&self, name: &str, bytes: &[u8], mode: u32) -> Result<(), StoreError> {
        let path = self.path(name);
        self.store.at(&path, durable::replace(self.store.disk(), &path, bytes, mode))
    }

    /// Whether no launch had an answer but `unresolved`.
    fn is_unanswered(&self) -> bool {
        let names = self.store.disk().list(&self.dir).unwrap_or_default();
        let mut answers = names.iter().filter(|n| n.starts_with("response-"));
        answers.all(|n| {
            let answer: Option<Answer> = self.get(n).ok().flatten();
            answer.is_none_or(|a| a.response.exit_code == exit::UNRESOLVED)
        })
    }

    /// Says that somebody waits for what will be in it, for as long as the file is held.
    #[must_use]
    pub fn watch(&self) -> Option<File> {
        let dir = File::open(self.absolute("")).ok()?;
        dir.lock_shared().ok().map(|()| dir)
    }

    /// Whether nobody waits for what is in it.
    #[must_use]
    pub fn is_unwatched(&self) -> bool {
        File::open(self.absolute("")).is_ok_and(|dir| dir.try_lock().is_ok())
    }

    /// The attempts of every launch; those of `launch` are counted in the second value.
    ///
    /// # Errors
    /// The disk's. An attempt that cannot be read is counted and passed over: it never acted.
    pub fn attempts(&self, launch: &str) -> Result<(Vec<Attempt>, u32), StoreError> {
        let names = self.store.at(&self.dir, self.store.disk().list(&self.dir))?;
        let own = format!("attempt-{launch}-");
        let count = names.iter().filter(|n| n.starts_with(&own) && !n.ends_with(".new")).count();
        let all = names.iter().filter(|n| n.starts_with("attempt-"));
        let read = all.filter_map(|name| self.get(name).ok().flatten()).collect();
        Ok((read, u32::try_from(count).unwrap_or(u32::MAX)))
    }

    /// Opens the file of what an attempt is doing.
    #[must_use]
    pub fn events(&self, launch: &str, attempt: u32) -> Events {
        let path = self.path(&format!("events-{launch}-{attempt}"));
        Events { file: self.store.disk().create("events.create", &path, 0o600).ok(), end: 0 }
    }

    /// Removes it. What is left by an error is removed by the next clean-up.
    pub fn remove(&self) {
        let _ = durable::sweep(self.store.disk(), &self.dir);
    }
}

fn json<T: Serialize>(value: &T) -> Vec<u8> {
    let mut bytes = serde_json::to_vec_pretty(value).expect("plain data");
    bytes.push(b'\n');
    bytes
}

/// The bytes of a value, as [`Scratch::write_new`] takes them.
#[must_use]
pub fn to_bytes<T: Serialize>(value: &T) -> Vec<u8> {
    json(value)
}

/// An answer, and when it was given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Answer {
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// The answer.
    pub response: Response,
}

/// What a worker tells those who watch. Best effort: it is no record.
pub struct Events {
    file: Option<Box<dyn DiskFile>>,
    end: u64,
}

/// One thing a worker tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Tidings {
    /// A step began.
    Step {
        /// Its name.
        name: String,
    },
    /// A long step has come so far.
    Progress {
        /// Its name.
        name: String,
        /// How far.
        done: u64,
        /// Of how much.
        total: u64,
    },
    /// Something was noted.
    Note {
        /// It.
        text: String,
    },
}

impl Events {
    /// Adds a line.
    pub fn tell(&mut self, tidings: &Tidings) {
        let mut line = serde_json::to_vec(tidings).expect("plain data");
        line.push(b'\n');
        if let Some(file) = self.file.as_mut().filter(|_| self.end < EVENTS_MAX)
            && file.write_at("events.write", self.end, &line).is_ok()
        {
            self.end += line.len() as u64;
        }
    }
}

/// The operation by whose scratch directory an unresolved state is resumed: the one that is open. Where the journal does
/// not tell, one that was kept before, so that asking again and again keeps no further one; else `own`.
#[must_use]
pub fn kept(store: &Store, own: &OperationId) -> OperationId {
    let has_recovery =
        |id: &OperationId| matches!(Scratch::of(store, id).get::<Recovery>("recovery.json"), Ok(Some(_)));
    match Journal::look(store.disk()) {
        Ok(Some(Contents { records, .. })) if !records.is_empty() => {
            records.last().map(|r| r.id.clone()).filter(has_recovery)
        }
        _ => {
            let names = store.disk().list("run").unwrap_or_default();
            let others = names.iter().filter_map(|name| name.parse().ok()).filter(|id| id != own);
            others.filter(has_recovery).find(|id| Scratch::of(store, id).is_unanswered())
        }
    }
    .unwrap_or_else(|| own.clone())
}

/// Removes the scratch directories that nobody needs: nothing is open, and the caller holds the service's lock.
///
/// - one with an answer, when that was there to be fetched for long enough;
/// - one without, whose operation has its receipt: that is the answer;
/// - one without either, whose worker is `gone` or was never started: it did nothing.
pub fn clean_up(store: &Store, own: &OperationId, gone: &mut dyn FnMut(&str) -> bool, now_ms: u64) {
    // One that is being prepared has no worker yet. Who launched this very worker may not have heard of it, on a busy
    // machine.
    let mut tries = 0;
    let _launching = loop {
        match Launching::try_begin(store) {
            Ok(Some(launching)) => break launching,
            Ok(None) if tries < 20 => std::thread::sleep(std::time::Duration::from_millis(50)),
            _ => return,
        }
        tries += 1;
    };
    for name in store.disk().list("run").unwrap_or_default() {
        let Ok(id) = name.parse::<OperationId>() else { continue };
        if id == *own {
            continue;
        }
        let scratch = Scratch::of(store, &id);
        let names = store.disk().list(&format!("run/{id}")).unwrap_or_default();
        let mut answers =
            names.iter().filter(|n| n.starts_with("response-") && !n.ends_with(".new")).peekable();
        let done = if answers.peek().is_some() {
            answers.all(|n| match scratch.get::<Answer>(n) {
                Ok(Some(answer)) => now_ms.abs_diff(answer.at_ms) > ANSWER_KEPT_MS,
                _ => true,
            })
        } else if matches!(store.receipt(&id), Ok(Some(_))) {
            true
        } else {
            let kept: Option<Recovery> = scratch.get("recovery.json").ok().flatten();
            kept.is_none_or(|kept| kept.unit.is_empty() || gone(&kept.unit))
        };
        if done {
            scratch.remove();
        }
    }
}
