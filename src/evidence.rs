//! What the kernel shows of a process: which release it is from.
//!
//! The proof is the identity of the file it executes (device and inode of `/proc/PID/exe`), not its path: paths
//! deceive. An interpreted service executes its interpreter; there, a working directory, a mapping or an open file
//! inside the release's tree is the proof.

use std::collections::HashSet;
use std::path::PathBuf;

use crate::durable::FileId;
use crate::manager::{Manager, Process};
use crate::operation::KernelProof;
use crate::recovery::Origin;
use crate::release::{Digest, Entry, Release};
use crate::store::Store;

/// One release, as the kernel would show it.
#[derive(Clone, Debug)]
pub struct Side {
    /// Which.
    pub release: Release,
    /// Its tree, absolute.
    pub tree: PathBuf,
    executables: HashSet<FileId>,
    contents: HashSet<Digest>,
}

impl Side {
    /// Reads the release's seal and looks up its executables; none where it has no seal.
    #[must_use]
    pub fn of(store: &Store, release: &Release) -> Option<Self> {
        let manifest = store.manifest(&release.dir_name()).ok()?;
        let mut executables = HashSet::new();
        let mut contents = HashSet::new();
        for (path, entry) in &manifest.entries {
            let Entry::File { mode, sha256, .. } = entry else { continue };
            if mode & 0o111 != 0 {
                let path = format!("releases/{}/tree/{path}", release.dir_name());
                executables.extend(store.disk().stat(&path).map(|s| s.id));
                contents.insert(*sha256);
            }
        }
        Some(Self { release: release.clone(), tree: store.tree(release), executables, contents })
    }

    /// What ties `process` to this release; none where nothing does.
    pub fn proof(&self, manager: &mut dyn Manager, process: &Process) -> Option<KernelProof> {
        if process.exe.is_some_and(|exe| self.executables.contains(&exe)) {
            return Some(KernelProof::Executable);
        }
        let tree = self.tree.to_str()?;
        manager.process_uses(process.pid, tree).then_some(KernelProof::OpenFile)
    }

    /// Whether `process` executes a file with the bytes of one of this release's executables: what an adopted program
    /// shows until it is started through `current`.
    pub fn same_bytes(&self, manager: &mut dyn Manager, process: &Process) -> bool {
        manager.exe_digest(process.pid).is_some_and(|digest| self.contents.contains(&digest))
    }
}

/// The two releases of an operation, and the activations that the journal recorded of them.
#[derive(Clone, Debug, Default)]
pub struct Sides {
    /// The stable release.
    pub stable: Option<Side>,
    /// The candidate.
    pub candidate: Option<Side>,
    /// The activation that ran before the operation.
    pub stable_invocation: Option<String>,
    /// The candidate's activation.
    pub candidate_invocation: Option<String>,
}

impl Sides {
    /// Which release a process is from: what its own files show, else what its unit's activation says, else unknown.
    /// The files come first, because a process that outlived its activation is in the next one's cgroup.
    pub fn origin(&self, manager: &mut dyn Manager, process: &Process, invocation: &str) -> Origin {
        let shows = |manager: &mut dyn Manager, side: &Option<Side>| {
            side.as_ref().is_some_and(|side| side.proof(manager, process).is_some())
        };
        match (shows(manager, &self.stable), shows(manager, &self.candidate)) {
            (true, false) => return Origin::Stable,
            (false, true) => return Origin::Candidate,
            _ => {}
        }
        let is =
            |recorded: &Option<String>| recorded.as_deref().is_some_and(|r| !r.is_empty() && r == invocation);
        if is(&self.stable_invocation) {
            Origin::Stable
        } else if is(&self.candidate_invocation) {
            Origin::Candidate
        } else {
            Origin::Unknown
        }
    }

    /// Where each live process of the unit comes from.
    pub fn origins(&self, manager: &mut dyn Manager, processes: &[Process], invocation: &str) -> Vec<Origin> {
        processes.iter().map(|p| self.origin(manager, p, invocation)).collect()
    }
}
