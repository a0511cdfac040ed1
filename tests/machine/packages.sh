# shellcheck shell=bash
# Sourced by tests/run.sh and packaging/try.sh, which say what they do by `say`: installs what is absent.

stop() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# need FILE:PACKAGE…, where FILE is a command, or a path.
need() {
    local pair missing=() log
    for pair in "$@"; do
        type -P "${pair%%:*}" >/dev/null || [[ -e ${pair%%:*} ]] || missing+=("${pair#*:}")
    done
    ((${#missing[@]})) || return 0
    mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
    type -P apt-get >/dev/null || stop "not installed: ${missing[*]}; there is no apt-get here: install them by hand"
    say "installing what is absent: ${missing[*]}"
    log=$(mktemp)
    if ! { apt-get -q update && apt-get -q install -y --no-install-recommends "${missing[@]}"; } \
        </dev/null >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        stop "apt-get could not install ${missing[*]}; what it said is above"
    fi
    rm -f "$log"
}

# What building, a machine, and a service in it need; and what is named.
need_machine() {
    ((EUID == 0)) || stop "must run as root, since it boots a systemd machine; try: sudo -E $0"
    type -P cargo >/dev/null || stop "cargo is not on PATH; install a Rust toolchain, 1.89 or later: https://rustup.rs"
    export DEBIAN_FRONTEND=noninteractive
    need cc:gcc /usr/include/stdio.h:libc6-dev strip:binutils systemd-nspawn:systemd-container systemctl:systemd \
        dbus-daemon:dbus mkfs.ext4:e2fsprogs nsenter:util-linux setpriv:util-linux findmnt:util-linux mount:mount \
        losetup:mount ps:procps /usr/bin/python3:python3 "$@"
}
