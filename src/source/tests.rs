//! Sources in every state of repair. The keys were made by minisign 0.11 for these tests alone.

use std::fs;
use std::path::Path;

use super::*;

/// The public key that signed.
pub(crate) const KEY: &str = "RWSCxVbRup5rApzNiH9Vz/wNUvs9isymdpI3s0IP53L27YBirJwyUxoN";
/// A key that signed nothing.
pub(crate) const OTHER_KEY: &str = "RWQ+loTtYrTbObBswpbbLIMxL/uk10Mhg+I0moimoJQxQ2Sr6/tv2nTP";
/// The artifact.
pub(crate) const ARTIFACT: &str = "#!/bin/sh\necho demo 2.0\n";
/// Its list of sums.
pub(crate) const SUMS: &str = "8099c715998b0c9a5744a4a79d6dbbad6b797b25a94c6897623208a7b20bfbe7  demo-2.0\n";
/// `minisign -S`, prehashed.
pub(crate) const SIGNATURE: &str = "untrusted comment: signature from minisign secret key
RUSCxVbRup5rAmszQj1W30OpqL/e9TSskMqNNf/LSKCHr51es4iF/SF8XImwNEaOzsE77UhZzIS1Vbsmfw6S2gV/DIY2PotNugc=
trusted comment: demo 2.0
Om2+XECW1J2NzJsiGo/tgfgscGF6nhEXvbT+AFVdNEIeMyjwcVnAxYqk4kFvHiNIIbzhnKT4ihRsLIsNz002Ag==
";
/// `minisign -S -l`, not prehashed.
pub(crate) const LEGACY_SIGNATURE: &str = "untrusted comment: signature from minisign secret key
RWSCxVbRup5rAkBMPIVC7yKqOqd9Tj0prJOIskmGdqexFXkJhUl04vx1i+o5XSDMqrTP5xCwzlyMgMJ3AgSwOO0LfvlZrQ1hYgs=
trusted comment: demo 2.0
odLrLVV71KDLu/n19o/nZsHxjxmNHGL5OOLsALo3Q82AZPwDEEl6uqdiKPedzpNuXlAL1Y5ReFtH1btzF9DaDA==
";

fn adapter(dir: &Path, trust: &str) -> Adapter {
    let text = format!(
        "unit = 'demo.service'\n[source]\npath = '{}'\nartifact = '{{version}}/demo-{{version}}'\nprogram = 'demo'\n{trust}\n[probe]\nkind = 'kernel'\n",
        dir.display()
    );
    Adapter::parse(Path::new("demo.toml"), "demo", &text).unwrap()
}

fn signed(dir: &Path) -> Adapter {
    adapter(dir, &format!("keys = ['{OTHER_KEY}', '{KEY}']"))
}

/// A source with version 2.0, whole and signed.
fn source() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    put(&dir, "demo-2.0", ARTIFACT);
    put(&dir, "SHA256SUMS", SUMS);
    put(&dir, "SHA256SUMS.minisig", SIGNATURE);
    dir
}

#[expect(clippy::disallowed_methods, reason = "a test's source")]
fn put(dir: &tempfile::TempDir, name: &str, text: &str) {
    fs::create_dir_all(dir.path().join("2.0")).unwrap();
    fs::write(dir.path().join("2.0").join(name), text).unwrap();
}

#[expect(clippy::disallowed_methods, reason = "a test's source")]
fn take(dir: &tempfile::TempDir, name: &str) {
    fs::remove_file(dir.path().join("2.0").join(name)).unwrap();
}

fn version(v: &str) -> Version {
    v.parse().unwrap()
}

#[test]
fn exactly_the_target_is_found_with_its_trusted_digest() {
    // K37.
    let dir = source();
    for signature in [SIGNATURE, LEGACY_SIGNATURE] {
        put(&dir, "SHA256SUMS.minisig", signature);
        let found = resolve(&signed(dir.path()), &version("2.0")).unwrap();
        assert_eq!(found.expected, Some(Digest::of(ARTIFACT.as_bytes())));
        assert_eq!(found.path, dir.path().join("2.0/demo-2.0"));
        assert_eq!((found.name.as_str(), found.size), ("demo-2.0", ARTIFACT.len() as u64));
        assert!(found.provenance.ends_with(&format!("signed by {KEY}")), "{}", found.provenance);
    }
    let by_file = resolve_file(&signed(dir.path()), &dir.path().join("2.0/demo-2.0")).unwrap();
    assert_eq!(by_file.expected, Some(Digest::of(ARTIFACT.as_bytes())));
}

#[test]
fn no_exact_version_is_held_and_nothing_else_is() {
    // K94: no exact version.
    let dir = source();
    for absent in ["2", "2.0.0", "2.1", "v2.0"] {
        let error = resolve(&signed(dir.path()), &version(absent)).unwrap_err();
        assert!(error.is_held(), "{absent}: {error}");
    }
    // A directory that has been made, and nothing was published in it yet.
    take(&dir, "demo-2.0");
    take(&dir, "SHA256SUMS");
    let error = resolve(&signed(dir.path()), &version("2.0")).unwrap_err();
    assert!(error.is_held(), "{error}");
    let error = resolve(&signed(Path::new("/nonexistent")), &version("2.0")).unwrap_err();
    assert!(matches!(error, SourceError::NoDirectory { .. }) && !error.is_held(), "{error}");
}

