//! Archives good, damaged and hostile. Whatever is in them, nothing outside the tree changes.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use tar::{EntryType, Header};

use super::*;
use crate::adapter::Limits;
use crate::durable::{Disk as _, RealDisk};
use crate::release::{Digest, Entry};

const LIMITS: Limits = Limits { bytes: 10_000_000, files: 2000, depth: 8 };

/// One raw member: name, type, mode, link target, data.
type Raw<'a> = (&'a [u8], EntryType, u32, &'a [u8], &'a [u8]);

const FILE: EntryType = EntryType::Regular;
const DIR: EntryType = EntryType::Directory;
const LINK: EntryType = EntryType::Symlink;

fn header(&(name, kind, mode, link, data): &Raw<'_>) -> Header {
    let mut header = Header::new_gnu();
    // Written as bytes: the crate's own functions would refuse most of what these tests need.
    let old = header.as_old_mut();
    old.name[..name.len()].copy_from_slice(name);
    old.linkname[..link.len()].copy_from_slice(link);
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(data.len() as u64);
    header.set_uid(1000);
    header.set_gid(1000);
    header.set_cksum();
    header
}

/// A tar archive without its end marker.
fn members(raw: &[Raw<'_>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for member in raw {
        bytes.extend_from_slice(header(member).as_bytes());
        bytes.extend_from_slice(member.4);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
    }
    bytes
}

