//! Staging, whole and interrupted. After every failure the state directory is as it was.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;

use super::*;
use crate::adapter::Limits;
use crate::durable::{DiskFile, RealDisk, Stat, Step};
use crate::source;

/// A disk whose changing calls are counted, and of which some fail.
struct Faulty {
    real: RealDisk,
    plan: Rc<Plan>,
    /// Directories that seem to be on another file system.
    mounted: Vec<&'static str>,
    space: Option<Space>,
}

#[derive(Default)]
struct Plan {
    calls: Cell<usize>,
    steps: RefCell<Vec<Step>>,
    fails: Cell<Option<(usize, i32)>>,
    /// Whether all later calls fail as well: the process was killed there.
    dead: Cell<bool>,
}

impl Plan {
    fn call(&self, step: Step) -> io::Result<()> {
        let n = self.calls.replace(self.calls.get() + 1);
        self.steps.borrow_mut().push(step);
        match self.fails.get() {
            Some((at, errno)) if n == at || n > at && self.dead.get() => {
                Err(io::Error::from_raw_os_error(errno))
            }
            _ => Ok(()),
        }
    }
}

struct FaultyFile(Box<dyn DiskFile>, Rc<Plan>);

impl Disk for Faulty {
    fn mkdir(&self, step: Step, path: &str, mode: u32) -> io::Result<()> {
        self.plan.call(step)?;
        self.real.mkdir(step, path, mode)
    }
    fn create(&self, step: Step, path: &str, mode: u32) -> io::Result<Box<dyn DiskFile>> {
        self.plan.call(step)?;
        Ok(Box::new(FaultyFile(self.real.create(step, path, mode)?, self.plan.clone())))
    }
    fn open(&self, path: &str) -> io::Result<Box<dyn DiskFile>> {
        self.real.open(path)
    }
    fn symlink(&self, step: Step, target: &str, path: &str) -> io::Result<()> {
        self.plan.call(step)?;
        self.real.symlink(step, target, path)
    }
    fn rename(&self, step: Step, from: &str, to: &str) -> io::Result<()> {
        self.plan.call(step)?;
        self.real.rename(step, from, to)
    }
    fn exchange(&self, step: Step, one: &str, other: &str) -> io::Result<()> {
        self.plan.call(step)?;
        self.real.exchange(step, one, other)
    }
    fn unlink(&self, step: Step, path: &str) -> io::Result<()> {
        self.plan.call(step)?;
        self.real.unlink(step, path)
    }
    fn rmdir(&self, step: Step, path: &str) -> io::Result<()> {
        self.plan.call(step)?;
        self.real.rmdir(step, path)
    }
    fn sync_dir(&self, step: Step, path: &str) -> io::Result<()> {
        self.plan.call(step)?;
        self.real.sync_dir(step, path)
    }
    fn sync_fs(&self, step: Step) -> io::Result<()> {
        self.plan.call(step)?;
        self.real.sync_fs(step)
    }
    fn read(&self, path: &str, limit: u64) -> io::Result<Vec<u8>> {
        self.real.read(path, limit)
    }
    fn reader(&self, path: &str) -> io::Result<Box<dyn io::Read>> {
        self.real.reader(path)
    }
    fn read_link(&self, path: &str) -> io::Result<String> {
        self.real.read_link(path)
    }
    fn stat(&self, path: &str) -> io::Result<Stat> {
        let mut stat = self.real.stat(path)?;
        if self.mounted.contains(&path) {
            stat.id.dev += 1;
        }
        Ok(stat)
    }
    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        self.real.list(path)
    }
    fn xattr(&self, path: &str, name: &str) -> io::Result<Option<Vec<u8>>> {
        self.real.xattr(path, name)
    }
    fn space(&self) -> io::Result<Space> {
        self.space.map_or_else(|| self.real.space(), Ok)
    }
}

