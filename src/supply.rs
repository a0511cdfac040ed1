//! The adapter's source of releases, as the transaction asks it.

use std::path::PathBuf;

use crate::adapter::Adapter;
use crate::release::{Manifest, Release, Version};
use crate::source::{self, Resolved, SourceError};
use crate::stage;
use crate::store::Store;
use crate::transaction::{Artifact, Source, SourceFailure};
use crate::watch::Watch;

/// Releases from the adapter's directory, or from one file given by hand.
pub struct Supply<'a> {
    adapter: &'a Adapter,
    file: Option<PathBuf>,
    resolved: Option<Resolved>,
}

impl<'a> Supply<'a> {
    /// From `file`, or from the adapter's directory without one.
    #[must_use]
    pub fn new(adapter: &'a Adapter, file: Option<PathBuf>) -> Self {
        Self { adapter, file, resolved: None }
    }
}

impl Source for Supply<'_> {
    fn resolve(&mut self, version: &Version) -> Result<Artifact, SourceFailure> {
        let found = match &self.file {
            Some(path) => source::resolve_file(self.adapter, path),
            None => source::resolve(self.adapter, version),
        };
        let resolved = found.map_err(|e: SourceError| {
            let why = e.to_string();
            if e.is_held() { SourceFailure::NoSuchVersion(why) } else { SourceFailure::Unusable(why) }
        })?;
        let artifact = Artifact { sha256: resolved.expected, provenance: resolved.provenance.clone() };
        self.resolved = Some(resolved);
        Ok(artifact)
    }

    fn stage(
        &mut self,
        store: &Store,
        version: &Version,
        carry: Option<&Release>,
        watch: &dyn Watch,
    ) -> Result<Manifest, SourceFailure> {
        let unusable = |why: &dyn std::fmt::Display| SourceFailure::Unusable(why.to_string());
        let resolved = self.resolved.take().ok_or_else(|| unusable(&"nothing was resolved"))?;
        stage::one_file_system(store.disk()).map_err(|e| unusable(&e))?;
        let mut progress = |done, total| watch.progress("staging", done, total);
        stage::stage(store.disk(), self.adapter, &resolved, version, carry, &mut progress)
            .map_err(|e| unusable(&e))
    }
}
