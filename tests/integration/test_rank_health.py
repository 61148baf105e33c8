"""Slow ranks and leaks of real runs are named."""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator

import pytest

from pretrain.run.folder import RunDir
from tests.helpers.ranks import run_in_ranks
from tests.helpers.runs import rank_pids
from tests.helpers.waiting import finish, pass_time, wait_until

LARGER = ("model.decoder.layers=4", "model.decoder.width=96", "model.decoder.ff_width=256", "train.steps=100000")
LEAK = """
from pretrain.training import loop

held = []

def zero(run, before=loop._zero):
    held.append(b"x" * 2**23)
    return before(run)

loop._zero = zero
"""


@contextlib.contextmanager
def stopped_now_and_then(pid: int) -> Iterator[None]:
    """Lets a process run for 10 ms, and stops it for 2 ms, again and again."""
    ended = threading.Event()

    def cycle() -> None:
        while not ended.is_set():
            pass_time(0.01)
            os.kill(pid, signal.SIGSTOP)
            pass_time(0.002)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=cycle)
    thread.start()
    yield
    ended.set()
    thread.join()


def test_all_ranks_name_the_slow_one_once_and_when_it_recovers(tmp_path):
    asked = {"folder": str(tmp_path), "steps": 120, "slow": [31, 80]}
    main, other = run_in_ranks("tests.integration.health_workers:judge", 2, asked)
    text = main[0][2]
    assert re.fullmatch(r"rank 1 on \S+, process \d+: computes 1.20 times as long as the median of the others, "
                        "over 25 steps", text)  # fmt: skip
    named, recovered = main[0][0], main[-1][0]
    assert 31 < named <= 60 and 81 < recovered <= 110
    assert main == [[named, "A slow rank", text], [named, {"slow_rank/1": 1.2}], [recovered, {}]]
    assert other == [row for row in main if len(row) == 2]
    (note,) = RunDir(tmp_path).read_record()["attempts"][0]["ranks"]
    assert note == {"rank": 1, "kind": "slow", "step": named, "text": text, "until": recovered}


@pytest.mark.long
@pytest.mark.parametrize("engine", ["{kind: deepspeed, zero_stage: 3}", "{kind: ddp, zero_stage: 0}"])
def test_a_rank_that_is_stopped_a_sixth_of_the_time_is_named_within_30_steps(make_run, engine):
    process = make_run.start("slow", *LARGER, f"engine={engine}", "checkpoint.every_steps=0")
    try:
        make_run.wait_for_step("slow", 40, process)

        def notes() -> list[dict[str, object]]:
            return make_run.folder("slow").read_record()["attempts"][0].get("ranks", [])

        begun = make_run.last_row("slow")["step"]
        with stopped_now_and_then(rank_pids(process)[1]):
            wait_until(notes, "a rank is named", process)
        wait_until(lambda: notes()[-1].get("until"), "it has recovered", process)
        process.terminate()
        output, _ = finish(process)
    finally:
        process.kill()
    (note,) = notes()
    assert note["rank"] == 1 and note["step"] - begun <= 31
    assert f"step {note['step']}: {note['text']}" in output
    assert re.search(rf"step {note['until']}: rank 1 on \S+ process \d+: is as fast as the others again", output)


@pytest.mark.long
def test_a_leak_is_named_with_what_is_left(make_run, tmp_path):
    (tmp_path / "leak.py").write_text(LEAK)
    process = make_run.start("leak", "train.steps=1000000", "extend=[leak]", ranks=1, PYTHONPATH=str(tmp_path))
    try:
        wait_until(
            lambda: (
                make_run.last_row("leak")["step"] and make_run.folder("leak").read_record()["attempts"][0].get("ranks")
            ),
            "the leak is named",
            process,
        )
        process.terminate()
        output, _ = finish(process)
    finally:
        process.kill()
    said = re.search(r"rank 0 on \S+, process \d+: its host memory grows by ([\d,]+) bytes a step; there is room for "
                     r"([\d,]+) steps more", output)  # fmt: skip
    growth, left = (int(number.replace(",", "")) for number in said.groups())
    assert 2**23 <= growth < 3 * 2**23
    assert 10 < left < 10**5
