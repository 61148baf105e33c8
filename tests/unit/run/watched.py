"""Jobs of three ranks that take steps together, one of which goes wrong: forked from one process
that has torch.

    python -m tests.unit.run.watched FOLDER SCENARIO ...

A rank's output goes to FOLDER/SCENARIO/RANK. At the end JSON on stdout has the exit code of each
rank of each scenario; those of frozen ranks are not there."""

import contextlib
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as td

from pretrain.run import heartbeat, watchdog
from pretrain.run.heartbeat import Board, Progress
from pretrain.run.watchdog import Watchdog
from pretrain.utils.net import reserved_port
from tests.helpers.waiting import hang, pass_time, wait_until

RANKS = 3
PHASE_S = 16.0
"""`engine.timeout_s`."""
BAD_STEP = 60


def shorten_waits() -> None:
    """A heartbeat four times a second; on a busy machine a process may well stand still for ten."""
    heartbeat.BEAT_S = watchdog.BEAT_S = 0.25
    heartbeat.SILENT_S = watchdog.SILENT_S = heartbeat.SILENT_S = watchdog.STORE_STAYS_S = 12.0
    watchdog.OBSERVE_S, watchdog.STORE_GONE_S = 12.5, 60.0
    heartbeat.Messenger.say.__defaults__ = (12.0,)


def say_farewell(code: int, reason: str) -> None:
    """As on a disk that is busy."""
    pass_time(3.0)
    print(f"farewell {code}: {reason}", flush=True)


def sleep_in_data() -> None:
    """What a source of data does that hangs."""
    hang()


def go_wrong(scenario: str, dog: Watchdog) -> None:
    """What happens to the rank that a scenario names."""
    if scenario.startswith("freeze"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif scenario.startswith("hang"):
        sleep_in_data()
    elif scenario.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif scenario.startswith("leave"):
        os._exit(0)
    elif scenario.startswith("fail"):
        dog.tell(65, "shard 7 is damaged")
        os._exit(65)


def take_steps(rank: int, scenario: str, store: td.Store) -> None:
    """A loop like the trainer's, whose ranks meet once a step."""
    publish, told = Board.publish, list[str]()
    Board.publish = lambda board, beat: (publish(board, beat), told.append(beat.phase))
    td.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=300))
    progress = Progress()
    dog = Watchdog(progress, rank, RANKS, PHASE_S)
    dog.farewell = say_farewell
    dog.start()
    kind, _, bad_rank = scenario.partition("-")
    if kind == "fail" and rank == 2:
        heartbeat.BEAT_S = 3.0  # hears of it late
    for step in range(1, 100_000):
        progress.enter("data", step)
        if rank == int(bad_rank) and step == BAD_STEP and not kind.endswith("middle"):
            if kind == "leave":
                progress.enter("close")
                wait_until(lambda: "close" in told, "a heartbeat says so")
            go_wrong(kind, dog)
        progress.enter("update")
        try:
            if rank == int(bad_rank) and step == BAD_STEP and kind.endswith("middle"):
                go_wrong(kind, dog)
            td.all_reduce(torch.ones(1))
        except RuntimeError:
            print(dog.explain().text, flush=True)
            os._exit(76)
        pass_time(0.02)


def start(folder: Path, scenario: str, port: int) -> dict[int, int]:
    """Forks the ranks of a scenario, which meet at a port; returns the rank of each process."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    (folder / scenario).mkdir()
    ranks = {}
    for rank in range(RANKS):
        child = os.fork()
        if not child:
            output = os.open(folder / scenario / str(rank), os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            take_steps(rank, scenario, td.TCPStore("127.0.0.1", port, RANKS, rank == 0))
        ranks[child] = rank
    return ranks


def main(folder: Path, scenarios: list[str]) -> None:
    """Runs the scenarios at the same time: their ranks sleep mostly."""
    shorten_waits()
    ports = contextlib.ExitStack()
    running = {
        child: (name, rank)
        for name in scenarios
        for child, rank in start(folder, name, ports.enter_context(reserved_port(None))).items()
    }
    frozen = {child for child, (name, rank) in running.items() if name == f"freeze-{rank}"}
    ended: dict[str, dict[int, int]] = {name: {} for name in scenarios}
    while running.keys() > frozen:
        child, status = os.waitpid(-1, 0)
        name, rank = running.pop(child)
        ended[name][rank] = os.waitstatus_to_exitcode(status)
    for child in frozen:
        os.kill(child, signal.SIGKILL)
    print(json.dumps(ended))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
