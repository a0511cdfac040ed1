#!/bin/bash
# Boots throw-away systemd machines over overlays of this host's /usr, /etc and /var, and ends them.
#
#   boot.sh run [OPTIONS] -- COMMAND…   boot one, run COMMAND with CUTOVER_TEST_MACHINE=DIR, end it: its exit code
#   boot.sh start [OPTIONS]             boot one that stays; prints its DIR
#   boot.sh stop DIR                    end it
#   boot.sh enter DIR COMMAND…          run COMMAND inside, as root
#   boot.sh power-cut DIR               kill all of it at once, and boot it again on the same storage
#   boot.sh reboot DIR                  an orderly reboot; returns when it is up again
#
#   --storage ext4|xfs|btrfs   the file system at /var/lib/cutover inside (default ext4)
#   --size SIZE                its size (default 2G, sparse)
#   --until PID                end the machine when this process has ended
#
# DIR/pid is the pid of the machine's systemd as seen from this host, new after each boot; /proc/PID/root is its
# root. DIR/console.log is what it printed.
#
# What is inside: the host's programs and accounts, but none of its enabled units, homes or data. All that is written
# goes to a tmpfs, so the host is left untouched. /var/lib/cutover is a real file system on a
# loop device, because what is proved there (inode numbers, syncs, renames) is not what an overlay does. Its network
# is a loopback of its own.
#
# How it ends: every mount is made in a mount namespace of the machine's keeper (one process a machine), and each
# process dies with its parent. So the mounts, the loop device and the processes are gone when the keeper is,
# even when it was killed by SIGKILL.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
self=$here/boot.sh
base=/run/cutover-machines

die() {
    printf 'boot.sh: %s\n' "$*" >&2
    exit 1
}

# Options that `run` and `start` share; leaves the rest in "${rest[@]}".
storage=ext4
size=2G
until=
rest=()
options() {
    while (($#)); do
        case $1 in
            --storage) storage=${2:?"--storage needs ext4, xfs or btrfs"} && shift 2 ;;
            --size) size=${2:?"--size needs a size, such as 2G"} && shift 2 ;;
            --until) until=${2:?"--until needs a pid"} && shift 2 ;;
            --) shift && break ;;
            *) break ;;
        esac
    done
    rest=("$@")
    case $storage in
        ext4 | xfs | btrfs) ;;
        *) die "--storage $storage: unknown; choose ext4, xfs or btrfs" ;;
    esac
}

