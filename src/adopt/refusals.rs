//! What cannot be adopted, by name. Pure: facts in, refusals out; nothing was changed when one is given.

use std::path::{Path, PathBuf};

use super::host::Profile;
use crate::manager::{UnitSettings, UnitState};
use crate::mounts::Unfit;

/// Why a service is not adopted: what is in the way, why, and the next step.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    /// It belongs to a user's manager.
    #[error(
        "{0} is a user unit: only the system's services can be adopted; install it as a system unit with User="
    )]
    UserUnit(String),
    /// There is no such unit, or it cannot be used.
    #[error("{unit} is {load}: mend the unit (`systemctl status {unit}`), then adopt it")]
    NotLoaded {
        /// The unit.
        unit: String,
        /// What systemd says of it.
        load: String,
    },
    /// Its files are newer than what systemd knows.
    #[error(
        "the files of {0} were changed since systemd read them, so that its lines are not known: run `systemctl \
         daemon-reload`, then adopt it"
    )]
    NeedsReload(String),
    /// It has no program.
    #[error("{unit} has no {path}, which {setting} names: install the program, or name its files by --from", path = path.display())]
    NoProgram {
        /// The unit.
        unit: String,
        /// What names it: `ExecStart` or `--from`.
        setting: &'static str,
        /// What is not there.
        path: PathBuf,
    },
    /// Nothing that is started comes from what was given.
    #[error(
        "no ExecStart line of {unit} goes into {path}: give the file or directory that it names by --from",
        path = path.display()
    )]
    NotStartedFrom {
        /// The unit.
        unit: String,
        /// What was given.
        path: PathBuf,
    },
    /// What runs is gone from the disk.
    #[error(
        "{path} was replaced since {unit} was started, so that what runs cannot be sealed: restart {unit}, then adopt \
         it at the version that runs then",
        path = path.display()
    )]
    Replaced {
        /// The unit.
        unit: String,
        /// The program.
        path: PathBuf,
    },
    /// A socket makes an instance for each connection.
    #[error(
        "{unit} is started by {socket} for one connection (Accept=yes): there is no lasting process to upgrade; let the \
         service accept connections itself (Accept=no)"
    )]
    AcceptingSocket {
        /// The unit.
        unit: String,
        /// The socket.
        socket: String,
    },
    /// The unit has a root of its own.
    #[error(
        "{unit} runs in {root} (RootDirectory= or RootImage=), where releases are not seen: upgrade that as a whole, or \
         take the setting out"
    )]
    OwnRoot {
        /// The unit.
        unit: String,
        /// Its root.
        root: String,
    },
    /// It cannot be stopped or started by hand.
    #[error(
        "{0} refuses to be started or stopped by hand (RefuseManualStart=, RefuseManualStop=), and an upgrade does both: \
         take the setting out"
    )]
    RefusesManual(String),
    /// The unit does not see the state directory.
    #[error(
        "{unit} does not see {state}: {hidden} is hidden from it (InaccessiblePaths= or TemporaryFileSystem=); hide \
         less, so that releases can be started"
    )]
    Hidden {
        /// The unit.
        unit: String,
        /// The state directory.
        state: String,
        /// What hides it.
        hidden: String,
    },
    /// Its main process is a guess.
    #[error(
        "{0} is Type=forking without PIDFile=: which process is the service would be a guess; add PIDFile=, or use \
         Type=exec or notify"
    )]
    ForkingWithoutPidFile(String),
    /// It is over as soon as it ran.
    #[error(
        "{0} is Type=oneshot without RemainAfterExit=: it has no state to come back to; add RemainAfterExit=yes"
    )]
    OneshotWithoutRemain(String),
    /// A profile by path would no longer apply.
    #[error(
        "AppArmor confines {path} by its path (profile {profile}), which would be lost: set AppArmorProfile={profile} in \
         {unit}, and allow {state}/releases/** in the profile",
        path = path.display()
    )]
    ProfileLost {
        /// The unit.
        unit: String,
        /// The program.
        path: PathBuf,
        /// The profile.
        profile: String,
        /// The state directory.
        state: String,
    },
    /// A profile by name does not know the new paths.
    #[error(
        "AppArmorProfile={profile} of {unit} does not allow what is in {state}: add `{state}/releases/** mrix,` to the \
         profile and load it"
    )]
    ProfileForbids {
        /// The unit.
        unit: String,
        /// The profile.
        profile: String,
        /// The state directory.
        state: String,
    },
    /// A package manager would replace it.
    #[error(
        "{path} belongs to the package {package}, whose upgrades would no longer reach the service: repeat with \
         --take-over, or leave it to the package manager",
        path = path.display()
    )]
    Packaged {
        /// The program or directory.
        path: PathBuf,
        /// The package.
        package: String,
    },
    /// The stop would run the new version's command on the old version.
    #[error(
        "{setting} of {unit} goes through current, and others can start the unit ({trigger}): while it stops, the old \
         version would be given the new version's stop command; if that is right, set policy.stop-commands = \
         \"fit-both\" in the adapter"
    )]
    StopCommand {
        /// The unit.
        unit: String,
        /// The setting.
        setting: String,
        /// What starts it.
        trigger: String,
    },
    /// The state directory's own place.
    #[error(transparent)]
    Place(#[from] Unfit),
    /// It is another service's already.
    #[error("{unit} already goes through {other}: it is managed as another service; use that one's name")]
    OfAnotherService {
        /// The unit.
        unit: String,
        /// The other's path.
        other: String,
    },
    /// It was shipped so.
    #[error(
        "{unit} already goes through {current}, and not by a drop-in of cutover's: there is nothing to adopt; `cutover \
         upgrade` installs its first release"
    )]
    AlreadyThrough {
        /// The unit.
        unit: String,
        /// The path.
        current: String,
    },
    /// The drop-in's place is taken.
    #[error("{path} is there and was not written by cutover for this service: move it away, then adopt", path = path.display())]
    DropInTaken {
        /// The file.
        path: PathBuf,
    },
    /// Another unit is managed under this name.
    #[error(
        "{service} manages {other}, and the adapter names {unit}: give {unit} a service of its own, or undo the adoption \
         of {other} first (the head of its drop-in says how)"
    )]
    OtherUnit {
        /// The service.
        service: String,
        /// The unit that it manages.
        other: String,
        /// The unit that the adapter names.
        unit: String,
    },
    /// It is adopted at another version or with other bytes.
    #[error(
        "{service} is under management at {stable}, and {wanted} is another: `cutover upgrade` moves it from one to the other"
    )]
    OtherRelease {
        /// The service.
        service: String,
        /// What is stable.
        stable: String,
        /// What was asked for.
        wanted: String,
    },
    /// It is adopted, but something else wins.
    #[error(
        "{unit} has its drop-in, but its ExecStart does not go through {current}{by}: take that out and run `systemctl \
         daemon-reload`"
    )]
    Overridden {
        /// The unit.
        unit: String,
        /// The path.
        current: String,
        /// `, since FILE wins`, where that is known.
        by: String,
    },
    /// It is adopted, but the state is gone.
    #[error(
        "{unit} goes through {current}, but slots/stable names no sealed release: undo the adoption as the head of {path} \
         says, then adopt it anew",
        path = path.display()
    )]
    NoStable {
        /// The unit.
        unit: String,
        /// The path.
        current: String,
        /// The drop-in.
        path: PathBuf,
    },
}

