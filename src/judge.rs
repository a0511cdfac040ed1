//! Judging a running version: is it the one that should run, and does it stay up?
//!
//! A try passes when one live activation, read before and after the application answered and unchanged, is shown by the
//! kernel or by its own answer to be the release, and the process that answered belongs to the unit. A version passes
//! when its tries pass for the whole settle time (K46–K48).
//!
//! A single failed try begins the settle time anew; as many in a row as it takes passes to begin are the end. Any change
//! of the activation, of the main process or of the restart count is the end at once: a crash loop is no pass.

use std::time::Duration;

use crate::adapter::{Adapter, Hook, Method, VersionField, VersionRule};
use crate::evidence::Side;
use crate::manager::{Command, HttpTarget, Manager, ManagerError, Process, UnitState};
use crate::operation::{Baseline, KernelProof, PeerProof, Proof};
use crate::release::Version;
use crate::unit::describe;
use crate::watch::Watch;

/// How many tries a baseline has.
const BASELINE_TRIES: u32 = 3;

/// Why a version is not good.
#[derive(Debug, thiserror::Error)]
pub enum Verdict {
    /// It failed by itself.
    #[error("{0}")]
    Bad(String),
    /// It went away because somebody else took it away.
    #[error("{0}")]
    Disturbed(String),
    /// systemd could not be asked.
    #[error(transparent)]
    Manager(#[from] ManagerError),
    /// The worker was asked to leave.
    #[error("interrupted")]
    Interrupted,
}

/// A try that did not pass.
#[derive(Debug)]
enum Miss {
    /// It may pass later.
    Yet(String),
    /// It is another version: it will not change.
    Wrong(String),
    /// The activation is over.
    Over(Verdict),
}

impl From<ManagerError> for Miss {
    fn from(e: ManagerError) -> Self {
        Self::Over(e.into())
    }
}

/// A version under judgement.
pub struct Judge<'a> {
    /// The service manager.
    pub manager: &'a mut dyn Manager,
    /// Where to report.
    pub watch: &'a dyn Watch,
    /// The service's configuration.
    pub adapter: &'a Adapter,
    /// The release that should run.
    pub side: &'a Side,
    /// Whether a process that executes the same bytes from elsewhere counts: for a stable version only.
    pub same_bytes_count: bool,
}

