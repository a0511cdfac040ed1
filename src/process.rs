//! What the kernel says about one process, read from /proc.
//!
//! A process that is gone, or that may not be read, has no start time and uses nothing: the caller who must know
//! asks for its start time first.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::durable::FileId;
use crate::release::Digest;

/// When the process started, in clock ticks since boot; none when it is gone. Together with the id it names one
/// process for ever.
#[must_use]
pub fn start_time(pid: u32) -> Option<u64> {
    parse_start_time(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Field 22 of `/proc/PID/stat`, counted behind the name, which may hold spaces and parentheses. A zombie has ended.
fn parse_start_time(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    // The state was field 3.
    fields.nth(22 - 4)?.parse().ok()
}

/// SHA-256 of the file that the process executes; none where it cannot be read.
#[must_use]
pub fn exe_digest(pid: u32) -> Option<Digest> {
    let mut file = std::fs::File::open(format!("/proc/{pid}/exe")).ok()?;
    Digest::of_reader(&mut file).ok().map(|(digest, _)| digest)
}

/// Whether the process has its working directory, an open file or a mapped file below `root` or at it.
///
/// A path alone would deceive: the process may live in another mount namespace, where the tree is mounted
/// elsewhere or something else lies at its path. So each path that the kernel names is walked upwards *as the
/// process sees it* (through `/proc/PID/root`), until a directory with the device and inode of `root` is met. A
/// subtree of `root` mounted elsewhere by itself is not recognised, nor is a file whose directories are gone.
#[must_use]
pub fn uses(pid: u32, root: &str) -> bool {
    let Ok(meta) = std::fs::metadata(root) else { return false };
    let mut ancestors = Ancestors {
        view: PathBuf::from(format!("/proc/{pid}/root")),
        root: FileId { dev: meta.dev(), ino: meta.ino() },
        known: HashMap::new(),
    };
    let link = |name: String| std::fs::read_link(name).ok();
    if link(format!("/proc/{pid}/cwd")).is_some_and(|path| ancestors.hold(&path)) {
        return true;
    }
    if let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/fd")) {
        for entry in entries.flatten() {
            // Sockets and pipes are no paths: `socket:[1]`.
            if std::fs::read_link(entry.path()).is_ok_and(|path| ancestors.hold(&path)) {
                return true;
            }
        }
    }
    let maps = std::fs::read(format!("/proc/{pid}/maps")).unwrap_or_default();
    mapped_files(&String::from_utf8_lossy(&maps)).iter().any(|path| ancestors.hold(Path::new(path)))
}

/// Directories as one process sees them, and whether they lie below the root that is looked for.
struct Ancestors {
    view: PathBuf,
    root: FileId,
    known: HashMap<PathBuf, bool>,
}

impl Ancestors {
    /// Whether the path, absolute in the process's view, is the root or below it.
    fn hold(&mut self, path: &Path) -> bool {
        if !path.is_absolute() {
            return false;
        }
        if let Some(&known) = self.known.get(path) {
            return known;
        }
        let relative = path.strip_prefix("/").unwrap_or(path);
        let here = std::fs::metadata(self.view.join(relative))
            .is_ok_and(|meta| meta.is_dir() && FileId { dev: meta.dev(), ino: meta.ino() } == self.root);
        let found = here || path.parent().is_some_and(|parent| self.hold(parent));
        self.known.insert(path.to_owned(), found);
        found
    }
}

/// The files in a `/proc/PID/maps`. The name is the sixth field and goes to the end of the line; a newline in it is
/// `\012`.
fn mapped_files(maps: &str) -> Vec<String> {
    let mut files: Vec<String> =
        maps.lines().filter_map(|line| line.find('/').map(|at| line[at..].replace("\\012", "\n"))).collect();
    files.sort_unstable();
    files.dedup();
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_time_is_behind_the_name() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4711 0 0";
        assert_eq!(parse_start_time(stat), Some(4711));
        assert_eq!(parse_start_time(&stat.replace(" S ", " Z ")), None, "a zombie has ended");
        assert!(start_time(std::process::id()).is_some());
        assert_eq!(start_time(u32::MAX), None);
    }

    #[test]
    fn mapped_files_are_named_once() {
        let maps = "55-56 r-xp 00000000 08:01 12    /opt/a b/x\n56-57 r--p 00000000 08:01 12    /opt/a b/x\n\
                    57-58 rw-p 00000000 00:00 0 [heap]\n58-59 rw-p 00000000 00:00 0 \n";
        assert_eq!(mapped_files(maps), ["/opt/a b/x"]);
    }

    #[test]
    fn this_process_uses_its_own_directories() {
        let pid = std::process::id();
        let exe = std::env::current_exe().unwrap();
        assert!(uses(pid, exe.parent().unwrap().to_str().unwrap()), "mapped");
        let cwd = std::env::current_dir().unwrap();
        assert!(uses(pid, cwd.to_str().unwrap()), "working directory");
        let dir = tempfile::tempdir().unwrap();
        assert!(!uses(pid, dir.path().to_str().unwrap()));
        let open = tempfile::NamedTempFile::new_in(dir.path()).unwrap();
        assert!(uses(pid, dir.path().to_str().unwrap()), "open file");
        drop(open);
        assert!(!uses(pid, "/no/such/directory"));
    }
}