/// All that the checks depend on, of a unit that is loaded and not adopted.
#[derive(Debug)]
pub(super) struct Facts<'a> {
    pub unit: &'a str,
    pub settings: &'a UnitSettings,
    /// The state directory, as it is named and without links.
    pub places: [&'a str; 2],
    /// Those of the sockets that trigger it that accept connections for it.
    pub accepting: &'a [String],
    /// The program or directory.
    pub path: &'a Path,
    /// Whether it was given by hand.
    pub given: bool,
    /// The settings with a line that is to go through `current`.
    pub changed: &'a [String],
    /// The executable of the main process, by path; empty where none runs.
    pub running: &'a str,
    pub profile: Option<&'a Profile>,
    /// The package that owns it, unless it is to be taken over.
    pub package: Option<&'a str>,
    pub stop_fits_both: bool,
    pub unfit: &'a [Unfit],
}

/// What is wrong with how the unit is loaded: nothing else is known of it then.
pub(super) fn of_load(unit: &str, state: &UnitState, is_user_unit: bool) -> Option<Refusal> {
    let unit = unit.to_owned();
    match state.load.as_str() {
        "loaded" if state.needs_reload => Some(Refusal::NeedsReload(unit)),
        "loaded" => None,
        "not-found" if is_user_unit => Some(Refusal::UserUnit(unit)),
        load => Some(Refusal::NotLoaded { unit, load: load.to_owned() }),
    }
}

