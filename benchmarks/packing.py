"""Fill of rows of whole documents, and speed of planning them: best-fit bins against simpler packers.

    python -m benchmarks.packing [--quick]

    ours          pretrain.data.bins: best-fit decreasing by a bit set of rooms
    first_fit     first-fit decreasing: the first bin, in the order of opening, that has room (a list scan)
    greedy        documents in their order; a new row where one does not fit (next fit)

Lengths: the files of Python's standard library at four bytes a token, and log-normal ones (median 245 tokens, a web
corpus in shape). Documents longer than a row are cut into full rows and a rest by every arm. Nothing else is cropped.
The target is 99.5% full; the aim 99.9% and 50 Mtok a CPU-second.
"""

import argparse
import os
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np

from benchmarks.common import measure, print_row
from pretrain.data.bins import cut_documents, pack_documents

SEQ_LENS = (1024, 2048)
MUST, AIM, AIM_MTOK = 0.995, 0.999, 50


def count_ours(lengths: np.ndarray, capacity: int) -> int:
    """Returns the number of rows."""
    return len(pack_documents(lengths, capacity))


def count_first_fit(lengths: np.ndarray, capacity: int) -> int:
    """The same by first-fit decreasing."""
    rooms: list[int] = []
    for length in sorted(cut_documents(lengths, capacity)[2].tolist(), reverse=True):
        for number, room in enumerate(rooms):
            if room >= length:
                rooms[number] -= length
                break
        else:
            rooms.append(capacity - length)
    return len(rooms)


def count_greedy(lengths: np.ndarray, capacity: int) -> int:
    """The same by next fit."""
    rows, room = 0, 0
    for length in cut_documents(lengths, capacity)[2].tolist():
        if length > room:
            rows, room = rows + 1, capacity
        room -= length
    return rows


ARMS: dict[str, Callable[[np.ndarray, int], int]] = {
    "ours": count_ours,
    "first_fit": count_first_fit,
    "greedy": count_greedy,
}


def main() -> None:
    """Measures, prints a table and the row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rng = np.random.default_rng(0)
    web = np.clip(rng.lognormal(5.5, 1.1, 5_000 if quick else 20_000).astype(np.int64), 1, None)
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    sizes = [file.stat().st_size // 4 + 1 for file in files if "site-packages" not in file.parts]
    stdlib = np.array(sizes, dtype=np.int64)
    figures: dict[str, dict[str, float]] = {}
    for name, lengths in (("web", web), ("stdlib", stdlib)):
        for seq_len in SEQ_LENS:
            timings = measure({arm: partial(work, lengths, seq_len) for arm, work in ARMS.items()}, 3 if quick else 5)
            for arm, work in ARMS.items():
                full = float(lengths.sum() / (work(lengths, seq_len) * seq_len))
                speed = float(lengths.sum() / min(timing.cpu_s for timing in timings[arm]) / 1e6)
                figures[f"{name} T={seq_len} {arm}"] = {"full": round(full, 5), "mtok_per_cpu_s": round(speed, 1)}
                print(f"{name:7} T={seq_len:<5} {arm:10} {full:8.3%} full  {speed:9.1f} Mtok/s")
    ours = [value["full"] for key, value in figures.items() if key.endswith("ours")]
    print(f"ours: {min(ours):.3%} full at worst (must {MUST:.1%}, aim {AIM:.1%})")
    print_row("packing", figures, ("numpy",))


if __name__ == "__main__":
    main()
