"""Rank, world size and the few collectives of the loop, which work in a single process too.

The launcher's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) is the only
input: torchrun, `accelerate launch`, `deepspeed` and `pretrain launch` all set it. Started alone,
it is filled in for a world of one.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from pretrain.errors import ConfigError
from pretrain.utils.net import listen_on_loopback, reserved_port
from pretrain.utils.safe_read import parse_json

if TYPE_CHECKING:
    from torch import Tensor, cuda

_of_this_process = contextlib.ExitStack()
"""Closed at the end of the process."""


@dataclass(frozen=True, slots=True)
class World:
    """This process's place in the job.

    With sequence parallelism `sequence` ranks share the rows of a batch, and with expert parallelism
    `experts` consecutive ranks share the experts of each layer. With tensor parallelism `tensor`
    consecutive ranks share the matrices of all layers, and the rows. `sequence x tensor`
    consecutive ranks have columns of the same rows, in their order.
    """

    rank: int
    size: int
    local_rank: int
    sequence: int = 1
    experts: int = 1
    tensor: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and tracks."""
        return self.rank == 0

    @property
    def row_ranks(self) -> int:
        """Number of ranks that have columns of the same rows."""
        return self.sequence * self.tensor

    @property
    def data_rank(self) -> int:
        """Number of this rank's rows among all ranks with other rows."""
        return self.rank // self.row_ranks

    @property
    def data_size(self) -> int:
        """Number of ranks, or groups of ranks, with rows of their own."""
        return self.size // self.row_ranks

    @property
    def row_rank(self) -> int:
        """Number of this rank among those that have columns of its rows."""
        return self.rank % self.row_ranks

    @property
    def parts(self) -> int:
        """Consecutive ranks that have a parameter among them: of an expert, or a matrix."""
        return max(self.experts, self.tensor)

    def on(self, device: str) -> str:
        """Describes the ranks on a device: `4 x cpu`."""
        shared = f", {self.row_ranks} ranks a row" if self.row_ranks > 1 else ""
        shared += f", tensors over {self.tensor} ranks" if self.tensor > 1 else ""
        shared += f", experts over {self.experts} ranks" if self.experts > 1 else ""
        return f"{self.size} x {device}{shared}"

    def sequence_group(self, timeout_s: int) -> Any:
        """Makes the group of the ranks that exchange heads of these rows. Collective among them."""
        first = self.data_rank * self.row_ranks + self.rank % self.tensor
        return _group_of(tuple(range(first, first + self.row_ranks, self.tensor)), timeout_s)

    def parts_group(self, timeout_s: int) -> Any:
        """Makes the process group of the ranks that share parameters with this one. Collective."""
        first = self.rank - self.rank % self.parts
        return _group_of(tuple(range(first, first + self.parts)), timeout_s)

    def copies_group(self, timeout_s: int) -> Any:
        """Makes the process group of the ranks that have the same parts. Collective."""
        return _group_of(tuple(range(self.rank % self.parts, self.size, self.parts)), timeout_s)


@functools.cache
def _group_of(ranks: tuple[int, ...], timeout_s: int) -> Any:
    """Makes a process group, once: the model and the engine share the one of parts."""
    import torch.distributed as td

    # By its members alone: a barrier of all ranks for each group would add up.
    return td.new_group(list(ranks), timedelta(seconds=timeout_s), use_local_synchronization=True)


def read_world() -> World:
    """Reads the launcher's environment; fills it in for a world of one where there is none.

    Raises:
        ConfigError: Only a part of it is set, or it makes no sense.
    """
    names = ("RANK", "WORLD_SIZE")
    present = [name for name in names if name in os.environ]
    if not present:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        port = _of_this_process.enter_context(reserved_port(None))
        os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        return World(0, 1, 0)
    text = "the launcher's environment is incomplete"
    fix = "start with `pretrain launch` or torchrun"
    try:
        rank, size = (int(os.environ[name]) for name in names)
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{text}: {error}", fix=fix) from None
    absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if absent:
        raise ConfigError(f"{text}: no {absent[0]}", fix=fix)
    if not 0 <= rank < size:
        raise ConfigError(f"RANK={rank} is not within WORLD_SIZE={size}", fix="correct the launcher's environment")
    return World(rank, size, local_rank)