/// The socket that would have made this instance, if it is one for a connection: its name then is
/// `PREFIX@NUMBER-…service` (`socket_instantiate_service` in systemd's sources). That the socket triggers it is forgotten
/// at a reload (tried on 252).
pub(super) fn socket_of_connection(unit: &str) -> Option<String> {
    let (prefix, instance) = unit.split_once('@')?;
    let (number, _) = instance.split_once('-')?;
    let counted = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    counted.then(|| format!("{prefix}.socket"))
}

/// The path through another service's `current` that a line goes through; `states` holds the state directories.
pub(super) fn through_another(settings: &UnitSettings, states: &str, service: &str) -> Option<String> {
    let words = settings.exec.iter().flat_map(|line| std::iter::once(&line.path).chain(&line.argv));
    words
        .filter_map(|word| {
            let (other, rest) = word.strip_prefix(states)?.strip_prefix('/')?.split_once('/')?;
            let through = rest == "current" || rest.starts_with("current/");
            (through && other != service).then(|| format!("{states}/{other}/current"))
        })
        .next()
}

/// Everything that is in the way.
pub(super) fn all(facts: &Facts) -> Vec<Refusal> {
    let Facts { settings, path, .. } = facts;
    let unit = || facts.unit.to_owned();
    let state = || facts.places[0].to_owned();
    let mut found: Vec<Refusal> = facts.unfit.iter().cloned().map(Refusal::from).collect();
    let mut add = |is: bool, refusal: &dyn Fn() -> Refusal| {
        if is {
            found.push(refusal());
        }
    };
    if let Some(socket) = facts.accepting.first() {
        add(true, &|| Refusal::AcceptingSocket { unit: unit(), socket: socket.clone() });
    }
    add(!settings.root.is_empty(), &|| Refusal::OwnRoot { unit: unit(), root: settings.root.clone() });
    add(settings.refuses_manual, &|| Refusal::RefusesManual(unit()));
    if let Some(hidden) = hides(&settings.hidden_paths, facts.places) {
        add(true, &|| Refusal::Hidden { unit: unit(), state: state(), hidden: hidden.to_owned() });
    }
    let is = |kind: &str| settings.service_type == kind;
    add(is("forking") && settings.pid_file.is_empty(), &|| Refusal::ForkingWithoutPidFile(unit()));
    add(is("oneshot") && !settings.remain_after_exit, &|| Refusal::OneshotWithoutRemain(unit()));
    add(facts.given && !facts.changed.iter().any(|s| s == "ExecStart"), &|| Refusal::NotStartedFrom {
        unit: unit(),
        path: path.to_path_buf(),
    });
    add(was_replaced(facts), &|| Refusal::Replaced { unit: unit(), path: path.to_path_buf() });
    if let Some(profile) = facts.profile {
        let name = || profile.name.clone();
        add(!profile.by_unit, &|| Refusal::ProfileLost {
            unit: unit(),
            path: path.to_path_buf(),
            profile: name(),
            state: state(),
        });
        add(profile.by_unit && !profile.knows_state, &|| Refusal::ProfileForbids {
            unit: unit(),
            profile: name(),
            state: state(),
        });
    }
    if let Some(package) = facts.package {
        add(true, &|| Refusal::Packaged { path: path.to_path_buf(), package: package.to_owned() });
    }
    let trigger = settings.triggered_by.first().cloned().or(is("dbus").then(|| "D-Bus".into()));
    let stop = facts.changed.iter().find(|s| s.starts_with("ExecStop"));
    if let (Some(trigger), Some(setting), false) = (trigger, stop, facts.stop_fits_both) {
        add(true, &|| Refusal::StopCommand {
            unit: unit(),
            setting: setting.clone(),
            trigger: trigger.clone(),
        });
    }
    found
}

/// Whether the file that the main process executes was replaced under its path: the kernel then says so.
fn was_replaced(facts: &Facts) -> bool {
    let Some(gone) = facts.running.strip_suffix(" (deleted)") else { return false };
    let gone = Path::new(gone);
    gone == facts.path
        || gone.starts_with(facts.path)
        || std::fs::canonicalize(facts.path).is_ok_and(|real| gone.starts_with(real))
}

