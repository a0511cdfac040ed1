//! What a state directory lies on: whether it can hold what must not be lost, run programs, and be there in time.
//!
//! Pure over the text of `/proc/self/mountinfo` and `/etc/fstab`; [`examine`] reads both. A mount is found by the id
//! that the kernel gives for the directory itself, so that no bind mount or stacked mount deceives.

use std::io;
use std::path::{Path, PathBuf};

/// One mount, as the kernel lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Where it is mounted.
    pub point: PathBuf,
    /// The file system's type: `ext4`, `fuse.sshfs`.
    pub kind: String,
    /// Options of the mount and of the file system.
    pub options: Vec<String>,
}

/// Why a directory cannot hold state. Each says what is wrong, why it matters and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// A file system that loses what it has acknowledged, or cannot name or order it.
    #[error(
        "{path} is on {kind} ({why}): what is recorded there does not survive; put it on ext4, xfs or btrfs of this \
         machine",
        path = path.display()
    )]
    Kind {
        /// The directory.
        path: PathBuf,
        /// The file system.
        kind: String,
        /// What it lacks.
        why: &'static str,
    },
    /// Nothing may be executed from it.
    #[error(
        "{path} is on {point}, which is mounted noexec: no release could be started from it; mount {path} on its own \
         without noexec",
        path = path.display(),
        point = point.display()
    )]
    NoExec {
        /// The directory.
        path: PathBuf,
        /// The mount.
        point: PathBuf,
    },
    /// It is mounted after the boot hook has to read it.
    #[error(
        "{path} is on {point}, which waits for the network (_netdev): it is not there when a boot is settled; put it \
         on a local disk",
        path = path.display(),
        point = point.display()
    )]
    Late {
        /// The directory.
        path: PathBuf,
        /// The mount.
        point: PathBuf,
    },
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Why the directory must not be used.
    pub unfit: Vec<Unfit>,
    /// What makes it weaker than it could be.
    pub warnings: Vec<String>,
}

/// File systems that do not keep what they acknowledge, by the beginning of their type.
const UNFIT: [(&str, &str); 16] = [
    ("tmpfs", "in memory"),
    ("ramfs", "in memory"),
    ("9p", "no durable renames"),
    ("virtiofs", "no durable renames"),
    ("nfs", "on the network"),
    ("cifs", "on the network"),
    ("smb", "on the network"),
    ("ceph", "on the network"),
    ("afs", "on the network"),
    ("ocfs2", "on the network"),
    ("gfs2", "on the network"),
    ("fuse", "another program keeps it"),
    ("vfat", "no symbolic links and no owners"),
    ("msdos", "no symbolic links and no owners"),
    ("exfat", "no symbolic links and no owners"),
    ("ntfs", "no journal of its own contents"),
];

/// Options that weaken what a sync promises, and what each does.
const WEAK: [(&str, &str); 5] = [
    ("nobarrier", "a power cut can lose what was synced"),
    ("barrier=0", "a power cut can lose what was synced"),
    ("data=writeback", "a power cut can leave old bytes in new files"),
    ("fsync_mode=posix", "a power cut can lose what was synced"),
    ("fsync_mode=nobarrier", "a power cut can lose what was synced"),
];

/// Looks at what the directory at `path` lies on.
///
/// # Errors
/// Where the kernel does not say.
pub fn examine(path: &Path) -> io::Result<Report> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    let real = std::fs::canonicalize(path)?;
    let mount = find(&mounts, mount_id(&real), &real)
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no mount holds it"))?;
    let fstab = std::fs::read_to_string("/etc/fstab").unwrap_or_default();
    // A service's own sandbox makes mounts of its own on the way: fstab names the one below.
    Ok(judge(path, &mount, &planned(&fstab, &real)))
}

/// The kernel's id of the mount that holds `path`; none where it is too old to say.
fn mount_id(path: &Path) -> Option<u64> {
    use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
    let about = statx(CWD, path, AtFlags::empty(), StatxFlags::MNT_ID).ok()?;
    (about.stx_mask & StatxFlags::MNT_ID.bits() != 0).then_some(about.stx_mnt_id)
}

/// The mount with this id, else the last one listed of those nearest above `path`.
fn find(mountinfo: &str, id: Option<u64>, path: &Path) -> Option<Mount> {
    let rows: Vec<(u64, Mount)> = mountinfo.lines().filter_map(parse).collect();
    if let Some((_, mount)) = rows.iter().find(|(row, _)| Some(*row) == id) {
        return Some(mount.clone());
    }
    rows.into_iter()
        .filter(|(_, mount)| path.starts_with(&mount.point))
        .max_by_key(|(_, mount)| mount.point.components().count())
        .map(|(_, mount)| mount)
}

/// A row: `36 35 98:0 /root /point rw,noexec shared:1 - ext4 /dev/sda1 rw,errors=continue`.
fn parse(row: &str) -> Option<(u64, Mount)> {
    let (own, of_kind) = row.split_once(" - ")?;
    let own: Vec<&str> = own.split(' ').collect();
    let mut of_kind = of_kind.split(' ');
    let [id, _, _, _, point, options, ..] = own[..] else { return None };
    let kind = of_kind.next()?.to_owned();
    let of_disk = of_kind.nth(1).unwrap_or_default();
    let options = options.split(',').chain(of_disk.split(',')).map(str::to_owned).collect();
    Some((id.parse().ok()?, Mount { point: unescape(point), kind, options }))
}

