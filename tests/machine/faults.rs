//! Breaking an operation on purpose, and looking at what is left of it.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::{Answer, Service, hex, wait_for};

/// The build that has failpoints; see src/failpoint.rs.
pub const BROKEN: &str = "/usr/lib/cutover-tests/cutover-failpoints";
const DIR: &str = "/run/cutover-test";

impl Service {
    /// What workers of this service do from now on: lines of `POINT ACTION [TIMES] [@N]`.
    pub fn failpoints(&self, lines: &[&str]) {
        let _ = fs::remove_file(self.m.path(format!("{DIR}/{}.fired", self.name)));
        self.m.write(format!("{DIR}/{}.failpoints", self.name), lines.join("\n"));
    }

    /// Lets workers go on that are held by lines other than these.
    pub fn hold_only(&self, lines: &[&str]) {
        self.m.write(format!("{DIR}/{}.failpoints", self.name), lines.join("\n"));
    }

    /// Times of this service's workers: lines of `NAME MILLISECONDS`.
    pub fn pace(&self, lines: &[&str]) {
        self.m.write(format!("{DIR}/{}.pace", self.name), lines.join("\n"));
    }

    /// The failpoints that were reached.
    pub fn fired(&self) -> Vec<String> {
        let text = fs::read_to_string(self.m.path(format!("{DIR}/{}.fired", self.name))).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    #[track_caller]
    pub fn wait_fired(&self, line: &str) {
        wait_for(&format!("{line} in {}", self.name), Duration::from_secs(30), || {
            self.fired().iter().any(|l| l == line)
        });
    }

    /// `cutover`, as the build with failpoints.
    pub fn broken(&self, args: &[&str]) -> Answer {
        let output = self.m.run(&[&[BROKEN], args].concat());
        let json = serde_json::from_str(&output.stdout).unwrap_or(Value::Null);
        Answer { code: output.code, json, output }
    }

    pub fn broken_upgrade(&self, version: &str, options: &[&str]) -> Answer {
        self.broken(&[&["upgrade", &self.name, version], options].concat())
    }

    /// Every file of the state directory: mode, and what is in it or where it points.
    pub fn snapshot(&self) -> BTreeMap<String, String> {
        let mut all = BTreeMap::new();
        walk(&self.m.path(&self.state), "", &mut all);
        all
    }

    /// [`Self::assert_settled`], whose recovery must change no byte, and nothing that runs.
    #[track_caller]
    pub fn assert_at_rest(&self, version: &str) {
        let running = || (self.property("InvocationID"), self.property("MainPID"), self.active());
        let before = (self.snapshot(), running());
        self.assert_settled(version);
        assert_eq!(before, (self.snapshot(), running()), "{}: a recovery with nothing to settle", self.name);
    }

    /// A recovery with nothing to settle changes no byte, and nothing that runs.
    #[track_caller]
    pub fn assert_recovery_changes_nothing(&self) {
        let running = || (self.property("InvocationID"), self.property("MainPID"), self.active());
        let before = (self.snapshot(), running());
        let again = self.recover(&[]);
        assert_eq!((again.code, again.json["result"].as_str()), (0, Some("settled")), "{again}");
        assert_eq!(before, (self.snapshot(), running()), "{again}");
    }

    /// The receipts of an operation: there must never be two.
    pub fn receipts_of(&self, id: &str) -> Vec<Value> {
        let history = self.m.cutover(&["history", &self.name]);
        let all = history.json["operations"].as_array().cloned().unwrap_or_else(|| panic!("{history}"));
        all.into_iter().filter(|r| r["id"] == id).collect()
    }

    /// The phases of an operation's timeline.
    pub fn timeline(&self, id: &str) -> Vec<String> {
        let log = self.m.cutover(&["log", &self.name, id]);
        let steps = log.json["timeline"].as_array().cloned().unwrap_or_else(|| panic!("{log}"));
        steps.iter().map(|s| s["phase"].as_str().unwrap_or_default().to_owned()).collect()
    }

    /// What systemd and the workers said of an operation.
    pub fn worker_log(&self, id: &str) -> String {
        let hash = hex(&Sha256::digest(id));
        self.m
            .run(&["journalctl", "--no-pager", "-o", "cat", "-u", &format!("cutover-op-{}*", &hash[..16])])
            .stdout
    }

    /// The worker's unit that is loaded for an operation; empty without one.
    pub fn worker_unit(&self, id: &str) -> String {
        let hash = hex(&Sha256::digest(id));
        let pattern = format!("cutover-op-{}*", &hash[..16]);
        let list =
            self.m.run(&["systemctl", "list-units", "--all", "--plain", "--no-legend", &pattern]).stdout;
        list.split_whitespace().next().unwrap_or_default().to_owned()
    }

    /// The scratch directory of an operation.
    pub fn scratch(&self, id: &str) -> String {
        format!("{}/run/{id}", self.state)
    }
}

fn walk(dir: &Path, below: &str, all: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = format!("{below}/{}", entry.file_name().to_string_lossy());
        let Ok(meta) = entry.path().symlink_metadata() else { continue };
        let what = if meta.is_symlink() {
            format!("-> {}", fs::read_link(entry.path()).unwrap_or_default().display())
        } else if meta.is_dir() {
            "/".into()
        } else {
            format!("{} {}", meta.size(), hex(&Sha256::digest(fs::read(entry.path()).unwrap_or_default())))
        };
        all.insert(path.clone(), format!("{:o} {what}", meta.permissions().mode()));
        if meta.is_dir() {
            walk(&entry.path(), &path, all);
        }
    }
}