requirements() {
    ((EUID == 0)) || die "must run as root: it mounts and makes namespaces; try sudo"
    local tool missing=()
    for tool in systemd-nspawn nsenter unshare setpriv findmnt losetup "mkfs.$storage"; do
        type -P "$tool" >/dev/null || missing+=("$tool")
    done
    ((${#missing[@]} == 0)) || die "not installed: ${missing[*]}; tests/run.sh installs what is needed, or:" \
        "apt-get install systemd-container dbus e2fsprogs util-linux"
    [[ -n $(findmnt -n -t cgroup2 -o TARGET) ]] ||
        die "no cgroup2 is mounted on this host; mount -t cgroup2 none /sys/fs/cgroup, or boot with the unified hierarchy"
}

# What a keeper that was killed by SIGKILL could not remove: plain files and empty cgroups.
sweep() {
    local dir keeper
    for dir in "$base"/*/; do
        [[ -e $dir/keeper ]] || continue
        keeper=$(<"$dir/keeper")
        [[ $keeper =~ ^[0-9]+$ && -e /proc/$keeper ]] && continue
        remove "${dir%/}"
    done
}

remove() {
    local dir=$1 name=${1##*/} own mount
    # nspawn makes the same cgroup in the version 1 hierarchy that some hosts still have.
    if [[ -s $dir/cgroup ]]; then
        own=$(<"$dir/cgroup")
        findmnt -n -l -t cgroup,cgroup2 -o TARGET | while read -r mount; do
            [[ ! -d $mount$own ]] || find "$mount$own" -depth -type d -exec rmdir {} + 2>/dev/null || true
        done
    fi
    rmdir "/run/systemd/nspawn/unix-export/$name" "/run/systemd/nspawn/propagate/$name" 2>/dev/null || true
    rm -rf --one-file-system "$dir"
}

# --- the keeper ---------------------------------------------------------------------------------------------------

keep() {
    local dir=$1
    local nspawn="" up="" name=${1##*/} cgroup2 outside
    cgroup2=$(findmnt -n -f -t cgroup2 -o TARGET)
    outside=$(sed -n 's/^0:://p' /proc/self/cgroup)
    exec </dev/null >>"$dir/keeper.log" 2>&1
    echo $$ >"$dir/keeper"
    # shellcheck disable=SC2317 # called by the trap
    finish() {
        trap '' TERM INT HUP
        if [[ -n $nspawn ]]; then
            kill -KILL "$nspawn" 2>/dev/null
            wait "$nspawn" 2>/dev/null
        fi
        # Out of the cgroup that is to be removed, which takes the kernel a moment after the last process.
        echo $$ >"$cgroup2$outside/cgroup.procs"
        local deadline=$((SECONDS + 5))
        while grep -q 'populated 1' "$cgroup2$(<"$dir/cgroup")/cgroup.events" && ((SECONDS < deadline)); do
            sleep 0.02
        done
        [[ -n $up ]] || cat "$dir/console.log" "$dir/keeper.log" >"$base/failed.log"
        umount -R "$dir/layer" 2>/dev/null || umount -R -l "$dir/layer"
        remove "$dir"
    }
    trap 'set +e; finish' EXIT
    trap 'exit 0' TERM INT HUP

    if [[ -n $until ]]; then
        # shellcheck disable=SC2016 # expanded by the other shell
        setpriv --pdeathsig KILL bash -c 'while [[ -e /proc/$1 ]]; do sleep 0.5; done; kill -TERM "$2"' until "$until" $$ &
    fi
    cgroups "$dir"
    layers "$dir"
    trim "$dir/layer/root"
    state "$dir"

    local status again=1
    while ((again)); do
        again=0
        rm -f "$dir/pid" "$dir/ready" "$dir/power-cut"
        nspawn "$dir" "$name" &
        nspawn=$!
        up=""
        ready "$dir" "$nspawn" || break
        up=yes
        status=0
        wait "$nspawn" || status=$?
        nspawn=""
        # 133 is nspawn's word for a reboot that whoever started it has to carry out.
        if ((status == 133)) || [[ -e $dir/power-cut ]]; then again=1; fi
    done
}

# A cgroup for each machine: nspawn uses fixed names below the one that it is started in.
cgroups() {
    local dir=$1 cgroup=$cgroup2${outside%/}/${1##*/}
    echo "${outside%/}/${dir##*/}" >"$dir/cgroup"
    mkdir -p "$cgroup/keeper" "$cgroup/machine" ||
        die "$cgroup: cannot be made; the cgroup2 file system must be writable here"
    echo $$ >"$cgroup/keeper/cgroup.procs"
    local controller
    for controller in $(<"$cgroup/cgroup.controllers"); do
        echo "+$controller" >"$cgroup/cgroup.subtree_control" 2>/dev/null || true
    done
}

layers() {
    local dir=$1 root=$1/layer/root name top
    mkdir "$dir/layer"
    mount -t tmpfs -o mode=0755 cutover-machine "$dir/layer"
    mkdir "$root"
    # /bin, /lib and the like, which lead into /usr.
    for name in /*; do
        [[ ! -L $name ]] || cp -P "$name" "$root/"
    done
    # One overlay each, since any of them may be a file system of its own on the host.
    for top in usr etc var; do
        mkdir -p "$dir/layer/$top"/{upper,work} "$root/$top"
    done
    # A character device 0:0 in the upper layer hides what is below: no need to read or delete it.
    for name in etc/systemd/{system,network} etc/{init.d,cutover,fstab,crypttab,machine-id,hostname,hosts} \
        etc/rc{0,1,2,3,4,5,6,S}.d var/{backups,cache,log,spool,tmp} var/lib/{apt,cutover,systemd} \
        usr/sbin/policy-rc.d; do
        if [[ -e /$name || -L /$name ]]; then
            top=$dir/layer/${name%%/*}/upper/${name#*/}
            mkdir -p "${top%/*}"
            mknod "$top" c 0 0
        fi
    done
    for top in usr etc var; do
        mount -t overlay cutover-machine "$root/$top" \
            -o "lowerdir=/$top,upperdir=$dir/layer/$top/upper,workdir=$dir/layer/$top/work" ||
            die "overlay over /$top on $root/$top: not mounted; the kernel needs overlayfs, and /$top a file system" \
                "that may be a lower layer"
    done
}

# What a real boot has and a test does not need. It boots in two to three seconds instead of twenty.
trim() {
    local root=$1 unit units=$1/etc/systemd/system
    mkdir -p "$root"/{proc,sys,dev,run,root,home,srv,mnt,media,opt} "$root"/var/{cache,log/journal,spool,tmp} \
        "$root"/var/lib/{cutover,systemd} "$root"/etc/{cutover/services,dbus-1/system.d,systemd/journald.conf.d} "$units"
    install -d -m 1777 "$root/tmp" "$root/var/tmp"
    chmod 700 "$root/root"
    tr -d - </proc/sys/kernel/random/uuid >"$root/etc/machine-id"
    echo cutover-machine >"$root/etc/hostname"
    printf '127.0.0.1 localhost cutover-machine\n::1 localhost\n' >"$root/etc/hosts"
    : >"$root/etc/fstab"
    rm -f "$root/etc/resolv.conf"
    # Tests read logs: none may be dropped.
    printf '[Journal]\nRateLimitIntervalSec=0\nRateLimitBurst=0\n' >"$root/etc/systemd/journald.conf.d/tests.conf"
    cat >"$root/etc/dbus-1/system.d/cutover-tests.conf" <<-'END'
	<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-BUS Bus Configuration 1.0//EN"
	 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
	<busconfig>
	  <policy user="root"><allow own_prefix="org.cutover.test"/></policy>
	  <policy context="default"><allow send_destination_prefix="org.cutover.test"/></policy>
	</busconfig>
	END
    for unit in getty.target console-getty.service systemd-timesyncd.service \
        systemd-networkd.service systemd-resolved.service systemd-udevd.service systemd-udev-trigger.service \
        systemd-hwdb-update.service systemd-journal-catalog-update.service ldconfig.service \
        systemd-firstboot.service systemd-update-utmp.service systemd-update-utmp-runlevel.service \
        systemd-binfmt.service systemd-random-seed.service systemd-ask-password-console.path \
        systemd-ask-password-wall.path systemd-tmpfiles-clean.timer systemd-pcrphase.service \
        systemd-pcrphase-sysinit.service proc-sys-fs-binfmt_misc.automount sys-kernel-config.mount \
        sys-kernel-debug.mount sys-kernel-tracing.mount sys-fs-fuse-connections.mount dev-hugepages.mount \
        var-lib-machines.mount; do
        ln -s /dev/null "$units/$unit"
    done
    ln -s /lib/systemd/system/multi-user.target "$units/default.target"
}

# The image is unlinked as soon as it is mounted: the loop device keeps it, and frees it with the mount.
state() {
    local dir=$1 image
    image=$(mktemp "${TMPDIR:-/var/tmp}/cutover-machine.XXXXXX")
    truncate -s "$size" "$image"
    case $storage in
        ext4) mkfs.ext4 -q -E lazy_itable_init=1,lazy_journal_init=1 "$image" ;;
        xfs) mkfs.xfs -q "$image" ;;
        btrfs) mkfs.btrfs -q "$image" ;;
    esac
    if ! mount -o loop "$image" "$dir/layer/root/var/lib/cutover"; then
        rm -f "$image"
        die "$image: not mounted by a loop device; the host needs /dev/loop-control and the loop and $storage modules"
    fi
    rm -f "$image"
    chmod 755 "$dir/layer/root/var/lib/cutover"
}

