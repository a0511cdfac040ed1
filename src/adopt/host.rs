//! What the machine says about a program: who owns it, and what confines it. Reads files only, below a root that
//! the tests replace.

use std::path::{Path, PathBuf};

/// A machine's root directory.
#[derive(Clone, Debug)]
pub(super) struct Host {
    root: PathBuf,
}

/// An AppArmor profile that applies to a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Profile {
    /// Its name.
    pub name: String,
    /// Whether the unit applies it by `AppArmorProfile=`; otherwise it is attached to the program's path.
    pub by_unit: bool,
    /// Whether a file of AppArmor's names the state directories.
    pub knows_state: bool,
}

impl Host {
    /// This machine.
    pub(super) fn this() -> Self {
        Self { root: "/".into() }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    fn text(&self, path: &str) -> Option<String> {
        let bytes = std::fs::read(self.at(path)).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The texts of the files in a directory.
    fn texts(&self, dir: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.at(dir)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
        names.sort();
        names.iter().filter_map(|name| self.text(&format!("{dir}/{name}"))).collect()
    }

    /// The Debian package that a file or something below a directory belongs to.
    pub(super) fn dpkg_owner(&self, path: &Path) -> Option<String> {
        let names = self.names(path);
        let below: Vec<String> = names.iter().map(|n| format!("{n}/")).collect();
        let owns = |line: &str| {
            names.iter().any(|n| n == line) && !self.at(line).is_dir()
                || below.iter().any(|dir| line.starts_with(dir.as_str()))
        };
        let dir = "/var/lib/dpkg/info";
        let entries = std::fs::read_dir(self.at(dir)).into_iter().flatten().flatten();
        let mut lists: Vec<String> = entries
            .filter_map(|e| e.file_name().into_string().ok())
            .filter(|n| n.ends_with(".list"))
            .collect();
        lists.sort();
        let owner = lists
            .into_iter()
            .find(|list| self.text(&format!("{dir}/{list}")).is_some_and(|text| text.lines().any(owns)))?;
        // `libc6:amd64.list`, where a package is there for several architectures.
        let package = owner.trim_end_matches(".list");
        Some(package.split(':').next().unwrap_or(package).to_owned())
    }

    /// The names that a package may list a file by: as it is given, without links, and from before `/usr` was merged.
    fn names(&self, path: &Path) -> Vec<String> {
        let mut names = vec![path.to_string_lossy().trim_end_matches('/').to_owned()];
        if let Ok(real) = std::fs::canonicalize(self.at(&names[0]))
            && let Ok(below) = real.strip_prefix(&self.root)
        {
            names.push(format!("/{}", below.display()));
        }
        for name in names.clone() {
            for top in ["bin", "sbin", "lib", "lib32", "lib64", "libx32"] {
                match name.strip_prefix("/usr") {
                    Some(old) if old.starts_with(&format!("/{top}/")) => names.push(old.to_owned()),
                    None if name.starts_with(&format!("/{top}/")) => names.push(format!("/usr{name}")),
                    _ => {}
                }
            }
        }
        names.sort();
        names.dedup();
        names
    }

    /// Whether packages of rpm are installed here, so that it is worth asking for an owner.
    pub(super) fn has_rpm(&self) -> bool {
        let databases = ["/var/lib/rpm", "/usr/lib/sysimage/rpm"];
        let kinds = ["rpmdb.sqlite", "Packages.db", "Packages"];
        self.at(RPM).exists()
            && databases.iter().any(|d| kinds.iter().any(|k| self.at(&format!("{d}/{k}")).exists()))
    }

    /// Whether the unit is one of users, not of the system.
    pub(super) fn is_user_unit(&self, unit: &str) -> bool {
        ["/etc/systemd/user", "/usr/lib/systemd/user", "/usr/local/lib/systemd/user"]
            .iter()
            .any(|dir| self.at(&format!("{dir}/{unit}")).exists())
    }

    /// What confines the program: of the process that runs, where there is one, else by AppArmor's own files.
    pub(super) fn profile(&self, of_unit: &str, pid: u32, program: &Path) -> Option<Profile> {
        if self.text("/sys/module/apparmor/parameters/enabled")?.trim() != "Y" {
            return None;
        }
        let mut files = self.texts("/etc/apparmor.d");
        files.extend(self.texts("/etc/apparmor.d/local"));
        let knows_state = files.iter().any(|text| text.contains(crate::store::STATE));
        if !of_unit.is_empty() {
            return Some(Profile { name: of_unit.to_owned(), by_unit: true, knows_state });
        }
        let name = if pid == 0 {
            let names = self.names(program);
            files.iter().flat_map(|text| text.lines()).find_map(|line| attaches(line, &names))?
        } else {
            let own = self
                .text(&format!("/proc/{pid}/attr/apparmor/current"))
                .or_else(|| self.text(&format!("/proc/{pid}/attr/current")))?;
            let own = own.trim_end_matches(['\0', '\n']);
            // `NAME (enforce)`
            let name = own.rsplit_once(" (").map_or(own, |(name, _)| name);
            (name != "unconfined" && !name.is_empty()).then(|| name.to_owned())?
        };
        Some(Profile { name, by_unit: false, knows_state })
    }
}

/// The program that asks the database of rpm.
pub(super) const RPM: &str = "/usr/bin/rpm";

/// The profile's name, where this line begins a profile that is attached to one of these paths:
/// `/usr/sbin/demo flags=(complain) {` or `profile demo /usr/{bin,sbin}/demo {`.
fn attaches(line: &str, paths: &[String]) -> Option<String> {
    let head = line.trim().strip_suffix('{')?.trim();
    let head =
        head.split_once("flags=").or_else(|| head.split_once("xattrs=")).map_or(head, |(head, _)| head);
    let mut words = head.split_whitespace().map(|w| w.trim_matches('"'));
    let mut first = words.next()?;
    if first == "profile" {
        first = words.next()?;
    }
    let attachment = words.next().unwrap_or(first);
    let hit = paths.iter().any(|path| matches(attachment.as_bytes(), path.as_bytes()));
    hit.then(|| first.to_owned())
}

/// AppArmor's patterns, as far as attachments use them: `*`, `**`, `?` and `{one,other}`.
fn matches(pattern: &[u8], path: &[u8]) -> bool {
    match pattern {
        [] => path.is_empty(),
        [b'*', b'*', rest @ ..] => (0..=path.len()).any(|n| matches(rest, &path[n..])),
        [b'*', rest @ ..] => {
            let within = path.iter().position(|c| *c == b'/').unwrap_or(path.len());
            (0..=within).any(|n| matches(rest, &path[n..]))
        }
        [b'?', rest @ ..] => path.first().is_some_and(|c| *c != b'/') && matches(rest, &path[1..]),
        [b'{', rest @ ..] => {
            let Some(end) = rest.iter().position(|c| *c == b'}') else { return false };
            rest[..end].split(|c| *c == b',').any(|part| matches(&[part, &rest[end + 1..]].concat(), path))
        }
        [own, rest @ ..] => path.first() == Some(own) && matches(rest, &path[1..]),
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "nothing here has to survive a power cut")]
mod tests {
    use super::*;

    fn host(files: &[(&str, &str)]) -> (tempfile::TempDir, Host) {
        let dir = tempfile::tempdir().unwrap();
        let host = Host { root: dir.path().canonicalize().unwrap() };
        for (path, text) in files {
            let path = host.at(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        (dir, host)
    }

    #[test]
    fn a_package_owns_a_file_by_any_of_its_names() {
        let (_dir, host) = host(&[
            ("/var/lib/dpkg/info/demo:amd64.list", "/.\n/usr\n/usr/sbin/demo\n/opt/app/lib/x\n"),
            ("/var/lib/dpkg/info/old.list", "/bin/old\n"),
            ("/var/lib/dpkg/info/demo.md5sums", "/usr/bin/other\n"),
            ("/usr/sbin/demo", ""),
            ("/usr/bin/old", ""),
            ("/opt/mine/x", ""),
        ]);
        std::os::unix::fs::symlink("usr/sbin", host.at("/sbin")).unwrap();
        let owner = |path: &str| host.dpkg_owner(Path::new(path));
        for (path, package) in [
            ("/usr/sbin/demo", Some("demo")),
            ("/sbin/demo", Some("demo")),
            ("/usr/bin/old", Some("old")),
            ("/bin/old", Some("old")),
            ("/opt/app", Some("demo")),
            ("/opt/app/", Some("demo")),
            ("/opt/mine", None),
            ("/usr/bin/other", None),
        ] {
            assert_eq!(owner(path).as_deref(), package, "{path}");
        }
        assert!(!host.has_rpm());
    }

    #[test]
    fn rpm_is_asked_only_where_it_has_a_database() {
        let (_dir, host) = host(&[("/usr/bin/rpm", ""), ("/usr/lib/sysimage/rpm/rpmdb.sqlite", "")]);
        assert!(host.has_rpm());
    }

    #[test]
    fn profiles_are_found_by_process_by_unit_and_by_file() {
        let enabled = ("/sys/module/apparmor/parameters/enabled", "Y\n");
        let profile =
            "include <x>\nprofile demo /usr/{bin,sbin}/demo flags=(attach_disconnected) {\n  /etc/** r,\n}\n";
        let (_dir, host) = host(&[
            enabled,
            ("/etc/apparmor.d/usr.sbin.demo", profile),
            ("/proc/7/attr/apparmor/current", "demo//child (enforce)\n"),
            ("/proc/8/attr/current", "unconfined\n"),
        ]);
        let of = |unit: &str, pid, path: &str| host.profile(unit, pid, Path::new(path));
        let found = |name: &str, by_unit| Some(Profile { name: name.into(), by_unit, knows_state: false });
        assert_eq!(of("", 7, "/usr/sbin/demo"), found("demo//child", false));
        assert_eq!(of("", 8, "/usr/sbin/demo"), None);
        assert_eq!(of("", 0, "/usr/sbin/demo"), found("demo", false));
        assert_eq!(of("", 0, "/usr/sbin/other"), None);
        assert_eq!(of("named", 8, "/usr/sbin/demo"), found("named", true));
    }

    #[test]
    fn without_apparmor_nothing_confines() {
        let (_dir, host) = host(&[("/proc/7/attr/current", "system_u:system_r:demo_t:s0")]);
        assert_eq!(host.profile("named", 7, Path::new("/x")), None);
    }

    #[test]
    fn patterns_of_attachments() {
        for (pattern, path, hit) in [
            ("/usr/sbin/demo", "/usr/sbin/demo", true),
            ("/usr/sbin/demo", "/usr/sbin/demo2", false),
            ("/{,usr/}{bin,sbin}/demo", "/usr/sbin/demo", true),
            ("/{,usr/}{bin,sbin}/demo", "/bin/demo", true),
            ("/opt/*/demo", "/opt/a/demo", true),
            ("/opt/*/demo", "/opt/a/b/demo", false),
            ("/opt/**", "/opt/a/b", true),
            ("/opt/?x", "/opt/ax", true),
        ] {
            assert_eq!(matches(pattern.as_bytes(), path.as_bytes()), hit, "{pattern} {path}");
        }
        let line = "profile \"demo\" \"/opt/demo\" xattrs=(a) {";
        assert_eq!(attaches(line, &["/opt/demo".into()]).as_deref(), Some("demo"));
        assert_eq!(attaches("  /opt/demo r,", &["/opt/demo".into()]), None);
    }
}
