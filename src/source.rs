//! Where a release comes from: the exact version, its sums, their signature.
//!
//! A source is a directory; the adapter's template says where an artifact lies below it, and `SHA256SUMS` with
//! `SHA256SUMS.minisig` lie beside the artifact. Nothing but the target itself is ever looked for (K37).
//!
//! | found | outcome |
//! |---|---|
//! | no directory or artifact for the version, and no sums that name it | [`SourceError::NoSuchVersion`]: held |
//! | anything else that is missing, empty, unsigned, tampered with | failed, each with its own reason |
//! | artifact, sums that name it, a good signature | [`Resolved`], with the digest to expect |
//! | `unsigned = true`: artifact and sums that name it | the same, unsigned |
//! | `unsigned = true`, `--file`, no sums beside it | [`Resolved`] without a digest: it is recorded when read |

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::adapter::Adapter;
use crate::feed::{self, FeedError};
use crate::release::{Digest, Version};
use crate::sums::{self, SumsError};

#[cfg(test)]
#[path = "source/tests.rs"]
pub(crate) mod tests;

/// The name of the list of sums.
pub const SUMS: &str = "SHA256SUMS";
/// What its signature's name adds.
pub const SIGNATURE_SUFFIX: &str = ".minisig";
/// The most that a list of sums may have: ten thousand lines.
const SUMS_MAX: u64 = 1024 * 1024;
/// The most that a signature may have: two comments and two lines of base64.
const SIGNATURE_MAX: u64 = 16 * 1024;

/// An artifact that was found and whose expected digest is trusted. Its bytes were not read yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// Where it is.
    pub path: PathBuf,
    /// Its file name, which says what it is.
    pub name: String,
    /// Its length in bytes.
    pub size: u64,
    /// What its SHA-256 must be; none for an unsigned `--file` without sums beside it.
    pub expected: Option<Digest>,
    /// Where it came from and who vouched for it, for people.
    pub provenance: String,
}

/// Why there is no artifact.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The source has nothing for this version and architecture. The upgrade is held.
    #[error("{path}: the source has no version {version}; publish it there, or ask for another", path = path.display())]
    NoSuchVersion {
        /// What was asked for.
        version: Version,
        /// Where it should be.
        path: PathBuf,
    },
    /// The adapter names no source.
    #[error("the adapter of {service} has no source.path; add it, or give the artifact by --file")]
    NoSource {
        /// The service.
        service: String,
    },
    /// The source's directory is not there.
    #[error("{path}: the source's directory is not there; mount it, or correct source.path of the adapter", path = path.display())]
    NoDirectory {
        /// The directory.
        path: PathBuf,
    },
    /// The sums name the artifact, or `--file` does, and it is not there.
    #[error("{path}: is not there, although {by} names it; publish it, then try again", path = path.display())]
    MissingArtifact {
        /// The artifact.
        path: PathBuf,
        /// What names it.
        by: String,
    },
    /// The artifact has no bytes.
    #[error("{path}: is empty; publish the artifact again", path = path.display())]
    EmptyArtifact {
        /// The artifact.
        path: PathBuf,
    },
    /// The artifact's name is not text.
    #[error("{path}: its name is not UTF-8; rename it", path = path.display())]
    Name {
        /// The artifact.
        path: PathBuf,
    },
    /// There is no list of sums.
    #[error("{path}: is missing; publish it beside the artifact (sha256sum ARTIFACT > SHA256SUMS)", path = path.display())]
    MissingSums {
        /// The list.
        path: PathBuf,
    },
    /// The list of sums cannot be used.
    #[error("{path}: {source}; publish it again", path = path.display())]
    Sums {
        /// The list.
        path: PathBuf,
        /// What is wrong.
        source: SumsError,
    },
    /// The list of sums does not name the artifact.
    #[error("{path}: does not name {name}; publish a list that does", path = path.display())]
    Unlisted {
        /// The list.
        path: PathBuf,
        /// The artifact's name.
        name: String,
    },
    /// There is no signature.
    #[error("{path}: is missing; sign the list (minisign -Sm SHA256SUMS), or set source.unsigned = true in the adapter", path = path.display())]
    MissingSignature {
        /// The signature.
        path: PathBuf,
    },
    /// The signature is not accepted.
    #[error("{path}: {source}; do not install it before you know why, then sign the list again", path = path.display())]
    Signature {
        /// The signature.
        path: PathBuf,
        /// What is wrong.
        source: SumsError,
    },
    /// A file that should be small is not.
    #[error("{path}: has more than {most} bytes; publish it again", path = path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The most it may have.
        most: u64,
    },
    /// A file cannot be read.
    #[error(transparent)]
    Read(#[from] FeedError),
}

impl SourceError {
    /// Whether nothing is wrong but that the version is not there (K94): held, not failed.
    #[must_use]
    pub fn is_held(&self) -> bool {
        matches!(self, Self::NoSuchVersion { .. })
    }
}

