//! A release: the immutable payload of one version, and the manifest that seals it.
//!
//! The digest of a release is the SHA-256 of its canonical manifest: one line an entry, sorted by path. It
//! depends on nothing else, so an adopted program and the same bytes from an archive have the same digest.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// What a version may be called: it becomes part of a directory's name.
const VERSION_MAX: usize = 64;

/// An exact version, as its publisher writes it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Version(String);

impl Version {
    /// The version as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether `self` is older than `other`, where both are semantic versions; `None` where they are not.
    #[must_use]
    pub fn is_older_than(&self, other: &Self) -> Option<bool> {
        let parse = |v: &Self| semver::Version::parse(v.0.strip_prefix('v').unwrap_or(&v.0)).ok();
        Some(parse(self)?.cmp_precedence(&parse(other)?).is_lt())
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<Version> for String {
    fn from(v: Version) -> Self {
        v.0
    }
}

impl TryFrom<String> for Version {
    type Error = InvalidName;
    fn try_from(s: String) -> Result<Self, InvalidName> {
        let legal = |c: char| c.is_ascii_alphanumeric() || "._+~:-".contains(c);
        let shaped = s.starts_with(|c: char| c.is_ascii_alphanumeric()) && s.chars().all(legal);
        if shaped && s.len() <= VERSION_MAX {
            return Ok(Self(s));
        }
        Err(InvalidName {
            what: "version",
            rule: "1 to 64 of [A-Za-z0-9._+~:-], beginning with a letter or a digit",
            given: s,
        })
    }
}

impl FromStr for Version {
    type Err = InvalidName;
    fn from_str(s: &str) -> Result<Self, InvalidName> {
        Self::try_from(s.to_owned())
    }
}

/// A name that breaks its grammar.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{given:?} is not a {what}: a {what} is {rule}")]
pub struct InvalidName {
    /// The kind of name.
    pub what: &'static str,
    /// What is legal.
    pub rule: &'static str,
    /// What was given.
    pub given: String,
}

/// A SHA-256, written as 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// The digest and the length of all that `reader` gives.
    ///
    /// # Errors
    /// The reader's.
    pub fn of_reader(reader: &mut dyn io::Read) -> io::Result<(Self, u64)> {
        let mut hash = Sha256::new();
        let mut piece = vec![0; 256 * 1024];
        let mut size = 0;
        loop {
            match reader.read(&mut piece) {
                Ok(0) => return Ok((Self(hash.finalize().into()), size)),
                Ok(n) => {
                    hash.update(&piece[..n]);
                    size += n as u64;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// The first twelve digits: enough to tell releases of one version apart by eye.
    #[must_use]
    pub fn short(&self) -> String {
        self.to_string()[..12].to_owned()
    }
}

impl From<[u8; 32]> for Digest {
    fn from(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<Digest> for String {
    fn from(d: Digest) -> Self {
        d.to_string()
    }
}

impl TryFrom<String> for Digest {
    type Error = InvalidName;
    fn try_from(s: String) -> Result<Self, InvalidName> {
        s.parse()
    }
}

impl FromStr for Digest {
    type Err = InvalidName;
    fn from_str(s: &str) -> Result<Self, InvalidName> {
        let refuse =
            || InvalidName { what: "digest", rule: "64 lower-case hexadecimal digits", given: s.to_owned() };
        if s.len() != 64 || !s.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
            return Err(refuse());
        }
        let mut out = [0; 32];
        for (byte, pair) in out.iter_mut().zip(s.as_bytes().chunks(2)) {
            let pair = std::str::from_utf8(pair).map_err(|_| refuse())?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| refuse())?;
        }
        Ok(Self(out))
    }
}

/// One release of a service: what it calls itself and what it is.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Release {
    /// The version it was published as.
    pub version: Version,
    /// The digest of its canonical manifest.
    pub digest: Digest,
}

impl Release {
    /// The name of its directory below `releases/`.
    #[must_use]
    pub fn dir_name(&self) -> String {
        format!("{}-{}", self.version, self.digest.short())
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.version, self.digest.short())
    }
}

/// One entry of a release's tree. Paths are relative, with `/`, without `.` or `..`; the root has no entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Entry {
    /// A directory and its permission bits.
    Dir {
        /// Permission bits, without set-id.
        mode: u32,
    },
    /// A regular file.
    File {
        /// Permission bits, without set-id.
        mode: u32,
        /// Length in bytes.
        size: u64,
        /// SHA-256 of the contents.
        sha256: Digest,
    },
    /// A symbolic link that stays inside the tree.
    Link {
        /// Where it points, as written.
        target: String,
    },
}

/// What a release consists of. Written as `manifest.json`, it is the release's seal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Manifest {
    /// The format of this file.
    pub format_version: u32,
    /// The version and digest of the release.
    pub release: Release,
    /// SHA-256 of the artifact it came from; none for an adopted program.
    pub artifact_sha256: Option<Digest>,
    /// Where it came from, for people.
    pub provenance: String,
    /// Every entry, by path.
    pub entries: BTreeMap<String, Entry>,
}

/// The manifest format that this build writes and reads.
pub const MANIFEST_FORMAT: u32 = 1;

/// A manifest that cannot serve as a seal.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// It is not the JSON of a manifest.
    #[error("is not a manifest: {0}")]
    Malformed(#[from] serde_json::Error),
    /// Its format is not the one this build knows.
    #[error("has format {0}, this build knows {MANIFEST_FORMAT}: use the cutover that wrote it")]
    Format(u32),
    /// Its entries do not have the digest it states.
    #[error("states digest {stated}, its entries have {actual}")]
    Digest {
        /// What it says.
        stated: Digest,
        /// What its entries give.
        actual: Digest,
    },
    /// A path that could leave the tree or that says the same thing twice.
    #[error("names the illegal path {0:?}")]
    Path(String),
}

impl Manifest {
    /// Seals `entries` as `version`.
    #[must_use]
    pub fn seal(
        version: Version,
        entries: BTreeMap<String, Entry>,
        artifact_sha256: Option<Digest>,
        provenance: String,
    ) -> Self {
        let digest = digest_of(&entries);
        Self {
            format_version: MANIFEST_FORMAT,
            release: Release { version, digest },
            artifact_sha256,
            provenance,
            entries,
        }
    }

