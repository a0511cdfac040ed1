#!/bin/bash
# Runs all tests, on a throw-away systemd machine, from a fresh clone on Debian 12 or later, as root.
#
#   tests/run.sh               formatting, lints, documentation, unit and integration tests
#   tests/run.sh FILTER…       only the tests whose names contain one of them: tests/run.sh upgrade
#
#   CUTOVER_TEST_THREADS=N     how many tests at once (default 4: they mostly wait)
#   CUTOVER_TEST_STORAGE=FS    the file system at /var/lib/cutover in the machine: ext4 (default), xfs, btrfs
#
# The last lines are those of cargo-nextest, or of cargo test where that is not installed. The host is left as it was,
# but for the packages that were absent.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tests/machine/packages.sh

say() { printf '\n== %s\n' "$*"; }

threads=${CUTOVER_TEST_THREADS:-4}
storage=${CUTOVER_TEST_STORAGE:-ext4}
target=${CARGO_TARGET_DIR:-target}
export CARGO_TERM_COLOR=${CARGO_TERM_COLOR:-never}

need_machine shellcheck:shellcheck

if (($# == 0)); then
    say "formatting, lints, documentation"
    shellcheck --external-sources tests/run.sh tests/machine/*.sh packaging/try.sh .ci/run
    cargo fmt --check
    cargo clippy --all-targets --quiet -- -D warnings
    cargo clippy --all-targets --quiet --features failpoints -- -D warnings
    RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --quiet
    say "manual and completions"
    cargo run --quiet --example generate -- --check
fi

say "building"
# One target directory: what the two differ in is this crate alone.
cargo build --quiet --bins --features failpoints
cp "$target/debug/cutover" "$target/cutover-failpoints"
cargo build --quiet --bins --examples

if cargo nextest --version >/dev/null 2>&1; then
    runner=(cargo nextest run --lib --bins --tests --test-threads "$threads" "$@")
    cargo nextest run --lib --bins --tests --no-run --cargo-quiet
else
    # cargo test takes one filter.
    runner=(cargo test --lib --bins --tests --no-fail-fast "${1:-}" -- --test-threads "$threads")
    cargo test --lib --bins --tests --no-run --quiet
fi

say "testing on a machine with $storage"
# shellcheck disable=SC2016 # expanded inside
exec tests/machine/boot.sh run --storage "$storage" --size 6G -- \
    bash -euc 'tests/machine/install.sh "$CUTOVER_TEST_MACHINE" && exec "$@"' run "${runner[@]}"
