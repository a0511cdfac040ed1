//! cutover moves a systemd service to a new version by one journaled transaction.

pub mod adapter;
pub mod archive;
pub mod durable;
mod failpoint;
pub mod feed;
pub mod http;
pub mod journal;
pub mod manager;
pub mod operation;
pub mod peer;
pub mod process;
pub mod receipt;
pub mod recovery;
pub mod release;
pub mod seal;
pub mod source;
pub mod stage;
pub mod sums;
pub mod supervise;
pub mod systemd;
pub mod tree;
pub mod watch;
pub mod watchdog;
