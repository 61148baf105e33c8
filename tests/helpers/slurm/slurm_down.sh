#!/usr/bin/env bash
# Takes down the cluster that slurm_up.sh started in DIR: slurm_down.sh -d DIR [-k]
#
#   -k  keeps DIR (logs, state); else it is removed.
#
# Ends only processes of this cluster, by number, each checked to belong to DIR. Nothing there is success.
set -uo pipefail
PATH=$PATH:/usr/sbin:/sbin
DIR= KEEP=0
while getopts d:k o; do case $o in d) DIR=$OPTARG ;; k) KEEP=1 ;; *) exit 2 ;; esac; done
[[ -e $DIR ]] || exit 0
[[ $(id -u) == 0 ]] || { echo "slurm_down: ERROR: must run as root" >&2; exit 1; }
[[ -f $DIR/.slurm-lab ]] || { echo "slurm_down: ERROR: $DIR is not of slurm_up.sh" >&2; exit 1; }
CONF=$DIR/etc/slurm.conf

alive() { # zombies count as gone
    local s
    s=$(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null) && [[ -n $s && ${s%% *} != [ZX] ]]
}
kids() {
    local p
    for p in "$@"; do
        echo "$p"
        kids $(cat "/proc/$p/task/"*/children 2>/dev/null)
    done
}
gone() { # gone TWENTIETHS PID...
    local n=$1 p i
    shift
    for (( i = 0; i < n; i++ )); do
        for p in "$@"; do alive "$p" && { sleep 0.05; continue 2; }; done
        return 0
    done
    return 1
}
ancestors=" " p=$$
while (( p > 1 )); do
    ancestors+="$p "
    p=$(sed 's/.*) . //; s/ .*//' "/proc/$p/stat" 2>/dev/null) || break
done
# Ours: daemons and nodes that name DIR, and tasks of its jobs; never our own ancestors.
ours() {
    local f p
    for f in $(grep -lsazxF -- "--socket=$DIR/run/munge.sock" /proc/[0-9]*/cmdline) \
        $(grep -lsazxF -- lab-node-init /proc/[0-9]*/cmdline | xargs -r grep -lsazxF -- "$DIR") \
        $(grep -lsazxF -- "SLURM_CONF=$CONF" /proc/[0-9]*/environ); do
        p=${f#/proc/} p=${p%%/*}
        [[ $ancestors != *" $p "* ]] || continue
        if [[ $f == *environ ]]; then
            case $(cat "/proc/$p/comm" 2>/dev/null) in
                slurmctld | slurmd | slurmstepd) ;;
                *) grep -qsaz '^SLURM_JOB_ID=' "$f" || continue ;;
            esac
        fi
        echo "$p"
    done
}
roots=$(ours)
all=$(kids $roots | sort -un)
for p in $roots; do
    if [[ $(cat "/proc/$p/comm" 2>/dev/null) == slurmctld ]]; then
        kill "$p" 2>/dev/null
        gone 60 "$p" || kill -9 "$p" 2>/dev/null
    fi
done
[[ -z $all ]] || { kill -9 $all 2>/dev/null; gone 100 $all; }
left=$(ours)
[[ -z $left ]] || { kill -9 $left 2>/dev/null; gone 100 $left; }
rc=0
for p in $(ours); do alive "$p" && { echo "slurm_down: ERROR: process $p did not end" >&2; rc=1; }; done
if [[ -s $DIR/run/bridge ]]; then
    b=$(<"$DIR/run/bridge")
    for l in $(ip -o link show master "$b" 2>/dev/null | sed 's/^[0-9]*: \([^:@]*\).*/\1/'); do
        ip link del "$l" 2>/dev/null
    done
    ip link del "$b" 2>/dev/null
fi
names="127\.0\.0\.1 n[0-9]+ # slurm-lab $DIR"
if grep -qsxE "$names" /etc/hosts; then # rewritten in place: it may be a bind mount
    {
        flock 9
        kept=$(grep -vxE "$names" /etc/hosts) && printf '%s\n' "$kept" >/etc/hosts
    } 9>/tmp/.slurmlab.lock
fi
[[ ! -s $DIR/run/lockfile ]] || rm -f "$(<"$DIR/run/lockfile")"
(( rc )) && exit 1
if (( KEEP )); then
    rm -f "$DIR"/run/*
else
    rm -rf --one-file-system "$DIR"
fi
