//! Adopting: an existing service comes under management, and goes on running meanwhile.
//!
//! ```text
//! refusals ─ seal what the unit runs ─ [adopting] ─ slots/stable, current, sync ─ DROP-IN ─ reload ─ read back ─ [done]
//! ```
//!
//! Guarantees:
//!
//! - The service is neither stopped nor started. From its next start on it runs from the release.
//! - The rename of the drop-in is the commit: recovery finishes an adoption whose drop-in is there, and undoes any
//!   other. Undone means: the drop-in is gone, systemd has read that, *and then* the links are gone. At no time does
//!   the unit name a path that is not there.
//! - It is adopted only when systemd, asked again, has exactly the lines that were meant. Where another file wins, the
//!   adoption is undone, and the receipt names the file.
//! - Running it again changes nothing.
//!
//! | file | idea |
//! |---|---|
//! | `refusals.rs` | what cannot be adopted, by name (pure) |
//! | `plan.rs` | what is adopted, and which lines go through it |
//! | `dropin.rs` | the drop-in as text, and what systemd made of it (pure) |
//! | `host.rs` | packages and AppArmor, from their files |

mod dropin;
mod host;
mod plan;
mod refusals;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use self::dropin::DropIn;
use self::host::Host;
use self::plan::Payload;
use self::refusals::{Facts, Refusal};
use crate::durable::{self, Disk, RealDisk};
use crate::evidence::Side;
use crate::failpoint;
use crate::judge::Verdict;
use crate::manager::{Command, ManagerError, UnitState};
use crate::operation::{Action, Baseline, Done, Event, Outcome, Proof, Subject};
use crate::receipt::Receipt;
use crate::recovery::{Aim, Links};
use crate::release::{Manifest, Release, Version};
use crate::stage;
use crate::store::Slot;
use crate::transaction::{Stop, Transaction};

/// Where the administrator's units and drop-ins are.
pub const UNITS: &str = "/etc/systemd/system";
/// The largest drop-in that is read: systemd itself reads no longer lines than 1 MiB.
const DROP_IN_MAX: u64 = 4 << 20;
/// How long a reload may take: systemd gives its generators 90 s.
const RELOAD: Duration = Duration::from_secs(150);
/// How long rpm may take to name an owner: its database may be cold.
const RPM_TIMEOUT: Duration = Duration::from_secs(30);
/// The most refusals that one answer names: its text is bounded.
const REFUSALS_NAMED: usize = 3;

/// What is asked of an adoption.
pub struct Adopt {
    /// What it calls itself now.
    pub version: Version,
    /// Where its files are.
    pub from: Option<PathBuf>,
    /// Take over what a package manager owns.
    pub take_over: bool,
}

/// Puts the adapter's unit under management, from a closed journal to a receipt.
///
/// # Errors
/// [`Stop`]: the adoption is open, and the next worker settles it.
pub fn adopt(transaction: &mut Transaction, wanted: &Adopt) -> Result<Receipt, Stop> {
    let units = open_units()?;
    adopt_on(transaction, &units, wanted)
}

/// Settles an adoption that was interrupted, by what is there.
///
/// # Errors
/// [`Stop`]: it is still open.
pub(crate) fn settle(transaction: &mut Transaction, subject: Subject) -> Result<Receipt, Stop> {
    let units = open_units()?;
    settle_on(transaction, &units, subject)
}

/// As [`adopt`]; `units` stands for [`UNITS`].
///
/// # Errors
/// As [`adopt`].
pub fn adopt_on(t: &mut Transaction, units: &dyn Disk, wanted: &Adopt) -> Result<Receipt, Stop> {
    let subject = Subject {
        action: Action::Adopt,
        from: t.store.slot(Slot::Stable).and_then(|dir| t.store.manifest(&dir).ok()).map(|m| m.release),
        target_version: wanted.version.clone(),
        target_digest: None,
        artifact_sha256: None,
        provenance: String::new(),
        started_at_ms: t.manager.wall_clock_ms(),
    };
    let state = t.store.absolute("").to_string_lossy().trim_end_matches('/').to_owned();
    let current = format!("{state}/current");
    let mut adoption = Adoption { t, units, host: Host::this(), state, current, subject };
    match adoption.prepare(wanted) {
        Ok(drop_in) => adoption.carry_out(&drop_in),
        Err(End::Over(outcome, reason)) => adoption.close(outcome, reason, None),
        Err(End::Stop(stop)) => Err(stop),
    }
}