/// The first of `hidden` that hides a state directory or a part of it.
fn hides<'a>(hidden: &'a [String], places: [&str; 2]) -> Option<&'a str> {
    let covers = |path: &Path| {
        places.iter().map(Path::new).any(|place| place.starts_with(path) || path.starts_with(place))
    };
    hidden.iter().map(String::as_str).find(|path| covers(Path::new(path)))
}

/// Whether the unit may not execute from the state directory as it is: the nearest of its settings above decides.
pub(super) fn must_be_opened(settings: &UnitSettings, places: [&str; 2]) -> bool {
    let nearest = |paths: &[String]| {
        let above = |path: &&String| places.iter().any(|place| Path::new(place).starts_with(path));
        paths.iter().filter(above).map(|path| Path::new(path).components().count()).max()
    };
    nearest(&settings.no_exec_paths) > nearest(&settings.exec_paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATE: &str = "/var/lib/cutover/demo";

    /// Facts of a harmless service, to be changed.
    struct Case {
        settings: UnitSettings,
        accepting: Vec<String>,
        path: &'static str,
        given: bool,
        changed: Vec<String>,
        running: &'static str,
        profile: Option<Profile>,
        package: Option<&'static str>,
        stop_fits_both: bool,
    }

    fn strings(words: &[&str]) -> Vec<String> {
        words.iter().map(|w| (*w).to_owned()).collect()
    }

    /// The names of the refusals after a change.
    fn names(change: impl FnOnce(&mut Case)) -> Vec<String> {
        let mut case = Case {
            settings: UnitSettings { service_type: "exec".into(), ..UnitSettings::default() },
            accepting: vec![],
            path: "/opt/demo/demo",
            given: false,
            changed: strings(&["ExecStart"]),
            running: "/opt/demo/demo",
            profile: None,
            package: None,
            stop_fits_both: false,
        };
        change(&mut case);
        let found = all(&Facts {
            unit: "demo.service",
            settings: &case.settings,
            places: [STATE, STATE],
            accepting: &case.accepting,
            path: Path::new(case.path),
            given: case.given,
            changed: &case.changed,
            running: case.running,
            profile: case.profile.as_ref(),
            package: case.package,
            stop_fits_both: case.stop_fits_both,
            unfit: &[],
        });
        for refusal in &found {
            let text = refusal.to_string();
            assert!(text.contains(": ") || text.contains("; "), "what: why and next step: {text}");
            assert!(text.len() < 400, "several fit into one reason: {text}");
        }
        found.iter().map(|r| format!("{r:?}").split([' ', '(', '{']).next().unwrap().to_owned()).collect()
    }

    #[test]
    fn each_refusal_has_its_own_cause() {
        assert_eq!(names(|_| ()), [""; 0]);
        for (name, found) in [
            ("OwnRoot", names(|c| c.settings.root = "/srv/root".into())),
            ("RefusesManual", names(|c| c.settings.refuses_manual = true)),
            ("Hidden", names(|c| c.settings.hidden_paths = strings(&["/srv", "/var"]))),
            ("Hidden", names(|c| c.settings.hidden_paths = vec![format!("{STATE}/releases")])),
            ("ForkingWithoutPidFile", names(|c| c.settings.service_type = "forking".into())),
            ("OneshotWithoutRemain", names(|c| c.settings.service_type = "oneshot".into())),
            ("AcceptingSocket", names(|c| c.accepting = strings(&["demo.socket"]))),
            ("NotStartedFrom", names(|c| (c.given, c.changed) = (true, strings(&["ExecStop"])))),
            ("Replaced", names(|c| c.running = "/opt/demo/demo (deleted)")),
            ("Replaced", names(|c| (c.path, c.running) = ("/opt/demo", "/opt/demo/x (deleted)"))),
            ("Packaged", names(|c| c.package = Some("demo"))),
            (
                "StopCommand",
                names(|c| {
                    c.settings.triggered_by = strings(&["demo.socket"]);
                    c.changed = strings(&["ExecStart", "ExecStopPost"]);
                }),
            ),
        ] {
            assert_eq!(found, [name]);
        }
    }

    #[test]
    fn what_is_allowed_is_no_refusal() {
        for harmless in [
            names(|c| {
                c.settings.service_type = "forking".into();
                c.settings.pid_file = "/run/x.pid".into();
            }),
            names(|c| {
                c.settings.service_type = "oneshot".into();
                c.settings.remain_after_exit = true;
            }),
            names(|c| c.settings.hidden_paths = strings(&["/home", "/var/lib/cutover/other"])),
            names(|c| c.settings.triggered_by = strings(&["demo.socket"])),
            names(|c| c.changed = strings(&["ExecStart", "ExecStop"])),
            names(|c| c.running = "/opt/other (deleted)"),
            names(|c| c.given = true),
            names(|c| {
                c.settings.service_type = "dbus".into();
                c.changed = strings(&["ExecStart", "ExecStop"]);
                c.stop_fits_both = true;
            }),
        ] {
            assert_eq!(harmless, [""; 0]);
        }
    }

    #[test]
    fn profiles_by_path_and_by_name() {
        for (by_unit, knows_state, name) in [
            (false, false, Some("ProfileLost")),
            (false, true, Some("ProfileLost")),
            (true, false, Some("ProfileForbids")),
            (true, true, None),
        ] {
            let profile = Profile { name: "demo".into(), by_unit, knows_state };
            assert_eq!(names(|c| c.profile = Some(profile)), Vec::from_iter(name));
        }
    }

    #[test]
    fn units_that_are_not_there_or_not_as_they_are_loaded() {
        let load = |load: &str, needs_reload, user| {
            let state = UnitState { load: load.into(), needs_reload, ..UnitState::default() };
            of_load("demo.service", &state, user)
        };
        assert_eq!(load("loaded", false, true), None);
        assert!(matches!(load("loaded", true, false), Some(Refusal::NeedsReload(_))));
        assert!(matches!(load("masked", false, false), Some(Refusal::NotLoaded { .. })));
        assert!(matches!(load("not-found", false, true), Some(Refusal::UserUnit(_))));
        assert!(matches!(load("not-found", false, false), Some(Refusal::NotLoaded { .. })));
    }

    #[test]
    fn an_instance_for_a_connection_shows_by_its_name() {
        let socket = |unit| socket_of_connection(unit);
        assert_eq!(socket("demo@0-1443-0.service").as_deref(), Some("demo.socket"));
        assert_eq!(socket("demo@12-[::1]:22-[::1]:5000.service").as_deref(), Some("demo.socket"));
        for unit in
            ["demo.service", "demo@one.service", "demo@one-two.service", "demo@7.service", "demo@-x.service"]
        {
            assert_eq!(socket(unit), None, "{unit}");
        }
    }

    #[test]
    fn the_nearest_setting_decides_on_execution() {
        let opened = |no: &[&str], yes: &[&str]| {
            let paths = |list: &[&str]| list.iter().map(|p| (*p).to_owned()).collect();
            let settings =
                UnitSettings { no_exec_paths: paths(no), exec_paths: paths(yes), ..UnitSettings::default() };
            must_be_opened(&settings, [STATE, STATE])
        };
        assert!(!opened(&[], &[]));
        assert!(opened(&["/"], &["/usr/bin/redis-server", "/usr/lib"]), "as in Debian's redis");
        assert!(opened(&["/var"], &["/"]));
        assert!(!opened(&["/"], &["/var/lib"]));
        assert!(!opened(&["/srv"], &[]));
    }

    #[test]
    fn another_services_path_is_seen_anywhere_in_a_line() {
        let through = |argv: &[&str]| {
            let exec = vec![crate::manager::ExecLine {
                setting: "ExecStart".into(),
                path: argv[0].into(),
                argv: argv.iter().map(|a| (*a).to_owned()).collect(),
                prefixes: String::new(),
            }];
            through_another(&UnitSettings { exec, ..UnitSettings::default() }, "/var/lib/cutover", "demo")
        };
        assert_eq!(
            through(&["/usr/bin/python3", "/var/lib/cutover/other/current/x"]).unwrap(),
            "/var/lib/cutover/other/current"
        );
        assert_eq!(through(&["/var/lib/cutover/demo/current/x"]), None);
        assert_eq!(through(&["/var/lib/cutover/other/data", "/var/lib/cutoverx/a/current/b"]), None);
    }
}
