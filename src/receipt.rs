//! The receipt: the recorded result of one operation.
//!
//! A receipt is a pure function of the operation's journal records, times included, so that recovery writes the very
//! bytes that the interrupted worker would have written. Its file carries a checksum; every changed bit is seen.

use serde::{Deserialize, Serialize};

use crate::journal::Record;
use crate::operation::{Action, Cause, Event, OperationId, Outcome, Phase, Proof, State};
use crate::release::{Digest, Release, Version};

/// The format that this build writes and reads.
pub const FORMAT: u32 = 1;

/// What is known of an operation: a result, or how far it has come. Every key is always present.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[expect(missing_docs, reason = "each is described at the record it comes from")]
pub struct Receipt {
    pub format_version: u32,
    pub id: OperationId,
    pub service: String,
    pub action: Action,
    pub from_version: Option<Version>,
    pub from_digest: Option<Digest>,
    pub target_version: Version,
    pub target_digest: Option<Digest>,
    pub artifact_sha256: Option<Digest>,
    /// The stable release after it (while it is open: before it).
    pub stable: Option<Release>,
    /// The last record: `done` for a result.
    pub phase: Phase,
    /// None while it is open.
    pub outcome: Option<Outcome>,
    pub cause: Option<Cause>,
    pub reason: String,
    pub proof: Option<Proof>,
    pub started_at_ms: u64,
    /// When its last record was written.
    pub updated_at_ms: u64,
    pub provenance: String,
    pub metadata: Metadata,
}

/// What a receipt says beside its result.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Metadata {
    /// When each record was written, and whether a reboot lay before it.
    pub timeline: Vec<Step>,
    /// What else happened that somebody should know.
    pub notes: Vec<String>,
}

/// One record of the timeline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Step {
    /// The record.
    pub phase: Phase,
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// Whether the machine was booted again since the record before.
    pub after_reboot: bool,
}

/// A receipt's file that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReceiptError {
    /// It is no receipt, or not one of this format.
    #[error("is not a receipt of format {FORMAT}: {0}")]
    Malformed(String),
    /// It was changed after it was written.
    #[error("does not have the checksum it states")]
    Checksum,
}

impl Receipt {
    /// The receipt of the operation whose records these are; none without records.
    #[must_use]
    pub fn of(service: &str, records: &[Record]) -> Option<Self> {
        let (first, last) = (records.first()?, records.last()?);
        let state = records.iter().try_fold(State::Idle, |s, r| s.apply(&r.event)).ok()?;
        let done = match &last.event {
            Event::Done(done) => Some(done),
            _ => None,
        };
        let subject = done.map(|d| &d.subject).or(state.subject())?;
        let mut boot = &first.boot_id;
        let timeline = records.iter().map(|r| {
            let after_reboot = *boot != r.boot_id;
            boot = &r.boot_id;
            Step { phase: r.event.phase(), at_ms: r.at_ms, after_reboot }
        });
        let verdict = match &state {
            State::RollingBack(_, _, _, verdict) => Some(verdict),
            _ => None,
        };
        Some(Self {
            format_version: FORMAT,
            id: last.id.clone(),
            service: service.to_owned(),
            action: subject.action,
            from_version: subject.from.as_ref().map(|r| r.version.clone()),
            from_digest: subject.from.as_ref().map(|r| r.digest),
            target_version: subject.target_version.clone(),
            target_digest: subject.target_digest,
            artifact_sha256: subject.artifact_sha256,
            stable: done.map_or(subject.from.clone(), |d| d.stable.clone()),
            phase: last.event.phase(),
            outcome: done.map(|d| d.outcome),
            cause: done.map_or(verdict.map(|v| v.cause), |d| d.cause),
            reason: done.map_or(verdict.map_or(String::new(), |v| v.reason.clone()), |d| d.reason.clone()),
            proof: done.and_then(|d| d.proof.clone()),
            started_at_ms: subject.started_at_ms,
            updated_at_ms: last.at_ms,
            provenance: subject.provenance.clone(),
            metadata: Metadata {
                timeline: timeline.collect(),
                notes: done.map_or_else(Vec::new, |d| d.notes.clone()),
            },
        })
    }

    /// The bytes of its file.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let body = serde_json::to_string_pretty(self).expect("a receipt is plain data");
        let sum = Digest::of(body.as_bytes());
        // The receipt with one more key, so that it can be read by eye and by anything that reads JSON.
        let body = body.strip_suffix("\n}").expect("pretty JSON of a struct");
        format!("{body},\n  \"checksum\": \"{sum}\"\n}}\n").into_bytes()
    }

    /// Reads a receipt's file.
    ///
    /// # Errors
    /// [`ReceiptError`]; the text fits after the file's path.
    pub fn parse(bytes: &[u8]) -> Result<Self, ReceiptError> {
        let malformed = |e: serde_json::Error| ReceiptError::Malformed(e.to_string());
        let mut json: serde_json::Value = serde_json::from_slice(bytes).map_err(malformed)?;
        if let Some(object) = json.as_object_mut() {
            object.remove("checksum");
        }
        let receipt: Self = serde_json::from_value(json).map_err(malformed)?;
        if receipt.format_version != FORMAT {
            return Err(ReceiptError::Malformed(format!("it has format {}", receipt.format_version)));
        }
        // One receipt has one file: any other bytes were not written by us.
        if receipt.to_bytes() == bytes { Ok(receipt) } else { Err(ReceiptError::Checksum) }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::operation::tests::events;

    pub(crate) fn receipt() -> Receipt {
        let events = events();
        let records: Vec<Record> = (0u32..)
            .zip([1, 2, 3, 4, 5, 7])
            .map(|(n, i)| Record {
                format_version: 1,
                seq: u64::from(n),
                index: n,
                id: "op".parse().unwrap(),
                boot_id: if n < 3 { "one" } else { "two" }.into(),
                at_ms: u64::from(n),
                event: events[i].clone(),
            })
            .collect();
        Receipt::of("demo", &records).unwrap()
    }

    #[test]
    fn it_reads_back_and_every_flipped_bit_and_truncation_is_seen() {
        let receipt = receipt();
        assert_eq!(receipt.outcome, Some(Outcome::Promoted));
        assert_eq!(receipt.metadata.timeline.iter().filter(|s| s.after_reboot).count(), 1);
        let bytes = receipt.to_bytes();
        assert_eq!(Receipt::parse(&bytes).unwrap(), receipt);
        for bit in 0..bytes.len() * 8 {
            let mut bent = bytes.clone();
            bent[bit / 8] ^= 1 << (bit % 8);
            assert!(Receipt::parse(&bent).is_err(), "bit {bit}");
        }
        for end in 0..bytes.len() {
            assert!(Receipt::parse(&bytes[..end]).is_err(), "cut at {end}");
        }
    }

    #[test]
    fn every_key_is_always_present() {
        let json = serde_json::to_value(receipt()).unwrap();
        for key in [
            "formatVersion",
            "id",
            "service",
            "action",
            "fromVersion",
            "fromDigest",
            "targetVersion",
            "targetDigest",
            "artifactSha256",
            "stable",
            "phase",
            "outcome",
            "cause",
            "reason",
            "proof",
            "startedAtMs",
            "updatedAtMs",
            "provenance",
            "metadata",
        ] {
            assert!(json.get(key).is_some(), "{key}");
        }
        assert_eq!(json["cause"], serde_json::Value::Null);
    }
}
