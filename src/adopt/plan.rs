//! What is adopted, and which of the unit's lines go through it. Files are only looked at.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::durable::FileId;
use crate::manager::{ExecLine, UnitSettings};
use crate::stage::Adoptee;

/// Where systemd looks for a program that is given by its name (`DEFAULT_PATH`; `/sbin` and `/bin` are links where
/// `/usr` is merged).
const SEARCHED: [&str; 6] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// What is adopted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Payload {
    /// One file: the program of the unit, or one given by hand.
    File {
        /// Where it is.
        path: PathBuf,
        /// Which file that is, whatever leads to it.
        id: FileId,
        /// Its path in the release.
        name: String,
        /// Whether it was given by hand: then arguments that name it go through `current` as well.
        given: bool,
    },
    /// A directory with everything in it.
    Directory {
        /// As it was given.
        path: PathBuf,
        /// Without links.
        real: PathBuf,
    },
}

impl Payload {
    /// A file or directory given by hand, or the program of the first `ExecStart` line. `program` is the adapter's
    /// path of a single executable in its release.
    ///
    /// # Errors
    /// The path where there is nothing that can be adopted.
    pub(super) fn find(
        settings: &UnitSettings,
        from: Option<&Path>,
        program: Option<&str>,
    ) -> Result<Self, PathBuf> {
        let path = match from {
            Some(from) => from.to_owned(),
            None => {
                let line = settings.exec.iter().find(|l| l.setting == "ExecStart");
                locate(&line.ok_or_else(PathBuf::new)?.path)
            }
        };
        let missing = |_| path.clone();
        let about = std::fs::metadata(&path).map_err(missing)?;
        if about.is_dir() && from.is_some() {
            return Ok(Self::Directory { real: std::fs::canonicalize(&path).map_err(missing)?, path });
        }
        let file_name = path.file_name().and_then(|n| n.to_str()).filter(|_| about.is_file());
        let name = program.or(file_name).ok_or_else(|| path.clone())?.to_owned();
        Ok(Self::File { id: id(&about), name, given: from.is_some(), path })
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        match self {
            Self::File { path, .. } | Self::Directory { path, .. } => path,
        }
    }

    /// What is sealed.
    pub(super) fn adoptee(&self) -> Adoptee {
        match self {
            Self::File { path, name, .. } => Adoptee::Program { path: path.clone(), name: name.clone() },
            Self::Directory { real, .. } => Adoptee::Directory(real.clone()),
        }
    }

    /// The path in the release of the file at `path`; none where it is none of ours.
    pub(super) fn inside(&self, path: &Path) -> Option<String> {
        let about = std::fs::metadata(path).ok()?;
        match self {
            Self::File { id: own, name, .. } => (id(&about) == *own).then(|| name.clone()),
            Self::Directory { path: named, real } => {
                // As it is named, where that is possible: links inside keep their meaning.
                let below = path.strip_prefix(named).or_else(|_| path.strip_prefix(real));
                let below = below.map(Path::to_owned).ok().or_else(|| {
                    let path = std::fs::canonicalize(path).ok()?;
                    path.strip_prefix(real).map(Path::to_owned).ok()
                })?;
                let plain = below.components().all(|c| matches!(c, std::path::Component::Normal(_)));
                below.to_str().filter(|b| plain && !b.is_empty()).map(str::to_owned)
            }
        }
    }

    /// As [`Payload::inside`], for an argument: it is a path as a whole, and of what was given by hand.
    fn argument(&self, word: &str) -> Option<String> {
        let counts = !matches!(self, Self::File { given: false, .. });
        (counts && word.starts_with('/')).then(|| self.inside(Path::new(word)))?
    }
}

fn id(about: &std::fs::Metadata) -> FileId {
    FileId { dev: about.dev(), ino: about.ino() }
}

/// The file of a program that a line names by its path or its name.
pub(super) fn locate(program: &str) -> PathBuf {
    if program.starts_with('/') {
        return program.into();
    }
    let found = SEARCHED.iter().map(|dir| Path::new(dir).join(program)).find(|p| p.is_file());
    found.unwrap_or_else(|| program.into())
}

/// The unit's lines, as they are to be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// Each setting with at least one line that changes, with all of its lines in order.
    pub sections: Vec<(String, Vec<ExecLine>)>,
    /// The settings of the lines that change.
    pub changed: Vec<String>,
    /// What stays as it is and may be meant to change.
    pub notes: Vec<String>,
}

/// Plans the lines. `current` is the absolute path that they go through.
pub(super) fn plan(settings: &UnitSettings, payload: &Payload, current: &str) -> Plan {
    let mut plan = Plan::default();
    for line in &settings.exec {
        let (new, changed) = rewrite(line, payload, current);
        match plan.sections.last_mut() {
            Some((setting, lines)) if *setting == line.setting => lines.push(new),
            _ => plan.sections.push((line.setting.clone(), vec![new])),
        }
        if changed {
            plan.changed.push(line.setting.clone());
        }
        let rest = line.argv.get(1..).unwrap_or_default();
        for word in rest.iter().filter(|w| names_a_part(w, payload)) {
            plan.notes
                .push(format!("{} still reads {word:?}: only whole arguments are rewritten", line.setting));
        }
    }
    plan.sections.retain(|(setting, _)| plan.changed.contains(setting));
    if let Payload::Directory { .. } = payload {
        let own = settings.working_directory.trim_start_matches('!');
        if !own.is_empty() && (payload.inside(Path::new(own)).is_some() || payload.path() == Path::new(own)) {
            plan.notes.push(format!(
                "WorkingDirectory={own} stays as it is: relative paths are read there, not in the release"
            ));
        }
    }
    plan
}

