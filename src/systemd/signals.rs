//! What signals tell: hints that end a wait, and whose jobs they were.
//!
//! Guarantees: everything that arrives is read, so that the connection's queue never fills; what is known of a unit
//! is the latest that was told or read. A signal that was lost leaves it behind until the next reading.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use zbus::export::futures_core::Stream as _;
use zbus::message::Type;
use zbus::{Message, MessageStream, OwnedObjectPath, Variant};

use super::properties::Properties;

/// What the task that drains the connection leaves for the caller.
#[derive(Debug, Default)]
pub(super) struct Signals {
    seen: Mutex<Seen>,
    pub(super) woken: Notify,
}

#[derive(Debug, Default)]
pub(super) struct Seen {
    /// PID 1 has left the bus and come back: subscription and references may be gone.
    pub(super) renewed: bool,
    /// By object path.
    pub(super) units: BTreeMap<String, Watched>,
}

/// What signals and readings told about the jobs of one unit.
#[derive(Debug, Default)]
pub(super) struct Watched {
    /// The last known `ActiveState`.
    active: String,
    /// The last known `SubState`.
    sub: String,
    /// Jobs that were announced or read.
    jobs: BTreeSet<u32>,
    /// Those of them that our own calls made.
    pub(super) own: BTreeSet<u32>,
    /// Those of them that came while the unit was up and have not ended.
    live: BTreeSet<u32>,
    /// Those of them that were live when the unit began to stop.
    ended_it: BTreeSet<u32>,
}

impl Watched {
    /// A job appeared. On a unit that is down, or that waits for its automatic restart, it ends nothing (the
    /// restart itself is such a job).
    pub(super) fn job_new(&mut self, id: u32) {
        let resting = matches!(self.active.as_str(), "" | "inactive" | "failed");
        if self.jobs.insert(id) && !resting && !self.sub.starts_with("auto-restart") {
            self.live.insert(id);
        }
    }

    /// A job ended. What it did to the unit was told before.
    fn job_removed(&mut self, id: u32) {
        self.live.remove(&id);
    }

    /// The unit's state was told or read. One that begins to stop under a job does so by that job: a start of what
    /// is up and a reload leave it up.
    /// Whether that is one to look at: a unit that is on its way says again when it has arrived.
    pub(super) fn state(&mut self, active: &str, sub: &str) -> bool {
        let on_its_way = matches!(active, "activating" | "deactivating") && !sub.starts_with("auto-restart");
        let news = !on_its_way && (self.active != active || self.sub != sub);
        if matches!(active, "deactivating" | "inactive" | "failed") {
            self.ended_it.extend(&self.live);
        }
        self.active = active.to_owned();
        self.sub = sub.to_owned();
        news
    }

    /// What was announced before a call: a job of that number is not the call's.
    pub(super) fn known(&self) -> BTreeSet<u32> {
        self.jobs.difference(&self.own).copied().collect()
    }

    pub(super) fn is_foreign(&self) -> bool {
        self.ended_it.difference(&self.own).next().is_some()
    }
}