/// As the recovery of an adoption; `units` stands for [`UNITS`].
///
/// # Errors
/// [`Stop`]: it is still open.
pub fn settle_on(t: &mut Transaction, units: &dyn Disk, subject: Subject) -> Result<Receipt, Stop> {
    let state = t.store.absolute("").to_string_lossy().trim_end_matches('/').to_owned();
    let current = format!("{state}/current");
    let mut adoption = Adoption { t, units, host: Host::this(), state, current, subject };
    match adoption.own_drop_in()? {
        Some(text) => adoption.finish(&text),
        None => adoption.undo("interrupted before the drop-in was written".into()),
    }
}

fn open_units() -> Result<RealDisk, Stop> {
    RealDisk::open(Path::new(UNITS)).map_err(|e| Stop::Again(format!("{UNITS}: {e}")))
}

/// How preparation ends where it does not lead on.
enum End {
    Over(Outcome, String),
    Stop(Stop),
}

impl From<Refusal> for End {
    fn from(refusal: Refusal) -> Self {
        Self::Over(Outcome::Held, refusal.to_string())
    }
}

impl From<ManagerError> for End {
    fn from(e: ManagerError) -> Self {
        Self::Stop(e.into())
    }
}

impl From<Stop> for End {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}

struct Adoption<'t, 'a> {
    t: &'t mut Transaction<'a>,
    units: &'t dyn Disk,
    host: Host,
    /// The state directory, absolute.
    state: String,
    /// What the lines are to go through.
    current: String,
    subject: Subject,
}

impl Adoption<'_, '_> {
    // ---- prepare: nothing changes but for a sealed release that no link names ----

    /// Checks everything and seals the release; the drop-in's text.
    fn prepare(&mut self, wanted: &Adopt) -> Result<String, End> {
        let unit = self.unit();
        let state = self.loaded(&unit)?;
        self.managed_already(&unit, wanted)?;
        let program = self.t.adapter.source.program.clone();
        let from = wanted.from.as_deref();
        let payload = Payload::find(&self.t.settings, from, program.as_deref()).map_err(|path| {
            let setting = if from.is_some() { "--from" } else { "ExecStart" };
            Refusal::NoProgram { unit: unit.clone(), setting, path }
        })?;
        let plan = plan::plan(&self.t.settings, &payload, &self.current);
        let open_for_execution = self.nothing_in_the_way(&state, &payload, &plan, wanted)?;
        plan.notes.into_iter().for_each(|note| self.t.note(note));
        let manifest = self.seal(&payload, &wanted.version)?;
        self.subject.target_digest = Some(manifest.release.digest);
        self.subject.provenance = manifest.provenance;
        if let Some(stable) = self.subject.from.as_ref().filter(|stable| **stable != manifest.release) {
            return Err(self.other_release(stable, &manifest.release).into());
        }
        let drop_in = DropIn {
            service: self.t.store.service(),
            unit: &unit,
            operation: &self.t.id,
            state: &self.state,
            sections: &plan.sections,
            open_for_execution,
        };
        Ok(drop_in.render())
    }

    fn unit(&self) -> String {
        self.t.adapter.unit.clone()
    }

    /// The unit's state and, in the transaction, its settings; refused where it is not properly loaded.
    fn loaded(&mut self, unit: &str) -> Result<UnitState, End> {
        let state = match self.t.manager.state(unit) {
            Err(ManagerError::Unit { unit, why: load }) => {
                return Err(Refusal::NotLoaded { unit, load }.into());
            }
            other => other?,
        };
        match refusals::of_load(unit, &state, self.host.is_user_unit(unit)) {
            Some(refusal) => Err(refusal.into()),
            None => {
                self.t.settings = self.t.manager.settings(unit)?;
                Ok(state)
            }
        }
    }

    /// Answers where the service, or the unit, is managed already; returns where neither is.
    fn managed_already(&mut self, unit: &str, wanted: &Adopt) -> Result<(), End> {
        let service = self.t.store.service().to_owned();
        let states = durable::parent(&self.state).to_owned();
        if let Some(other) = refusals::through_another(&self.t.settings, &states, &service) {
            return Err(Refusal::OfAnotherService { unit: unit.to_owned(), other }.into());
        }
        let path = Path::new(UNITS).join(self.path());
        let text = self.drop_in()?;
        let ours = text.as_deref().and_then(dropin::mark).filter(|mark| mark.service == service);
        let current = self.current.clone();
        let through = self.goes_through(Some("ExecStart"));
        match (through, text, ours) {
            (true, _, Some(_)) => self.adopted_already(unit, wanted),
            (true, _, None) => Err(Refusal::AlreadyThrough { unit: unit.to_owned(), current }.into()),
            (false, Some(_), Some(_)) => {
                let by = self.winner("ExecStart").map(|w| format!(", since {w} wins")).unwrap_or_default();
                Err(Refusal::Overridden { unit: unit.to_owned(), current, by }.into())
            }
            (false, Some(_), None) => Err(Refusal::DropInTaken { path }.into()),
            (false, None, _) => match self.other_unit(&service) {
                Some(other) => Err(Refusal::OtherUnit { service, other, unit: unit.to_owned() }.into()),
                None => Ok(()),
            },
        }
    }