impl DiskFile for FaultyFile {
    fn write_at(&mut self, step: Step, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.1.call(step)?;
        self.0.write_at(step, offset, bytes)
    }
    fn set_xattr(&mut self, step: Step, name: &str, value: &[u8]) -> io::Result<()> {
        self.1.call(step)?;
        self.0.set_xattr(step, name, value)
    }
    fn sync(&mut self, step: Step) -> io::Result<()> {
        self.1.call(step)?;
        self.0.sync(step)
    }
    fn sync_data(&mut self, step: Step) -> io::Result<()> {
        self.1.call(step)?;
        self.0.sync_data(step)
    }
    fn read_uncached(&mut self, step: Step, limit: u64) -> io::Result<Vec<u8>> {
        self.0.read_uncached(step, limit)
    }
}

/// A state directory and, beside it, a source.
struct Host {
    dir: tempfile::TempDir,
    adapter: Adapter,
}

impl Host {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let outside = RealDisk::open(dir.path()).unwrap();
        for made in ["state", "state/slots", "source"] {
            outside.mkdir("test", made, 0o755).unwrap();
        }
        let text = "unit = 'demo.service'\n[source]\nunsigned = true\nprogram = 'bin/demo'\n[probe]\nkind = 'kernel'\n";
        let adapter = Adapter::parse(Path::new("demo.toml"), "demo", text).unwrap();
        Self { dir, adapter }
    }

    fn disk(&self) -> Faulty {
        let real = RealDisk::open(&self.dir.path().join("state")).unwrap();
        Faulty { real, plan: Rc::default(), mounted: Vec::new(), space: None }
    }

    #[expect(clippy::disallowed_methods, reason = "a test's source")]
    fn publish(&self, name: &str, bytes: &[u8]) -> Resolved {
        let path = self.dir.path().join("source").join(name);
        std::fs::write(&path, bytes).unwrap();
        let sums = format!("{}  {name}\n", Digest::of(bytes));
        std::fs::write(path.with_file_name(source::SUMS), sums).unwrap();
        self.resolve(name)
    }

    fn resolve(&self, name: &str) -> Resolved {
        source::resolve_file(&self.adapter, &self.dir.path().join("source").join(name)).unwrap()
    }

    fn stage(&self, disk: &dyn Disk, resolved: &Resolved) -> Result<Manifest, StageError> {
        stage(disk, &self.adapter, resolved, &version(), None, &mut |_, _| {})
    }

    fn releases(&self) -> Vec<String> {
        self.disk().list(RELEASES).unwrap_or_default()
    }

    fn adopt(&self, disk: &dyn Disk, what: &Adoptee) -> Result<Manifest, StageError> {
        adopt_tree(disk, what, &version(), self.adapter.limits, &mut |_, _| {})
    }
}

fn version() -> Version {
    "2.0".parse().unwrap()
}

/// A tar of these files.
fn tar(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, bytes) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o755);
        builder.append_data(&mut header, name, *bytes).unwrap();
    }
    builder.into_inner().unwrap()
}

fn demo() -> Vec<u8> {
    tar(&[("bin/demo", b"#!/bin/sh\n"), ("lib/a", &[1; 3000]), ("lib/b", &[2; 700_000])])
}