/// Finds exactly `version` in the adapter's source.
///
/// # Errors
/// [`SourceError`]; [`SourceError::is_held`] tells "no such version" from failures.
pub fn resolve(adapter: &Adapter, version: &Version) -> Result<Resolved, SourceError> {
    let Some(directory) = &adapter.source.directory else {
        return Err(SourceError::NoSource { service: adapter.service.clone() });
    };
    let stall = adapter.timeouts.stall;
    if !exists(directory, stall)? {
        return Err(SourceError::NoDirectory { path: directory.clone() });
    }
    let path = directory.join(adapter.source.artifact_of(version));
    let found = exists(&path, stall)?;
    let (expected, by) = match trusted_sum(adapter, &path) {
        // Without the artifact, a list that is missing or does not name it says that there is no such version;
        // anything else that is wrong with it is worth knowing.
        Err(SourceError::MissingSums { .. } | SourceError::Unlisted { .. }) if !found => {
            return Err(SourceError::NoSuchVersion { version: version.clone(), path });
        }
        other => other?,
    };
    if !found {
        return Err(SourceError::MissingArtifact { path, by: SUMS.to_owned() });
    }
    resolved(path, Some(expected), by, stall)
}

/// Takes the artifact at `path`, given by `--file`.
///
/// # Errors
/// [`SourceError`]; never "no such version".
pub fn resolve_file(adapter: &Adapter, path: &Path) -> Result<Resolved, SourceError> {
    let stall = adapter.timeouts.stall;
    if !exists(path, stall)? {
        return Err(SourceError::MissingArtifact { path: path.to_owned(), by: "--file".to_owned() });
    }
    match trusted_sum(adapter, path) {
        Ok((expected, by)) => resolved(path.to_owned(), Some(expected), by, stall),
        Err(SourceError::MissingSums { .. }) if adapter.source.unsigned => {
            resolved(path.to_owned(), None, "unsigned, without a sum".to_owned(), stall)
        }
        Err(e) => Err(e),
    }
}

/// The sum that the list beside `artifact` states for it, and who signed the list.
fn trusted_sum(adapter: &Adapter, artifact: &Path) -> Result<(Digest, String), SourceError> {
    let stall = adapter.timeouts.stall;
    let name = name_of(artifact)?;
    let path = artifact.with_file_name(SUMS);
    let list =
        read(&path, SUMS_MAX, stall)?.ok_or_else(|| SourceError::MissingSums { path: path.clone() })?;
    let by = if adapter.source.unsigned {
        "unsigned".to_owned()
    } else {
        let path = artifact.with_file_name(format!("{SUMS}{SIGNATURE_SUFFIX}"));
        let signature = read(&path, SIGNATURE_MAX, stall)?;
        let signature = signature.ok_or_else(|| SourceError::MissingSignature { path: path.clone() })?;
        match sums::verify(&adapter.source.keys, &list, &signature) {
            Ok(key) => format!("signed by {key}"),
            Err(source) => return Err(SourceError::Signature { path, source }),
        }
    };
    let sums = sums::parse(&list).map_err(|source| SourceError::Sums { path: path.clone(), source })?;
    match sums.get(&name) {
        Some(digest) => Ok((*digest, by)),
        None => Err(SourceError::Unlisted { path, name }),
    }
}

fn resolved(
    path: PathBuf,
    expected: Option<Digest>,
    by: String,
    stall: Duration,
) -> Result<Resolved, SourceError> {
    let about = feed::describe(&path, stall)?;
    if !about.is_file() {
        return Err(FeedError::NotAFile { path }.into());
    }
    if about.len() == 0 {
        return Err(SourceError::EmptyArtifact { path });
    }
    let provenance = format!("{}, {by}", path.display());
    Ok(Resolved { name: name_of(&path)?, size: about.len(), path, expected, provenance })
}

fn name_of(path: &Path) -> Result<String, SourceError> {
    let name = path.file_name().and_then(|name| name.to_str());
    name.map(str::to_owned).ok_or_else(|| SourceError::Name { path: path.to_owned() })
}

fn read(path: &Path, most: u64, stall: Duration) -> Result<Option<Vec<u8>>, SourceError> {
    match feed::read_small(path, most, stall) {
        Ok(Some(bytes)) => Ok(Some(bytes)),
        Ok(None) => Err(SourceError::TooLarge { path: path.to_owned(), most }),
        Err(e) if is_missing(&e) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

fn exists(path: &Path, stall: Duration) -> Result<bool, SourceError> {
    match feed::describe(path, stall) {
        Ok(_) => Ok(true),
        Err(e) if is_missing(&e) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

fn is_missing(error: &FeedError) -> bool {
    matches!(error, FeedError::Open { source, .. }
        if matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory))
}
