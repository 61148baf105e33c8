"""Milliseconds of a traced step: by category of kernel, idle between kernels, and waits of the host.

    summarize(path, steps)     reads a Chrome trace of torch.profiler

On a GPU its kernels, copies and fills are counted; in a trace of a CPU the operators, without those that they call.
"""

import gzip
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

CATEGORIES = {
    "collectives": "nccl|c10d|gloo",
    "attention": "flash|fmha|attention|sdpa|mha",
    "products": r"gemm|cutlass|xmma|nvjet|wgmma|splitk|aten::(mm|addmm|bmm|baddbmm|linear|_scaled_mm)",
    "update": "adam|multi_tensor|foreach|muon",
    "fused by torch.compile": "^triton_",
    "copies": "memcpy|copy|catarray|aten::(cat|to|clone|contiguous)",
    "fills": "memset|fill|zero",
    "reductions": "reduce|softmax|norm|sum|mean|argmax",
    "elementwise": "elementwise|vectorized|aten::(add|mul|div|sub|neg|silu|gelu|exp|sqrt)",
}
"""Patterns of names; the first that is found decides. Products of a graph of torch.compile are those of a library."""
_PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in CATEGORIES.items()}
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
WAITS = re.compile("Synchronize|cudaMemcpy$")
LONGEST = 5
NAME_LENGTH = 60

Event = dict[str, Any]


def category_of(name: str) -> str:
    """Returns the category of a kernel or an operator."""
    return next((category for category, pattern in _PATTERNS.items() if pattern.search(name)), "other")


def summarize(path: Path, steps: int) -> dict[str, Any]:
    """Summarizes a trace of some steps.

    Returns:
        Per step: `ms` by category, a sum over streams, which may overlap; `busy_ms`, in which any stream works;
        `idle_ms`, in which none does between the first kernel and the last, and the same by what comes after it;
        `kernels`, their number; `waits_ms` of the host, by call. And `longest_gaps`: ms, the kernels before and after.
    """
    opening = gzip.open if path.suffix == ".gz" else Path.open
    with opening(path, "rt") as file:
        spans = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    work = [event for event in spans if event.get("cat") in ON_DEVICE] or list(_without_calls(spans))
    work.sort(key=itemgetter("ts"))
    by_category: Counter[str] = Counter()
    for event in work:
        by_category[category_of(event["name"])] += event["dur"]
    gaps = list(_gaps(work))
    after: Counter[str] = Counter()
    for length, _, event in gaps:
        after[category_of(event["name"])] += length
    waits: Counter[str] = Counter()
    for event in spans:
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and WAITS.search(event["name"]):
            waits[event["name"]] += event["dur"]
    idle = sum(length for length, _, _ in gaps)
    whole = max(map(_end_of, work)) - work[0]["ts"] if work else 0.0
    longest = sorted(gaps, key=itemgetter(0), reverse=True)[:LONGEST]
    return {
        "ms": _in_ms(by_category, steps),
        "busy_ms": round((whole - idle) / steps / 1e3, 3),
        "idle_ms": round(idle / steps / 1e3, 3),
        "idle_before_ms": _in_ms(after, steps),
        "kernels": len(work) // steps,
        "waits_ms": _in_ms(waits, steps),
        "longest_gaps": [
            [round(length / 1e3, 3), before["name"][:NAME_LENGTH], event["name"][:NAME_LENGTH]]
            for length, before, event in longest
        ],
    }


def _in_ms(microseconds: Counter[str], steps: int) -> dict[str, float]:
    return {name: round(value / steps / 1e3, 3) for name, value in microseconds.most_common()}


def _without_calls(spans: Sequence[Event]) -> Iterator[Event]:
    """Yields the parts of the operators of a CPU in which they call no other."""
    by_thread: dict[Any, list[Event]] = {}
    for event in spans:
        if event.get("cat") == "cpu_op":
            by_thread.setdefault(event["tid"], []).append(event)
    for events in by_thread.values():
        running: list[Event] = []
        now = 0.0
        last = {"ts": math.inf, "dur": 0.0}
        for event in [*sorted(events, key=lambda event: (event["ts"], -event["dur"])), last]:
            while running and _end_of(running[-1]) <= event["ts"]:
                ended = running.pop()
                yield ended | {"ts": now, "dur": _end_of(ended) - now}
                now = _end_of(ended)
            if running:
                yield running[-1] | {"ts": now, "dur": event["ts"] - now}
            running.append(event)
            now = event["ts"]


def _end_of(event: Event) -> float:
    return event["ts"] + event["dur"]


def _gaps(work: Sequence[Event]) -> Iterator[tuple[float, Event, Event]]:
    """Yields the lengths of the times without work, and what is before and after; `work` is in order of its begin."""
    latest: Event | None = None
    end = 0.0
    for event in work:
        if latest is not None and event["ts"] > end:
            yield event["ts"] - end, latest, event
        if latest is None or _end_of(event) > end:
            latest, end = event, _end_of(event)
