#!/usr/bin/env bash
# Works on one node of a cluster that slurm_up.sh started: slurm_node.sh DIR VERB [NODE] [ARGS]
#
#   boot NODE      makes the node (namespaces, cable) and starts its slurmd
#   crash NODE     power loss: the cable first, then all its processes; peers hear nothing (simple mode: as killall)
#   killall NODE   all its processes die, the network stays up: peers get resets
#   kill-slurmd, stop-slurmd, start-slurmd NODE    only the node's slurmd; tasks live on
#   reboot NODE    crash, 4 s, boot, resume; Slurm fails the node's jobs when it sees the new boot time
#   resume NODE    waits until the node answers, and clears DOWN and DRAIN
#   cut, heal NODE unplugs and replugs its cable (netns mode)
#   exec NODE CMD  runs CMD on it          pids NODE  its processes, as the host numbers them
#   ctld-kill, ctld-stop, ctld-start       the controller; a start recovers the saved state
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
source "$1/etc/lab" # DIR MODE BR TIMENS
V=${2-help} N=${3-}
export SLURM_CONF=$DIR/etc/slurm.conf
die() { echo "slurm_node: $*" >&2; exit 1; }
case $V in
    help) sed -n '2,/^set/{/^#/p}' "$0"; exit 0 ;;
    ctld-*) ;;
    *) [[ -n $N && -d $DIR/nodes/$N ]] || die "no such node '$N'" ;;
esac
VETH=${BR/slurmlab/sl}$N
CLEAN=(env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
    SLURM_CONF="$SLURM_CONF" SLURM_LAB_NODE="$N")
ENTER=(-m -u -n -p)
(( TIMENS )) && ENTER+=(-T)

