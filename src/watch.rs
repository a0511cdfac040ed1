//! How a worker tells the world what it is doing, and how the world tells it to leave.

use std::time::Duration;

/// What the steps of an operation report to, and ask.
pub trait Watch {
    /// A step begins and will be over within `at_most`: until then the process counts as alive.
    fn step(&self, name: &str, at_most: Duration);
    /// How far a long step has come.
    fn progress(&self, name: &str, done: u64, total: u64);
    /// Something that belongs into the log.
    fn note(&self, text: &str);
    /// Whether the process was asked to leave: it then leaves at the next safe point.
    fn interrupted(&self) -> bool;
}

/// Reports to nobody and never leaves.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Watch for Silent {
    fn step(&self, _: &str, _: Duration) {}
    fn progress(&self, _: &str, _: u64, _: u64) {}
    fn note(&self, _: &str) {}
    fn interrupted(&self) -> bool {
        false
    }
}
