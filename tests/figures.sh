#!/bin/bash
# Measures the figures of docs/benchmarks.md on a throw-away machine: tests/figures.sh [PAIRS]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tests/machine/packages.sh
. tests/machine/packages.sh
need_machine strace:strace openssl:openssl

cargo build --quiet --release --bins --examples
export CUTOVER_TEST_PROFILE=release
# shellcheck disable=SC2016 # expanded inside
exec tests/machine/boot.sh run --storage "${CUTOVER_TEST_STORAGE:-ext4}" --size 6G -- \
    bash -euc 'tests/machine/install.sh "$CUTOVER_TEST_MACHINE" && exec "$@"' run \
    "${CARGO_TARGET_DIR:-target}/release/examples/figures" "$@"
