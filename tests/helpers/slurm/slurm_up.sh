#!/usr/bin/env bash
# Brings up a real Slurm cluster of several nodes on this machine, for tests.
#
#   slurm_up.sh -d DIR [-n NODES] [-g GPUS] [-c CPUS] [-M MEM_MB] [-m auto|netns|simple] [-x 'Key=Value']...
#
#   -d DIR    configuration, keys, spool, logs, process ids; at most 64 characters
#   -n NODES  compute nodes n1..nN (2)          -g GPUS   fake GPUs a node (8); 0: none
#   -c CPUS   claimed by each node (16)         -M MEM_MB claimed by each node (65536)
#   -m MODE   netns: each node has namespaces of its own (host name, address, processes, /dev/shm);
#             simple: the nodes are processes of this host; auto: netns where the kernel allows it
#   -x K=V    replaces or appends a global line of slurm.conf; may repeat
#
# Then: source DIR/env.sh; DIR/bin/slurm_node help; slurm_down.sh -d DIR.
# Needs root and the packages slurmctld, slurmd, slurm-client, munge (netns: iproute2 and util-linux too).
set -euo pipefail
umask 022
PATH=$PATH:/usr/sbin:/sbin
T0=${EPOCHREALTIME/./}
die() { echo "slurm_up: ERROR: $*" >&2; exit 1; }
note() { echo "slurm_up: $*"; }

DIR= NODES=2 GPUS=8 CPUS=16 MEM=65536 MODE=auto EXTRA=()
while getopts d:n:g:c:M:m:x: o; do case $o in
    d) DIR=$OPTARG ;; n) NODES=$OPTARG ;; g) GPUS=$OPTARG ;; c) CPUS=$OPTARG ;; M) MEM=$OPTARG ;;
    m) MODE=$OPTARG ;; x) EXTRA+=("$OPTARG") ;; *) exit 2 ;;
