#!/bin/bash
# Puts what was built into a machine: install.sh DIR
#
#   target/PROFILE/cutover          /usr/bin/cutover        (PROFILE: CUTOVER_TEST_PROFILE, default debug)
#   target/cutover-failpoints       /usr/lib/cutover-tests/cutover-failpoints   (if it was built: tests/run.sh does)
#   target/PROFILE/examples/demo     /usr/lib/cutover-tests/demo
set -euo pipefail

dir=${1:?"install.sh needs the directory of a machine, see boot.sh"}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
target=${CARGO_TARGET_DIR:-target}
profile=${CUTOVER_TEST_PROFILE:-debug}
root=/proc/$(<"$dir/pid")/root

# By rename: what is there may be running.
put() {
    [[ -e $1 ]] || { echo "install.sh: $1: not built; run cargo build --bins --examples first" >&2; exit 1; }
    mkdir -p "$root${2%/*}"
    cp "$1" "$root$2.new"
    chmod 755 "$root$2.new"
    [[ $# -lt 3 ]] || "$3" --strip-unneeded "$root$2.new"
    mv "$root$2.new" "$root$2"
}

# Each operation copies the executable that it runs as.
put "$target/$profile/cutover" /usr/bin/cutover strip
# Each release of each test is a copy of it: small ones.
put "$target/$profile/examples/demo" /usr/lib/cutover-tests/demo strip
if [[ -e $target/cutover-failpoints ]]; then
    put "$target/cutover-failpoints" /usr/lib/cutover-tests/cutover-failpoints strip
fi