    /// The service is under management by our own drop-in: the same again changes nothing.
    fn adopted_already(&mut self, unit: &str, wanted: &Adopt) -> Result<(), End> {
        let Some(stable) = self.subject.from.clone() else {
            let path = Path::new(UNITS).join(self.path());
            return Err(
                Refusal::NoStable { unit: unit.to_owned(), current: self.current.clone(), path }.into()
            );
        };
        let mut asked = Release { version: wanted.version.clone(), ..stable.clone() };
        if let Some(from) = wanted.from.as_deref().filter(|_| asked == stable) {
            let program = self.t.adapter.source.program.clone();
            let missing = |path| Refusal::NoProgram { unit: unit.to_owned(), setting: "--from", path };
            let payload = Payload::find(&self.t.settings, Some(from), program.as_deref()).map_err(missing)?;
            asked = self.seal(&payload, &wanted.version)?.release;
        }
        if asked != stable {
            return Err(self.other_release(&stable, &asked).into());
        }
        self.subject.target_digest = Some(stable.digest);
        Err(End::Over(Outcome::UpToDate, format!("{unit} is under management already, at {stable}")))
    }

    fn other_release(&self, stable: &Release, wanted: &Release) -> Refusal {
        Refusal::OtherRelease {
            service: self.t.store.service().to_owned(),
            stable: stable.to_string(),
            wanted: if stable.version == wanted.version {
                wanted.to_string()
            } else {
                wanted.version.to_string()
            },
        }
    }

    /// Another unit with a drop-in of this service.
    fn other_unit(&self, service: &str) -> Option<String> {
        let dirs = self.units.list("").unwrap_or_default();
        dirs.iter().filter_map(|dir| dir.strip_suffix(".d")).map(str::to_owned).find(|unit| {
            let text = self.units.read(&format!("{unit}.d/{}", dropin::FILE), DROP_IN_MAX).ok();
            let mark = text.and_then(|text| dropin::mark(&String::from_utf8_lossy(&text)));
            mark.is_some_and(|mark| mark.service == service)
        })
    }

    /// Gathers the facts and refuses by name. Whether the unit has to be allowed to execute releases.
    fn nothing_in_the_way(
        &mut self,
        state: &UnitState,
        payload: &Payload,
        plan: &plan::Plan,
        wanted: &Adopt,
    ) -> Result<bool, End> {
        let unit = self.unit();
        let package = self.package(payload.path())?;
        if let Some(package) = package.as_ref().filter(|_| wanted.take_over) {
            self.t.note(format!(
                "taken over from the package {package}, whose upgrades do not reach the service"
            ));
        }
        let place = crate::mounts::examine(Path::new(&self.state))
            .map_err(|e| End::Over(Outcome::Failed, format!("{}: {e}", self.state)))?;
        place.warnings.into_iter().for_each(|warning| self.t.note(warning));
        let real = std::fs::canonicalize(&self.state)
            .map_or_else(|_| self.state.clone(), |path| path.display().to_string());
        let places = [self.state.as_str(), real.as_str()];
        let mut accepting = self.t.settings.triggered_by.clone();
        accepting.extend(refusals::socket_of_connection(&unit));
        accepting.retain(|name| name.ends_with(".socket"));
        let mut accepts = vec![];
        for socket in accepting {
            if self.t.manager.settings(&socket)?.accept {
                accepts.push(socket);
            }
        }
        let processes = self.t.manager.processes(&unit)?;
        let running = processes.iter().find(|p| p.pid == state.main_pid).map_or("", |p| &p.exe_path);
        let profile = self.host.profile(&self.t.settings.apparmor_profile, state.main_pid, payload.path());
        let found = refusals::all(&Facts {
            unit: &unit,
            settings: &self.t.settings,
            places,
            accepting: &accepts,
            path: payload.path(),
            given: wanted.from.is_some(),
            changed: &plan.changed,
            running,
            profile: profile.as_ref(),
            package: package.as_deref().filter(|_| !wanted.take_over),
            stop_fits_both: self.t.adapter.policy.stop_fits_both,
            unfit: &place.unfit,
        });
        if found.is_empty() {
            return Ok(refusals::must_be_opened(&self.t.settings, places));
        }
        let named: Vec<String> = found.iter().take(REFUSALS_NAMED).map(ToString::to_string).collect();
        Err(End::Over(Outcome::Held, named.join("; also: ")))
    }