def ranks_of_node(world: World) -> int:
    """Returns the ranks of this node by the launcher's environment; all, where it does not say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or world.size)


@contextlib.contextmanager
def loopback_store(world: World) -> Iterator[None]:
    """Keeps the job's store off the network, where MASTER_ADDR is loopback; around what sets up the group.

    torch's own store listens on every interface, and whoever reaches it can end or forge the run.
    The group (`env://`) finds this one by its port, and keeps it. Raises: OSError: The port is in
    use.
    """
    import torch.distributed as td

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_wanted = world.is_main and not is_of_agent and not td.is_initialized()
    listener = listen_on_loopback(host, port) if is_wanted else None
    if listener is None:
        yield
        return
    store = td.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
    yield
    del store  # the group has it too


def is_distributed() -> bool:
    """Returns whether a process group of more than one rank is up."""
    import torch.distributed as td

    return td.is_available() and td.is_initialized() and td.get_world_size() > 1


def all_reduce_sum(values: Any) -> Any:
    """Sums a tensor over the ranks, in place; returns it."""
    import torch.distributed as td

    if is_distributed():
        td.all_reduce(values)
    return values


def start_all_reduce_sum(values: "Tensor") -> Callable[[], "Tensor"]:
    """Begins to sum a tensor over the ranks, in place; returns what waits for the sums on the host.

    On CUDA they are summed and copied on a stream of their own, so that neither waits for what is
    queued after this call.
    """
    import torch
    import torch.distributed as td

    if not values.is_cuda:
        work = td.all_reduce(values, async_op=True) if is_distributed() else None

        def wait() -> "Tensor":
            if work is not None:
                work.wait()
            return values

        return wait
    stream = _stream_of_sums(values.device)
    stream.wait_stream(torch.cuda.current_stream())
    values.record_stream(stream)
    with torch.cuda.stream(stream):
        if is_distributed():
            td.all_reduce(values, async_op=True).wait()  # the stream waits, not the host
        return start_copy_to_host(values)


@functools.cache
def _stream_of_sums(device: Any) -> "cuda.Stream":
    import torch

    return torch.cuda.Stream(device)


def start_copy_to_host(values: "Tensor") -> Callable[[], "Tensor"]:
    """Begins to copy a tensor to the host; returns the function that waits for the copy.

    The copy waits for what is queued before this call on the current stream, and the host, then,
    for nothing that is queued after it. A tensor that is on the host is returned itself.
    """
    if not values.is_cuda:
        return lambda: values
    import torch

    copied = values.to("cpu", non_blocking=True)  # in pinned memory
    event = torch.cuda.current_stream().record_event()

    def wait() -> "Tensor":
        event.synchronize()
        return copied

    return wait


def broadcast_object(value: Any) -> Any:
    """Returns rank 0's `value` on every rank. It travels as JSON, never as a pickle."""
    return gather_objects(value)[0]


def gather_objects(value: Any) -> list[Any]:
    """Returns every rank's JSON-able `value`, by rank, on every rank."""
    import json

    import torch
    import torch.distributed as td

    if not is_distributed():
        return [parse_json(json.dumps(value))]
    device = _device_of_group()
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([content.numel()], device=device)
    sizes = [torch.zeros_like(size) for _ in range(td.get_world_size())]
    td.all_gather(sizes, size)
    longest = max(int(item) for item in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: content.numel()] = content
    rows = [torch.empty_like(padded) for _ in sizes]
    td.all_gather(rows, padded)
    return [parse_json(bytes(row[: int(n)].cpu().numpy())) for row, n in zip(rows, sizes, strict=True)]


def join_bytes(content: bytes, start: int, total: int) -> bytes:
    """Returns `total` bytes, of which each rank has some from `start` on, and no two the same.

    Collective: each byte travels once, where `gather_objects` has as many for each rank as the
    rank with the most.
    """
    import torch

    together = torch.zeros(total, dtype=torch.uint8, device=_device_of_group())
    if content:
        mine = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        together[start : start + len(content)] = mine
    summed: Tensor = all_reduce_sum(together)
    return summed.cpu().numpy().tobytes()


def _device_of_group() -> Any:
    """Returns the device of the tensors of collectives."""
    import torch
    import torch.distributed as td

    return torch.device("cuda" if is_distributed() and td.get_backend() == "nccl" else "cpu")


def leave(exit_code: int) -> NoReturn:
    """Ends this process at once, its output flushed; everything else must be closed before.

    An orderly interpreter exit races with the threads of native code, and now and then aborts a
    process whose work is done (SIGABRT): those of process groups that accelerate and DeepSpeed keep
    references to, `destroy_process_group` or not, and a trainer of `tokenizers` that Ctrl-C left.
    """
    import logging

    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed terminal is no reason to stay
            stream.flush()
    os._exit(exit_code)
