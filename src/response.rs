//! The one answer of every run: JSON in a pipe, text on a terminal, and an exit code (K91–K97).

use serde::{Deserialize, Serialize};

use crate::operation::Outcome;
use crate::receipt::Receipt;

/// The version of this answer's shape.
pub const PROTOCOL: u32 = 1;

/// The exit codes, which are an interface.
///
/// | code | means |
/// |---|---|
/// | 0 | promoted, up-to-date, adopted; readable; nothing to settle |
/// | 1 | rolled back, or failed before any change |
/// | 2 | held, or busy: nothing changed |
/// | 3 | unresolved |
/// | 64 | the command line cannot be used |
pub mod exit {
    #![expect(missing_docs, reason = "the table above")]
    pub const DONE: i32 = 0;
    pub const NOT_DONE: i32 = 1;
    pub const HELD: i32 = 2;
    pub const UNRESOLVED: i32 = 3;
    pub const USAGE: i32 = 64;
}

/// The exit code of a recorded outcome.
#[must_use]
pub fn exit_code(outcome: Outcome) -> i32 {
    match outcome {
        Outcome::Promoted | Outcome::UpToDate | Outcome::Adopted => exit::DONE,
        Outcome::RolledBack | Outcome::Failed => exit::NOT_DONE,
        Outcome::Held => exit::HELD,
    }
}

/// What is known of an operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Observation {
    /// A receipt, or how far an open operation has come.
    Observed {
        /// It.
        operation: Box<Receipt>,
    },
    /// There was never an operation.
    Genesis,
    /// The records cannot be read.
    Unreadable {
        /// Why.
        reason: String,
    },
}

/// The answer. Every key is always present.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Response {
    /// The shape of this answer.
    pub protocol_version: u32,
    /// What was asked: `upgrade`, `recover`, `status`, …
    pub action: String,
    /// What came of it: an outcome, or `settled`, `staged`, `readable`, `busy`, `conflict`, `unresolved`, `error`.
    pub result: String,
    /// The exit code.
    pub exit_code: i32,
    /// The operation it is about.
    pub operation: Observation,
    /// What went wrong, as a sentence that says what to do next; none where nothing did.
    pub error: Option<String>,
}

impl Response {
    /// An answer without an error.
    #[must_use]
    pub fn new(action: &str, result: &str, exit_code: i32, operation: Observation) -> Self {
        let (action, result) = (action.to_owned(), result.to_owned());
        Self { protocol_version: PROTOCOL, action, result, exit_code, operation, error: None }
    }

    /// The answer that a receipt is.
    #[must_use]
    pub fn of(action: &str, receipt: Receipt) -> Self {
        let (result, code) = match receipt.outcome {
            Some(outcome) => (name(outcome), exit_code(outcome)),
            None => ("unresolved", exit::UNRESOLVED),
        };
        Self::new(action, result, code, Observation::Observed { operation: Box::new(receipt) })
    }

    /// The same answer, with what went wrong.
    #[must_use]
    pub fn because(mut self, error: impl Into<String>) -> Self {
        self.error = Some(error.into());
        self
    }
}

/// An outcome as it is written.
#[must_use]
pub fn name(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Promoted => "promoted",
        Outcome::UpToDate => "up-to-date",
        Outcome::RolledBack => "rolled-back",
        Outcome::Held => "held",
        Outcome::Failed => "failed",
        Outcome::Adopted => "adopted",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shape_is_the_promised_one() {
        let receipt = crate::receipt::tests::receipt();
        let json = serde_json::to_value(Response::of("upgrade", receipt)).unwrap();
        assert_eq!(json["protocolVersion"], 1);
        assert_eq!(json["exitCode"], 0);
        assert_eq!(json["operation"]["kind"], "observed");
        assert_eq!(json["operation"]["operation"]["outcome"], "promoted");
        assert_eq!(json["error"], serde_json::Value::Null);
        let genesis = Response::new("status", "readable", 0, Observation::Genesis);
        assert_eq!(
            serde_json::to_value(genesis).unwrap()["operation"],
            serde_json::json!({"kind": "genesis"})
        );
        let unreadable = Observation::Unreadable { reason: "x".into() };
        let unreadable = serde_json::to_value(unreadable).unwrap();
        assert_eq!(unreadable, serde_json::json!({"kind": "unreadable", "reason": "x"}));
    }

    #[test]
    fn exit_codes_are_the_promised_ones() {
        // K92–K94.
        use Outcome::{Adopted, Failed, Held, Promoted, RolledBack, UpToDate};
        let codes = [Promoted, UpToDate, Adopted, RolledBack, Failed, Held].map(exit_code);
        assert_eq!(codes, [0, 0, 0, 1, 1, 2]);
    }
}