nspawn() {
    local dir=$1 name=$2
    echo "$BASHPID" >"$cgroup2$(<"$dir/cgroup")/machine/cgroup.procs"
    # What nspawn boots outlives it when it is killed. As the first of a pid namespace it takes all with it.
    exec env -i PATH="$PATH" SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1 \
        setpriv --pdeathsig KILL unshare --pid --fork --kill-child --mount-proc \
        systemd-nspawn --quiet --directory="$dir/layer/root" --machine="$name" --hostname=cutover-machine --boot \
        --register=no --keep-unit --private-network --capability=all --console=read-only \
        --link-journal=no --resolv-conf=off --timezone=off --kill-signal=SIGRTMIN+3 \
        </dev/null >>"$dir/console.log" 2>&1
}

# The pid of the machine's systemd, seen from this host: the grandchild of the unshare that runs nspawn.
leader() {
    local nspawn pid
    for nspawn in $(<"/proc/$1/task/$1/children"); do
        for pid in $(<"/proc/$nspawn/task/$nspawn/children"); do
            if [[ $(readlink "/proc/$pid/exe") == */systemd && -e /proc/$pid/root/run/systemd/private ]]; then
                echo "$pid"
                return
            fi
        done
    done
}

# Waits until the machine is up, then writes DIR/pid and DIR/ready.
ready() {
    local dir=$1 nspawn=$2 pid="" state="" deadline=$((SECONDS + 90))
    while ((SECONDS < deadline)); do
        kill -0 "$nspawn" 2>/dev/null || break
        [[ -n $pid ]] || pid=$(leader "$nspawn" 2>/dev/null) || true
        if [[ -n $pid ]]; then
            echo "$pid" >"$dir/pid.new"
            mv "$dir/pid.new" "$dir/pid"
            state=$("$self" enter "$dir" systemctl is-system-running 2>/dev/null) || true
            case $state in
                running | degraded)
                    furnish "$dir" "$pid"
                    echo "$state" >"$dir/ready.new"
                    mv "$dir/ready.new" "$dir/ready"
                    return 0
                    ;;
            esac
        fi
        sleep 0.05
    done
    echo "the machine did not come up: its state is '${state:-unknown}'"
    return 1
}