impl Signals {
    pub(super) fn seen(&self) -> MutexGuard<'_, Seen> {
        // A panic elsewhere leaves hints behind, and hints may be wrong.
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in one message; whether somebody should look.
    fn take(&self, message: &Message) -> bool {
        if message.message_type() != Type::Signal {
            return false;
        }
        let header = message.header();
        let member = header.member().map_or("", |member| member.as_str());
        let mut seen = self.seen();
        match member {
            "JobNew" => {
                let Ok((id, _, unit)) = message.body().deserialize::<(u32, OwnedObjectPath, String)>() else {
                    return false;
                };
                let Some(unit) = seen.units.get_mut(&object_path(&unit)) else { return false };
                unit.job_new(id);
                false
            }
            "JobRemoved" => {
                let Ok((id, _, unit, _)) =
                    message.body().deserialize::<(u32, OwnedObjectPath, String, String)>()
                else {
                    return false;
                };
                let Some(unit) = seen.units.get_mut(&object_path(&unit)) else { return false };
                unit.job_removed(id);
                true
            }
            "PropertiesChanged" => {
                let path = header.path().map_or("", |path| path.as_str());
                let Some(unit) = seen.units.get_mut(path) else { return false };
                let body = message.body();
                let Ok((_, changed, _)) = body.deserialize::<(&str, HashMap<&str, Variant<'_>>, Vec<&str>)>()
                else {
                    return false;
                };
                let changed = Properties::new(changed);
                // Those of the service come in a signal of their own, always together with this one.
                changed.has("ActiveState")
                    && unit.state(&changed.text("ActiveState"), &changed.text("SubState"))
            }
            "NameOwnerChanged" => {
                seen.renewed = true;
                true
            }
            "Reloading" => true,
            _ => false,
        }
    }
}

/// Reads all that arrives, so that the queue never fills, and wakes whoever waits. Ends with the connection.
pub(super) async fn drain(mut stream: MessageStream, signals: Arc<Signals>) {
    loop {
        let next = std::future::poll_fn(|context| Pin::new(&mut stream).poll_next(context)).await;
        match next {
            Some(Ok(message)) => {
                if signals.take(&message) {
                    signals.woken.notify_one();
                }
            }
            Some(Err(_)) | None => break,
        }
    }
    signals.woken.notify_one();
}

/// Where systemd puts a unit's object: what is no letter or digit is `_` and two hexadecimal digits.
pub(super) fn object_path(unit: &str) -> String {
    let mut path = String::from("/org/freedesktop/systemd1/unit/");
    for (at, byte) in unit.bytes().enumerate() {
        if byte.is_ascii_alphabetic() || (at > 0 && byte.is_ascii_digit()) {
            path.push(char::from(byte));
        } else {
            path.push_str(&format!("_{byte:02x}"));
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn object_paths_are_systemds() {
        assert_eq!(object_path("demo.service"), "/org/freedesktop/systemd1/unit/demo_2eservice");
        assert_eq!(object_path("9p-a@b.mount"), "/org/freedesktop/systemd1/unit/_39p_2da_40b_2emount");
        assert_eq!(object_path("a\\x2db.service"), "/org/freedesktop/systemd1/unit/a_5cx2db_2eservice");
    }

    #[test]
    fn a_job_that_ends_the_unit_and_is_not_ours_is_foreign() {
        let up = || {
            let mut unit = Watched::default();
            unit.state("active", "running");
            unit
        };

        let mut ours = up();
        assert!(!ours.known().contains(&7));
        ours.job_new(7); // announced before the reply
        ours.state("deactivating", "stop-sigterm");
        assert!(ours.is_foreign(), "until the reply says whose it is");
        ours.own.insert(7);
        assert!(!ours.is_foreign());

        let mut theirs = up();
        theirs.job_new(8);
        assert!(theirs.known().contains(&8), "a job that was there before our call stays theirs");
        theirs.state("inactive", "dead");
        theirs.job_removed(8);
        assert!(theirs.is_foreign());

        let mut harmless = up();
        harmless.job_new(9); // a start of what is up, or a reload
        harmless.state("reloading", "reload");
        harmless.job_removed(9);
        harmless.state("failed", "failed"); // a crash, later
        assert!(!harmless.is_foreign());

        let mut restarting = up();
        restarting.state("activating", "auto-restart");
        restarting.job_new(10);
        restarting.state("active", "running");
        restarting.job_new(10); // read again: still the same job
        restarting.job_removed(10);
        restarting.state("activating", "auto-restart");
        assert!(!restarting.is_foreign());

        let mut down = up();
        down.state("inactive", "dead");
        down.job_new(11); // somebody's start
        down.state("activating", "start");
        down.job_removed(11);
        assert!(!down.is_foreign());
    }
}