    /// The package that owns a file, by dpkg's lists or as rpm says.
    fn package(&mut self, path: &Path) -> Result<Option<String>, End> {
        if let Some(package) = self.host.dpkg_owner(path) {
            return Ok(Some(package));
        }
        if !self.host.has_rpm() {
            return Ok(None);
        }
        // Its database is no text. As every other program, it runs in a unit of its own.
        self.t.watch.step("asking rpm", RPM_TIMEOUT + Duration::from_secs(30));
        let argv = [host::RPM, "-qf", "--qf", "%{NAME}\\n", &path.to_string_lossy()].map(str::to_owned);
        let answer = self.t.manager.run(&Command {
            service: self.t.adapter.service.clone(),
            purpose: "owner".into(),
            argv: argv.to_vec(),
            user: None,
            environment: vec![],
            timeout: RPM_TIMEOUT,
        })?;
        let text = String::from_utf8_lossy(&answer.stdout).into_owned();
        Ok((answer.status == Some(0)).then(|| text.lines().next().unwrap_or("?").to_owned()))
    }

    fn seal(&mut self, payload: &Payload, version: &Version) -> Result<Manifest, End> {
        self.t.watch.step("staging", stage::STAGING_TIME);
        let watch = self.t.watch;
        let mut progress = |done, total| watch.progress("staging", done, total);
        let (disk, limits) = (self.t.store.disk(), self.t.adapter.limits);
        stage::adopt_tree(disk, &payload.adoptee(), version, limits, &mut progress)
            .map_err(|e| End::Over(Outcome::Failed, e.to_string()))
    }

    // ---- carry out: from here on, the drop-in decides ----

    fn carry_out(&mut self, drop_in: &str) -> Result<Receipt, Stop> {
        self.t.leave_if_asked()?;
        self.t.watch.step("adopting", RELOAD);
        self.t.append(Event::Adopting(self.subject.clone()))?;
        let target = self.subject.target().expect("it was sealed");
        self.t.store.set_slot(Slot::Stable, &target)?;
        self.t.store.set_current(&target)?;
        self.t.store.sync_current()?;
        failpoint::hit("after:links");
        if let Err(e) = self.write(drop_in) {
            return self.undo(format!("{UNITS}/{} cannot be written: {e}", self.path()));
        }
        failpoint::hit("after:drop-in");
        self.finish(drop_in)
    }

    /// The drop-in's path below [`UNITS`]: by the unit's own name, so that it holds whatever alias is used.
    fn path(&self) -> String {
        format!("{}/{}", self.dir(), dropin::FILE)
    }

    fn dir(&self) -> String {
        let id = &self.t.settings.id;
        format!("{}.d", if id.is_empty() { &self.t.adapter.unit } else { id })
    }

    fn write(&self, drop_in: &str) -> io::Result<()> {
        let dir = self.dir();
        // Also where it is there: whoever made it may not have synced its name.
        durable::make_dir(self.units, &dir, 0o755)?;
        durable::replace(self.units, &self.path(), drop_in.as_bytes(), 0o644)
    }

    /// The drop-in is there: reads back what systemd makes of it, and closes the adoption either way.
    fn finish(&mut self, drop_in: &str) -> Result<Receipt, Stop> {
        // A predecessor may have been killed between the rename and its sync.
        let synced = durable::confirm(self.units, &self.dir());
        synced.map_err(|e| Stop::Again(format!("{UNITS}/{}: {e}", self.dir())))?;
        self.reload()?;
        match dropin::overridden(drop_in, &self.t.settings) {
            None => {
                let proof = self.look()?;
                self.close(Outcome::Adopted, String::new(), proof)
            }
            Some(setting) => {
                let reason = match self.winner(&setting) {
                    Some(file) => format!(
                        "{file} is read after the drop-in and wins with its own {setting}: take that out of it, then \
                         adopt again"
                    ),
                    None => format!(
                        "systemd does not have the {setting} that was written to {UNITS}/{}; `systemctl cat {}` shows \
                         what it has",
                        self.path(),
                        self.t.adapter.unit
                    ),
                };
                self.undo(reason)
            }
        }
    }

