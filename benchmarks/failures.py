"""A month of a large run with failures: its goodput against checkpoint interval, restart time and spare nodes.

    python -m benchmarks.failures --picture docs/scale.png

Failures come at random (a Poisson process) at the rate of Llama 3's training: one each 2.7 hours on 16,384 GPUs (Llama
Team 2024, 3.3.4: 466 interruptions in 54 days, of the unexpected ones 78% by hardware). A failure ends the job at any
moment, in a restart too; all work since the newest finished checkpoint is done again. Where hardware failed, a spare
node takes its place, or the job waits for a repair.

Goodput is the share of the month that is progress. With blocking saves and spares for all it has a closed form (Daly
2006, 13): `M e^(R/M) (e^((t + s)/M) - 1) / t` is the expected time of a unit of work, with M between failures, a
restart R, a save s and an interval t. What is simulated is held to it by a test.
"""

import argparse
import heapq
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.common import print_row
from pretrain.plan.course import daly_interval, young_interval

HOUR_S = 3600.0
MONTH_S = 30 * 24 * HOUR_S
LLAMA_GPUS = 16_384
LLAMA_MTBF_S = 2.7 * HOUR_S
HARDWARE_SHARE = 0.78


@dataclass(frozen=True, slots=True)
class Operation:
    """How a run is operated.

    Attributes:
        mtbf_s: Mean seconds between failures of the job.
        interval_s: Work between the beginnings of two saves.
        stall_s: Seconds of a save in which training waits.
        write_s: Seconds after which it is finished, those included; at most interval and stall.
        restart_s: Seconds from a failure to the next step, with nodes for it.
        spares: Nodes that stand by. None: always one more.
        repair_s: Seconds until a failed node is one of these again.
        hardware: Share of the failures that take a node away.
    """

    mtbf_s: float
    interval_s: float
    stall_s: float
    write_s: float
    restart_s: float = 600.0
    spares: int | None = None
    repair_s: float = 24 * HOUR_S
    hardware: float = HARDWARE_SHARE


def mtbf_s(gpus: int) -> float:
    """Returns the seconds between failures of a job on so many GPUs, at Llama 3's rate."""
    return LLAMA_MTBF_S * LLAMA_GPUS / gpus


def expected_goodput(one: Operation) -> float:
    """Returns Daly's closed form: for saves that block, and spares for all."""
    mtbf, cycle = one.mtbf_s, one.interval_s + one.write_s
    return one.interval_s / (mtbf * math.exp(one.restart_s / mtbf) * math.expm1(cycle / mtbf))


def goodput(one: Operation, length_s: float, rng: random.Random) -> float:
    """Simulates a run of a length; returns the share of it that is progress."""
    cycle = one.interval_s + one.stall_s
    now = work = 0.0
    restart = 0.0  # of the first start nothing is counted
    kinds = random.Random(rng.random())  # apart, so that spares change no time of a failure
    repairs: list[float] = []  # times at which failed nodes are back
    while True:
        up = rng.expovariate(1 / one.mtbf_s)
        ran = min(up, length_s - now) - restart
        if now + up >= length_s:
            # The run ends between failures, and loses nothing.
            whole, rest = divmod(max(0.0, ran), cycle)
            return (work + whole * one.interval_s + min(rest, one.interval_s)) / length_s
        finished = max(0, math.floor((ran - one.write_s + one.stall_s) / cycle))
        work += finished * one.interval_s
        now += up
        restart = one.restart_s
        if one.spares is not None and kinds.random() < one.hardware:
            while repairs and repairs[0] <= now:
                heapq.heappop(repairs)
            heapq.heappush(repairs, now + one.repair_s)
            while len(repairs) > one.spares:
                now = max(now, heapq.heappop(repairs))
            if now >= length_s:
                return work / length_s


def months(one: Operation, count: int, seed: int = 0) -> tuple[float, float]:
    """Returns the mean goodput of months, and its standard error; the same seed sees the same failures."""
    found = [goodput(one, MONTH_S, random.Random(seed + number)) for number in range(count)]
    return fmean(found), stdev(found) / math.sqrt(count)


def best(one: Operation) -> Operation:
    """Returns an operation at Daly's interval for what a save costs: the time that training waits."""
    return replace(one, interval_s=max(daly_interval(one.stall_s, one.mtbf_s), one.write_s - one.stall_s))