fn tar(raw: &[Raw<'_>]) -> Vec<u8> {
    let mut bytes = members(raw);
    bytes.resize(bytes.len() + 1024, 0);
    bytes
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}

struct Unpacked {
    dir: tempfile::TempDir,
    result: Result<BTreeMap<String, Entry>, ArchiveError>,
    digest: Digest,
}

impl Unpacked {
    fn error(&self) -> &ArchiveError {
        self.result.as_ref().expect_err("it was accepted")
    }

    fn entries(&self) -> &BTreeMap<String, Entry> {
        self.result.as_ref().unwrap_or_else(|e| panic!("{e}"))
    }
}

/// Unpacks an artifact of this name and content.
#[expect(clippy::disallowed_methods, reason = "a test's artifact")]
fn unpack_with(name: &str, bytes: &[u8], limits: Limits, strip: u32) -> Unpacked {
    let dir = tempfile::tempdir().unwrap();
    let artifact = dir.path().join(name);
    std::fs::write(&artifact, bytes).unwrap();
    let disk = RealDisk::open(dir.path()).unwrap();
    for made in ["state", "state/tree"] {
        disk.mkdir("test", made, 0o755).unwrap();
    }
    let mut silent = |_, _| {};
    let mut feed = Feed::open(&artifact, Duration::from_secs(10), &mut silent).unwrap();
    let mut tree = Tree::new(&disk, "state/tree", limits, strip);
    let result = Kind::of(name)
        .and_then(|kind| unpack(kind, &mut feed, &mut tree, Some("bin/demo")))
        .and_then(|()| tree.finish().map_err(ArchiveError::Tree));
    let digest = feed.finish().unwrap();
    // Whatever it was: nothing is beside the tree.
    assert_eq!(disk.list("state").unwrap(), ["tree"]);
    assert_eq!(disk.list("").unwrap().len(), 2);
    Unpacked { dir, result, digest }
}

fn unpack_tar(raw: &[Raw<'_>]) -> Unpacked {
    unpack_with("demo.tar", &tar(raw), LIMITS, 0)
}

fn good() -> Vec<Raw<'static>> {
    vec![
        (b"./", DIR, 0o755, b"", b""),
        (b"./bin/", DIR, 0o755, b"", b""),
        (b"./bin/demo", FILE, 0o755, b"", b"#!/bin/sh\n"),
        (b"./bin/d", LINK, 0o777, b"../bin/demo", b""),
        (b"./etc/x/conf", FILE, 0o664, b"", b"a=1\n"),
        (b"./empty", FILE, 0o600, b"", b""),
    ]
}

fn good_entries() -> BTreeMap<String, Entry> {
    let file = |mode, bytes: &[u8]| Entry::File { mode, size: bytes.len() as u64, sha256: Digest::of(bytes) };
    [
        ("bin", Entry::Dir { mode: 0o755 }),
        ("bin/demo", file(0o755, b"#!/bin/sh\n")),
        ("bin/d", Entry::Link { target: "../bin/demo".to_owned() }),
        ("etc", Entry::Dir { mode: 0o755 }),
        ("etc/x", Entry::Dir { mode: 0o755 }),
        // Group's right to write is dropped.
        ("etc/x/conf", file(0o644, b"a=1\n")),
        ("empty", file(0o600, b"")),
    ]
    .map(|(path, entry)| (path.to_owned(), entry))
    .into()
}

#[test]
fn each_kind_unpacks_to_the_same_entries_and_hashes_all_its_bytes() {
    // K38.
    let plain = tar(&good());
    for (name, bytes) in [
        ("demo.tar", plain.clone()),
        ("demo.tar.gz", gzip(&plain)),
        ("demo.tgz", gzip(&plain)),
        ("demo.tar.zst", zstd(&plain)),
        ("demo.tzst", zstd(&plain)),
    ] {
        let unpacked = unpack_with(name, &bytes, LIMITS, 0);
        assert_eq!(*unpacked.entries(), good_entries(), "{name}");
        assert_eq!(unpacked.digest, Digest::of(&bytes), "{name}");
        let tree = unpacked.dir.path().join("state/tree");
        assert_eq!(std::fs::read(tree.join("bin/d")).unwrap(), b"#!/bin/sh\n");
        assert_eq!(std::fs::read(tree.join("etc/x/conf")).unwrap(), b"a=1\n");
    }
}

#[test]
fn a_single_executable_gets_the_adapters_name() {
    for bytes in [&b"#!/bin/sh\n"[..], b"\x7fELF\x02\x01\x01and so on"] {
        let unpacked = unpack_with("demo-2.0", bytes, LIMITS, 0);
        let entry = Entry::File { mode: 0o755, size: bytes.len() as u64, sha256: Digest::of(bytes) };
        let entries = [("bin", Entry::Dir { mode: 0o755 }), ("bin/demo", entry)];
        assert_eq!(*unpacked.entries(), entries.map(|(p, e)| (p.to_owned(), e)).into());
        assert_eq!(unpacked.digest, Digest::of(bytes));
    }
}

#[test]
fn bytes_behind_the_end_are_hashed_as_well() {
    let mut bytes = tar(&good());
    bytes.extend_from_slice(&[7; 1_000_000]);
    let unpacked = unpack_with("demo.tar", &bytes, LIMITS, 0);
    assert_eq!(*unpacked.entries(), good_entries());
    assert_eq!(unpacked.digest, Digest::of(&bytes));
}

#[test]
fn leading_directories_fall_away_but_no_file_does() {
    let raw: Vec<Raw<'_>> = vec![(b"demo-1/", DIR, 0o755, b"", b""), (b"demo-1/a/b", FILE, 0o644, b"", b"x")];
    let strip = |n| unpack_with("demo.tar", &tar(&raw), LIMITS, n);
    let paths = |u: &Unpacked| u.entries().keys().cloned().collect::<Vec<_>>();
    assert_eq!(paths(&strip(0)), ["demo-1", "demo-1/a", "demo-1/a/b"]);
    assert_eq!(paths(&strip(1)), ["a", "a/b"]);
    assert_eq!(paths(&strip(2)), ["b"]);
    assert!(matches!(strip(3).error(), ArchiveError::Tree(TreeError::Stripped { strip: 3, .. })));
}

#[test]
fn what_a_release_must_not_hold_is_refused_by_name() {
    fn is(unpacked: &Unpacked, what: fn(&TreeError) -> bool) -> bool {
        matches!(unpacked.error(), ArchiveError::Tree(e) if what(e))
    }
    type Row = (&'static str, Vec<Raw<'static>>, fn(&TreeError) -> bool);
    let file = |name: &'static [u8]| -> Raw<'static> { (name, FILE, 0o644, b"", b"x") };
    let link = |name: &'static [u8], to: &'static [u8]| -> Raw<'static> { (name, LINK, 0o777, to, b"") };
    let name: fn(&TreeError) -> bool = |e| matches!(e, TreeError::Name { .. });
    let escapes: fn(&TreeError) -> bool = |e| matches!(e, TreeError::Escapes { .. });
    let through: fn(&TreeError) -> bool = |e| matches!(e, TreeError::Through { .. });
    let twice: fn(&TreeError) -> bool = |e| matches!(e, TreeError::Twice { .. });
    let kind: fn(&TreeError) -> bool = |e| matches!(e, TreeError::Kind { .. });
    let special: fn(&TreeError) -> bool = |e| matches!(e, TreeError::SpecialBits { .. });
    let rows: Vec<Row> = vec![
        ("absolute", vec![file(b"/etc/passwd")], name),
        ("dot dot", vec![file(b"../x")], name),
        ("inner dot dot", vec![file(b"a/../../x")], name),
        ("harmless dot dot", vec![file(b"a/../x")], name),
        ("dot dot directory", vec![("a/..".as_bytes(), DIR, 0o755, b"", b"")], name),
        ("not UTF-8", vec![file(b"a\xff")], name),
        ("new line", vec![file(b"a\nf 0644 0 x")], name),
        ("escape sequence", vec![file(b"a\x1b[2J")], name),
        ("control character in a target", vec![link(b"l", b"a\nb")], name),
        ("absolute link", vec![link(b"l", b"/etc")], escapes),
        ("link upwards", vec![link(b"l", b"..")], escapes),
        ("link far upwards", vec![link(b"a/l", b"../../x")], escapes),
        ("link there and back", vec![link(b"l", b"a/../..")], escapes),
        ("link without a target", vec![link(b"l", b"")], escapes),
        ("links that leave together", vec![link(b"x/y/z", b"../.."), link(b"w", b"x/y/z/../..")], escapes),
        ("the same, later one first", vec![link(b"w", b"x/y/z/../.."), link(b"x/y/z", b"../..")], escapes),
        ("through a link", vec![link(b"l", b"d"), file(b"l/x")], through),
        ("a directory through a link", vec![link(b"l", b"d"), (b"l/x", DIR, 0o755, b"", b"")], through),
        ("a link through a link", vec![link(b"l", b"d"), link(b"l/x", b"y")], through),
        ("below a file", vec![file(b"f"), file(b"f/x")], through),
        ("a file twice", vec![file(b"f"), file(b"f")], twice),
        ("a file twice by another name", vec![file(b"a/f"), file(b".//a/./f")], twice),
        ("a file for a link", vec![link(b"l", b"x"), file(b"l")], twice),
        ("a link for a file", vec![file(b"l"), link(b"l", b"x")], twice),
        ("a file for an implied directory", vec![file(b"d/f"), file(b"d")], twice),
        ("a directory for a link", vec![link(b"l", b"x"), (b"l", DIR, 0o755, b"", b"")], twice),
        ("a directory twice", vec![(b"d", DIR, 0o755, b"", b""), (b"d", DIR, 0o700, b"", b"")], twice),
        ("a late directory", vec![file(b"d/f"), (b"d", DIR, 0o700, b"", b"")], |e| {
            matches!(e, TreeError::LateDirectory { mode: 0o700, .. })
        }),
        ("hard link", vec![file(b"f"), (b"h", EntryType::Link, 0o644, b"f", b"")], kind),
        ("hard link out", vec![(b"h", EntryType::Link, 0o644, b"/etc/passwd", b"")], kind),
        ("character device", vec![(b"c", EntryType::Char, 0o644, b"", b"")], kind),
        ("block device", vec![(b"b", EntryType::Block, 0o644, b"", b"")], kind),
        ("pipe", vec![(b"p", EntryType::Fifo, 0o644, b"", b"")], kind),
        ("sparse", vec![(b"s", EntryType::GNUSparse, 0o644, b"", b"")], kind),
        ("unknown type", vec![(b"u", EntryType::new(b'Z'), 0o644, b"", b"")], kind),
        ("set-user-id", vec![(b"s", FILE, 0o4755, b"", b"")], special),
        ("set-group-id", vec![(b"s", FILE, 0o2755, b"", b"")], special),
        ("sticky directory", vec![(b"d", DIR, 0o1777, b"", b"")], special),
        ("nothing", vec![(b"d", DIR, 0o755, b"", b"")], |e| matches!(e, TreeError::Empty)),
    ];
    for (what, raw, expected) in rows {
        let unpacked = unpack_tar(&raw);
        assert!(is(&unpacked, expected), "{what}: {:?}", unpacked.result);
    }
}

#[test]
fn the_limits_of_the_adapter_hold() {
    let limited = |raw: &[Raw<'_>], limits| unpack_with("demo.tar", &tar(raw), limits, 0);
    let limit = |u: &Unpacked| match u.error() {
        ArchiveError::Tree(TreeError::Limit { limit, .. }) => *limit,
        other => panic!("{other}"),
    };
    let file = |name: &'static [u8], data: &'static [u8]| -> Raw<'static> { (name, FILE, 0o644, b"", data) };
    let limits = Limits { bytes: 10, ..LIMITS };
    assert!(limited(&[file(b"a", b"12345"), file(b"b", b"12345")], limits).result.is_ok());
    assert_eq!(limit(&limited(&[file(b"a", b"12345"), file(b"b", b"123456")], limits)), "bytes");
    let limits = Limits { files: 3, ..LIMITS };
    assert!(limited(&[file(b"d/e/a", b"")], limits).result.is_ok());
    assert_eq!(limit(&limited(&[file(b"d/e/a", b""), file(b"b", b"")], limits)), "files");
    assert_eq!(limit(&limited(&[file(b"d/e/f/a", b"")], limits)), "files");
    let limits = Limits { depth: 2, ..LIMITS };
    assert!(limited(&[file(b"d/e/a", b"")], limits).result.is_ok());
    assert_eq!(limit(&limited(&[file(b"d/e/f/a", b"")], limits)), "depth");
    // A size that no archive can have.
    let mut header = header(&(b"a", FILE, 0o644, b"", b""));
    header.set_size(u64::MAX);
    header.set_cksum();
    let unpacked = unpack_with("demo.tar", header.as_bytes(), LIMITS, 0);
    assert_eq!(limit(&unpacked), "bytes");
    // Bytes that belong to no file count as well: a bomb behind the end, or of headers.
    let mut bomb = tar(&good());
    bomb.resize(40_000_000, 0);
    for (name, bytes) in [("demo.tar.gz", gzip(&bomb)), ("demo.tar.zst", zstd(&bomb))] {
        let unpacked = unpack_with(name, &bytes, LIMITS, 0);
        assert!(matches!(unpacked.error(), ArchiveError::Tar(TarError::TooLong(_))), "{:?}", unpacked.result);
    }
}

#[test]
fn an_archive_that_is_cut_off_anywhere_is_refused_as_such() {
    // A04, A07 (b).
    let plain = tar(&good());
    let ends: Vec<usize> =
        (513..plain.len()).step_by(101).chain([plain.len() - 1, plain.len() - 512]).collect();
    for end in ends {
        let unpacked = unpack_with("demo.tar", &plain[..end], LIMITS, 0);
        let cut = matches!(
            unpacked.error(),
            ArchiveError::Tar(TarError::Truncated { .. }) | ArchiveError::Tree(TreeError::Short { .. })
        );
        assert!(cut, "{end}: {:?}", unpacked.result);
    }
    for (name, bytes) in [("demo.tar.gz", gzip(&plain)), ("demo.tar.zst", zstd(&plain))] {
        for end in 4..bytes.len() {
            let unpacked = unpack_with(name, &bytes[..end], LIMITS, 0);
            assert!(
                matches!(unpacked.error(), ArchiveError::Truncated),
                "{name} {end}: {:?}",
                unpacked.result
            );
        }
    }
}

#[test]
fn a_damaged_archive_never_unpacks_to_something_else() {
    let plain = tar(&good());
    for (name, bytes) in [("demo.tar.gz", gzip(&plain)), ("demo.tar.zst", zstd_with_checksum(&plain))] {
        for at in 0..bytes.len() {
            let mut bent = bytes.clone();
            bent[at] ^= 0x10;
            // Some bits mean nothing, such as the time in a gzip header.
            if let Ok(entries) = unpack_with(name, &bent, LIMITS, 0).result {
                assert_eq!(entries, good_entries(), "{name} byte {at}");
            }
        }
    }
    // The size is right and the last half is zeros.
    for (name, bytes) in [("demo.tar.gz", gzip(&plain)), ("demo.tar.zst", zstd(&plain)), ("demo.tar", plain)]
    {
        let mut zeroed = bytes.clone();
        zeroed[bytes.len() / 2..].fill(0);
        let unpacked = unpack_with(name, &zeroed, LIMITS, 0);
        if name != "demo.tar" {
            unpacked.error();
        }
        assert_ne!(unpacked.digest, Digest::of(&bytes), "{name}");
    }
}

fn zstd_with_checksum(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
    encoder.include_checksum(true).unwrap();
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn content_and_name_must_agree() {
    // A07 (c): an error page under the archive's name.
    let plain = tar(&good());
    let page = b"<!DOCTYPE html><html><body>404 Not Found</body></html>".repeat(20);
    for name in ["demo", "demo.tar", "demo.tar.gz", "demo.tar.zst"] {
        let unpacked = unpack_with(name, &page, LIMITS, 0);
        assert!(
            matches!(unpacked.error(), ArchiveError::WrongKind { found: "a web page", .. }),
            "{name}: {:?}",
            unpacked.result
        );
        assert!(matches!(unpack_with(name, b"", LIMITS, 0).error(), ArchiveError::Empty));
        assert!(matches!(unpack_with(name, b"x", LIMITS, 0).error(), ArchiveError::WrongKind { .. }));
        let zeros = unpack_with(name, &[0; 4096], LIMITS, 0);
        assert!(matches!(zeros.error(), ArchiveError::WrongKind { found: "zeros", .. }), "{name}");
    }
    for (name, bytes) in [("demo", &gzip(&plain)), ("demo.tar.zst", &gzip(&plain)), ("demo.tar.gz", &plain)] {
        let unpacked = unpack_with(name, bytes, LIMITS, 0);
        assert!(matches!(unpacked.error(), ArchiveError::WrongKind { .. }), "{name}");
    }
    for name in ["demo.zip", "demo.tar.xz", "demo.gz"] {
        assert!(matches!(Kind::of(name), Err(ArchiveError::Unsupported { .. })), "{name}");
    }
}

#[test]
fn zstd_windows_above_8_mib_are_refused_by_name() {
    let plain = tar(&good());
    for (log, fits) in [(23, true), (24, false), (27, false)] {
        let mut encoder = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
        encoder.window_log(log).unwrap();
        encoder.write_all(&plain).unwrap();
        let bytes = encoder.finish().unwrap();
        let unpacked = unpack_with("demo.tar.zst", &bytes, LIMITS, 0);
        match unpacked.result {
            Ok(_) => assert!(fits, "2^{log}"),
            Err(ArchiveError::Window) => assert!(!fits, "2^{log}"),
            Err(e) => panic!("2^{log}: {e}"),
        }
    }
}

#[test]
fn long_names_are_read_from_gnu_and_pax_headers() {
    let long = format!("d/{}", "n".repeat(200));
    let record = |key: &str, value: &str| {
        let body = format!(" {key}={value}\n");
        let mut len = body.len() + 1;
        while len != body.len() + len.to_string().len() {
            len = body.len() + len.to_string().len();
        }
        format!("{len}{body}")
    };
    let gnu = format!("{long}\0");
    let pax = record("path", &long) + &record("mtime", "1.5") + &record("SCHILY.xattr.user.x", "1");
    let comment = record("comment", "git");
    let any = |name, kind, data| -> Raw<'_> { (name, kind, 0o644, b"", data) };
    for raw in [
        vec![any(b"././@LongLink", EntryType::GNULongName, gnu.as_bytes()), any(b"short", FILE, b"x")],
        vec![
            any(b"g", EntryType::XGlobalHeader, comment.as_bytes()),
            any(b"p", EntryType::XHeader, pax.as_bytes()),
            any(b"short", FILE, b"x"),
        ],
    ] {
        let unpacked = unpack_tar(&raw);
        assert_eq!(unpacked.entries().keys().collect::<Vec<_>>(), ["d", long.as_str()]);
    }
    // What readers understand in different ways is refused, and so are names without a member.
    let (path, size) = (record("path", "x"), record("size", "99999999999999999999999"));
    let sparse = record("GNU.sparse.major", "1");
    for raw in [
        vec![any(b"g", EntryType::XGlobalHeader, path.as_bytes()), any(b"f", FILE, b"")],
        vec![any(b"p", EntryType::XHeader, size.as_bytes()), any(b"f", FILE, b"")],
        vec![any(b"p", EntryType::XHeader, b"no pax header"), any(b"f", FILE, b"")],
        vec![any(b"p", EntryType::XHeader, sparse.as_bytes()), any(b"f", FILE, b"")],
        vec![
            any(b"p", EntryType::XHeader, path.as_bytes()),
            any(b"l", EntryType::GNULongName, b"y"),
            any(b"f", FILE, b""),
        ],
        vec![any(b"f", FILE, b""), any(b"l", EntryType::GNULongName, b"y")],
        vec![any(b"d", DIR, b"data")],
    ] {
        unpack_tar(&raw).error();
    }
    // A name of a gigabyte is not read into memory.
    let mut huge = header(&(b"l", EntryType::GNULongName, 0o644, b"", b""));
    huge.set_size(1 << 30);
    huge.set_cksum();
    let unpacked = unpack_with("demo.tar", huge.as_bytes(), LIMITS, 0);
    assert!(matches!(unpacked.error(), ArchiveError::Tar(TarError::Malformed { .. })));
}

#[test]
fn members_behind_an_empty_block_are_not_silently_lost() {
    let mut bytes = members(&good());
    bytes.resize(bytes.len() + 512, 0);
    bytes.extend_from_slice(&tar(&[(b"more", FILE, 0o644, b"", b"x")]));
    let unpacked = unpack_with("demo.tar", &bytes, LIMITS, 0);
    assert!(
        matches!(unpacked.error(), ArchiveError::Tar(TarError::Malformed { .. })),
        "{:?}",
        unpacked.result
    );
}

#[test]
fn what_tar_itself_writes_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let disk = RealDisk::open(dir.path()).unwrap();
    let put = |path: &str, bytes: &[u8]| {
        disk.create("test", path, 0o644).unwrap().write_at("test", 0, bytes).unwrap();
    };
    // Too long for a plain header, and what ustar can still split.
    let (sub, long) = ("d".repeat(60), "n".repeat(90));
    for made in ["in".to_owned(), format!("in/{sub}")] {
        disk.mkdir("test", &made, 0o755).unwrap();
    }
    put("in/a", &[5; 100_000]);
    put(&format!("in/{sub}/{long}"), b"x");
    disk.symlink("test", &sub, "in/l").unwrap();
    for format in ["gnu", "pax", "ustar"] {
        let out = dir.path().join("demo.tar");
        let status = std::process::Command::new("tar")
            .args([&format!("--format={format}"), "-cf"])
            .args([&out, Path::new("-C")])
            .arg(dir.path())
            .arg("in")
            .status();
        assert!(status.expect("tar is needed").success());
        let unpacked = unpack_with("demo.tar", &std::fs::read(&out).unwrap(), LIMITS, 1);
        let paths: Vec<_> = unpacked.entries().keys().cloned().collect();
        assert_eq!(paths, ["a", &sub, &format!("{sub}/{long}"), "l"], "{format}");
    }
}
