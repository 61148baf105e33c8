"""One run of `pretrain` on the dry CUDA runtime, in a process of its own: what a steady step asks of the device.

    LD_PRELOAD=libcuda.so.1 python -m tests.cuda_dry.case OUT STEP train CONFIG [OVERRIDES]
    LD_PRELOAD=libcuda.so.1 python -m tests.cuda_dry.case OUT STEP decode | update

Writes a table of the step, as JSON, to OUT; exits as the command does. With WORLD_SIZE above 1 it is rank 0 of ranks
that are not there, and exits after the step: nobody writes their parts of a checkpoint. So does it with an optimizer in
host memory, which computes, but with gradients that nobody has.
"""

import ctypes
import dataclasses
import json
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore

from pretrain.config.engine import PLAIN_ENGINE, EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.config.optim import OptimConfig
from pretrain.config.presets import expand_preset
from pretrain.dist import World, leave
from pretrain.engine.replicated import TorchEngine
from pretrain.generation.constraints import Constraints
from pretrain.generation.sampling import stream
from pretrain.model import build_model
from pretrain.optim.build import build_optimizer
from pretrain.optim.groups import group_parameters
from pretrain.training import loop
from pretrain.training.step import StepTotals

OURS = ("pretrain/", "deepspeed/runtime/", "accelerate/", "torch/optim/")
"""Where a wait is looked for, from the innermost frame on: not in DeepSpeed's wrapper of torch.cuda."""


BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of a value by Triton's name of its type."""