# What nspawn does not give, and is lost at each boot.
furnish() {
    local dir=$1 dev=/proc/$2/root/dev n
    # As on Debian: nothing may be executed from /run.
    "$self" enter "$dir" mount -o remount,noexec /run
    # Tests mount small file systems of their own.
    [[ -e $dev/loop-control ]] || mknod "$dev/loop-control" c 10 237
    for n in {0..63}; do
        [[ -e $dev/loop$n ]] || mknod "$dev/loop$n" b 7 "$n"
    done
}

# --- commands -----------------------------------------------------------------------------------------------------

# Starts a keeper, waits for the machine and sets $dir. With "bound" the keeper ends when this process does.
boot() {
    local bound=$1
    requirements
    mkdir -p "$base"
    sweep
    dir=$(mktemp -d "$base/cutover-XXXXXX")
    chmod 755 "$dir"
    local command=(unshare --mount --propagation private "$self" keep "$dir" "$storage" "$size" "$until")
    # Where systemd runs this host, cgroups are its own: it delegates one.
    if [[ $(</proc/1/comm) == systemd && -d /run/systemd/system ]]; then
        command=(systemd-run --quiet --scope --collect -p Delegate=yes --unit="${dir##*/}" "${command[@]}")
    fi
    [[ $bound == bound ]] && command=(setpriv --pdeathsig TERM "${command[@]}")
    setsid "${command[@]}" </dev/null >>"$dir/keeper.log" 2>&1 &
    keeper=$!
    until [[ -e $dir/ready ]]; do
        if ! kill -0 "$keeper" 2>/dev/null; then
            tail -n 20 "$base/failed.log" >&2 2>/dev/null || true
            die "the machine did not boot; all it said is in $base/failed.log"
        fi
        sleep 0.05
    done
}

end() {
    local dir=$1 keeper
    [[ -s $dir/keeper ]] || die "$dir: no machine; 'boot.sh start' prints the directory of one"
    keeper=$(<"$dir/keeper")
    kill -TERM "$keeper" 2>/dev/null || true
    while [[ -e /proc/$keeper && $(ps -o stat= -p "$keeper") != Z* ]]; do sleep 0.02; done
    [[ ! -e $dir ]] || remove "$dir"
}

wait_again() {
    local dir=$1 keeper
    keeper=$(<"$dir/keeper")
    until [[ -e $dir/ready ]]; do
        [[ -e /proc/$keeper ]] || die "$dir: the machine did not come up again; see $base/failed.log"
        sleep 0.05
    done
}

main() {
    local action=${1:-}
    (($#)) && shift
    case $action in
        run)
            options "$@"
            ((${#rest[@]})) || die "run needs a command: boot.sh run -- COMMAND"
            local status=0 child=""
            dir=""
            trap '[[ -z $dir || ! -e $dir/keeper ]] || end "$dir"' EXIT
            # The command gets the signal; this script ends the machine when the command has gone.
            trap '[[ -z $child ]] || kill -TERM "$child" 2>/dev/null; exit 130' INT
            trap '[[ -z $child ]] || kill -TERM "$child" 2>/dev/null; exit 143' TERM HUP
            boot bound
            CUTOVER_TEST_MACHINE=$dir setpriv --pdeathsig TERM -- "${rest[@]}" &
            child=$!
            wait "$child" || status=$?
            exit "$status"
            ;;
        start)
            options "$@"
            boot free
            echo "$dir"
            ;;
        keep)
            storage=$2 size=$3 until=$4
            keep "$1"
            ;;
        stop) end "${1:?"stop needs the directory that start printed"}" ;;
        enter) exec "$here/enter.sh" "$@" ;;
        reboot)
            rm -f "$1/ready"
            "$here/enter.sh" "$1" systemctl reboot
            wait_again "$1"
            ;;
        power-cut)
            rm -f "$1/ready"
            : >"$1/power-cut"
            kill -KILL "$(<"$1/pid")"
            wait_again "$1"
            ;;
        *)
            sed -n '2,/^set /s/^# \{0,1\}//p' "$self"
            [[ $action == --help ]] || exit 64
            ;;
    esac
}

main "$@"