    /// The bytes of `manifest.json`.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec_pretty(self).expect("a manifest is plain data");
        bytes.push(b'\n');
        bytes
    }

    /// Reads a seal. It is accepted only if its entries have the digest that it states.
    ///
    /// # Errors
    /// [`ManifestError`] says what is wrong with it; the text fits after the file's path.
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Format {
            format_version: u32,
        }
        let Format { format_version } = serde_json::from_slice(bytes)?;
        if format_version != MANIFEST_FORMAT {
            return Err(ManifestError::Format(format_version));
        }
        let manifest: Self = serde_json::from_slice(bytes)?;
        if let Some(bad) = manifest.entries.keys().find(|p| !is_plain_path(p)) {
            return Err(ManifestError::Path(bad.clone()));
        }
        let actual = digest_of(&manifest.entries);
        if actual != manifest.release.digest {
            let stated = manifest.release.digest;
            return Err(ManifestError::Digest { stated, actual });
        }
        Ok(manifest)
    }
}

/// Whether `path` is relative, normal, and free of control characters.
#[must_use]
pub fn is_plain_path(path: &str) -> bool {
    !path.is_empty()
        && !path.contains(|c: char| c.is_control())
        && path.split('/').all(|part| !matches!(part, "" | "." | ".."))
}

fn digest_of(entries: &BTreeMap<String, Entry>) -> Digest {
    let mut hash = Sha256::new();
    for (path, entry) in entries {
        // Paths and targets hold no control characters, so a line cannot be forged by one.
        let line = match entry {
            Entry::Dir { mode } => format!("d {mode:04o} {path}\n"),
            Entry::File { mode, size, sha256 } => format!("f {mode:04o} {size} {sha256} {path}\n"),
            Entry::Link { target } => format!("l {path}\t{target}\n"),
        };
        hash.update(line.as_bytes());
    }
    Digest(hash.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(bytes: &[u8], mode: u32) -> Entry {
        Entry::File { mode, size: bytes.len() as u64, sha256: Digest::of(bytes) }
    }

    fn manifest(entries: &[(&str, Entry)]) -> Manifest {
        let entries = entries.iter().map(|(p, e)| ((*p).to_owned(), e.clone())).collect();
        Manifest::seal("1.0".parse().unwrap(), entries, None, "test".into())
    }

    #[test]
    fn the_digest_depends_on_the_tree_alone() {
        let one = manifest(&[("bin", Entry::Dir { mode: 0o755 }), ("bin/a", file(b"x", 0o755))]);
        let mut other = one.clone();
        other.provenance = "elsewhere".into();
        other.artifact_sha256 = Some(Digest::of(b"artifact"));
        assert_eq!(one.release.digest, digest_of(&other.entries));
        for changed in [
            manifest(&[("bin", Entry::Dir { mode: 0o700 }), ("bin/a", file(b"x", 0o755))]),
            manifest(&[("bin", Entry::Dir { mode: 0o755 }), ("bin/a", file(b"y", 0o755))]),
            manifest(&[("bin", Entry::Dir { mode: 0o755 }), ("bin/a", file(b"x", 0o644))]),
            manifest(&[("bin", Entry::Dir { mode: 0o755 }), ("bin/b", file(b"x", 0o755))]),
        ] {
            assert_ne!(one.release.digest, changed.release.digest);
        }
    }

    #[test]
    fn a_seal_reads_back_and_every_flipped_bit_is_seen_or_harmless() {
        let sealed = manifest(&[("a", file(b"x", 0o755)), ("l", Entry::Link { target: "a".into() })]);
        let bytes = sealed.to_bytes();
        assert_eq!(Manifest::parse(&bytes).unwrap(), sealed);
        for bit in 0..bytes.len() * 8 {
            let mut bent = bytes.clone();
            bent[bit / 8] ^= 1 << (bit % 8);
            if let Ok(read) = Manifest::parse(&bent) {
                assert_eq!(read.entries, sealed.entries, "bit {bit} changed what is sealed");
            }
        }
        for end in 0..bytes.len() - 2 {
            assert!(Manifest::parse(&bytes[..end]).is_err(), "cut at {end}");
        }
    }

    #[test]
    fn versions_that_could_leave_a_directory_are_refused() {
        for bad in ["", ".", "..", "../x", "a/b", "-1", ".1", "a b", "a\n", &"1".repeat(65)] {
            assert!(bad.parse::<Version>().is_err(), "{bad:?}");
        }
        for good in ["1", "1.2.3", "v2.0+b7", "5:7.0.15-1~deb12u7"] {
            assert_eq!(good.parse::<Version>().unwrap().as_str(), good);
        }
    }

    #[test]
    fn older_is_known_only_between_semantic_versions() {
        let older =
            |a: &str, b: &str| a.parse::<Version>().unwrap().is_older_than(&b.parse::<Version>().unwrap());
        assert_eq!(older("1.9.0", "1.10.0"), Some(true));
        assert_eq!(older("v1.10.0", "1.9.0"), Some(false));
        assert_eq!(older("1.0.0-rc.1", "1.0.0"), Some(true));
        assert_eq!(older("1.0.0+a", "1.0.0+b"), Some(false));
        assert_eq!(older("2024.1", "1.0.0"), None);
    }
}