impl Judge<'_> {
    /// Judges the activation that `first` shows.
    ///
    /// # Errors
    /// [`Verdict`].
    pub fn judge(&mut self, first: &UnitState) -> Result<Proof, Verdict> {
        let probe = &self.adapter.probe;
        let begun = self.manager.now();
        let whole = probe.timeout + 2 * probe.settle;
        self.watch.step("probing", whole + Duration::from_secs(30));
        let (mut passes, mut misses) = (0, 0);
        let mut passing_since = None;
        let mut has_begun = false;
        loop {
            if self.watch.interrupted() {
                return Err(Verdict::Interrupted);
            }
            let tried_at = self.manager.now();
            match self.once(first) {
                Ok(proof) => {
                    passes += 1;
                    misses = 0;
                    has_begun |= passes >= probe.passes;
                    let since = *passing_since.get_or_insert(tried_at);
                    let settled = self.manager.now().saturating_sub(since);
                    let ms = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
                    self.watch.progress("probing", ms(settled.min(probe.settle)), ms(probe.settle));
                    if has_begun && passes >= probe.passes && settled >= probe.settle {
                        return Ok(proof);
                    }
                }
                Err(Miss::Over(verdict)) => return Err(verdict),
                Err(Miss::Yet(why) | Miss::Wrong(why)) if has_begun && misses + 1 >= probe.passes => {
                    return Err(Verdict::Bad(format!("it stopped passing: {why}")));
                }
                Err(Miss::Wrong(why)) if misses + 1 >= probe.passes => return Err(Verdict::Bad(why)),
                Err(miss) => {
                    misses = if matches!(miss, Miss::Wrong(_)) || has_begun { misses + 1 } else { 0 };
                    passes = 0;
                    passing_since = None;
                    let (Miss::Yet(why) | Miss::Wrong(why)) = miss else { continue };
                    let elapsed = self.manager.now().saturating_sub(begun);
                    if !has_begun && elapsed > probe.timeout {
                        let after = probe.timeout;
                        return Err(Verdict::Bad(format!(
                            "it did not begin to pass within {after:?}: {why}"
                        )));
                    }
                    if elapsed > whole {
                        let settle = probe.settle;
                        return Err(Verdict::Bad(format!(
                            "it did not pass for {settle:?} at a stretch: {why}"
                        )));
                    }
                }
            }
            self.pause(tried_at + probe.interval);
        }
    }

    /// How the running version does now: a few tries, no settling.
    ///
    /// # Errors
    /// systemd's.
    pub fn baseline(&mut self, first: &UnitState) -> Result<(Baseline, Option<Proof>, String), Verdict> {
        let tries = BASELINE_TRIES * (self.adapter.probe.answer + self.adapter.probe.interval);
        self.watch.step("baseline", tries + Duration::from_secs(30));
        let mut last = String::new();
        for _ in 0..BASELINE_TRIES {
            let tried_at = self.manager.now();
            match self.once(first) {
                Ok(proof) => return Ok((Baseline::Passing, Some(proof), String::new())),
                Err(Miss::Over(Verdict::Bad(why) | Verdict::Disturbed(why))) => {
                    return Ok((Baseline::Failing, None, why));
                }
                Err(Miss::Over(other)) => return Err(other),
                Err(Miss::Yet(why) | Miss::Wrong(why)) => last = why,
            }
            self.pause(tried_at + self.adapter.probe.interval);
        }
        Ok((Baseline::Failing, None, last))
    }

    /// One try.
    ///
    /// # Errors
    /// Why it did not pass, as a sentence.
    pub fn look(&mut self, first: &UnitState) -> Result<Proof, String> {
        self.once(first).map_err(|miss| match miss {
            Miss::Yet(why) | Miss::Wrong(why) => why,
            Miss::Over(verdict) => verdict.to_string(),
        })
    }

    fn pause(&mut self, until: Duration) {
        loop {
            let now = self.manager.now();
            if now >= until || self.watch.interrupted() {
                return;
            }
            self.manager.wait(until - now);
        }
    }

    fn once(&mut self, first: &UnitState) -> Result<Proof, Miss> {
        let unit = self.adapter.unit.clone();
        let before = self.manager.state(&unit)?;
        self.unchanged(first, &before)?;
        let processes = self.manager.processes(&unit)?;
        let main = processes.iter().find(|p| p.pid == before.main_pid).cloned();
        if main.is_none() && before.main_pid != 0 {
            return Err(Miss::Yet(format!("main process {} is not in the unit's cgroup", before.main_pid)));
        }
        let (version, peers) = self.ask()?;
        let after = self.manager.state(&unit)?;
        self.unchanged(&before, &after)?;
        if after.main_pid != before.main_pid {
            return Err(Miss::Over(Verdict::Bad("its main process changed while it was asked".into())));
        }
        let peer = self.peer(&unit, peers.as_deref(), processes)?;
        let kernel = self.kernel(main.as_ref(), version.is_some())?;
        Ok(Proof { pid: after.main_pid, invocation: after.invocation, kernel, version, peer })
    }

    /// The activation is up, and it is the one that was up first.
    fn unchanged(&mut self, first: &UnitState, now: &UnitState) -> Result<(), Miss> {
        let unit = &self.adapter.unit;
        let same = now.invocation == first.invocation && now.restarts == first.restarts;
        let same_main = now.main_pid == first.main_pid || first.main_pid == 0;
        // A job that is queued on it (a reload, or a stop that has not begun) has changed nothing yet.
        if same && same_main && now.is_up() {
            return Ok(());
        }
        let why = format!("{unit} did not stay up: it is {}", describe(now));
        // An automatic restart also gives a new activation; only a job of somebody else, with no failure of its own, is
        // taken for somebody else's doing.
        let own_fault = now.restarts > first.restarts || !matches!(now.result.as_str(), "" | "success");
        if !own_fault && self.manager.foreign_job_seen(unit) {
            return Err(Miss::Over(Verdict::Disturbed(format!("{why}, by a job that is not ours"))));
        }
        Err(Miss::Over(Verdict::Bad(why)))
    }

    /// What the application says: its version, where it reports one, and who holds the other end.
    fn ask(&mut self) -> Result<(Option<String>, Option<Vec<u32>>), Miss> {
        match &self.adapter.probe.method {
            Method::Kernel => Ok((None, None)),
            Method::Http(target) => self.ask_http(&target.clone()),
            Method::Command(hook) => Ok((self.ask_command(&hook.clone())?, None)),
        }
    }

    fn ask_http(&mut self, target: &HttpTarget) -> Result<(Option<String>, Option<Vec<u32>>), Miss> {
        let timeout = self.adapter.probe.answer;
        let answer = self
            .manager
            .http_get(&self.adapter.unit, target, timeout)
            .map_err(|e| Miss::Yet(format!("it does not answer: {e}")))?;
        if !(200..300).contains(&answer.status) {
            return Err(Miss::Yet(format!("it answers with HTTP status {}", answer.status)));
        }
        Ok((self.version_in(&answer.body)?, Some(answer.peers)))
    }

    fn ask_command(&mut self, hook: &Hook) -> Result<Option<String>, Miss> {
        let result = self.manager.run(&Command {
            service: self.adapter.service.clone(),
            purpose: "probe".into(),
            argv: hook.command.clone(),
            user: hook.user.clone(),
            environment: vec![("CUTOVER_VERSION".into(), self.side.release.version.to_string())],
            timeout: hook.timeout,
        })?;
        match result.status {
            Some(0) => self.version_in(&result.stdout),
            _ if result.timed_out => {
                Err(Miss::Yet(format!("the probe command took longer than {:?}", hook.timeout)))
            }
            Some(status) => Err(Miss::Yet(format!("the probe command exited with {status}"))),
            None => Err(Miss::Yet("the probe command was killed".into())),
        }
    }

    fn version_in(&self, answer: &[u8]) -> Result<Option<String>, Miss> {
        let Some(found) = extract(&self.adapter.probe.version, answer).map_err(Miss::Yet)? else {
            return Ok(None);
        };
        let wanted = &self.side.release.version;
        if agrees(self.adapter.probe.rule, wanted, &found) {
            // What follows a version may be a whole page, and the proof goes into a record.
            Ok(Some(kept(&found)))
        } else {
            Err(Miss::Wrong(format!("it reports version {}, wanted is {wanted}", shorten(&found))))
        }
    }

    fn peer(&mut self, unit: &str, peers: Option<&[u32]>, before: Vec<Process>) -> Result<PeerProof, Miss> {
        let Some(peers) = peers else { return Ok(PeerProof::None) };
        if peers.is_empty() {
            return Ok(PeerProof::Unproved);
        }
        let mut ours = before;
        if !ours.iter().any(|p| peers.contains(&p.pid)) {
            // A process that was started to answer.
            ours = self.manager.processes(unit)?;
        }
        match ours.iter().find(|p| peers.contains(&p.pid)) {
            Some(process) => self.not_of_another_release(process).map(|()| PeerProof::Proved),
            None => {
                Err(Miss::Yet(format!("it was answered by process {}, which is not of {unit}", peers[0])))
            }
        }
    }

    fn kernel(&mut self, main: Option<&Process>, answered: bool) -> Result<KernelProof, Miss> {
        let Some(main) = main else {
            // Only of a oneshot is it right that nothing runs; a command then answers for what it left behind.
            if matches!(self.adapter.probe.method, Method::Command(_)) {
                return Ok(KernelProof::Exited);
            }
            return Err(Miss::Yet(format!(
                "{} has no main process; only a probe command can speak for it",
                self.adapter.unit
            )));
        };
        if let Some(proof) = self.side.proof(self.manager, main) {
            return Ok(proof);
        }
        self.not_of_another_release(main)?;
        if self.same_bytes_count && self.side.same_bytes(self.manager, main) {
            return Ok(KernelProof::SameBytes);
        }
        if answered {
            return Ok(KernelProof::AnswerOnly);
        }
        let (pid, path, release) = (main.pid, &main.exe_path, &self.side.release);
        Err(Miss::Yet(format!("main process {pid} ({path}) is not from release {release}")))
    }

    /// Paths deceive, but one that leads into another release never speaks for this one.
    fn not_of_another_release(&self, process: &Process) -> Result<(), Miss> {
        let releases = self.side.tree.parent().and_then(std::path::Path::parent);
        let elsewhere = releases
            .is_some_and(|dir| process.exe_path.starts_with(&format!("{}/", dir.display())))
            && !process.exe_path.starts_with(&format!("{}/", self.side.tree.display()));
        if elsewhere {
            let (pid, path) = (process.pid, &process.exe_path);
            return Err(Miss::Wrong(format!("process {pid} is from another release: it executes {path}")));
        }
        Ok(())
    }
}

