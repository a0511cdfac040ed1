//! cutover moves a systemd service to a new version by one journaled transaction.

pub mod adapter;
pub mod durable;
mod failpoint;
pub mod journal;
pub mod manager;
pub mod operation;
pub mod receipt;
pub mod recovery;
pub mod release;
pub mod watch;
