"""Shared by the arms of the GPU campaign: device, sizes, timing by events, memory, rates, and rows on disk.

    python -m benchmarks.gpu_bench JOB      one arm in its own process; JOB is the JSON that `gpu.py` writes

An arm is a function of a `Bench`. On a CPU, which is the rehearsal, times are those of the host and memory is unknown.
"""

import contextlib
import gc
import importlib
import json
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from benchmarks.common import append_row, environment
from pretrain.errors import ConfigError
from pretrain.plan.flops import RowFlops
from pretrain.plan.gpus import GPUS, Gpu, name_of_device

Size = TypeVar("Size")

PACKAGES = ("torch", "triton", "transformers", "accelerate", "deepspeed", "torchao")
GIVEN = ("nanogpt", "tinyshakespeare", "multi30k")
"""Paths of what is not in the repository; without one, an arm or a case is not measured."""
CLOCKS = ("driver_version", "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


@dataclass
class Bench:
    """What an arm works with.

    Attributes:
        arm: Name of the arm.
        question: Question that it answers.
        out: Folder of the rows, the table of kernels and the trace.
        scratch: Folder of all else that an arm writes: text, runs, checkpoints.
        rehearse: Tiny shapes on a CPU.
        command: Command of the campaign.
        commit: Commit of the tree.
        nanogpt: Clone of nanoGPT, or a folder with its model.py. None: not measured.
        tinyshakespeare: Text of nanoGPT's character models. None: not measured.
        multi30k: Folder of Multi30k's sentences. None: not measured.
        race_s: Seconds that nanoGPT trains for in the race.
        earlier: Files of rows of earlier calls, for what compares the whole campaign.
        cases: Words of which the name of a compared step or layout must have one; none: all are run.
        groups: Groups of the arm `ranks`; none: all are run.
        failed: Cases that ended with an error.
    """

    arm: str
    question: str
    out: Path
    scratch: Path
    rehearse: bool
    command: str
    commit: str
    nanogpt: Path | None
    tinyshakespeare: Path | None = None
    multi30k: Path | None = None
    race_s: float = 900.0
    earlier: tuple[Path, ...] = ()
    cases: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    failed: list[str] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """The GPU; a CPU in the rehearsal."""
        return torch.device("cpu" if self.rehearse else "cuda")

    @property
    def gpu(self) -> Gpu | None:
        """Data sheet of the GPU; None: unknown, or a CPU."""
        name = None if self.rehearse else name_of_device(torch.cuda.get_device_name())
        return None if name is None else GPUS[name]

    def pick(self, full: Size, tiny: Size) -> Size:
        """Returns the size of a campaign or of its rehearsal."""
        return tiny if self.rehearse else full

    def wants(self, case: str) -> bool:
        """Returns whether a case is among those asked for by `--cases`."""
        return not self.cases or any(word in case for word in self.cases)

    def synchronize(self) -> None:
        """Waits for the device."""
        if not self.rehearse:
            torch.cuda.synchronize()

    def free(self) -> None:
        """Releases what the last case has left, compiled code too."""
        gc.collect()
        if not self.rehearse:
            torch._dynamo.reset()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    @contextlib.contextmanager
    def case(self, name: str, shape: dict[str, Any]) -> Iterator[None]:
        """Context of a case that may fail without the others: its error is a row.

        Neither a ConfigError is a failure nor a full GPU: this machine has no such kernel, package or memory, and the
        row has the reason.
        """
        self.free()
        try:
            yield
        except (ConfigError, torch.OutOfMemoryError) as error:
            self.write(name, shape, refused=str(error)[:300])
        except Exception as error:
            traceback.print_exc()
            self.failed.append(name)
            self.write(name, shape, error=f"{type(error).__name__}: {error}"[:2000])

    def _mark(self) -> Any:
        if self.rehearse:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def measure(self, step: Callable[[], Any], full_steps: int, warmup: int = 3) -> dict[str, Any]:
        """Times calls after some that warm up, one by one; the host does not wait for the device between them.

        Returns:
            `ms` (median and quartiles), `host_ms` (of a call on the host), peak bytes, clocks before and after.
        """
        steps = self.pick(full_steps, 2)
        for _ in range(self.pick(warmup, 1)):
            step()
        self.synchronize()
        before = read_clocks()
        if not self.rehearse:
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        marks = [self._mark()]
        for _ in range(steps):
            step()
            marks.append(self._mark())
        host_s = time.perf_counter() - begun
        self.synchronize()
        ms = [1e3 * (b - a) if self.rehearse else a.elapsed_time(b) for a, b in pairwise(marks)]
        return {
            "ms": quartiles(ms),
            "steps": steps,
            "host_ms": round(1e3 * host_s / steps, 4),
            **self.memory(),
            "clocks": [before, read_clocks()],
        }

    def memory(self) -> dict[str, int | None]:
        """Returns the peaks of the allocator since the last reset; None on a CPU."""
        known = not self.rehearse
        return {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated() if known else None,
            "peak_reserved_bytes": torch.cuda.max_memory_reserved() if known else None,
        }

    def rates(self, ms: float, tokens: int, flops: RowFlops, rows: int, causal: bool = True) -> dict[str, Any]:
        """Returns tokens a second, MFU, and the MFU that counts half of causal attention.

        Args:
            ms: Duration of a step.
            tokens: Tokens of a step, without padding.
            flops: FLOPs of training on a row, all pairs of attention counted.
            rows: Rows of a step.
            causal: Whether half of the pairs are masked.
        """
        peak = self.gpu and self.gpu.flops
        found: dict[str, Any] = {"tokens_per_s": round(1e3 * tokens / ms, 1), "mfu": None, "mfu_halved_causal": None}
        if peak:
            found["mfu"] = round(rows * flops.total / (ms / 1e3) / peak, 4)
            if causal:
                halved = flops.total - flops.attention / 2
                found["mfu_halved_causal"] = round(rows * halved / (ms / 1e3) / peak, 4)
        return found

    def write(self, case: str, shape: dict[str, Any], **figures: Any) -> None:
        """Appends a row, on disk when this returns, and prints its essence."""
        row = {"arm": self.arm, "question": self.question, "case": case, "shape": shape, **figures}
        row["environment"] = _environment() | {"command": self.command, "commit": self.commit}
        append_row(self.out / "rows.jsonl", row)
        names = ("ms", "host_ms", "tokens_per_s", "mfu", "loss_difference", "refused", "error", "held", "value")
        shown = {name: figures[name] for name in names if figures.get(name) is not None}
        print(f"{self.arm}: {case}: {json.dumps(shown)}", flush=True)


def quartiles(values: list[float]) -> dict[str, float]:
    """Returns the median and the quartiles."""
    low, median, high = np.percentile(values, (25, 50, 75))
    return {"median": round(float(median), 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def read_clocks() -> dict[str, str]:
    """Returns driver, clocks in MHz, power in W and temperature, as nvidia-smi prints them; empty without it."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    if done.returncode:
        return {}
    return dict(zip(CLOCKS, map(str.strip, done.stdout.splitlines()[0].split(",")), strict=True))


@cache
def _environment() -> dict[str, Any]:
    installed = tuple(name for name in PACKAGES if find_spec(name) is not None)
    found = environment(installed)
    has_gpu = torch.cuda.is_available()
    found["gpu"] = torch.cuda.get_device_name() if has_gpu else None
    found["driver"] = read_clocks().get("driver_version")
    found["cuda"] = torch.version.cuda
    found["cudnn"] = torch.backends.cudnn.version() if has_gpu else None
    return found


def installed_version(package: str, module: str) -> str | None:
    """Returns the version of a package whose module can be imported; None: there is none."""
    return version(package) if find_spec(module) is not None else None


def main() -> None:
    """Runs the arm of a job; the exit code is 1 if a case failed."""
    job = json.loads(sys.argv[1])
    module, _, name = job.pop("function").partition(":")
    for path in ("out", "scratch", *GIVEN):
        job[path] = job.get(path) and Path(job[path])
    job["earlier"] = tuple(map(Path, job.get("earlier", ())))
    job["cases"], job["groups"] = tuple(job.get("cases", ())), tuple(job.get("groups", ()))
    bench = Bench(**job)
    if not bench.rehearse and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU; --rehearse runs the campaign on a CPU")
    getattr(importlib.import_module(module), name)(bench)
    if bench.failed:
        raise SystemExit(f"failed: {'; '.join(bench.failed)}")


if __name__ == "__main__":
    main()