/// Paths in the kernel's and in fstab's tables write white space and backslashes as three octal digits.
fn unescape(field: &str) -> PathBuf {
    let mut plain = String::new();
    let mut rest = field;
    while let Some(at) = rest.find('\\') {
        plain.push_str(&rest[..at]);
        let code = rest.get(at + 1..at + 4).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => {
                plain.push(char::from(code));
                rest = &rest[at + 4..];
            }
            None => {
                plain.push('\\');
                rest = &rest[at + 1..];
            }
        }
    }
    PathBuf::from(plain + rest)
}

/// The options that fstab has for the mount nearest above `path`.
fn planned(fstab: &str, path: &Path) -> Vec<String> {
    fstab
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter_map(|fields| match fields[..] {
            [device, point, _, options, ..] if !device.starts_with('#') => Some((unescape(point), options)),
            _ => None,
        })
        .filter(|(point, _)| path.starts_with(point))
        .max_by_key(|(point, _)| point.components().count())
        .map(|(_, options)| options.split(',').map(str::to_owned).collect())
        .unwrap_or_default()
}

fn judge(path: &Path, mount: &Mount, planned: &[String]) -> Report {
    let has = |option: &str| mount.options.iter().any(|o| o == option);
    let plans = |option: &str| planned.iter().any(|o| o == option);
    let mut report = Report::default();
    let (path, point) = (path.to_owned(), mount.point.clone());
    let kind = &mount.kind;
    if let Some((_, why)) = UNFIT.iter().find(|(beginning, _)| kind.starts_with(beginning)) {
        report.unfit.push(Unfit::Kind { path: path.clone(), kind: kind.clone(), why });
    } else if kind == "overlay" && has("volatile") {
        let why = "mounted volatile, it ignores syncs";
        report.unfit.push(Unfit::Kind { path: path.clone(), kind: kind.clone(), why });
    }
    if has("noexec") {
        report.unfit.push(Unfit::NoExec { path: path.clone(), point: point.clone() });
    }
    if plans("_netdev") {
        report.unfit.push(Unfit::Late { path: path.clone(), point: point.clone() });
    }
    for (option, what) in WEAK {
        if has(option) {
            report.warnings.push(format!("{} is mounted {option}: {what}", point.display()));
        }
    }
    for option in ["nofail", "noauto", "x-systemd.automount"] {
        if plans(option) {
            report.warnings.push(format!(
                "/etc/fstab has {option} for what holds {}: a boot may begin without it",
                path.display()
            ));
        }
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
21 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw,errors=remount-ro
30 21 8:2 / /var rw,nosuid,noexec shared:2 - xfs /dev/sda2 rw,attr2
31 30 0:40 / /var/lib/a\\040b rw - fuse.sshfs host:/ rw
32 30 0:41 / /var/lib/cutover rw - tmpfs tmpfs rw,size=1k
33 32 8:3 / /var/lib/cutover rw,relatime - ext4 /dev/sdb rw,nobarrier,data=writeback
34 21 0:50 / /ov rw - overlay overlay rw,lowerdir=/a,upperdir=/b,volatile
";

    fn at(path: &str) -> Mount {
        find(TABLE, None, Path::new(path)).unwrap()
    }

    #[test]
    fn the_mount_is_the_nearest_or_the_one_with_the_id() {
        assert_eq!(at("/etc").kind, "ext4");
        assert_eq!(at("/var/lib/x").kind, "xfs");
        assert_eq!(at("/var/lib/a b/c").kind, "fuse.sshfs");
        assert_eq!(at("/var/lib/cutover/demo").kind, "ext4", "the upper of two stacked ones");
        assert_eq!(find(TABLE, Some(32), Path::new("/var/lib/cutover")).unwrap().kind, "tmpfs");
        assert_eq!(find(TABLE, Some(99), Path::new("/etc")).unwrap().point, Path::new("/"));
    }

    #[test]
    fn what_cannot_hold_state_is_named() {
        let words = |path: &str, planned: &[&str]| {
            let planned: Vec<String> = planned.iter().map(|o| (*o).to_owned()).collect();
            let report = judge(Path::new(path), &at(path), &planned);
            let unfit: Vec<String> = report.unfit.iter().map(ToString::to_string).collect();
            (unfit.join("\n"), report.warnings.join("\n"))
        };
        assert_eq!(words("/etc", &[]), (String::new(), String::new()));
        assert!(words("/var/lib/x", &[]).0.contains("is on /var, which is mounted noexec"));
        assert!(words("/var/lib/a b/c", &[]).0.contains("fuse.sshfs"));
        assert!(words("/ov/x", &[]).0.contains("volatile"));
        let (unfit, warned) = words("/var/lib/cutover/demo", &[]);
        assert_eq!(unfit, "");
        assert_eq!(warned.lines().count(), 2, "{warned}");
        assert!(words("/etc", &["_netdev"]).0.contains("waits for the network"));
        assert!(words("/etc", &["nofail"]).1.contains("nofail"));
    }

    #[test]
    fn fstab_is_read_by_the_nearest_mount() {
        let fstab = "# /dev/x /var ext4 _netdev 0 0\n/dev/a / ext4 defaults 0 1\n\
                     UUID=1 /var/lib ext4 defaults,nofail,x-systemd.automount 0 2\n";
        assert_eq!(
            planned(fstab, Path::new("/var/lib/cutover")),
            ["defaults", "nofail", "x-systemd.automount"]
        );
        assert_eq!(planned(fstab, Path::new("/srv")), ["defaults"]);
        assert_eq!(planned("", Path::new("/srv")), [""; 0]);
    }

    #[test]
    fn this_machine_is_examined() {
        let dir = tempfile::tempdir().unwrap();
        examine(dir.path()).unwrap();
    }
}
