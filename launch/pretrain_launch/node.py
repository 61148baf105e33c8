"""One task of the step: starts the ranks of a node by a launcher, or is one rank (mode `srun`).

    srun  ->  this, on each node  ->  torchrun  ->  pretrain_launch.rank  ->  pretrain train

Signals are blocked from here on: Slurm sends SIGUSR1 to every process of a step, and torchrun would
die of it. Ranks take them as soon as they can answer.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from pretrain.config.engine import JOB_GPUS
from pretrain.errors import EXIT_OK, EXIT_UNAVAILABLE, PretrainError
from pretrain.utils.io import disk_errors, make_dir
from pretrain.utils.process import guard_streams, usable_cores
from pretrain.utils.safe_read import parse_json
from pretrain_launch.exits import find_cause, job_code, note_exit, noted_ranks
from pretrain_launch.modes import Meeting, launcher_command, rank_variables
from pretrain_launch.rank import BLOCKED, run_rank
from pretrain_launch.rendezvous import interface_of, route_to
from pretrain_launch.spec import LaunchSpec, load_spec


def node_environment(base: Mapping[str, str], spec: LaunchSpec, interface: str | None) -> dict[str, str]:
    """Adds defaults to the environment of the ranks of a node; variables of the user stay."""
    defaults = {"OMP_NUM_THREADS": str(max(1, usable_cores() // spec.ranks_per_node))}
    if spec.gpus_per_node and spec.site.gpus != "none":
        defaults[JOB_GPUS] = str(spec.gpus_per_node)
    if interface:
        defaults |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return {**defaults, **base}


def run_node(spec: LaunchSpec, meeting: Meeting, exits: Path) -> int:
    """Runs the ranks of this task; returns 0 if none of them failed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    number = meeting.nodes.index(os.environ["SLURMD_NODENAME"])
    own_address = route_to(meeting.address, meeting.port)
    interface = spec.site.interface or (interface_of(own_address) if own_address else None)
    environment = node_environment(os.environ, spec, interface)
    host = socket.gethostname()
    if spec.mode == "srun":
        local_rank = int(os.environ["SLURM_LOCALID"])
        os.environ.update({**environment, **rank_variables(meeting, number, local_rank)})
        return run_rank(str(spec.config), spec.folder.logs, exits)
    command = launcher_command(spec.mode, meeting, number, own_address or host, exits / "hostfile")
    program = ["pretrain_launch.rank", str(spec.config), str(spec.folder.logs), str(exits)]
    log = make_dir(spec.folder.logs) / f"launcher-{number:05d}.log"
    with disk_errors("open", log):
        stacks = log.open("ab")
    with stacks:  # of the launcher after a failed rank; ranks print to stdout
        code = subprocess.run([*command, *program], env=environment, stdin=subprocess.DEVNULL, stderr=stacks).returncode
    if code == EXIT_OK:
        return EXIT_OK
    first = number * meeting.ranks_per_node
    ours = range(first, first + meeting.ranks_per_node)
    ended = {rank: end for rank, end in noted_ranks(exits).items() if rank in ours}
    if not ended:
        said = f"{spec.mode} ended with exit code {code} before its ranks: {log}"
        note_exit(exits, "node", number, host=host, said=said)
    return job_code(find_cause(ended), ended) or EXIT_UNAVAILABLE


def main() -> None:
    """Runs `python -m pretrain_launch.node SPEC MEETING EXITS`."""
    guard_streams()
    spec, text, exits = sys.argv[1:]
    values = parse_json(text)
    meeting = Meeting(**{**values, "nodes": tuple(values["nodes"])})
    try:
        sys.exit(run_node(load_spec(Path(spec)), meeting, Path(exits)))
    except PretrainError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
