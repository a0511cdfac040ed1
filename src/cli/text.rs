//! What people read on a terminal. It is no interface: it may change at any time.

use std::fmt::Write as _;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use jiff::Timestamp;

use crate::operation::{Cause, KernelProof, Outcome, PeerProof};
use crate::receipt::Receipt;
use crate::response::{Observation, Response, name};
use crate::scratch::Tidings;

/// An answer.
pub(crate) fn response(response: &Response) -> String {
    // Where the answer is not the operation's own, the operation is not shown: `status` does that.
    if let Some(error) = &response.error {
        let mut text = format!("{}: {error}\n", response.result);
        if matches!(response.result.as_str(), "busy" | "unresolved" | "conflict")
            && let Observation::Observed { operation } = &response.operation
        {
            text += &receipt(operation);
        }
        return text;
    }
    match (response.result.as_str(), &response.operation) {
        ("staged", _) => "staged: the release is sealed; nothing else was changed\n".into(),
        ("settled", _) => "settled: nothing was open\n".into(),
        (_, Observation::Observed { operation }) => {
            let mut text = receipt(operation);
            if operation.outcome.is_none() {
                let service = &operation.service;
                let _ =
                    writeln!(text, "  next      if no worker is at it any more: cutover recover {service}");
            }
            text
        }
        (_, Observation::Genesis) => {
            "genesis: no operation was ever recorded here (the service may well run)\n".into()
        }
        (_, Observation::Unreadable { reason }) => format!("the records cannot be read: {reason}\n"),
    }
}

/// A receipt, in a few lines.
pub(crate) fn receipt(receipt: &Receipt) -> String {
    let mut text = headline(receipt);
    text.push('\n');
    let mut line = |key: &str, value: &str| {
        if !value.is_empty() {
            let _ = writeln!(text, "  {key:<10}{value}");
        }
    };
    line("why", &receipt.reason);
    if let Some(cause) = receipt.cause {
        line(
            "cause",
            match cause {
                Cause::BadCandidate => "bad-candidate: its bytes are quarantined",
                Cause::Undetermined => "undetermined: the candidate could not be judged",
            },
        );
    }
    if let Some(proof) = &receipt.proof {
        let version = proof.version.as_ref().map_or(String::new(), |v| format!(", reports {v}"));
        let kernel = match proof.kernel {
            KernelProof::Executable => "executes the release",
            KernelProof::SameBytes => "executes the same bytes",
            KernelProof::OpenFile => "has files of the release open",
            KernelProof::Exited => "has done its work and ended",
            KernelProof::AnswerOnly => "is known by its answer alone",
        };
        let peer = match proof.peer {
            PeerProof::Proved => ", and it is the one that answered",
            PeerProof::Unproved => ", and who answered could not be read",
            PeerProof::None => "",
        };
        line("proof", &format!("process {} {kernel}{version}{peer}", proof.pid));
    }
    line("stable", &receipt.stable.as_ref().map_or("none".into(), ToString::to_string));
    for note in &receipt.metadata.notes {
        line("note", note);
    }
    line("id", receipt.id.as_str());
    line("when", &when(receipt.updated_at_ms));
    text
}

/// A receipt, in one line.
pub(crate) fn headline(receipt: &Receipt) -> String {
    let from = receipt.from_version.as_ref().map_or("nothing".into(), ToString::to_string);
    let (service, target) = (&receipt.service, &receipt.target_version);
    match receipt.outcome {
        None => format!("{service}: from {from} to {target}, open in phase {}", receipt.phase),
        Some(Outcome::Adopted) => format!("{service}: adopted as {target}"),
        Some(outcome @ (Outcome::Promoted | Outcome::RolledBack)) => {
            format!("{service}: from {from} to {target}: {}", name(outcome))
        }
        Some(outcome) => format!("{service}: to {target}: {}", name(outcome)),
    }
}

/// The timeline of an operation.
pub(crate) fn timeline(receipt: &Receipt) -> String {
    let mut text = format!("{}\n", headline(receipt));
    for step in &receipt.metadata.timeline {
        let reboot = if step.after_reboot { "  after a reboot" } else { "" };
        let since = step.at_ms.saturating_sub(receipt.started_at_ms);
        let seconds = since as f64 / 1000.0;
        let _ = writeln!(text, "  {}  +{seconds:>8.3} s  {}{reboot}", when(step.at_ms), step.phase);
    }
    if !receipt.reason.is_empty() {
        let _ = writeln!(text, "  {}", receipt.reason);
    }
    for note in &receipt.metadata.notes {
        let _ = writeln!(text, "  note: {note}");
    }
    text
}

/// A time, for people.
pub(crate) fn when(ms: u64) -> String {
    i64::try_from(ms)
        .ok()
        .and_then(|ms| Timestamp::from_millisecond(ms).ok())
        .map_or_else(|| ms.to_string(), |t| t.strftime("%Y-%m-%d %H:%M:%S UTC").to_string())
}

/// The progress of an operation on stderr.
pub(crate) struct Bar {
    bar: ProgressBar,
    shown: bool,
}

impl Bar {
    pub(crate) fn new(shown: bool) -> Self {
        let target = if shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        Self { bar: ProgressBar::with_draw_target(Some(0), target), shown }
    }

    pub(crate) fn tell(&mut self, tidings: Tidings) {
        if !self.shown {
            return;
        }
        match tidings {
            Tidings::Step { name } => {
                self.bar.set_style(ProgressStyle::with_template("{spinner} {msg}").expect("a template"));
                self.bar.set_message(name);
                self.bar.tick();
            }
            Tidings::Progress { name, done, total } => {
                let template = match name.as_str() {
                    "staging" => "{msg} [{bar:30}] {bytes}/{total_bytes}",
                    _ => "{msg} [{bar:30}] {percent}%",
                };
                self.bar.set_style(ProgressStyle::with_template(template).expect("a template"));
                self.bar.set_message(name);
                self.bar.set_length(total);
                self.bar.set_position(done);
            }
            Tidings::Note { text } => self.bar.println(text),
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
