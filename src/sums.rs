//! `SHA256SUMS` and its signature: pure parsing and checking.

use std::collections::BTreeMap;

use minisign_verify::{PublicKey, Signature};

use crate::release::Digest;

/// Why a list of sums or its signature is not accepted. The text fits after the file's path.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SumsError {
    /// There is nothing in it. An empty signature is no signature.
    #[error("is empty, which counts as missing")]
    Empty,
    /// A line is not `SHA256  NAME`.
    #[error("line {line} is not a SHA-256 with a file name, as sha256sum writes them")]
    Line {
        /// Its number, from 1.
        line: usize,
    },
    /// A name has two different sums.
    #[error("line {line} gives {name} another sum than a line before it")]
    Conflict {
        /// Its number, from 1.
        line: usize,
        /// The name.
        name: String,
    },
    /// The signature is no minisign signature.
    #[error("is not a minisign signature")]
    Signature,
    /// It was made with none of the adapter's keys.
    #[error("was made with a key that the adapter does not name in source.keys")]
    Key,
    /// It does not fit what it should sign.
    #[error("does not fit: what it signs was changed")]
    Tampered,
}

/// Reads the list that `sha256sum` writes: a sum, a space, a space (text) or `*` (binary), a name. A `./` before a
/// name falls away.
///
/// # Errors
/// [`SumsError`]: an empty list, any line of another form, a name with two sums.
pub fn parse(bytes: &[u8]) -> Result<BTreeMap<String, Digest>, SumsError> {
    let mut sums = BTreeMap::new();
    for (line, bytes) in (1..).zip(bytes.split(|b| *b == b'\n')) {
        if bytes.is_empty() {
            continue;
        }
        let (name, sum) = parse_line(bytes).ok_or(SumsError::Line { line })?;
        if sums.insert(name.to_owned(), sum).is_some_and(|before| before != sum) {
            return Err(SumsError::Conflict { line, name: name.to_owned() });
        }
    }
    if sums.is_empty() { Err(SumsError::Empty) } else { Ok(sums) }
}

fn parse_line(bytes: &[u8]) -> Option<(&str, Digest)> {
    let line = std::str::from_utf8(bytes).ok()?;
    let (sum, rest) = line.split_at_checked(64)?;
    let name = rest.strip_prefix("  ").or_else(|| rest.strip_prefix(" *"))?;
    let name = name.strip_prefix("./").unwrap_or(name);
    if name.is_empty() || name.contains(|c: char| c.is_control()) {
        return None;
    }
    Some((name, sum.to_ascii_lowercase().parse().ok()?))
}

/// Checks a minisign signature of `signed` by any of `keys`, prehashed or of the older form, and returns the key
/// that made it.
///
/// # Errors
/// [`SumsError`].
pub fn verify<'k>(keys: &'k [String], signed: &[u8], signature: &[u8]) -> Result<&'k str, SumsError> {
    if signature.trim_ascii().is_empty() {
        return Err(SumsError::Empty);
    }
    let text = std::str::from_utf8(signature).map_err(|_| SumsError::Signature)?;
    let signature = Signature::decode(text).map_err(|_| SumsError::Signature)?;
    let mut refused = SumsError::Key;
    for text in keys {
        // The adapter was refused if a key of it cannot be read.
        let Ok(key) = PublicKey::from_base64(text) else { continue };
        match key.verify(signed, &signature, true) {
            Ok(()) => return Ok(text),
            Err(minisign_verify::Error::UnexpectedKeyId) => {}
            Err(_) => refused = SumsError::Tampered,
        }
    }
    Err(refused)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::tests::{KEY, LEGACY_SIGNATURE, OTHER_KEY, SIGNATURE, SUMS};

    #[test]
    fn both_forms_of_a_line_are_read() {
        let (a, b) = (Digest::of(b"a"), Digest::of(b"b"));
        let text = format!("{a}  a.tar\n{b} *./b c\n\n{a}  a.tar\n{}  A\n", a.to_string().to_uppercase());
        let sums = parse(text.as_bytes()).unwrap();
        let expected = [("A", a), ("a.tar", a), ("b c", b)].map(|(n, d)| (n.to_owned(), d));
        assert_eq!(sums, BTreeMap::from(expected));
    }

    #[test]
    fn what_is_no_list_is_refused() {
        let a = Digest::of(b"a");
        for (text, error) in [
            (String::new(), SumsError::Empty),
            ("\n\n".into(), SumsError::Empty),
            ("<!DOCTYPE html>\n".into(), SumsError::Line { line: 1 }),
            (format!("{a}  x\n{}", &a.to_string()[..40]), SumsError::Line { line: 2 }),
            (format!("{a} x\n"), SumsError::Line { line: 1 }),
            (format!("{a}  \n"), SumsError::Line { line: 1 }),
            (format!("{a}  x\r\n"), SumsError::Line { line: 1 }),
            (format!("\\{a}  x\n"), SumsError::Line { line: 1 }),
            (format!("{a}é  x\n"), SumsError::Line { line: 1 }),
            (
                format!("{a}  x\n{}  ./x\n", Digest::of(b"b")),
                SumsError::Conflict { line: 2, name: "x".into() },
            ),
        ] {
            assert_eq!(parse(text.as_bytes()), Err(error), "{text:?}");
        }
    }

    #[test]
    fn a_signature_of_either_form_by_any_of_the_keys_is_accepted() {
        let keys = [OTHER_KEY.to_owned(), KEY.to_owned()];
        for signature in [SIGNATURE, LEGACY_SIGNATURE] {
            assert_eq!(verify(&keys, SUMS.as_bytes(), signature.as_bytes()), Ok(KEY));
            let refused = verify(&keys[..1], SUMS.as_bytes(), signature.as_bytes());
            assert_eq!(refused, Err(SumsError::Key));
        }
    }

    #[test]
    fn every_flipped_bit_of_the_signed_list_and_of_the_signature_is_seen() {
        let keys = [KEY.to_owned()];
        let flipped = |text: &str, bit: usize| {
            let mut bytes = text.as_bytes().to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            bytes
        };
        for bit in 0..SUMS.len() * 8 {
            let refused = verify(&keys, &flipped(SUMS, bit), SIGNATURE.as_bytes());
            assert_eq!(refused, Err(SumsError::Tampered), "bit {bit}");
        }
        // The first line is a comment that nothing signs.
        let comment = SIGNATURE.find('\n').unwrap() * 8;
        for bit in comment..SIGNATURE.len() * 8 {
            let bent = flipped(SIGNATURE, bit);
            // A line's end may bend only where nothing follows it.
            if verify(&keys, SUMS.as_bytes(), &bent).is_ok() {
                assert!(bit / 8 >= SIGNATURE.trim_end().len(), "bit {bit} went unseen");
            }
        }
    }

    #[test]
    fn an_empty_signature_is_a_missing_one() {
        // A07: never "nothing to check".
        let keys = [KEY.to_owned()];
        for empty in ["", "\n", "  \n\n"] {
            assert_eq!(verify(&keys, SUMS.as_bytes(), empty.as_bytes()), Err(SumsError::Empty));
        }
        for end in 1..SIGNATURE.trim_end().len() {
            assert!(verify(&keys, SUMS.as_bytes(), &SIGNATURE.as_bytes()[..end]).is_err(), "cut at {end}");
        }
    }
}