esac; done
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# ---- checks
[[ $(id -u) == 0 ]] || die "must run as root (slurmd does)"
[[ $NODES =~ ^[1-9][0-9]*$ && $NODES -le 64 ]] || die "-n must be 1..64"
[[ $GPUS =~ ^[0-9]+$ && $CPUS =~ ^[1-9][0-9]*$ && $MEM =~ ^[1-9][0-9]*$ ]] || die "-g, -c and -M must be numbers"
[[ $MODE =~ ^(auto|netns|simple)$ ]] || die "-m must be auto, netns or simple"
[[ $DIR == /* ]] || die "-d must be an absolute path"
[[ $DIR != *[[:space:]%,\;\"\'\\]* ]] || die "-d goes into slurm.conf: no spaces, quotes or any of % , ;"
(( ${#DIR} <= 64 )) || die "-d is ${#DIR} characters; Unix sockets under it allow at most 64"
missing=()
for t in munged slurmctld slurmd scontrol sinfo sbatch srun squeue setsid perl awk sed grep; do
    command -v "$t" >/dev/null || missing+=("$t")
done
(( ${#missing[@]} == 0 )) || die "missing: ${missing[*]} (packages slurmctld, slurmd, slurm-client, munge)"
STEPD=$(dirname "$(command -v slurmd)")/slurmstepd
[[ -x $STEPD ]] || die "missing: $STEPD"
case $(uname -m) in x86_64) PRCTL=157 ;; aarch64) PRCTL=167 ;; *) die "unknown machine $(uname -m)" ;; esac
slurmd -C >/dev/null 2>&1 || die "slurmd does not run here: $(slurmd -C 2>&1 | tail -1)"

can_netns() {
    local t rc
    for t in ip unshare nsenter mount; do command -v "$t" >/dev/null || { WHY="no $t"; return 1; }; done
    WHY=$(unshare --net --uts --mount --pid --fork sh -c 'hostname slurmprobe && mount -t proc proc /proc &&
        mount -t tmpfs tmpfs /dev/shm && ip link set lo up' 2>&1) || return 1
    # Two clusters may come up at once: the interfaces of the trial carry our process id.
    WHY=$(ip link add slpb$$ type bridge 2>&1 && ip link add slpa$$ type veth peer name slpc$$ 2>&1) && rc=0 || rc=$?
    ip link del slpa$$ 2>/dev/null || true
    ip link del slpb$$ 2>/dev/null || true
    return $rc
}
if [[ $MODE == auto ]]; then
    if can_netns; then MODE=netns; else MODE=simple; note "no namespaces here (${WHY:-?}): simple mode"; fi
elif [[ $MODE == netns ]]; then
    can_netns || die "no namespaces here: ${WHY:-?}"
fi
# With a time namespace a node's uptime starts at its boot, so that Slurm sees a reboot as one.
TIMENS=0
[[ $MODE == netns ]] && unshare --time --boottime -1 --fork true 2>/dev/null && TIMENS=1

[[ ! -e $DIR || -z $(ls -A "$DIR") ]] || die "$DIR is not empty"
mkdir -p "$DIR"/{etc,run,log,bin,dev,nodes,local,spool/ctld}
touch "$DIR/.slurm-lab"
trap 'rc=$?; if (( rc )); then tail -n 5 "$DIR"/log/*.log >&2 2>/dev/null || true
      "$HERE/slurm_down.sh" -k -d "$DIR" >&2 || true; fi' EXIT

# ---- a free index: ports and, in netns mode, a subnet
port_busy() {
    local h
    printf -v h ':%04X' "$1"
    cat /proc/net/tcp /proc/net/tcp6 2>/dev/null |
        awk -v h="$h" '$4 == "0A" && substr($2, length($2) - 4) == h {f = 1} END {exit !f}'
}
BR= IDX=
for (( i = 0; i < 40; i++ )); do
    busy=0
    for (( p = 21000 + 100 * i; p <= 21000 + 100 * i + NODES; p++ )); do port_busy $p && { busy=1; break; }; done
    (( busy )) && continue
    if [[ $MODE == netns ]]; then # making the bridge is the lock of the index
        [[ -z $(ip -o addr show to 198.18.$i.0/24) ]] || continue
        ip link add slurmlab$i type bridge 2>/dev/null || continue
        BR=slurmlab$i
        echo $BR >"$DIR/run/bridge"
        ip addr add 198.18.$i.254/24 dev $BR
        ip link set $BR up
    else
        # One at a time looks at it and writes it. An owner that is gone loses it: one that comes up is a process, and
        # one that is up has a controller.
        lock=/tmp/.slurmlab$i.lock
        exec 9>/tmp/.slurmlab.lock
        flock 9
        pid= owner=
        [[ ! -s $lock ]] || read -r pid owner <$lock
        if [[ -n $owner && ( -f $owner/run/ctld.pid || -e /proc/$pid ) ]]; then exec 9>&-; continue; fi
        echo "$$ $DIR" >$lock
        echo $lock >"$DIR/run/lockfile"
        exec 9>&-
    fi
    IDX=$i
    break
done
[[ -n $IDX ]] || die "no free port and subnet (40 tried)"
BASE=$(( 21000 + 100 * IDX ))
HOST=$(hostname -s 2>/dev/null || hostname)
if [[ $MODE == netns ]]; then CTLADDR=198.18.$IDX.254; else CTLADDR=127.0.0.1; fi

# ---- configuration
head -c 1024 /dev/urandom >"$DIR/etc/munge.key"
chmod 400 "$DIR/etc/munge.key"
NODE_LINES= HOSTS="127.0.0.1 localhost"$'\n'"$CTLADDR $HOST slurmctl"$'\n'
for (( k = 1; k <= NODES; k++ )); do
    if [[ $MODE == netns ]]; then
        a=198.18.$IDX.$k l="NodeName=n$k NodeHostname=n$k NodeAddr=198.18.$IDX.$k Port=$(( BASE + 1 ))"
    else
        a=127.0.0.1 l="NodeName=n$k NodeHostname=$HOST NodeAddr=127.0.0.1 Port=$(( BASE + k ))"
    fi
    NODE_LINES+="$l"$'\n' HOSTS+="$a n$k"$'\n'
    mkdir -p "$DIR/nodes/n$k" "$DIR/spool/n$k"
    echo "$a" >"$DIR/nodes/n$k/addr"
done
printf %s "$HOSTS" >"$DIR/etc/hosts" # /etc/hosts of the nodes; in simple mode the names go into the real one
if [[ $MODE == simple ]]; then # also where a name resolves: the lines of another cluster go with it
    {
        flock 9
        for (( k = 1; k <= NODES; k++ )); do
            echo "127.0.0.1 n$k # slurm-lab $DIR" >>/etc/hosts || note "n$k cannot be made to resolve"
        done
    } 9>/tmp/.slurmlab.lock
fi
GRES= GRESTYPES=
if (( GPUS > 0 )); then
    GRESTYPES="GresTypes=gpu" GRES=" Gres=gpu:h100:$GPUS"
    for (( g = 0; g < GPUS; g++ )); do # slurmd wants devices
        mknod -m 666 "$DIR/dev/fakegpu$g" c 1 3 || die "mknod is not allowed here: use -g 0"
    done
    r=0
    (( GPUS > 1 )) && r="[0-$(( GPUS - 1 ))]"
    printf 'AutoDetect=off\nName=gpu Type=h100 File=%s/dev/fakegpu%s\n' "$DIR" "$r" >"$DIR/etc/gres.conf"
fi
cat >"$DIR/etc/slurm.conf" <<CONF
ClusterName=lab$IDX
SlurmctldHost=$HOST($CTLADDR)
SlurmctldPort=$BASE
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$DIR/run/munge.sock
StateSaveLocation=$DIR/spool/ctld
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/run/ctld.pid
SlurmdPidFile=$DIR/run/slurmd.%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd.%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
MailProg=/bin/true
# No cgroups and no binding: many nodes share this machine.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=5
PropagateResourceLimits=NONE
MpiDefault=none
SwitchType=switch/none
# The node lines below are believed, not the hardware.
SlurmdParameters=config_overrides
ReturnToService=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
$GRESTYPES
# No slurmdbd: finished jobs stay visible to scontrol for MinJobAge.
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$DIR/log/jobcomp.txt
MinJobAge=3600
# Fast reactions.
SchedulerType=sched/backfill
SlurmctldParameters=preempt_send_user_signal
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=5
# Longer than KillWait, and than a busy node takes: a kill that a node answers later is sent again, and meets the same
# step of the next start.
MessageTimeout=18
CompleteWait=0
SlurmctldTimeout=10
SlurmdTimeout=20
TCPTimeout=2
BatchStartTimeout=60
InactiveLimit=0
UnkillableStepTimeout=60
# Nodes and partitions.
NodeName=DEFAULT CPUs=$CPUS Boards=1 SocketsPerBoard=1 CoresPerSocket=$CPUS ThreadsPerCore=1 RealMemory=$MEM$GRES
${NODE_LINES}PartitionName=DEFAULT Nodes=ALL State=UP MaxTime=INFINITE DefaultTime=60 DefMemPerCPU=1024
PartitionName=main Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=90
PartitionName=urgent PriorityTier=10 PreemptMode=OFF
CONF
for kv in ${EXTRA[@]+"${EXTRA[@]}"}; do
    [[ $kv == [A-Za-z]*=* ]] || die "-x wants Key=Value, got '$kv'"
    key=${kv%%=*}
    [[ ! ${key,,} =~ ^(nodename|partitionname)$ ]] || die "-x is for global lines, not $key"
    grep -viE "^$key=" "$DIR/etc/slurm.conf" >"$DIR/etc/.new" || true
    sed "s|^# Nodes and partitions\.|$kv\n&|" "$DIR/etc/.new" >"$DIR/etc/slurm.conf"
    rm "$DIR/etc/.new"
done
cat >"$DIR/env.sh" <<ENV
export SLURM_CONF=$DIR/etc/slurm.conf SLURM_LAB_DIR=$DIR
case ":\$PATH:" in *":$DIR/bin:"*) ;; *) export PATH=$DIR/bin:\$PATH ;; esac
ENV
printf 'DIR=%s MODE=%s BR=%s TIMENS=%s\n' "$DIR" "$MODE" "$BR" "$TIMENS" >"$DIR/etc/lab"
# slurmstepd as a child subreaper (36 = PR_SET_CHILD_SUBREAPER, kept over exec): proctrack/linuxproc then finds and
# ends tasks whose parent died, as cgroups would.
cat >"$DIR/bin/stepd" <<PERL
#!/usr/bin/perl
syscall($PRCTL, 36, 1, 0, 0, 0) == 0 or warn "prctl: \$!";
exec { '$STEPD' } 'slurmstepd', @ARGV;
PERL
chmod +x "$DIR/bin/stepd"
NODE=$DIR/bin/slurm_node
printf '#!/usr/bin/env bash\nexec bash %q %q "$@"\n' "$HERE/slurm_node.sh" "$DIR" >"$NODE"
chmod +x "$NODE"

# ---- start
export SLURM_CONF=$DIR/etc/slurm.conf
munged --force --key-file="$DIR/etc/munge.key" --socket="$DIR/run/munge.sock" --pid-file="$DIR/run/munged.pid" \
    --log-file="$DIR/log/munged.log" --seed-file="$DIR/run/munge.seed" >>"$DIR/log/munged.out" 2>&1 ||
    die "munged: $(tail -n 2 "$DIR/log/munged.out")"
"$NODE" ctld-start -c || die "slurmctld did not start: $(tail -n 3 "$DIR/log/slurmctld.out")"
for (( i = 0; i < 600; i++ )); do
    timeout 15 scontrol ping 2>/dev/null | grep -q 'is UP' && break
    f=$(grep -m1 'fatal: ' "$DIR/log/slurmctld.log" 2>/dev/null) && die "slurmctld: ${f#*fatal: }"
    sleep 0.1
done
(( i < 600 )) || die "slurmctld does not answer within 60 s (see $DIR/log/slurmctld.log)"
pids=()
for (( k = 1; k <= NODES; k++ )); do "$NODE" boot n$k & pids+=($!); done
for p in "${pids[@]}"; do wait "$p" || die "a node did not boot"; done
for (( i = 0; i < 900; i++ )); do
    up=$(sinfo -h -N -p main -t idle -r -o %N 2>/dev/null | wc -l)
    (( up == NODES )) && break
    sleep 0.1
done
(( up == NODES )) || die "only $up of $NODES nodes registered within 90 s: $(sinfo -R -h 2>&1 | head -5)"
w=$(cd / && timeout 120 env -i PATH="$PATH" HOME=/root SLURM_CONF="$SLURM_CONF" \
    srun -Q -p main -N"$NODES" --ntasks-per-node=1 -t 1 sh -c 'echo $SLURMD_NODENAME' 2>&1 | sort -V | xargs) ||
    die "the first srun failed: $w"
[[ $w == "$(seq -f n%g -s ' ' "$NODES")" ]] || die "the first srun answered '$w'"
note "up in $(( (${EPOCHREALTIME/./} - T0) / 1000 )) ms: $NODES nodes, $MODE, $GPUS fake GPUs each, in $DIR"
