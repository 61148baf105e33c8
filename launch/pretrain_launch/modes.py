"""Command lines that start the ranks of a node, without ssh: torchrun, accelerate, deepspeed.

With `srun`, Slurm itself starts each rank. Pure, except for the interpreter.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

JOIN_S = 300
"""Timeout of a node that waits for others: importing torch takes minutes on a busy file system."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Rendezvous of the ranks of a start."""

    address: str  # of the first node; all can reach it
    port: int  # free, on the first node
    nodes: tuple[str, ...]  # host names, the one with `address` first
    ranks_per_node: int
    identity: str  # unique name of this start, so that leftovers of others are ignored

    @property
    def world_size(self) -> int:
        """Ranks."""
        return len(self.nodes) * self.ranks_per_node

    @property
    def endpoint(self) -> str:
        """Address and port."""
        return format_endpoint(self.address, self.port)


def format_endpoint(address: str, port: int) -> str:
    """Returns `10.0.0.1:29500`, or `[fd00::1]:29500`."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def rank_variables(meeting: Meeting, node_rank: int, local_rank: int) -> dict[str, str]:
    """Returns the variables of a rank, as torchrun sets them."""
    return {
        "RANK": str(node_rank * meeting.ranks_per_node + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(meeting.world_size),
        "LOCAL_WORLD_SIZE": str(meeting.ranks_per_node),
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
    }


def launcher_command(mode: str, meeting: Meeting, node_rank: int, own_address: str, hostfile: Path) -> list[str]:
    """Returns the command line that starts the ranks of a node, up to the module that each runs."""
    if mode == "torchrun":
        # torch would guess the node of the store by names, which several interfaces have.
        settings = f"is_host={int(node_rank == 0)},join_timeout={JOIN_S},last_call_timeout=5"
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={len(meeting.nodes)}", f"--nproc-per-node={meeting.ranks_per_node}"),
            *("--max-restarts=0", "--rdzv-backend=c10d", f"--rdzv-endpoint={meeting.endpoint}"),
            *(f"--rdzv-id={meeting.identity}", f"--rdzv-conf={settings}"),
            *(f"--local-addr={own_address}", "--module"),
        ]
    if mode == "accelerate":
        # --multi_gpu makes it start several processes; on CPUs too, as ranks choose their device.
        return [
            *(sys.executable, "-m", "accelerate.commands.launch"),
            *(["--multi_gpu"] if meeting.world_size > 1 else []),
            *(f"--num_machines={len(meeting.nodes)}", f"--machine_rank={node_rank}"),
            f"--num_processes={meeting.world_size}",
            *("--mixed_precision=no", "--dynamo_backend=no"),
            *(f"--main_process_ip={meeting.address}", f"--main_process_port={meeting.port}"),
            *("--rdzv_backend=static", "--max_restarts=0", "--module"),
        ]
    assert mode == "deepspeed"
    return [
        *(sys.executable, "-m", "deepspeed.launcher.runner"),
        *(f"--hostfile={hostfile}", "--no_ssh", f"--node_rank={node_rank}"),
        *(f"--master_addr={meeting.address}", f"--master_port={meeting.port}", "--module"),
    ]


def hostfile_text(meeting: Meeting) -> str:
    """Returns the nodes as `deepspeed` reads them."""
    return "".join(f"{node} slots={meeting.ranks_per_node}\n" for node in meeting.nodes)