#[test]
fn a_staged_release_is_whole_named_by_its_digest_and_costs_three_syncs_at_most() {
    // K38, K39.
    let host = Host::new();
    let resolved = host.publish("demo.tar", &demo());
    let disk = host.disk();
    let mut seen = (0, 0);
    let manifest =
        stage(&disk, &host.adapter, &resolved, &version(), None, &mut |done, total| seen = (done, total))
            .unwrap();
    assert_eq!(seen, (resolved.size, resolved.size));
    assert_eq!(manifest.artifact_sha256, resolved.expected);
    assert_eq!(host.releases(), [manifest.release.dir_name()]);
    assert_eq!(seal::verify(&disk, &manifest.release, Depth::Hashes).unwrap(), manifest);
    let syncs = disk.plan.steps.borrow().iter().filter(|s| s.contains("sync")).count();
    assert!(syncs <= 3, "{syncs} syncs: {:?}", disk.plan.steps.borrow());
    // Again: found whole, nothing is written.
    let disk = host.disk();
    assert_eq!(host.stage(&disk, &resolved).unwrap(), manifest);
    assert_eq!(*disk.plan.steps.borrow(), ["confirm.sync-dir"]);
    // The same tree in another artifact: unpacked, and the release that is there is kept.
    let inode = |host: &Host| host.disk().stat(&seal::dir_of(&manifest.release)).unwrap().id;
    let before = inode(&host);
    let mut longer = demo();
    longer.extend_from_slice(&[0; 512]);
    assert_eq!(host.stage(&host.disk(), &host.publish("demo.tar", &longer)).unwrap(), manifest);
    assert_eq!((host.releases(), inode(&host)), (vec![manifest.release.dir_name()], before));
}

#[test]
fn whatever_call_fails_nothing_is_left() {
    // E3, L4 in small: a full disk, a full quota, a failing one, one that became read-only.
    for errno in
        [rustix::io::Errno::NOSPC, rustix::io::Errno::DQUOT, rustix::io::Errno::IO, rustix::io::Errno::ROFS]
    {
        for at in 0.. {
            let host = Host::new();
            let resolved = host.publish("demo.tar", &demo());
            let disk = host.disk();
            disk.plan.fails.set(Some((at, errno.raw_os_error())));
            let result = host.stage(&disk, &resolved);
            if disk.plan.calls.get() <= at {
                result.unwrap();
                assert!(at > 10, "only {at} calls");
                break;
            }
            let error = result.expect_err(&format!("call {at} ({:?})", disk.plan.steps.borrow()[at]));
            let full = matches!(errno, rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT);
            match error {
                // B07: what is missing is said in figures.
                StageError::NoSpace { need, have, .. } => assert!(full && need > have, "{need} {have}"),
                StageError::Disk { .. } => assert!(!full),
                other => panic!("{other}"),
            }
            assert_eq!(host.releases(), Vec::<String>::new(), "call {at} left something");
        }
    }
}

#[test]
fn killed_at_any_call_the_next_staging_succeeds_and_leaves_nothing_else() {
    // A06, B01.
    for at in 0.. {
        let host = Host::new();
        let resolved = host.publish("demo.tar", &demo());
        let disk = host.disk();
        disk.plan.dead.set(true);
        disk.plan.fails.set(Some((at, rustix::io::Errno::IO.raw_os_error())));
        if host.stage(&disk, &resolved).is_ok() && disk.plan.calls.get() <= at {
            break;
        }
        for name in host.releases().iter().filter(|name| !name.starts_with(STAGING)) {
            // What has a name that counts is whole.
            let manifest = seal::read_manifest(&host.disk(), &format!("{RELEASES}/{name}")).unwrap();
            seal::verify(&host.disk(), &manifest.release, Depth::Hashes).unwrap();
        }
        let disk = host.disk();
        let manifest = host.stage(&disk, &resolved).unwrap();
        assert_eq!(host.releases(), [manifest.release.dir_name()], "killed at {at}");
        assert!(
            disk.plan.steps.borrow().contains(&"publish-tree.sync-dir")
                || disk.plan.steps.borrow().contains(&"confirm.sync-dir")
        );
    }
}

