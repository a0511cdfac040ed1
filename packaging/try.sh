#!/bin/bash
# cutover at work, in a few minutes: builds it, boots a throw-away systemd machine over this host (which is left
# untouched), and upgrades a real service in it, NATS, from the version in one Debian release to that in the next.
# Then a bad release is rolled back by itself, and an operation whose worker is killed is settled.
#
# For Debian 12 or later, as root, with a Rust toolchain; systemd need not be running. Packages that are absent are
# installed. Ends with 0 when everything went as told.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tests/machine/packages.sh

target=${CARGO_TARGET_DIR:-target}
cache=tests/.cache/nats

say() { printf '\n\e[1m%s\e[0m\n' "$*"; }
[[ -t 1 ]] || say() { printf '\n%s\n' "$*"; }
tell() { printf '%s\n' "$*"; }

# --- on the host --------------------------------------------------------------------------------------------------

# NATS as two Debian releases have it: a single program that tells its version over HTTP. From the mirror that apt uses
# here, with lists of our own, so that the host's apt sees nothing of it.
fetch() {
    [[ -e $cache/old.deb && -e $cache/new.deb ]] && return
    local mirror key=/usr/share/keyrings/debian-archive-keyring.gpg suite work found=()
    work=$(mktemp -d)
    # shellcheck disable=SC2064 # now
    trap "rm -rf '$work'" EXIT
    # shellcheck disable=SC2016 # apt's own names
    mirrors() { apt-get indextargets --format '$(REPO_URI) $(LABEL)' 'Identifier: Packages' | sed -n 's/ Debian$//p'; }
    mirror=$(mirrors | head -n 1)
    if [[ -z $mirror ]]; then
        apt-get -q update </dev/null >"$work/log" 2>&1 || stop "apt-get update failed: $(tail -n 3 "$work/log")"
        mirror=$(mirrors | head -n 1)
    fi
    [[ -n $mirror ]] || stop "/etc/apt names no Debian mirror, from which NATS would come; add one to its sources"
    mkdir -p "$work"/{lists,archives}/partial "$cache"
    for suite in bookworm trixie forky sid; do
        local apt=(-o "Dir::Etc::sourcelist=$work/$suite.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$work/lists"
            -o "Dir::Cache=$work" -o Dir::State::status=/dev/null -o Acquire::Languages=none
            -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false -o APT::Sandbox::User=root)
        echo "deb ${key:+$([[ -e $key ]] && echo "[signed-by=$key]")} $mirror $suite main" >"$work/$suite.list"
        mkdir -p "$work/$suite"
        if ! { apt-get "${apt[@]}" -q update && (cd "$work/$suite" && apt-get "${apt[@]}" -q download nats-server) &&
            dpkg-deb -x "$work/$suite"/*.deb "$work/$suite/root"; } </dev/null >"$work/log" 2>&1; then
            tell "  Debian $suite: not to be had from $mirror ($(grep -m 1 '^E:' "$work/log" || tail -n 1 "$work/log"))"
            continue
        fi
        if ! "$work/$suite/root/usr/sbin/nats-server" --version >/dev/null 2>&1; then
            tell "  Debian $suite: its nats-server does not run with this host's libc"
            continue
        fi
        # The same version twice would be no upgrade.
        if ((${#found[@]})) && cmp -s "$work/$suite/root/usr/sbin/nats-server" "$work/${found[0]}/root/usr/sbin/nats-server"
        then
            continue
        fi
        found+=("$suite")
        ((${#found[@]} < 2)) || break
    done
    ((${#found[@]} == 2)) ||
        stop "$mirror has no two versions of nats-server that run here (found: ${found[*]:-none}); try another mirror"
    cp "$work/${found[0]}"/*.deb "$cache/old.deb"
    cp "$work/${found[1]}"/*.deb "$cache/new.deb.part"
    mv "$cache/new.deb.part" "$cache/new.deb"
}

prepare() {
    local began=$SECONDS
    say "Preparing: what is absent, cutover itself, and two versions of NATS from Debian"
    need_machine script:bsdutils
    cargo build --release --quiet --bin cutover
    fetch
    tell "  done in $((SECONDS - began)) s"
    say "Booting a throw-away systemd machine over this host"
    exec tests/machine/boot.sh run -- "$PWD/packaging/try.sh" --story
}

# --- in the machine -----------------------------------------------------------------------------------------------

inside() { tests/machine/enter.sh "$CUTOVER_TEST_MACHINE" "$@"; }

# Runs a command line in the machine as on a terminal, shows both, and compares the exit code.
checks=0
expect() {
    local wanted=$1 code=0
    shift
    tell "  # $*"
    inside script -qec "$*" /dev/null 2>&1 | tr -d '\r' | sed 's/^/  /' || code=$?
    if ((code != wanted)); then
        tell "  exit code $code, but $wanted was expected. The machine's last words:"
        inside journalctl -n 30 --no-pager -o short-precise | sed 's/^/  /'
        stop "the story ends here: '$*' exited $code instead of $wanted"
    fi
    checks=$((checks + 1))
}

# The version that NATS itself reports, now.
running() { inside /usr/bin/python3 -c '
import json, urllib.request
print(json.load(urllib.request.urlopen("http://127.0.0.1:8222/varz", timeout=5))["version"])'; }

expect_running() {
    local version
    version=$(running) || version="nothing"
    [[ $version == "$1" ]] || stop "NATS answers $version, but $1 was expected"
    tell "  NATS itself says: $version"
    checks=$((checks + 1))
}

# Clients that connect, ask and wait for the answer, over and over; at the end, what became of their requests.
clients() {
    inside /usr/bin/python3 -c '
import os, socket, threading, time

counts = {"answered": 0, "refused": 0, "cut off": 0}
answers, lock, stop = [time.monotonic()], threading.Lock(), threading.Event()

def client():
    while not stop.is_set():
        try:
            with socket.create_connection(("127.0.0.1", 4222), timeout=5) as s:
                s.sendall(b"CONNECT {\"verbose\":false}\r\nPING\r\n")
                got = b""
                while b"PONG" not in got:
                    part = s.recv(4096)
                    if not part:
                        raise ConnectionResetError
                    got += part
            what = "answered"
        except ConnectionRefusedError:
            what = "refused"
        except OSError:
            what = "cut off"
        with lock:
            counts[what] += 1
            if what == "answered":
                answers.append(time.monotonic())
        time.sleep(0.004)

threads = [threading.Thread(target=client, daemon=True) for _ in range(4)]
for t in threads:
    t.start()
open("/run/clients", "w").close()
while os.path.exists("/run/clients"):
    time.sleep(0.02)
stop.set()
for t in threads:
    t.join()
gap = max(b - a for a, b in zip(answers, answers[1:]))
print("  requests meanwhile: " + ", ".join(f"{n} {what}" for what, n in counts.items())
      + f"; the longest time without an answer: {gap * 1000:.0f} ms")'
}

clients_start() {
    clients &
    clients=$!
    until inside test -e /run/clients; do sleep 0.05; done
}

clients_stop() {
    inside rm /run/clients
    wait "$clients"
}

publish() {
    local version=$1 file=$2 root=$3/srv/releases/nats/$1
    mkdir -p "$root"
    install -m 755 "$file" "$root/nats-server"
    (cd "$root" && sha256sum nats-server >SHA256SUMS)
    tell "  published in /srv/releases/nats/$version"
}

story() {
    local began=$SECONDS root work old new bad=9.9.9
    root=/proc/$(<"$CUTOVER_TEST_MACHINE/pid")/root
    work=$root/srv/work
    mkdir -p "$work"
    tell "  up: systemd $(inside systemctl --version | sed -n '1s/systemd \([0-9]*\).*/\1/p'), $(inside systemctl is-system-running)"
    install -m 755 "$target/release/cutover" "$root/usr/bin/cutover"
    cp "$cache/old.deb" "$work/"
    dpkg-deb -x "$cache/old.deb" "$work/old"
    dpkg-deb -x "$cache/new.deb" "$work/new"

    say "1. A service as Debian ships it"
    inside env DEBIAN_FRONTEND=noninteractive dpkg -i /srv/work/old.deb >/dev/null 2>&1 ||
        stop "dpkg -i nats-server failed in the machine; see $cache/old.deb"
    printf 'host: 127.0.0.1\nport: 4222\nhttp: 127.0.0.1:8222\n' >"$root/etc/nats-server.conf"
    inside systemctl restart nats-server
    until running >/dev/null 2>&1; do sleep 0.1; done
    old=$(running)
    new=$("$work/new/usr/sbin/nats-server" --version | sed 's/.*v//')
    tell "  nats-server $old is installed by dpkg and runs as Debian's own unit:"
    inside systemctl show -p ExecStart --value nats-server | sed -n 's/.*argv\[\]=\([^;]*\) ;.*/    \1/p'
    tell "  For comparison, clients during a plain 'systemctl restart nats-server':"
    clients_start
    inside systemctl restart nats-server
    sleep 1
    clients_stop

    say "2. Put under management, without stopping it"
    cat >"$root/etc/cutover/services/nats.toml" <<-'END'
	unit = "nats-server.service"

	[source]
	path = "/srv/releases/nats"
	artifact = "{version}/nats-server"
	program = "nats-server"
	unsigned = true

	[probe]
	kind = "http"
	url = "http://127.0.0.1:8222/varz"
	version = { pointer = "/version" }
	rule = "exact"
	interval = "200ms"
	passes = 2
	settle = "1s"
	timeout = "8s"
	END
    tell "  /etc/cutover/services/nats.toml:"
    sed 's/^/    /' "$root/etc/cutover/services/nats.toml"
    expect 0 cutover adopt nats --unit nats-server.service --version "$old" --take-over
    expect_running "$old"

    say "3. A good release: $old to $new, while clients use it"
    publish "$new" "$work/new/usr/sbin/nats-server" "$root"
    clients_start
    expect 0 cutover upgrade nats "$new"
    clients_stop
    expect_running "$new"

    say "4. A bad release: $bad starts, stays up, and never answers"
    printf '#!/bin/sh\nwhile :; do sleep 1; done\n' >"$work/bad"
    publish "$bad" "$work/bad" "$root"
    expect 1 cutover upgrade nats "$bad"
    expect_running "$new"
    tell "  and it is not tried again by itself:"
    expect 2 cutover upgrade nats "$bad"

    say "5. A crash: back to $old on request, and the worker is killed by SIGKILL once NATS is to be stopped"
    publish "$old" "$work/old/usr/sbin/nats-server" "$root"
    tell "  # cutover upgrade nats $old --allow-downgrade --id killed &"
    local code=0
    # shellcheck disable=SC2016 # expanded inside
    inside bash -c '
        cutover upgrade nats "$1" --allow-downgrade --id killed >/srv/work/answer 2>&1 &
        # One record is one line; the journal keeps those of earlier operations, too.
        until grep -qs "\"killed\".*running-experiment" /var/lib/cutover/nats/journal; do
            kill -0 %1 2>/dev/null || break
            sleep 0.01
        done
        unit=$(systemctl list-units --plain --no-legend "cutover-op-*" | cut -d " " -f 1 | head -n 1)
        if [[ -n $unit ]]; then
            echo "  # kill -KILL $(systemctl show --value -p MainPID "$unit")     ($unit)"
            systemctl kill --kill-whom=main --signal=KILL "$unit"
        else
            echo "  no worker was seen"
        fi
        wait %1
        code=$?
        grep -E "^  \"(result|exitCode)|\"(outcome|cause|reason)\"" /srv/work/answer | sed "s/^ */    /"
        [[ -n $unit ]] && exit "$code"' bash "$old" || code=$?
    ((code == 1)) || stop "the killed operation exited $code, but 1 (rolled back) was expected"
    checks=$((checks + 1))
    tell "  settled by the recovery worker that systemd started; another recovery finds nothing to do:"
    expect 0 cutover recover nats
    expect_running "$new"

    say "6. What is on record"
    expect 0 cutover status nats
    expect 0 cutover history nats
    expect 0 cutover log nats killed
    expect 0 cutover verify nats

    say "All of it went as told: $checks checks in $((SECONDS - began)) s. The machine is gone now; this host is as it was."
}

case ${1:-} in
    --story) story ;;
    "") prepare ;;
    *) stop "unknown argument '$1'; it takes none" ;;
esac
