//! Preparation: everything up to `handing-over`. Nothing that runs changes, and every refusal is an outcome: `held`, `failed`
//! or `up-to-date`.

use std::time::Duration;

use super::{Source, SourceFailure, Stop, Transaction, Upgrade};
use crate::evidence::{Side, Sides};
use crate::failpoint;
use crate::judge;
use crate::manager::{ManagerError, UnitState};
use crate::operation::{Baseline, Done, Event, Handover, Outcome, Proof, Subject};
use crate::release::{Entry, Manifest, Release};
use crate::seal;
use crate::store::Slot;
use crate::unit;

/// How much room a finished operation needs for its records: a receipt, its archive and the answer.
const RESERVE: usize = 64 * 1024;
/// Files held in reserve: one for each file that ending an operation creates. No operation's id is one of these names.
const RESERVE_FILES: [&str; 3] = ["run/reserve~1", "run/reserve~2", "run/reserve~3"];

/// How preparation ends where it does not lead on.
pub(super) enum Early {
    Over(Box<Done>),
    Stop(Stop),
}

impl<T: Into<Stop>> From<T> for Early {
    fn from(stop: T) -> Self {
        Self::Stop(stop.into())
    }
}

/// A subject, and what it says on the way out.
pub(super) struct Draft {
    pub(super) subject: Subject,
}

impl Draft {
    fn over(&self, outcome: Outcome, reason: impl Into<String>) -> Early {
        self.over_with(outcome, reason, None)
    }

    fn over_with(&self, outcome: Outcome, reason: impl Into<String>, proof: Option<Proof>) -> Early {
        let (subject, stable) = (self.subject.clone(), self.subject.from.clone());
        let reason = reason.into();
        Early::Over(Box::new(Done { subject, outcome, cause: None, reason, stable, proof, notes: vec![] }))
    }

    fn held(&self, reason: impl Into<String>) -> Early {
        self.over(Outcome::Held, reason)
    }

    fn failed(&self, reason: impl Into<String>) -> Early {
        self.over(Outcome::Failed, reason)
    }
}