#[test]
fn an_artifact_that_is_not_the_one_listed_changes_nothing() {
    // A04 and its variant, A07 (b) and (c): cut off, zeroed in half, an error page, another file.
    let whole = demo();
    let mut zeroed = whole.clone();
    zeroed[whole.len() / 2..].fill(0);
    let mut other = whole.clone();
    other[600] ^= 1;
    for bytes in [&whole[..4096], &zeroed, b"<html>404</html>", &other] {
        let host = Host::new();
        host.publish("demo.tar", &whole);
        let sums = host.dir.path().join("source/SHA256SUMS");
        let listed = std::fs::read(&sums).unwrap();
        host.publish("demo.tar", bytes);
        overwrite(&sums, &listed);
        let error = host.stage(&host.disk(), &host.resolve("demo.tar")).unwrap_err();
        let StageError::WrongHash { expected, actual, .. } = &error else { panic!("{error}") };
        assert_eq!((*expected, *actual), (Digest::of(&whole), Digest::of(bytes)), "{error}");
        assert_eq!(host.releases(), Vec::<String>::new());
        // A07 (d): the right one, afterwards.
        overwrite(&host.dir.path().join("source/demo.tar"), &whole);
        host.stage(&host.disk(), &host.resolve("demo.tar")).unwrap();
    }
    // Listed as it is, and no good.
    let host = Host::new();
    let error = host.stage(&host.disk(), &host.publish("demo.tar", &whole[..4096])).unwrap_err();
    assert!(matches!(error, StageError::Archive { .. }), "{error}");
    assert_eq!(host.releases(), Vec::<String>::new());
}