alive() { # zombies count as gone
    local s
    s=$(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null) && [[ -n $s && ${s%% *} != [ZX] ]]
}
is_ours() { grep -qszxF "SLURM_LAB_NODE=$N" "/proc/$1/environ" && grep -qszxF "SLURM_CONF=$SLURM_CONF" "/proc/$1/environ"; }
initpid() { # the node's process 1
    local p
    p=$(cat "$DIR/nodes/$N/init.pid" 2>/dev/null) && alive "$p" && is_ours "$p" && echo "$p"
}
nspids() {
    local want d
    want=$(readlink "/proc/$1/ns/pid")
    for d in /proc/[0-9]*; do [[ $(readlink "$d/ns/pid" 2>/dev/null) == "$want" ]] && echo "${d#/proc/}"; done
    true
}
kids() {
    local p
    for p in "$@"; do
        echo "$p"
        kids $(cat "/proc/$p/task/"*/children 2>/dev/null)
    done
}
daemons() { # slurmd and slurmstepd of the node; tasks are their children
    local d
    for d in /proc/[0-9]*; do
        [[ $(cat "$d/comm" 2>/dev/null) =~ ^slurm(d|stepd)$ ]] && is_ours "${d#/proc/}" && echo "${d#/proc/}"
    done
    true
}
slurmd_pid() {
    local p
    for p in $(daemons); do [[ $(cat "/proc/$p/comm") == slurmd ]] && echo "$p"; done
    true
}
allpids() {
    local p
    if [[ $MODE == netns ]]; then p=$(initpid) && nspids "$p" || true; else kids $(daemons) | sort -un; fi
}
run_on_node() {
    local p
    if [[ $MODE == netns ]]; then
        p=$(initpid) || die "$N is not booted"
        nsenter -t "$p" "${ENTER[@]}" -- "$@"
    else
        "$@"
    fi
}
start_slurmd() {
    run_on_node "${CLEAN[@]}" slurmd -d "$DIR/bin/stepd" -N "$N" </dev/null >>"$DIR/log/slurmd.$N.out" 2>&1 ||
        die "slurmd on $N did not start: $(tail -n 2 "$DIR/log/slurmd.$N.out")"
}
make_node() {
    local p up timens=()
    initpid >/dev/null && die "$N is already booted"
    rm -f "$DIR/nodes/$N/init.pid" "$DIR/nodes/$N/go"
    mkdir -p "$DIR/nodes/$N/local"
    up=$(cut -d. -f1 /proc/uptime)
    (( TIMENS )) && timens=(--time --boottime "-$up")
    # The node's process 1 sets itself up, then only reaps.
    "${CLEAN[@]}" setsid unshare --net --uts --mount --pid ${timens[@]+"${timens[@]}"} --fork bash -c '
        D=$1 N=$2 A=$3
        read -r me _ </proc/self/stat; echo $me >$D/nodes/$N/init.pid.t; mv $D/nodes/$N/init.pid.t $D/nodes/$N/init.pid
        hostname $N; mount -t proc proc /proc; mount -t tmpfs -o mode=1777 tmpfs /dev/shm
        mount --bind $D/etc/hosts /etc/hosts; mount --bind $D/nodes/$N/local $D/local; ip link set lo up
        for ((i=0;i<6000;i++)); do ip link show eth0 >/dev/null 2>&1 && break; sleep 0.01; done
        ip addr add $A/24 dev eth0 && ip link set eth0 up && : >$D/nodes/$N/go
        trap : TERM INT HUP; while :; do sleep 3600 & wait $!; done' \
        lab-node-init "$DIR" "$N" "$(<"$DIR/nodes/$N/addr")" </dev/null >>"$DIR/log/init.$N.out" 2>&1 &
    disown
    for (( i = 0; i < 6000; i++ )); do [[ -s $DIR/nodes/$N/init.pid ]] && break; sleep 0.01; done
    p=$(initpid) || die "$N has no namespaces: $(tail -n 2 "$DIR/log/init.$N.out")"
    ip link del "$VETH" 2>/dev/null || true
    ip link add "$VETH" type veth peer name eth0 netns "$p"
    ip link set "$VETH" master "$BR" up
    for (( i = 0; i < 6000; i++ )); do [[ -e $DIR/nodes/$N/go ]] && break; sleep 0.01; done
    [[ -e $DIR/nodes/$N/go ]] || die "$N has no network: $(tail -n 2 "$DIR/log/init.$N.out")"
}
end_node() {
    local p
    if [[ $MODE == netns ]]; then
        [[ $V == killall ]] || ip link set "$VETH" down 2>/dev/null || true
        p=$(initpid) || return 0
        kill -9 "$p" # its namespace goes with it
        for (( i = 0; i < 3000; i++ )); do alive "$p" || break; sleep 0.02; done
    else
        p=$(allpids)
        [[ -z $p ]] || kill -9 $p 2>/dev/null || true
    fi
}
resume() {
    local i state
    for (( i = 0; i < 2000; i++ )); do
        state=$(scontrol -o show node "$N" | grep -o ' State=[^ ]*' || true)
        case $state in
            *DOWN* | *DRAIN* | *FAIL*) scontrol update nodename="$N" state=resume 2>/dev/null || true ;;
            '' | *NOT_RESPONDING* | *UNKNOWN*) ;;
            *) return 0 ;;
        esac
        sleep 0.1
    done
    die "$N stays $state"
}
cable() {
    [[ $MODE == netns ]] || die "needs netns mode"
    ip link set "$VETH" "$1"
}

case $V in
    boot) [[ $MODE == simple ]] || make_node; start_slurmd ;;
    crash | killall) end_node ;;
    kill-slurmd) kill -9 $(slurmd_pid) ;;
    stop-slurmd) kill $(slurmd_pid) ;;
    start-slurmd) start_slurmd ;;
    # A boot is told in whole seconds, up to two too early, and must be later than the last that Slurm has heard.
    reboot) V=crash; end_node; sleep 4; [[ $MODE == simple ]] || make_node; start_slurmd; resume ;;
    resume) resume ;;
    cut) cable down ;;
    heal) cable up ;;
    exec) run_on_node "${@:4}" ;;
    pids) allpids ;;
    ctld-kill) kill -9 "$(<"$DIR/run/ctld.pid")" ;;
    ctld-stop) kill "$(<"$DIR/run/ctld.pid")" ;;
    ctld-start) "${CLEAN[@]}" slurmctld ${3-} >>"$DIR/log/slurmctld.out" 2>&1 ;;
    *) die "no such verb '$V'" ;;
esac