/// The version in an answer; `None` where the adapter says that there is none.
fn extract(field: &VersionField, answer: &[u8]) -> Result<Option<String>, String> {
    let text = || std::str::from_utf8(answer).map_err(|_| "its answer is not UTF-8".to_owned());
    match field {
        VersionField::None => Ok(None),
        VersionField::Body => Ok(Some(text()?.trim().to_owned())),
        VersionField::Pointer(pointer) => {
            let json: serde_json::Value =
                serde_json::from_slice(answer).map_err(|e| format!("its answer is not JSON: {e}"))?;
            match json.pointer(pointer) {
                Some(serde_json::Value::String(version)) => Ok(Some(version.clone())),
                Some(serde_json::Value::Number(version)) => Ok(Some(version.to_string())),
                _ => Err(format!("its answer has no version at {pointer}")),
            }
        }
        VersionField::Line(prefix) => text()?
            .lines()
            .find_map(|line| line.strip_prefix(prefix.as_str()))
            .map(|rest| Some(rest.trim().to_owned()))
            .ok_or_else(|| format!("its answer has no line that begins with {prefix:?}")),
    }
}

/// Whether what was reported is the version wanted.
fn agrees(rule: VersionRule, wanted: &Version, found: &str) -> bool {
    let wanted = wanted.as_str();
    match rule {
        VersionRule::Exact => found == wanted,
        VersionRule::Semver => {
            let parse = |v: &str| semver::Version::parse(v.strip_prefix('v').unwrap_or(v)).ok();
            match (parse(wanted), parse(found)) {
                (Some(wanted), Some(found)) => wanted.cmp_precedence(&found).is_eq(),
                _ => false,
            }
        }
        VersionRule::Prefix => found
            .strip_prefix(wanted)
            .is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit() || c == '.')),
        VersionRule::Contained => {
            let boundary = |c: Option<char>| c.is_none_or(|c| !c.is_ascii_digit() && c != '.');
            !found.is_empty()
                && wanted.match_indices(found).any(|(at, _)| {
                    boundary(wanted[..at].chars().next_back())
                        && boundary(wanted[at + found.len()..].chars().next())
                })
        }
    }
}