INTERVALS_MIN = (1, 2, 3, 5, 7, 10, 15, 20, 30, 45, 60, 90, 120, 180)
SAVES_S = (5.0, 30.0, 120.0, 600.0)
RESTARTS_MIN = (1, 2, 5, 10, 15, 20, 30, 45, 60)
SIZES = (2048, 10_240, 16_384, 100_000)
SPARES = (0, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32)
REPAIRS_H = (6, 24, 72)


def sweep(count: int) -> dict[str, Any]:
    """Returns the curves of the picture: goodput by interval and save, restart and size, spares and repair."""
    job = Operation(mtbf_s(LLAMA_GPUS), 0.0, 30.0, 30.0)
    by_interval: dict[str, Any] = {}
    for save in SAVES_S:
        blocking = replace(job, stall_s=save, write_s=save)
        each = [replace(blocking, interval_s=60.0 * minutes) for minutes in INTERVALS_MIN]
        by_interval[f"{save:g}"] = {
            "goodput": [round(months(one, count)[0], 4) for one in each],
            "closed": [round(expected_goodput(one), 4) for one in each],
            "daly_min": round(daly_interval(save, job.mtbf_s) / 60, 1),
            "young_min": round(young_interval(save, job.mtbf_s) / 60, 1),
            "at_daly": round(months(best(blocking), count)[0], 4),
        }
    by_restart = {}
    for gpus in SIZES:
        each = [best(replace(job, mtbf_s=mtbf_s(gpus), restart_s=60.0 * minutes)) for minutes in RESTARTS_MIN]
        by_restart[f"{gpus}"] = [round(months(one, count)[0], 4) for one in each]
    by_spares = {}
    for hours in REPAIRS_H:
        each = [best(replace(job, spares=spares, repair_s=hours * HOUR_S)) for spares in SPARES]
        by_spares[f"{hours}"] = [round(months(one, count)[0], 4) for one in each]
    # Copied to the host in 2 s, and written beside training.
    beside = replace(job, stall_s=2.0, write_s=120.0)
    others = {"write_beside_s": 120, "at_daly": round(months(best(beside), count)[0], 4)}
    error = max(months(replace(job, interval_s=60.0 * minutes), count)[1] for minutes in (5, 60))
    return {
        "by_interval": by_interval,
        "by_restart": by_restart,
        "by_spares": by_spares,
        "beside": others,
        "standard_error": round(error, 5),
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """Draws the three sweeps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(15, 4.6), layout="constrained", sharey=True)
    for save, row in found["by_interval"].items():
        (line,) = panels[0].plot(INTERVALS_MIN, row["goodput"], "o", markersize=4)
        panels[0].plot(INTERVALS_MIN, row["closed"], color=line.get_color(), label=f"a save of {save} s")
        panels[0].axvline(row["daly_min"], color=line.get_color(), linestyle=":", linewidth=1)
    panels[0].set(xscale="log", xlabel="minutes between checkpoints", ylabel="goodput of a month")
    panels[0].set(title="16,384 GPUs, restart in 10 min\npoints: simulated, lines: Daly 2006, dotted: his interval")
    for gpus, row in found["by_restart"].items():
        panels[1].plot(RESTARTS_MIN, row, marker="o", markersize=4, label=f"{int(gpus):,} GPUs")
    panels[1].set(xlabel="minutes of a restart", title="at Daly's interval for a save of 30 s")
    for hours, row in found["by_spares"].items():
        panels[2].plot(SPARES, row, marker="o", markersize=4, label=f"repaired in {hours} h")
    panels[2].set(xlabel="spare nodes of 8 GPUs", title="16,384 GPUs, save of 30 s, restart in 10 min")
    for axes in panels:
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc="lower left" if axes is panels[1] else "lower right")
    for axes in panels[:1]:
        ticks = [1, 3, 10, 30, 60, 180]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Simulates, draws and prints a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", type=Path, help="also draw the curves into this file")
    parser.add_argument("--months", type=int, default=200, help="months of a point")
    parser.add_argument("--quick", action="store_true", help="10 months of a point")
    asked = parser.parse_args()
    found = sweep(10 if asked.quick else asked.months)
    if asked.picture is not None:
        draw(found, asked.picture)
    axes = {"interval_min": INTERVALS_MIN, "restart_min": RESTARTS_MIN, "spares": SPARES}
    print_row("failures: a month on 16,384 GPUs", {"axes": axes, **found}, ())


if __name__ == "__main__":
    main()