impl Transaction<'_> {
    pub(super) fn prepare(
        &mut self,
        draft: &mut Draft,
        wanted: &Upgrade,
        source: &mut dyn Source,
    ) -> Result<Handover, Early> {
        self.policy(draft, wanted)?;
        let state = self.observe(draft)?;
        self.watch.step("staging", crate::stage::STAGING_TIME);
        let manifest = self.obtain(draft, wanted, source, &state)?;
        self.candidate_fits(draft, &manifest)?;
        self.prove_way_back(draft)?;
        self.leave_if_asked()?;
        self.append(Event::Staged(draft.subject.clone()))?;
        self.store.set_slot(Slot::Experiment, &manifest.release)?;
        failpoint::hit("after:experiment");
        self.reserve(draft)?;
        let was = self.baseline(draft)?;
        if !self.journal.fits(&self.id, &Event::HandingOver(was.clone())) {
            let count = was.dependants.len() + was.triggers.len();
            return Err(draft.failed(format!(
                "the names of the {count} units that depend on {} or trigger it do not fit into one record; stop some of \
                 them first",
                self.adapter.unit
            )));
        }
        self.leave_if_asked()?;
        Ok(was)
    }

    fn policy(&mut self, draft: &Draft, wanted: &Upgrade) -> Result<(), Early> {
        if self.adapter.policy.consent_required && !wanted.consent {
            return Err(draft.held(
                "not consented: the adapter requires consent for each upgrade; repeat with --consent",
            ));
        }
        let Some(from) = &draft.subject.from else { return Ok(()) };
        let older = wanted
            .target
            .is_older_than(&from.version)
            .unwrap_or_else(|| self.store.past().iter().any(|r| r.version == wanted.target));
        if older && !wanted.allow_downgrade && wanted.target != from.version {
            let (target, now) = (&wanted.target, &from.version);
            return Err(draft.held(format!(
                "{target} is older than {now}, which is stable; repeat with --allow-downgrade"
            )));
        }
        Ok(())
    }

    /// Whether the unit, as its settings were read, executes through `current`.
    pub(crate) fn goes_through_current(&self) -> Result<(), String> {
        let unit = &self.adapter.unit;
        let current = format!("{}/", self.store.absolute("current").display());
        let goes_through = |line: &crate::manager::ExecLine| {
            line.path.starts_with(&current) || line.argv.iter().any(|a| a.starts_with(&current))
        };
        if self.settings.exec.iter().any(|line| line.setting == "ExecStart" && goes_through(line)) {
            return Ok(());
        }
        Err(format!(
            "owned elsewhere: the effective ExecStart of {unit} does not go through {current}; see `systemctl cat \
             {unit}`"
        ))
    }

    /// Reads the unit, and says what makes an upgrade impossible.
    fn observe(&mut self, draft: &Draft) -> Result<UnitState, Early> {
        let unit = &self.adapter.unit;
        let state = self.manager.state(unit)?;
        if state.load != "loaded" {
            return Err(draft.failed(format!("unit {unit} is {}: mend the unit, then try again", state.load)));
        }
        self.settings = self.manager.settings(unit)?;
        if let Err(why) = self.goes_through_current() {
            return Err(draft.held(why));
        }
        let begun = self.manager.now();
        let patience = self.adapter.timeouts.foreign_job;
        self.watch.step("waiting for a foreign job", patience);
        let mut state = state;
        while state.job.is_some() {
            if self.manager.now().saturating_sub(begun) > patience {
                return Err(draft.failed(format!(
                    "a job that is not ours is queued on {unit} and did not end in {patience:?}"
                )));
            }
            self.manager.wait(Duration::from_millis(200));
            state = self.manager.state(unit)?;
            self.leave_if_asked()?;
        }
        Ok(state)
    }

    /// Resolves and seals the candidate.
    fn obtain(
        &mut self,
        draft: &mut Draft,
        wanted: &Upgrade,
        source: &mut dyn Source,
        state: &UnitState,
    ) -> Result<Manifest, Early> {
        let failed = |draft: &Draft, failure| match failure {
            SourceFailure::NoSuchVersion(why) => draft.held(why),
            SourceFailure::Unusable(why) => draft.failed(why),
        };
        let artifact = source.resolve(&wanted.target).map_err(|f| failed(draft, f))?;
        draft.subject.artifact_sha256 = artifact.sha256;
        draft.subject.provenance = artifact.provenance;
        self.not_quarantined(draft, wanted)?;
        let from = draft.subject.from.clone();
        let manifest = source
            .stage(self.store, &wanted.target, from.as_ref(), self.watch)
            .map_err(|f| failed(draft, f))?;
        draft.subject.target_digest = Some(manifest.release.digest);
        draft.subject.artifact_sha256 = manifest.artifact_sha256.or(artifact.sha256);
        self.not_quarantined(draft, wanted)?;
        self.sides = Sides {
            stable: from.as_ref().and_then(|r| Side::of(self.store, r)),
            candidate: Side::of(self.store, &manifest.release),
            stable_invocation: Some(state.invocation.clone()),
            candidate_invocation: None,
        };
        if from.as_ref() == Some(&manifest.release) {
            self.up_to_date(draft, &manifest.release, state)?;
        }
        Ok(manifest)
    }

    fn not_quarantined(&self, draft: &Draft, wanted: &Upgrade) -> Result<(), Early> {
        let (digest, artifact) = (draft.subject.target_digest, draft.subject.artifact_sha256);
        let known = self
            .store
            .quarantine()
            .into_iter()
            .find(|q| digest == Some(q.digest) || (artifact.is_some() && artifact == q.artifact_sha256));
        match known {
            Some(q) if !wanted.retry_quarantined => Err(draft.held(format!(
                "quarantined: these bytes failed as {} in operation {} ({}); repeat with --retry-quarantined, or publish \
                 a mended build",
                q.version, q.operation, q.reason
            ))),
            _ => Ok(()),
        }
    }

    /// The same bytes are stable: over, if they are what runs.
    fn up_to_date(&mut self, draft: &Draft, release: &Release, state: &UnitState) -> Result<(), Early> {
        if self.store.current() != Some(release.dir_name()) {
            return Ok(());
        }
        if state.active == "inactive" {
            let why = format!("{release} is stable; the service is stopped and was left so");
            return Err(draft.over(Outcome::UpToDate, why));
        }
        if !state.is_up() {
            return Ok(());
        }
        let Some(side) = self.sides.stable.clone() else { return Ok(()) };
        match self.judge(&side, true).look(state) {
            Ok(proof) => {
                Err(draft.over_with(Outcome::UpToDate, format!("{release} already runs"), Some(proof)))
            }
            Err(why) => {
                self.note(format!("{release} is stable, but is not what runs or does not pass: {why}"));
                Ok(())
            }
        }
    }

    /// Every program that the unit's lines name through `current` is in the candidate, and may be executed.
    fn candidate_fits(&self, draft: &Draft, manifest: &Manifest) -> Result<(), Early> {
        let current = format!("{}/", self.store.absolute("current").display());
        for line in &self.settings.exec {
            for (n, word) in std::iter::once(&line.path).chain(&line.argv).enumerate() {
                let Some(path) = word.strip_prefix(&current) else { continue };
                let program = n == 0;
                let fits = match manifest.entries.get(path) {
                    Some(Entry::File { mode, .. }) => !program || mode & 0o111 != 0,
                    Some(Entry::Link { .. }) => true,
                    Some(Entry::Dir { .. }) => !program,
                    None => !program && line.path.starts_with(&current),
                };
                if !fits {
                    let (release, setting) = (&manifest.release, &line.setting);
                    return Err(draft.failed(format!(
                        "release {release} has no {} {path}, which {setting} of {} names",
                        if program { "executable" } else { "file" },
                        self.adapter.unit
                    )));
                }
            }
        }
        Ok(())
    }

    fn prove_way_back(&self, draft: &Draft) -> Result<(), Early> {
        let Some(from) = &draft.subject.from else {
            return match self.store.disk().stat("slots/stable") {
                Ok(_) => Err(draft
                    .failed("slots/stable names no sealed release; `cutover verify` says what is damaged")),
                Err(_) => Ok(()),
            };
        };
        if let Err(why) = seal::verify(self.store.disk(), from, seal::Depth::Shape) {
            return Err(draft.failed(format!("there is no way back: the stable release {from} {why}")));
        }
        if !self.store.disk().may_execute() {
            let path = self.store.absolute("");
            return Err(
                draft.failed(format!("{} is mounted noexec: no release could run from it", path.display()))
            );
        }
        self.store.prepare_current(from)?;
        Ok(())
    }

    /// Holds room, so that a disk that fills up meanwhile cannot keep the operation from being closed.
    fn reserve(&self, draft: &Draft) -> Result<(), Early> {
        self.release_reserve();
        for path in RESERVE_FILES {
            let disk = self.store.disk();
            let made = disk.create("reserve.create", path, 0o600);
            let held = made.and_then(|mut file| file.write_at("reserve.write", 0, &[0; RESERVE]));
            if let Err(e) = held {
                self.release_reserve();
                return Err(draft.failed(format!(
                    "no space for the operation's records at {}: {e}",
                    self.store.absolute(path).display()
                )));
            }
        }
        Ok(())
    }

    pub(super) fn release_reserve(&self) {
        for path in RESERVE_FILES {
            let _ = self.store.disk().unlink("reserve.unlink", path);
        }
    }

    /// How the running version does, and all that the stop will destroy.
    fn baseline(&mut self, draft: &Draft) -> Result<Handover, Early> {
        let unit = self.adapter.unit.clone();
        let state = self.manager.state(&unit)?;
        let mut why = String::new();
        let baseline = match (&self.sides.stable.clone(), state.active.as_str()) {
            (None, _) => Baseline::Nothing,
            (Some(_), "inactive") => Baseline::Stopped,
            (Some(side), _) if state.is_up() => {
                let seen = self.judge(side, true).baseline(&state);
                let (baseline, _, reason) = seen.map_err(|v| self.early(v))?;
                why = reason;
                baseline
            }
            (Some(_), _) => {
                why = unit::describe(&state);
                Baseline::Failing
            }
        };
        if baseline == Baseline::Failing {
            if self.adapter.policy.baseline_must_pass {
                return Err(draft.failed(format!(
                    "the running version does not pass, and the adapter requires it to: {why}"
                )));
            }
            self.note(format!("the running version did not pass before the upgrade: {why}"));
        }
        let mut active = |units: &[String]| -> Result<Vec<String>, ManagerError> {
            let mut up = vec![];
            for unit in units {
                if self.manager.state(unit)?.is_up() {
                    up.push(unit.clone());
                }
            }
            Ok(up)
        };
        let triggers = active(&self.settings.triggered_by)?;
        let dependants = active(&self.settings.pulls_down)?;
        let triggered = !self.settings.triggered_by.is_empty() || self.settings.service_type == "dbus";
        Ok(Handover {
            baseline,
            invocation: if baseline == Baseline::Stopped { String::new() } else { state.invocation },
            main_pid: state.main_pid,
            restarts: state.restarts,
            triggered,
            triggers,
            dependants,
            bound_ms: u64::try_from(self.bound().as_millis()).unwrap_or(u64::MAX),
        })
    }

    fn early(&self, verdict: judge::Verdict) -> Early {
        match verdict {
            judge::Verdict::Manager(e) => e.into(),
            other => Early::Stop(Stop::Leave(other.to_string())),
        }
    }
}