class Counters:
    """The counters of the runtime, and the places in Python from which the device was waited for."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self.waits: Counter[str] = Counter()
        self.ahead: Counter[str] = Counter()
        note = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_long)(self._note)
        self._kept = note  # called from C
        self._library.dry_on_wait(note)

    def _note(self, call: bytes, ahead: int) -> None:
        place = f"wait: {call.decode()} in {_place()}"
        self.waits[place] += 1
        self.ahead[place] += ahead

    def reset(self) -> None:
        """Begins to count."""
        self._library.dry_reset()
        self.waits.clear()
        self.ahead.clear()

    def table(self, path: Path) -> dict[str, list[float]]:
        """Returns calls and amount by name: bytes, FLOPs, of waits the kernels that they are not for.

        Kernels of a kind are one row.
        """
        self._library.dry_write(str(path).encode())
        table: dict[str, list[float]] = {}
        for line in path.read_text().splitlines():
            calls, amount, name = line.split("\t")
            if name.startswith("cuda"):  # a wait, of which the place is known too
                continue
            kind = name.split(" ")
            row = " ".join(kind[:-1]) if kind[0] in ("kernel", "compiled") else name
            found = table.setdefault(row, [0, 0.0])
            found[0] += int(calls)
            found[1] += float(amount)
        path.unlink()
        compiled = torch._dynamo.utils.counters if "torch._dynamo" in sys.modules else {}
        table["compiled graphs"] = [compiled["stats"]["unique_graphs"] if compiled else 0, 0.0]
        table["graph breaks"] = [sum(compiled["graph_break"].values()) if compiled else 0, 0.0]
        return table | {place: [count, self.ahead[place]] for place, count in self.waits.items()}


def _place() -> str:
    """Returns file and function of the innermost frame of the project or its engine."""
    for frame in reversed(traceback.extract_stack()):
        for part in OURS:
            if part in frame.filename and "cuda_dry" not in frame.filename:
                return f"{part}{frame.filename.rpartition(part)[2]} {frame.name}"
    return "another thread"


def _store_of_one(host: str, port: int, rank: int, size: int, timeout: Any, *_: Any) -> TCPStore:
    """Returns the store of a job whose other ranks are not waited for."""
    return TCPStore(host, port, size, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True)


def _apply_every_step() -> None:
    """Lets DeepSpeed read whether a norm is finite, and take it to be: the device holds no values."""

    def read(norm: Any) -> bool:
        is_invalid(norm)
        return False

    for module in [found for found in sys.modules.values() if "is_invalid_grad_norm" in vars(found)]:
        is_invalid = module.is_invalid_grad_norm
        module.is_invalid_grad_norm = read


def watch(counters: Counters, out: Path, step: int) -> None:
    """Counts from the beginning of one step to that of the next, and lets the run go on.

    Sums of an exchange are those of this rank, made on the host: the device holds no values.
    """
    accumulate, exchange = loop._accumulate, loop.start_exchange
    begun = 0

    def counted(*given: Any) -> Any:
        nonlocal begun
        begun += 1
        if begun == 1:
            _apply_every_step()
        if begun == step:
            torch.cuda.reset_peak_memory_stats()
            counters.reset()
        elif begun == step + 1:
            table = counters.table(out)
            table["memory: peak allocated"] = [1, torch.cuda.max_memory_allocated()]
            out.write_text(json.dumps(table))
            if torch.distributed.get_world_size() > 1:
                leave(0)
        return accumulate(*given)

    def exchanged(sums: Any, done: Any, coming: Any, layout: Any, **flags: Any) -> Callable[[], StepTotals]:
        finish = exchange(sums, done, coming, layout, **flags)

        def totals() -> StepTotals:
            agreed = finish()
            zeros = agreed.sums | {"nll": (0.0,), "correct": (0.0,), "by_source": ()}
            flag = {"stop": flags.get("stop", False), "num_written": int(flags.get("is_written", False))}
            return dataclasses.replace(agreed, sums=zeros, done=done, coming=coming, **flag)

        return totals

    loop._accumulate = counted
    loop.start_exchange = exchanged


def decode(counters: Counters, out: Path, step: int) -> None:
    """Decodes two prompts greedily, and counts one step: the scores of the next token, and its choice."""
    device = torch.device("cuda")
    config = ModelConfig.model_validate(expand_preset({"preset": "llama-5m", "vocab_size": 512}))
    model = build_model(config, PLAIN_ENGINE, device).to(device, torch.bfloat16).eval()
    chosen = stream(model, [[3] * 8, [4] * 8], Constraints(max_new_tokens=step + 1))
    for _ in range(step):
        next(chosen)
    counters.reset()
    next(chosen)
    out.write_text(json.dumps(counters.table(out)))


def update(counters: Counters, out: Path, step: int) -> None:
    """Updates 2^24 weights of four matrices in 16 bits, and counts one update of our own engine.

    Bytes of its compiled kernel are those of its loads and stores of tensors, in Triton's code.
    """
    from torch._inductor.utils import run_and_get_code

    module = nn.ParameterList(torch.zeros(2048, 2048) for _ in range(4))
    groups, config = group_parameters(module), EngineConfig(kind="single")
    optimizer = build_optimizer(groups, OptimConfig(lr=1e-3), torch.device("cuda"), fuses=config.fuses_update("cuda"))
    accelerator = SimpleNamespace(prepare_model=lambda module, **_: module, device=torch.device("cuda"))
    names = {id(weight): name for name, weight in module.named_parameters()}
    engine = TorchEngine(module, names, optimizer, accelerator, config, 1.0, World(0, 1, 0))

    def take() -> None:
        for weight in module:
            weight.grad = torch.zeros_like(weight)
        engine.update(1e-3)

    _, (code,) = run_and_get_code(take)
    for _ in range(step):
        take()
    counters.reset()
    take()
    types = dict(re.findall(r"'(\w+_ptr\d+)': '\*(\w+)'", code))
    moved = sum(BYTES[types[name]] for name in re.findall(r"tl\.(?:load|store)\((\w+) \+ \(x0\)", code))
    out.write_text(json.dumps(counters.table(out) | {"compiled kernel: bytes a weight": [1, moved]}))


def main() -> None:
    """Runs the command."""
    out, step, *arguments = sys.argv[1:]
    # The package hides this module by a function.
    sys.modules["torch.distributed.rendezvous"]._create_c10d_store = _store_of_one
    alone = {"decode": decode, "update": update}
    if arguments[0] in alone:
        alone[arguments[0]](Counters(), Path(out), int(step))
        return
    watch(Counters(), Path(out), int(step))
    from pretrain.__main__ import main as run

    sys.argv = ["pretrain", *arguments]
    run()


if __name__ == "__main__":
    main()
