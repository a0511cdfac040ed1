//! The command line's grammar: the source of its help, completions and man page.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

use crate::operation::OperationId;
use crate::release::Version;

/// Upgrades systemd services as journaled transactions.
///
/// Exit codes: 0 done or readable; 1 rolled back, or failed before any change; 2 held or busy, nothing changed;
/// 3 unresolved; 64 wrong usage.
#[derive(Debug, Parser)]
#[command(name = "cutover", version, max_term_width = 100)]
pub(crate) struct Args {
    /// Answer in JSON, also on a terminal.
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Put an existing service under management, without stopping it.
    Adopt {
        /// The service: the name of its adapter.
        name: String,
        /// The unit, as a check against the adapter.
        #[arg(long, value_name = "UNIT")]
        unit: Option<String>,
        /// The version that runs now.
        #[arg(long)]
        version: Version,
        /// The directory of the service's files, where it is more than its program.
        #[arg(long, value_name = "PATH")]
        from: Option<PathBuf>,
        /// Take over a program that dpkg or rpm owns.
        #[arg(long)]
        take_over: bool,
        /// The operation's id; a new one by default.
        #[arg(long)]
        id: Option<OperationId>,
    },
    /// Move a service to another version: stop, start, prove, or bring the old one back.
    Upgrade {
        /// The service.
        name: String,
        /// The exact version.
        version: Version,
        /// The operation's id; the same id again replays its result.
        #[arg(long)]
        id: Option<OperationId>,
        /// The artifact, instead of the one in the adapter's source.
        #[arg(long, value_name = "PATH")]
        file: Option<PathBuf>,
        /// Consent, where the adapter requires it.
        #[arg(long)]
        consent: bool,
        /// Allow an older version.
        #[arg(long)]
        allow_downgrade: bool,
        /// Try bytes again that failed before.
        #[arg(long)]
        retry_quarantined: bool,
    },
    /// Verify and seal a release, and change nothing else.
    Stage {
        /// The service.
        name: String,
        /// The exact version.
        version: Version,
        /// The artifact, instead of the one in the adapter's source.
        #[arg(long, value_name = "PATH")]
        file: Option<PathBuf>,
    },
    /// Settle an operation that was interrupted.
    Recover {
        /// The service.
        name: String,
        /// The operation; by default the one that is open.
        #[arg(long)]
        id: Option<OperationId>,
    },
    /// Take up a kept recovery, offline.
    Resume {
        /// The `recovery.json` that was named when the operation was left unresolved.
        file: PathBuf,
    },
    /// Show the result of the last operation (not the live service: that is `probe`).
    Status {
        /// The service; all of them without it.
        name: Option<String>,
    },
    /// Ask the live service what runs, from which release, since when.
    Probe {
        /// The service.
        name: String,
    },
    /// List the services.
    List,
    /// List a service's receipts, newest first.
    History {
        /// The service.
        name: String,
    },
    /// Show one receipt.
    Show {
        /// The service.
        name: String,
        /// The operation.
        id: OperationId,
    },
    /// Show the timeline of an operation, by default the last one.
    Log {
        /// The service.
        name: String,
        /// The operation.
        id: Option<OperationId>,
    },
    /// Read every release back and compare it with its seal; check the links.
    Verify {
        /// The service.
        name: String,
    },
    /// Show the version.
    Version,
    /// Serve one request (started by systemd).
    #[command(hide = true)]
    Worker {
        service: String,
        id: OperationId,
        launch: String,
        #[arg(long)]
        recover: bool,
    },
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    #[test]
    fn the_grammar_is_sound() {
        super::Args::command().debug_assert();
    }
}
