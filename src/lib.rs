//! cutover moves a systemd service to a new version by one journaled transaction.

pub mod adapter;
pub mod durable;
pub mod manager;
pub mod release;