/// A reported version as it is recorded: of its first line, no more than a version may have.
fn kept(found: &str) -> String {
    found.lines().next().unwrap_or_default().chars().take(64).collect()
}

fn shorten(text: &str) -> String {
    let mut short: String = text.chars().take(80).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    format!("{short:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reported_version_is_compared_by_the_rule_that_was_declared() {
        // A30.
        use VersionRule::{Contained, Exact, Prefix, Semver};
        for (rule, wanted, found, expected) in [
            (Exact, "1.4.0", "1.4.0", true),
            (Exact, "1.4.0", "v1.4.0", false),
            (Semver, "1.4.0", "v1.4.0", true),
            (Semver, "1.4.0", "1.4.0+b7", true),
            (Semver, "1.4.0", "1.4.0-1.el9", false),
            (Semver, "1.4.0", "not a version", false),
            (Prefix, "1.4.0", "1.4.0-1.el9", true),
            (Prefix, "1.4.0", "1.4.01", false),
            (Prefix, "1.4", "1.4.1", false),
            (Contained, "5:7.0.15-1~deb12u1", "7.0.15", true),
            (Contained, "5:7.0.15-1~deb12u1", "7.0.1", false),
            (Contained, "5:7.0.15-1~deb12u1", "", false),
            (Contained, "17.0.15", "7.0.15", false),
        ] {
            assert_eq!(agrees(rule, &wanted.parse().unwrap(), found), expected, "{rule:?} {wanted} {found}");
        }
    }

    #[test]
    fn an_answer_without_its_version_says_so() {
        let pointer = VersionField::Pointer("/v".into());
        assert_eq!(extract(&pointer, br#"{"v":"1"}"#), Ok(Some("1".into())));
        assert_eq!(extract(&pointer, br#"{"w":"1"}"#), Err("its answer has no version at /v".into()));
        assert!(extract(&pointer, b"<html>").unwrap_err().contains("not JSON"));
        assert_eq!(extract(&VersionField::Body, b" 1.0\n"), Ok(Some("1.0".into())));
        assert!(extract(&VersionField::Body, &[0xff]).unwrap_err().contains("UTF-8"));
        let line = VersionField::Line("redis_version:".into());
        assert_eq!(extract(&line, b"# Server\r\nredis_version:7.0.15\r\n"), Ok(Some("7.0.15".into())));
        assert!(extract(&line, b"").is_err());
        assert_eq!(extract(&VersionField::None, &[0xff]), Ok(None));
    }

    #[test]
    fn of_a_long_answer_only_the_version_is_recorded() {
        let page = format!("2.0 (built here)\n{}", "x".repeat(60_000));
        assert!(agrees(VersionRule::Prefix, &"2.0".parse().unwrap(), &page));
        assert_eq!(kept(&page), "2.0 (built here)");
        assert_eq!(kept(&"1.2.3+".repeat(99)).len(), 64);
    }
}