    fn reload(&mut self) -> Result<(), Stop> {
        self.t.watch.step("reloading", RELOAD);
        self.t.manager.reload()?;
        failpoint::hit("after:reload");
        self.t.settings = self.t.manager.settings(&self.t.adapter.unit)?;
        Ok(())
    }

    fn winner(&self, setting: &str) -> Option<String> {
        let own = format!("{UNITS}/{}", self.path());
        let read = |path: &str| std::fs::read_to_string(path).ok();
        dropin::winner(&self.t.settings.drop_ins, &own, setting, &read)
    }

    /// Whether what runs is what was said, by the probe: a note where it is not.
    fn look(&mut self) -> Result<Option<Proof>, Stop> {
        let target = self.subject.target().expect("it was sealed");
        let state = self.t.manager.state(&self.t.adapter.unit)?;
        if !state.is_up() {
            self.t.note(format!(
                "{} is {}: that it is {target} was not checked",
                self.t.adapter.unit, state.active
            ));
            return Ok(None);
        }
        let Some(side) = Side::of(self.t.store, &target) else { return Ok(None) };
        match self.t.judge(&side, true).baseline(&state) {
            Ok((Baseline::Passing, proof, _)) => Ok(proof),
            Ok((_, _, why)) => {
                self.t.note(format!("what runs does not pass as {target}: {why}"));
                Ok(None)
            }
            Err(Verdict::Manager(e)) => Err(e.into()),
            Err(_) => Err(Stop::Leave("while probing".into())),
        }
    }

    /// Takes everything back, in reverse. What is gone already is not taken back again.
    fn undo(&mut self, reason: String) -> Result<Receipt, Stop> {
        let failed = |path: &str, e: io::Error| Stop::Again(format!("{UNITS}/{path}: {e}"));
        let (dir, path) = (self.dir(), self.path());
        if self.units.stat(&dir).is_ok() {
            let leftover = format!("{path}.new");
            let mut gone = vec![leftover];
            if self.own_drop_in()?.is_some() {
                gone.push(path);
            }
            for path in gone {
                durable::remove(self.units, &path).map_err(|e| failed(&path, e))?;
            }
            // An empty one says nothing, whoever made it.
            if self.units.list(&dir).is_ok_and(|names| names.is_empty()) {
                let removed = self.units.rmdir("undo-adopt.rmdir", &dir);
                let synced = removed.and_then(|()| self.units.sync_dir("undo-adopt.sync", ""));
                synced.map_err(|e| failed(&dir, e))?;
            }
        }
        self.reload()?;
        if self.goes_through(None) && self.subject.from.is_none() {
            // Without the links the unit could not be started any more.
            return Err(Stop::Unresolved(format!(
                "{reason}; but {} goes through {} by something else than the drop-in of this adoption: take that out",
                self.t.adapter.unit, self.current
            )));
        }
        let at = |from: &Option<Release>| from.clone().map_or(Aim::Absent, Aim::At);
        let links = Links { stable: at(&self.subject.from), current: at(&self.subject.from) };
        self.t.store.aim(&links)?;
        self.close(Outcome::Failed, reason, None)
    }

    fn close(&mut self, outcome: Outcome, reason: String, proof: Option<Proof>) -> Result<Receipt, Stop> {
        let subject = self.subject.clone();
        let stable = if outcome == Outcome::Adopted { subject.target() } else { subject.from.clone() };
        self.t.close(Done { subject, outcome, cause: None, reason, stable, proof, notes: vec![] })
    }

    // ---- what is there ----

    /// The text at the drop-in's place; none where there is none.
    fn drop_in(&self) -> Result<Option<String>, Stop> {
        match self.units.read(&self.path(), DROP_IN_MAX) {
            Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
            Err(e) => Err(Stop::Again(format!("{UNITS}/{}: {e}", self.path()))),
        }
    }

    /// The drop-in, if this very operation wrote it and nobody has changed it.
    fn own_drop_in(&self) -> Result<Option<String>, Stop> {
        let ours = |text: &String| {
            dropin::mark(text).is_some_and(|mark| mark.whole && mark.operation == self.t.id.as_str())
        };
        Ok(self.drop_in()?.filter(ours))
    }

    /// Whether a line of this setting, or of any, goes through our `current`.
    fn goes_through(&self, setting: Option<&str>) -> bool {
        let current = format!("{}/", self.current);
        let lines = self.t.settings.exec.iter();
        lines
            .filter(|line| setting.is_none_or(|setting| line.setting == setting))
            .flat_map(|line| std::iter::once(&line.path).chain(&line.argv))
            .any(|word| word.starts_with(&current))
    }
}