/// Whether an argument has the path of something of ours within it (`--config=/opt/demo/x`).
fn names_a_part(word: &str, payload: &Payload) -> bool {
    let Payload::Directory { path, .. } = payload else { return false };
    let dir = format!("{}/", path.display());
    word.contains(&dir) && payload.argument(word).is_none()
}

fn rewrite(line: &ExecLine, payload: &Payload, current: &str) -> (ExecLine, bool) {
    let mut new = line.clone();
    if let Some(inside) = payload.inside(&locate(&line.path)) {
        new.path = format!("{current}/{inside}");
        // Programs with several names look at the one that they are called by.
        let name = |path: &str| path.rsplit('/').next().map(str::to_owned);
        if let Some(first) = new.argv.first_mut()
            && *first == line.path
            && name(first) == name(&new.path)
        {
            first.clone_from(&new.path);
        }
    }
    for argument in new.argv.iter_mut().skip(1) {
        if let Some(inside) = payload.argument(argument) {
            *argument = format!("{current}/{inside}");
        }
    }
    let changed = new != *line;
    (new, changed)
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "nothing here has to survive a power cut")]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const CURRENT: &str = "/var/lib/cutover/demo/current";

    fn line(setting: &str, argv: &[&str]) -> ExecLine {
        ExecLine {
            setting: setting.into(),
            path: argv[0].into(),
            argv: argv.iter().map(|a| (*a).to_owned()).collect(),
            prefixes: "-".into(),
        }
    }

    fn texts(plan: &Plan) -> Vec<String> {
        let lines = plan.sections.iter().flat_map(|(_, lines)| lines);
        lines.map(|l| format!("{} {} | {}", l.setting, l.path, l.argv.join(" "))).collect()
    }

    #[test]
    fn lines_of_one_program_are_rewritten_whatever_leads_to_it() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        std::fs::write(at("real"), "x").unwrap();
        symlink(at("real"), at("demo")).unwrap();
        symlink(at("demo"), at("demo-check")).unwrap();
        let settings = UnitSettings {
            exec: vec![
                line("ExecStartPre", &[&at("demo-check"), "-t"]),
                line("ExecStartPre", &["/bin/true"]),
                line("ExecStart", &[&at("demo"), "--self", &at("demo")]),
                line("ExecReload", &["/bin/kill", "-HUP", "$MAINPID"]),
            ],
            ..UnitSettings::default()
        };
        let payload = Payload::find(&settings, None, None).unwrap();
        let plan = plan(&settings, &payload, CURRENT);
        assert_eq!(
            texts(&plan),
            [
                format!("ExecStartPre {CURRENT}/demo | {} -t", at("demo-check")),
                "ExecStartPre /bin/true | /bin/true".into(),
                format!("ExecStart {CURRENT}/demo | {CURRENT}/demo --self {}", at("demo")),
            ],
            "another name is kept as argv[0], arguments stay, untouched settings are not repeated"
        );
        assert_eq!(plan.changed, ["ExecStartPre", "ExecStart"]);
        let named = Payload::find(&settings, None, Some("bin/tool")).unwrap();
        assert_eq!(named.inside(Path::new(&at("real"))).as_deref(), Some("bin/tool"));
    }

    #[test]
    fn programs_and_whole_arguments_in_a_directory_are_rewritten() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().join("app-1.0");
        std::fs::create_dir_all(real.join("lib")).unwrap();
        std::fs::write(real.join("lib/main.py"), "x").unwrap();
        let app = dir.path().join("app");
        symlink(&real, &app).unwrap();
        let (app, real) = (app.to_str().unwrap(), real.to_str().unwrap());
        let settings = UnitSettings {
            exec: vec![
                line(
                    "ExecStart",
                    &[
                        "/usr/bin/env",
                        &format!("{app}/lib/main.py"),
                        &format!("{real}/lib"),
                        &format!("{app}/run/socket"),
                        &format!("--conf={app}/lib/main.py"),
                        &format!("{app}/lib/../lib/main.py"),
                    ],
                ),
                line("ExecStop", &["/usr/bin/env", "/elsewhere"]),
            ],
            working_directory: format!("!{app}"),
            ..UnitSettings::default()
        };
        let payload = Payload::find(&settings, Some(Path::new(app)), Some("ignored")).unwrap();
        let plan = plan(&settings, &payload, CURRENT);
        assert_eq!(
            texts(&plan),
            [format!(
                "ExecStart /usr/bin/env | /usr/bin/env {CURRENT}/lib/main.py {CURRENT}/lib {app}/run/socket \
                 --conf={app}/lib/main.py {app}/lib/../lib/main.py"
            )]
        );
        assert_eq!(plan.notes.len(), 4, "{:?}", plan.notes);
        assert!(plan.notes[3].starts_with("WorkingDirectory="));
    }

    #[test]
    fn what_is_not_there_is_named() {
        let settings =
            UnitSettings { exec: vec![line("ExecStart", &["/no/such"])], ..UnitSettings::default() };
        assert_eq!(Payload::find(&settings, None, None).unwrap_err(), Path::new("/no/such"));
        let none = UnitSettings::default();
        assert_eq!(Payload::find(&none, Some(Path::new("/no")), None).unwrap_err(), Path::new("/no"));
        assert!(Payload::find(&none, None, None).is_err());
    }

    #[test]
    fn programs_by_name_are_looked_for_where_systemd_does() {
        assert!(locate("env").is_absolute());
        assert_eq!(locate("no-such-program"), Path::new("no-such-program"));
        assert_eq!(locate("/x"), Path::new("/x"));
    }
}