#[expect(clippy::disallowed_methods, reason = "a test's source")]
fn overwrite(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_damaged_release_is_replaced_in_one_step_and_seen_by_the_right_depth() {
    // A04: "present" is answered by the seal, and then repaired.
    let host = Host::new();
    let resolved = host.publish("demo.tar", &demo());
    let manifest = host.stage(&host.disk(), &resolved).unwrap();
    let dir = seal::dir_of(&manifest.release);
    let root = host.dir.path().join("state").join(&dir);
    let disk = host.disk();
    type Damage = (&'static str, bool, fn(&Path, &Faulty, &str));
    let damages: [Damage; 9] = [
        ("half is zeros", false, |root, _, _| {
            let mut bytes = vec![2; 700_000];
            bytes[350_000..].fill(0);
            overwrite(&root.join("tree/lib/b"), &bytes);
        }),
        ("cut off", true, |root, _, _| overwrite(&root.join("tree/lib/b"), &[2; 4096])),
        ("a file is gone", true, |_, disk, dir| disk.unlink("t", &format!("{dir}/tree/bin/demo")).unwrap()),
        ("a file too many", true, |root, _, _| overwrite(&root.join("tree/lib/c"), b"")),
        ("a link for a file", true, |_, disk, dir| {
            disk.unlink("t", &format!("{dir}/tree/lib/a")).unwrap();
            disk.symlink("t", "b", &format!("{dir}/tree/lib/a")).unwrap();
        }),
        ("another mode", true, |_, disk, dir| {
            disk.unlink("t", &format!("{dir}/tree/lib/a")).unwrap();
            let mut file = disk.create("t", &format!("{dir}/tree/lib/a"), 0o700).unwrap();
            file.write_at("t", 0, &[1; 3000]).unwrap();
        }),
        ("no tree", true, |_, disk, dir| durable::sweep(disk, &format!("{dir}/tree")).unwrap()),
        ("no seal", true, |_, disk, dir| disk.unlink("t", &format!("{dir}/manifest.json")).unwrap()),
        ("half a seal", true, |root, _, _| overwrite(&root.join("manifest.json"), b"{\"formatVersion\":1")),
    ];
    for (what, shape, damage) in damages {
        damage(&root, &disk, &dir);
        seal::verify(&disk, &manifest.release, Depth::Hashes).expect_err(what);
        assert_eq!(seal::verify(&disk, &manifest.release, Depth::Shape).is_err(), shape, "{what}");
        host.stage(&disk, &resolved).unwrap_or_else(|e| panic!("{what}: {e}"));
        seal::verify(&disk, &manifest.release, Depth::Hashes).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(host.releases(), [manifest.release.dir_name()], "{what}");
    }
}

#[test]
fn sweeping_removes_what_was_never_finished_and_nothing_that_is_named() {
    let host = Host::new();
    let manifest = host.stage(&host.disk(), &host.publish("demo.tar", &demo())).unwrap();
    let disk = host.disk();
    for dir in [".staging-1", "3.0-half", "4.0-running", "5.0-live"] {
        disk.mkdir("t", &format!("{RELEASES}/{dir}"), 0o755).unwrap();
        disk.create("t", &format!("{RELEASES}/{dir}/x"), 0o644).unwrap();
    }
    disk.symlink("t", "../releases/4.0-running", "slots/stable").unwrap();
    disk.symlink("t", "releases/5.0-live/tree", "current").unwrap();
    disk.symlink("t", "/etc", &format!("{RELEASES}/link")).unwrap();
    sweep_staging(&disk).unwrap();
    assert_eq!(host.releases(), [&manifest.release.dir_name(), "4.0-running", "5.0-live"]);
    assert!(Path::new("/etc/passwd").exists());
}

#[test]
fn too_little_space_is_told_before_anything_is_written() {
    // B07.
    let host = Host::new();
    let resolved = host.publish("demo.tar", &demo());
    for (space, what) in [
        (Space { bytes: resolved.size, inodes: 1000 }, "bytes"),
        (Space { bytes: u64::MAX, inodes: 3 }, "files"),
    ] {
        let mut disk = host.disk();
        disk.space = Some(space);
        let error = host.stage(&disk, &resolved).unwrap_err();
        assert!(matches!(error, StageError::NoSpace { what: w, .. } if w == what), "{error}");
        assert_eq!(host.releases(), Vec::<String>::new());
    }
}

#[test]
fn a_part_on_another_file_system_is_found_before_it_is_needed() {
    // S3.
    let host = Host::new();
    let resolved = host.publish("demo.tar", &demo());
    host.stage(&host.disk(), &resolved).unwrap();
    for dir in [RELEASES, "slots"] {
        let mut disk = host.disk();
        disk.mounted.push(dir);
        let error = one_file_system(&disk).unwrap_err();
        assert!(matches!(&error, StageError::OtherFileSystem { path } if path == dir), "{error}");
        host.stage(&disk, &resolved).unwrap_err();
        assert_eq!(disk.plan.calls.get(), 0);
    }
    one_file_system(&host.disk()).unwrap();
}

#[test]
fn a_thousand_files_are_staged_and_verified() {
    let host = Host::new();
    let names: Vec<String> = (0..1000).map(|i| format!("d{}/f{i}", i % 37)).collect();
    let files: Vec<(&str, &[u8])> = names.iter().map(|n| (n.as_str(), n.as_bytes())).collect();
    let manifest = host.stage(&host.disk(), &host.publish("demo.tar", &tar(&files))).unwrap();
    assert_eq!(manifest.entries.len(), 1037);
    seal::verify(&host.disk(), &manifest.release, Depth::Hashes).unwrap();
}

#[test]
fn an_adopted_program_and_the_same_bytes_from_an_artifact_are_one_release() {
    let host = Host::new();
    let resolved = host.publish("demo", b"#!/bin/sh\necho 2.0\n");
    let program = Adoptee::Program { path: resolved.path.clone(), name: "bin/demo".to_owned() };
    let adopted = host.adopt(&host.disk(), &program).unwrap();
    assert_eq!(adopted.artifact_sha256, None);
    let staged = host.stage(&host.disk(), &resolved).unwrap();
    assert_eq!(staged.release, adopted.release);
    assert_eq!(host.releases(), [adopted.release.dir_name()]);
}

#[test]
fn a_directory_is_adopted_with_what_may_be_in_a_release_alone() {
    let host = Host::new();
    let outside = RealDisk::open(host.dir.path()).unwrap();
    outside.mkdir("t", "app", 0o755).unwrap();
    outside.mkdir("t", "app/bin", 0o775).unwrap();
    outside.create("t", "app/bin/demo", 0o775).unwrap().write_at("t", 0, b"#!").unwrap();
    outside.symlink("t", "bin/demo", "app/demo").unwrap();
    let from = Adoptee::Directory(host.dir.path().join("app"));
    let manifest = host.adopt(&host.disk(), &from).unwrap();
    let file = Entry::File { mode: 0o755, size: 2, sha256: Digest::of(b"#!") };
    let link = Entry::Link { target: "bin/demo".to_owned() };
    let entries = [("bin", Entry::Dir { mode: 0o755 }), ("bin/demo", file), ("demo", link)];
    assert_eq!(manifest.entries, entries.map(|(p, e)| (p.to_owned(), e)).into());
    seal::verify(&host.disk(), &manifest.release, Depth::Hashes).unwrap();
    // Twice changes nothing.
    assert_eq!(host.adopt(&host.disk(), &from).unwrap(), manifest);

    outside.symlink("t", "../../etc", "app/bin/out").unwrap();
    let error = host.adopt(&host.disk(), &from).unwrap_err();
    assert!(matches!(error, StageError::Adopt { source: TreeError::Escapes { .. }, .. }), "{error}");
    outside.unlink("t", "app/bin/out").unwrap();
    outside.create("t", "app/su", 0o4755).unwrap();
    let error = host.adopt(&host.disk(), &from).unwrap_err();
    assert!(matches!(error, StageError::Adopt { source: TreeError::SpecialBits { .. }, .. }), "{error}");
    assert_eq!(host.releases(), [manifest.release.dir_name()]);
    for (path, name) in [("/nonexistent", "x"), ("/dev/null", "x")] {
        let program = Adoptee::Program { path: path.into(), name: name.into() };
        assert!(matches!(host.adopt(&host.disk(), &program).unwrap_err(), StageError::Read(_)), "{path}");
    }
}

/// `cap_net_bind_service=ep`, as `setcap` writes it (`struct vfs_cap_data`, revision 2).
const CAPABILITY: &[u8] = &[1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

#[test]
fn capabilities_go_from_the_stable_release_to_the_candidate_and_change_no_digest() {
    // A39: file capabilities lost by a copy.
    let host = Host::new();
    let outside = RealDisk::open(host.dir.path()).unwrap();
    let mut file = outside.create("t", "demo", 0o755).unwrap();
    file.write_at("t", 0, b"#!/bin/sh\n").unwrap();
    if let Err(e) = file.set_xattr("t", "security.capability", CAPABILITY) {
        eprintln!("SKIPPED: file capabilities cannot be set here: {e}");
        return;
    }
    let path = host.dir.path().join("demo");
    let stable =
        host.adopt(&host.disk(), &Adoptee::Program { path, name: "bin/demo".into() }).unwrap().release;
    let capability = |release: &Release| {
        host.disk().xattr(&format!("{}/tree/bin/demo", seal::dir_of(release)), "security.capability").unwrap()
    };
    assert_eq!(capability(&stable).as_deref(), Some(CAPABILITY));
    let resolved = host.publish("demo.tar", &demo());
    let with =
        stage(&host.disk(), &host.adapter, &resolved, &version(), Some(&stable), &mut |_, _| {}).unwrap();
    assert_eq!(capability(&with.release).as_deref(), Some(CAPABILITY));
    seal::verify(&host.disk(), &with.release, Depth::Hashes).unwrap();
    durable::sweep(&host.disk(), &seal::dir_of(&with.release)).unwrap();
    let without = host.stage(&host.disk(), &resolved).unwrap();
    assert_eq!((capability(&without.release), &without), (None, &with));
}

#[test]
fn limits_of_the_adapter_hold_for_what_is_adopted_as_well() {
    let mut host = Host::new();
    host.adapter.limits = Limits { bytes: 5, ..host.adapter.limits };
    let path = host.publish("demo", b"#!/bin/sh\n").path;
    let error = host.adopt(&host.disk(), &Adoptee::Program { path, name: "demo".into() }).unwrap_err();
    assert!(matches!(error, StageError::Adopt { source: TreeError::Limit { .. }, .. }), "{error}");
    assert_eq!(host.releases(), Vec::<String>::new());
}