#[test]
fn each_fault_of_a_source_has_its_own_reason() {
    // A07, among others: empty lists and signatures count as missing ones.
    type Fault = (&'static str, Option<&'static str>, fn(&SourceError) -> bool);
    let faults: [Fault; 14] = [
        ("demo-2.0", None, |e| matches!(e, SourceError::MissingArtifact { .. })),
        ("demo-2.0", Some(""), |e| matches!(e, SourceError::EmptyArtifact { .. })),
        ("SHA256SUMS", None, |e| matches!(e, SourceError::MissingSums { .. })),
        // An unsigned list is not even read for its faults.
        ("SHA256SUMS", Some(""), |e| matches!(e, SourceError::Signature { source: SumsError::Tampered, .. })),
        ("SHA256SUMS", Some("<html>"), |e| matches!(e, SourceError::Signature { .. })),
        ("SHA256SUMS.minisig", None, |e| matches!(e, SourceError::MissingSignature { .. })),
        ("SHA256SUMS.minisig", Some(""), |e| {
            matches!(e, SourceError::Signature { source: SumsError::Empty, .. })
        }),
        ("SHA256SUMS.minisig", Some("<html>\n"), |e| {
            matches!(e, SourceError::Signature { source: SumsError::Signature, .. })
        }),
        ("SHA256SUMS", Some("#"), |e| matches!(e, SourceError::Signature { .. })),
        ("unsigned:SHA256SUMS", Some(""), |e| {
            matches!(e, SourceError::Sums { source: SumsError::Empty, .. })
        }),
        ("unsigned:SHA256SUMS", Some("<html>\n"), |e| {
            matches!(e, SourceError::Sums { source: SumsError::Line { line: 1 }, .. })
        }),
        (
            "unsigned:SHA256SUMS",
            Some("8099c715998b0c9a5744a4a79d6dbbad6b797b25a94c6897623208a7b20bfbe7  demo-2.1\n"),
            |e| matches!(e, SourceError::Unlisted { .. }),
        ),
        (
            "unsigned:SHA256SUMS",
            Some(
                "8099c715998b0c9a5744a4a79d6dbbad6b797b25a94c6897623208a7b20bfbe7  demo-2.0\n\
                 8099c715998b0c9a5744a4a79d6dbbad6b797b25a94c6897623208a7b20bfbe8 *demo-2.0\n",
            ),
            |e| matches!(e, SourceError::Sums { source: SumsError::Conflict { line: 2, .. }, .. }),
        ),
        ("unsigned:SHA256SUMS", None, |e| matches!(e, SourceError::MissingSums { .. })),
    ];
    for (name, text, is_it) in faults {
        let dir = source();
        let (adapter, name) = match name.strip_prefix("unsigned:") {
            Some(name) => (adapter(dir.path(), "unsigned = true"), name),
            None => (signed(dir.path()), name),
        };
        take(&dir, name);
        if let Some(text) = text {
            put(&dir, name, text);
        }
        let error = resolve(&adapter, &version("2.0")).unwrap_err();
        assert!(is_it(&error), "{name} = {text:?}: {error}");
        assert!(!error.is_held(), "{name} = {text:?}: {error}");
        assert!(error.to_string().contains(dir.path().to_str().unwrap()), "names no path: {error}");
    }
}

#[test]
fn a_signature_by_another_key_is_refused() {
    let dir = source();
    let other = adapter(dir.path(), &format!("keys = ['{OTHER_KEY}']"));
    let error = resolve(&other, &version("2.0")).unwrap_err();
    assert!(matches!(error, SourceError::Signature { source: SumsError::Key, .. }), "{error}");
}

#[test]
fn an_unsigned_file_needs_no_sums_but_obeys_those_that_are_there() {
    let dir = source();
    let unsigned = adapter(dir.path(), "unsigned = true");
    let path = dir.path().join("2.0/demo-2.0");
    assert!(resolve_file(&unsigned, &path).unwrap().expected.is_some());
    put(&dir, "SHA256SUMS", "");
    assert!(resolve_file(&unsigned, &path).is_err());
    take(&dir, "SHA256SUMS");
    assert_eq!(resolve_file(&unsigned, &path).unwrap().expected, None);
    // With keys, the list and its signature are required for --file as well.
    let error = resolve_file(&signed(dir.path()), &path).unwrap_err();
    assert!(matches!(error, SourceError::MissingSums { .. }), "{error}");
    let error = resolve_file(&unsigned, &dir.path().join("2.0/gone")).unwrap_err();
    assert!(matches!(error, SourceError::MissingArtifact { .. }) && !error.is_held(), "{error}");
}

#[test]
fn what_is_no_regular_file_is_refused_without_opening_it() {
    let dir = source();
    take(&dir, "demo-2.0");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        dir.path().join("2.0/demo-2.0"),
        rustix::fs::FileType::Fifo,
        0o644.into(),
        0,
    )
    .unwrap();
    let error = resolve(&signed(dir.path()), &version("2.0")).unwrap_err();
    assert!(matches!(error, SourceError::Read(FeedError::NotAFile { .. })), "{error}");
}

#[test]
fn a_list_of_endless_length_is_not_read() {
    let dir = source();
    put(&dir, "SHA256SUMS", &SUMS.repeat(20_000));
    let error = resolve(&signed(dir.path()), &version("2.0")).unwrap_err();
    assert!(matches!(error, SourceError::TooLarge { .. }), "{error}");
}
