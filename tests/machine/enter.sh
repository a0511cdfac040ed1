#!/bin/bash
# Runs a command inside a throw-away machine, as root: enter.sh DIR COMMAND…
#
# All its namespaces, and a cgroup of the machine that belongs to no unit, as for someone who is logged in. The command
# dies when this process does.
set -euo pipefail

dir=${1:?"enter.sh needs the directory of a machine, see boot.sh"}
shift
[[ -s $dir/pid ]] || { echo "enter.sh: $dir/pid: no machine runs there; start one by boot.sh" >&2; exit 1; }
pid=$(<"$dir/pid")

inside=$(sed -n 's/^0:://p' "/proc/$pid/cgroup")
own=$(sed -n 's/^0:://p' /proc/self/cgroup)
cgroup=$(findmnt -n -f -t cgroup2 -o TARGET)${inside%/init.scope}/test.slice
mkdir -p "$cgroup" 2>/dev/null || true
echo $$ >"$cgroup/cgroup.procs" || echo "enter.sh: $cgroup: not entered; the command stays in $own" >&2

exec nsenter --target "$pid" --all --wd="/proc/$pid/root/root" -- \
    /usr/bin/env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 TERM=dumb \
    /usr/bin/setpriv --pdeathsig KILL -- "$@"
