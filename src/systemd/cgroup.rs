//! Which processes a control group holds, asked of the kernel.
//!
//! A unit's group outlives the unit where processes are left over, and systemd then no longer says where it is:
//! the caller remembers the path. Reading never changes anything; a group that is not there is empty.

use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::durable::FileId;
use crate::manager::Process;

/// Where systemd's hierarchy can be, best first: version 2 alone; version 2 beside version 1 (`hybrid`), whose
/// groups systemd keeps equal to its own; version 1 by name.
const ROOTS: [&str; 3] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd"];

/// The hierarchy in which systemd keeps its units.
#[derive(Clone, Debug)]
pub(super) struct Hierarchy(PathBuf);

impl Hierarchy {
    /// Finds it: the first place whose root is a group (has `cgroup.procs`).
    pub(super) fn find() -> Self {
        let root = ROOTS.iter().find(|root| Path::new(root).join("cgroup.procs").exists());
        Self(PathBuf::from(root.unwrap_or(&ROOTS[0])))
    }

    /// The processes of a group and of those below it. `group` is what systemd calls it (`/system.slice/…`).
    pub(super) fn processes(&self, group: &str) -> io::Result<Vec<Process>> {
        let directory = self.0.join(group.trim_start_matches('/'));
        // Version 2 says at once whether anything is in there, at any depth.
        match std::fs::read_to_string(directory.join("cgroup.events")) {
            Ok(events) if events.lines().any(|line| line == "populated 0") => return Ok(Vec::new()),
            Err(error) if is_gone(&error) && !directory.exists() => return Ok(Vec::new()),
            _ => {}
        }
        let mut pids = Vec::new();
        walk(&directory, &mut pids)?;
        pids.sort_unstable();
        pids.dedup();
        Ok(pids.into_iter().map(describe).collect())
    }
}

fn walk(directory: &Path, pids: &mut Vec<u32>) -> io::Result<()> {
    match std::fs::read_to_string(directory.join("cgroup.procs")) {
        Ok(text) => pids.extend(parse_procs(&text)),
        // A threaded group: its processes are listed in the one above.
        Err(error) if error.kind() == ErrorKind::Unsupported => {}
        Err(error) if is_gone(&error) => return Ok(()),
        Err(error) => return Err(error),
    }
    let entries = match std::fs::read_dir(directory) {
        Err(error) if is_gone(&error) => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = match entry {
            Err(error) if is_gone(&error) => return Ok(()),
            entry => entry?,
        };
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            walk(&entry.path(), pids)?;
        }
    }
    Ok(())
}

/// ENOENT before the group is opened, ENODEV when it goes away while it is read.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound
        || error.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error())
}

/// The ids in a `cgroup.procs`; 0 stands for a process that this PID namespace does not show.
fn parse_procs(text: &str) -> impl Iterator<Item = u32> + '_ {
    text.lines().filter_map(|line| line.trim().parse().ok())
}

fn describe(pid: u32) -> Process {
    let link = format!("/proc/{pid}/exe");
    // Followed by the kernel to the very file, whatever its path is by now, or whether it has one.
    let exe = std::fs::metadata(&link).ok().map(|file| FileId { dev: file.dev(), ino: file.ino() });
    let exe_path =
        std::fs::read_link(&link).map(|path| path.to_string_lossy().into_owned()).unwrap_or_default();
    Process { pid, exe, exe_path }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn procs_are_numbers_by_line() {
        assert_eq!(parse_procs("12\n0\n7\n").collect::<Vec<_>>(), [12, 0, 7]);
        assert_eq!(parse_procs("").count(), 0);
    }

    #[test]
    fn a_group_that_is_not_there_is_empty() {
        assert_eq!(Hierarchy::find().processes("/no-such.slice/no-such.service").unwrap(), []);
    }

    #[test]
    fn this_process_is_described_by_its_file() {
        let me = describe(std::process::id());
        let exe = std::fs::metadata(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(me.exe, Some(FileId { dev: exe.dev(), ino: exe.ino() }));
    }
}
