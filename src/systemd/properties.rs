//! What systemd says about a unit, as values of our own. Pure: tested with values made by hand.
//!
//! A property that this systemd does not have reads as empty, zero or no: older ones lack newer settings. The
//! caller asks [`Properties::has`] for those that it cannot do without.

use std::collections::HashMap;
use std::time::Duration;

use zbus::Variant;

use crate::manager::{ExecLine, UnitSettings, UnitState};

/// The properties of one object.
pub(super) struct Properties<'m>(HashMap<&'m str, Variant<'m>>);

impl<'m> Properties<'m> {
    pub(super) fn new(properties: HashMap<&'m str, Variant<'m>>) -> Self {
        Self(properties)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// A string or an object path.
    pub(super) fn text(&self, name: &str) -> String {
        self.0.get(name).map(text).unwrap_or_default()
    }

    pub(super) fn flag(&self, name: &str) -> bool {
        matches!(self.0.get(name), Some(Variant::Bool(true)))
    }

    /// A number; negative ones, which none of ours is, read as 0.
    pub(super) fn number(&self, name: &str) -> u64 {
        match self.0.get(name) {
            Some(Variant::U32(number)) => u64::from(*number),
            Some(Variant::U64(number)) => *number,
            Some(Variant::I32(number)) => u64::try_from(*number).unwrap_or(0),
            _ => 0,
        }
    }

    pub(super) fn number32(&self, name: &str) -> u32 {
        u32::try_from(self.number(name)).unwrap_or(0)
    }

    /// A list of strings.
    pub(super) fn list(&self, name: &str) -> Vec<String> {
        match self.0.get(name) {
            Some(Variant::Array(array)) => array.iter().map(text).collect(),
            _ => Vec::new(),
        }
    }

    /// A time in microseconds, where all ones mean never.
    fn time(&self, name: &str) -> Option<Duration> {
        match self.number(name) {
            u64::MAX => None,
            micros => Some(Duration::from_micros(micros)),
        }
    }

    /// The number of the job that is queued, or none.
    fn job(&self) -> Option<u32> {
        match self.0.get("Job") {
            Some(Variant::Structure(job)) => match job.fields().first() {
                Some(Variant::U32(id)) if *id != 0 => Some(*id),
                _ => None,
            },
            _ => None,
        }
    }

    /// Bytes as hexadecimal digits.
    fn hex(&self, name: &str) -> String {
        match self.0.get(name) {
            Some(Variant::Array(bytes)) => bytes
                .iter()
                .filter_map(
                    |byte| if let Variant::U8(byte) = byte { Some(format!("{byte:02x}")) } else { None },
                )
                .collect(),
            _ => String::new(),
        }
    }

    /// The second of a pair (`(bs)`), as `AppArmorProfile` is given.
    fn second(&self, name: &str) -> String {
        match self.0.get(name) {
            Some(Variant::Structure(pair)) => pair.fields().get(1).map(text).unwrap_or_default(),
            other => other.map(text).unwrap_or_default(),
        }
    }

    /// A list of paths (`as`), or of paths with options (`a(ss)`), without the prefixes that say `may be absent`
    /// (`-`) and `below RootDirectory` (`+`).
    fn paths(&self, name: &str) -> Vec<String> {
        let Some(Variant::Array(array)) = self.0.get(name) else { return Vec::new() };
        array
            .iter()
            .map(|item| match item {
                Variant::Structure(pair) => pair.fields().first().map(text).unwrap_or_default(),
                plain => text(plain),
            })
            .map(|path| path.trim_start_matches(['-', '+']).to_owned())
            .collect()
    }

    /// The moving part.
    pub(super) fn state(&self) -> UnitState {
        UnitState {
            load: self.text("LoadState"),
            active: self.text("ActiveState"),
            sub: self.text("SubState"),
            job: self.job(),
            main_pid: self.number32("MainPID"),
            invocation: self.hex("InvocationID"),
            restarts: self.number32("NRestarts"),
            // systemd says `no` before the first start as well; only a time makes it a result.
            condition: self.flag("ConditionResult") || self.number("ConditionTimestampMonotonic") == 0,
            result: self.text("Result"),
            exit: exit(self.number32("ExecMainCode"), self.number32("ExecMainStatus")),
            needs_reload: self.flag("NeedDaemonReload"),
        }
    }

    /// The exit status of the last main process; none where it was killed or has not ended.
    pub(super) fn exit_status(&self) -> Option<i32> {
        (self.number("ExecMainCode") == CLD_EXITED)
            .then(|| i32::try_from(self.number("ExecMainStatus")).ok())?
    }

    /// The part that a reload changes, `pulls_down` apart, which takes more than one unit.
    pub(super) fn settings(&self) -> UnitSettings {
        let mut triggered_by = self.list("TriggeredBy");
        triggered_by.extend(self.list("UpheldBy"));
        let mut requires = self.list("Requires");
        requires.extend(self.list("BindsTo"));
        requires.extend(self.list("Requisite"));
        let mut hidden_paths = self.paths("InaccessiblePaths");
        hidden_paths.extend(self.paths("TemporaryFileSystem"));
        let root = [self.text("RootDirectory"), self.text("RootImage")].concat();
        UnitSettings {
            id: self.text("Id"),
            service_type: self.text("Type"),
            exec: EXEC.iter().flat_map(|setting| self.exec(setting)).collect(),
            remain_after_exit: self.flag("RemainAfterExit"),
            pid_file: self.text("PIDFile"),
            kill_mode: self.text("KillMode"),
            user: self.text("User"),
            timeout_start: self.time("TimeoutStartUSec"),
            timeout_stop: self.time("TimeoutStopUSec"),
            triggered_by,
            pulls_down: Vec::new(),
            requires,
            refuses_manual: self.flag("RefuseManualStart") || self.flag("RefuseManualStop"),
            root,
            no_exec_paths: self.paths("NoExecPaths"),
            exec_paths: self.paths("ExecPaths"),
            hidden_paths,
            working_directory: self.text("WorkingDirectory"),
            accept: self.flag("Accept"),
            apparmor_profile: self.second("AppArmorProfile"),
            fragment: self.text("FragmentPath"),
            drop_ins: self.list("DropInPaths"),
        }
    }

    /// The lines of one `Exec*=` setting.
    fn exec(&self, setting: &str) -> Vec<ExecLine> {
        // `…Ex` has the flags as words; the plain one only knows `-`.
        let Some(Variant::Array(lines)) = self.0.get(format!("{setting}Ex").as_str()) else {
            return Vec::new();
        };
        lines
            .iter()
            .filter_map(|line| {
                let Variant::Structure(line) = line else { return None };
                let [path, argv, flags, ..] = line.fields() else { return None };
                Some(ExecLine {
                    setting: setting.to_owned(),
                    path: text(path),
                    argv: strings(argv),
                    prefixes: prefixes(&strings(flags)),
                })
            })
            .collect()
    }
}

/// Units that stopping this one stops as well, in one step. These are the relations that `atom_map` in systemd's
/// `src/core/unit-dependency-atom.c` gives `UNIT_ATOM_PROPAGATE_STOP`.
pub(super) const PULLS_DOWN: [&str; 5] =
    ["RequiredBy", "RequisiteOf", "BoundBy", "ConsistsOf", "PropagatesStopTo"];

/// `si_code` of a process that exited by itself.
const CLD_EXITED: u64 = 1;

/// The `Exec*=` settings of a service, in the order in which they run.
const EXEC: [&str; 7] =
    ["ExecCondition", "ExecStartPre", "ExecStart", "ExecStartPost", "ExecReload", "ExecStop", "ExecStopPost"];

fn text(value: &Variant<'_>) -> String {
    match value {
        Variant::Str(text) => text.to_string(),
        Variant::ObjectPath(path) => path.to_string(),
        _ => String::new(),
    }
}

fn strings(value: &Variant<'_>) -> Vec<String> {
    match value {
        Variant::Array(array) => array.iter().map(text).collect(),
        _ => Vec::new(),
    }
}

/// The prefixes that a unit file would have, from systemd's words for them.
fn prefixes(flags: &[String]) -> String {
    let mut prefixes = String::new();
    for (flag, prefix) in [
        ("ignore-failure", "-"),
        ("no-env-expand", ":"),
        ("privileged", "+"),
        ("no-setuid", "!"),
        ("ambient", "!!"),
        ("via-shell", "|"),
    ] {
        if flags.iter().any(|has| has == flag) {
            prefixes.push_str(prefix);
        }
    }
    prefixes
}

/// How a main process ended, in words. The codes are `si_code` of SIGCHLD.
fn exit(code: u32, status: u32) -> String {
    match code {
        0 => String::new(),
        1 => format!("exited {status}"),
        3 => format!("killed by {status}, core dumped"),
        _ => format!("killed by {status}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn properties(values: Vec<(&'static str, Variant<'static>)>) -> Properties<'static> {
        Properties::new(values.into_iter().collect())
    }

    #[test]
    fn a_state_is_read_and_what_is_missing_is_empty() {
        let state = properties(vec![
            ("ActiveState", Variant::new("active")),
            ("Job", Variant::new((9u32, zbus::ObjectPath::try_from("/j").unwrap()))),
            ("InvocationID", Variant::new(vec![0u8, 0xab, 0x10])),
            ("MainPID", Variant::new(77u32)),
            ("ExecMainCode", Variant::new(2i32)),
            ("ExecMainStatus", Variant::new(9i32)),
        ])
        .state();
        assert_eq!(state.active, "active");
        assert_eq!(state.job, Some(9));
        assert_eq!(state.invocation, "00ab10");
        assert_eq!(state.main_pid, 77);
        assert_eq!(state.exit, "killed by 9");
        assert_eq!(state.sub, "");
        assert!(state.condition, "never started");
    }

    #[test]
    fn no_job_is_zero_and_a_failed_condition_has_a_time() {
        let state = properties(vec![
            ("Job", Variant::new((0u32, zbus::ObjectPath::try_from("/").unwrap()))),
            ("ConditionResult", Variant::new(false)),
            ("ConditionTimestampMonotonic", Variant::new(5u64)),
        ])
        .state();
        assert_eq!(state.job, None);
        assert!(!state.condition);
    }

    #[test]
    fn exec_lines_keep_their_prefixes() {
        type Row = (&'static str, Vec<&'static str>, Vec<&'static str>, u64, u64, u64, u64, u32, i32, i32);
        let row: Row =
            ("/bin/a", vec!["a", "b c"], vec!["ignore-failure", "privileged"], 0, 0, 0, 0, 0, 0, 0);
        let settings = properties(vec![
            ("ExecStartEx", Variant::new(vec![row])),
            ("TimeoutStopUSec", Variant::new(u64::MAX)),
            ("TimeoutStartUSec", Variant::new(1_500_000u64)),
            ("TriggeredBy", Variant::new(vec!["a.socket"])),
            ("InaccessiblePaths", Variant::new(vec!["-/opt"])),
            ("TemporaryFileSystem", Variant::new(vec![("/srv", "ro")])),
            ("AppArmorProfile", Variant::new((true, "demo"))),
        ])
        .settings();
        assert_eq!(
            settings.exec,
            [ExecLine {
                setting: "ExecStart".into(),
                path: "/bin/a".into(),
                argv: vec!["a".into(), "b c".into()],
                prefixes: "-+".into()
            }]
        );
        assert_eq!(settings.timeout_stop, None);
        assert_eq!(settings.timeout_start, Some(Duration::from_millis(1500)));
        assert_eq!(settings.triggered_by, ["a.socket"]);
        assert_eq!(settings.hidden_paths, ["/opt", "/srv"]);
        assert_eq!(settings.apparmor_profile, "demo");
    }

    #[test]
    fn prefixes_by_flag() {
        let of = |flags: &[&str]| prefixes(&flags.iter().map(|flag| (*flag).to_owned()).collect::<Vec<_>>());
        assert_eq!(of(&[]), "");
        assert_eq!(of(&["no-setuid"]), "!");
        assert_eq!(of(&["ambient", "no-env-expand"]), ":!!");
    }
}
