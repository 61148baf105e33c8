"""Verdict on a job that hangs, a pure function of the heartbeats; and their exchange through the store.

no heartbeat any more      ->  frozen or gone: the process was stopped or killed, or its host is dead
fewest marks, then fewest
collectives begun          ->  hangs: all others wait for it; ranks that wait are never blamed
all in the same place      ->  no culprit: every rank reports its position
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as td

from pretrain.errors import EXIT_HANG, EXIT_UNAVAILABLE
from pretrain.run.phase import Beat, Pulse

SILENT_S = 3.0

MAX_NAMED = 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why the job ends.

    Attributes:
        text: Message for the user; its first line is the summary.
        exit_code: Exit code of every rank.
        culprits: Ranks at fault.
    """

    text: str
    exit_code: int = EXIT_HANG
    culprits: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON."""
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Verdict":
        """Reads what `to_json` gave."""
        return Verdict(values["text"], values["exit_code"], tuple(values["culprits"]))


@dataclass(frozen=True, slots=True)
class Standing:
    """Last heartbeat of another rank, and the seconds since it was new."""

    beat: Beat
    silent_s: float


def find_missing(own: Beat, others: Mapping[int, Standing], world_size: int) -> Verdict | None:
    """Returns the verdict on the ranks that have no heartbeat, or none any more; None where all have one."""
    absent = [rank for rank in range(world_size) if rank != own.rank and rank not in others]
    if absent and own.phase in ("start", "meet"):
        text = f"{_name_ranks(absent)} never came up; {_name(own)} has been waiting {own.where()}"
        return Verdict(text, EXIT_UNAVAILABLE, tuple(absent))
    silent = [standing for standing in others.values() if standing.silent_s >= SILENT_S]
    lines = [describe_silent(standing) for standing in silent[:MAX_NAMED]]
    if absent:
        gone = f"{_name_ranks(absent)} {'are' if len(absent) > 1 else 'is'} frozen or gone"
        lines.insert(0, f"{gone}: no heartbeat has ever come from there")
    culprits = (*absent, *(standing.beat.rank for standing in silent))
    return Verdict("\n".join(lines), EXIT_HANG, culprits) if lines else None


def judge(own: Beat, others: Mapping[int, Standing], world_size: int) -> Verdict | None:
    """Says who holds the job up, asked by a rank that has waited for longer than its own phase may take.

    Returns:
        The verdict; None where those behind are within the limit of what they are doing.
    """
    if (missing := find_missing(own, others, world_size)) is not None:
        return missing
    beats = [own, *(standing.beat for standing in others.values())]
    place = min((beat.marks, beat.collectives) for beat in beats)
    behind = [beat for beat in beats if (beat.marks, beat.collectives) == place]
    if len(behind) == world_size > 1:
        return Verdict(_stand_still(beats))
    if any(beat.for_s < beat.limit_s for beat in behind):
        return None
    waiting = world_size - len(behind)
    lines = [_describe_hung(beat, waiting) for beat in behind[:MAX_NAMED]]
    return Verdict("\n".join(lines), EXIT_HANG, tuple(beat.rank for beat in behind))


def judge_alone(own: Beat) -> Verdict:
    """The verdict on a rank that takes longer than its phase may, and for which no other waits."""
    return Verdict(_describe_hung(own, 0), EXIT_HANG, (own.rank,))


def describe_silent(standing: Standing) -> str:
    """Returns what there is to say of a rank whose heartbeat has stopped."""
    beat = standing.beat
    return (
        f"{_name(beat)} is frozen or gone: no heartbeat for {standing.silent_s:.0f} s (its process was stopped or "
        f"killed, or its host is dead); it was last seen {beat.where()}, at:\n{_stack(beat)}"
    )


def describe_store(place: str, holder: Beat | None, silent_s: float | None) -> str:
    """Returns what there is to say when the job's store does not answer.

    Args:
        place: Where it is.
        holder: The last heartbeat of the rank that keeps it; None: no rank does, or none has come.
        silent_s: For how long; None: it has closed.
    """
    if holder is None:
        what = "has closed" if silent_s is None else f"has not answered for {silent_s:.0f} s"
        return f"the store of the job at {place} {what}: who keeps it is frozen, gone, or unreachable"
    if silent_s is None:
        place = f"the store of the job, which it keeps at {place}, has closed"
        return f"{_name(holder)} is gone: {place}; it was last seen {holder.where()}, at:\n{_stack(holder)}"
    return describe_silent(Standing(holder, silent_s))


def _describe_hung(beat: Beat, waiting: int) -> str:
    wait = (
        f", while {waiting} rank{'s' if waiting > 1 else ''} wait{'' if waiting > 1 else 's'} for it" if waiting else ""
    )
    return f"{_name(beat)} hangs: {beat.where()} (limit {beat.limit_s:.0f} s){wait}, at:\n{_stack(beat)}"


def _stand_still(beats: Sequence[Beat]) -> str:
    lines = [f"all {len(beats)} ranks stand still at the same place: none can be named; the network may be down"]
    for beat in beats[:MAX_NAMED]:
        lines.append(f"  {_name(beat)} is {beat.where()}, at:\n{_stack(beat)}")
    return "\n".join(lines)


def _name(beat: Beat) -> str:
    return f"rank {beat.rank} ({beat.host}, process {beat.pid})"


def _name_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:MAX_NAMED])
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{', ...' if len(ranks) > MAX_NAMED else ''}"


def _stack(beat: Beat) -> str:
    return "\n".join(f"    {call}" for call in beat.stack)


# Exchange of heartbeats: a few keys in the store that initialised the process group, over a
# connection of its own, so that nothing waits behind the main thread's. A call may block without
# limit when the store's process is frozen: only a thread that may be abandoned makes them.


CONNECT_S = 5.0

ANSWER_S = 1e6

"""Effectively no timeout: the process of the store may be stopped for a while; the watchdog measures its silence. torch
waits for at most 2^31 milliseconds."""


class Board:
    """Heartbeats and verdict of one job in the store.

    Args:
        host: Host of the store.
        port: Port of the store.

    Raises:
        DistError: It cannot be reached; every method may raise it.
    """

    def __init__(self, host: str, port: int) -> None:
        timeout = timedelta(seconds=CONNECT_S)
        store = td.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        store.set_timeout(timedelta(seconds=ANSWER_S))
        # torchrun's store outlives an attempt, and its verdict must not.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = td.PrefixStore(f"pretrain-watchdog-{attempt}", store)

    def publish(self, beat: Beat) -> None:
        """Replaces this rank's heartbeat."""
        self._store.set(f"beat-{beat.rank}", json.dumps(beat.to_json()))

    def read(self, ranks: Iterable[int]) -> list[Beat]:
        """Returns the heartbeats of those of `ranks` that have one."""
        keys = [f"beat-{rank}" for rank in ranks]
        found = [key for key in keys if self._store.check([key])]
        return [Beat(**json.loads(text)) for text in self._store.multi_get(found)] if found else []

    def verdict(self) -> Verdict | None:
        """Returns the verdict, if there is one."""
        return Verdict.from_json(json.loads(self._store.get("verdict"))) if self._store.check(["verdict"]) else None

    def conclude(self, verdict: Verdict) -> Verdict:
        """Publishes a verdict unless there is one; returns the one that is published."""
        return Verdict.from_json(json.loads(self._store.compare_set("verdict", "", json.dumps(verdict.to_json()))))


def num_collectives() -> int:
    """Returns the number of collectives begun by this process, over all process groups; 0 where torch has none."""
    from torch.distributed import distributed_c10d

    with contextlib.suppress(AttributeError, RuntimeError):
        groups = list(distributed_c10d._world.pg_map)
        return sum(group._get_sequence_number_for_group() for group in groups)
    return 0


# The thread that talks to the store. It may be abandoned in a call that never returns; its results
# so far are read from other threads.


BEAT_S = 1.0


class Messenger:
    """What this rank knows of the others.

    Args:
        pulse: Makes this rank's heartbeats.
        rank: This rank.
        world_size: Ranks.
        address: Host and port of the process group's store.
        store_rank: The rank that keeps it; None: the launcher does.
    """

    def __init__(
        self, pulse: Pulse, rank: int, world_size: int, address: tuple[str, int], store_rank: int | None
    ) -> None:
        self._pulse, self._address = pulse, address
        self._others = [other for other in range(world_size) if other != rank]
        self._always = [other for other in self._others if other == store_rank]
        self._seen: dict[int, tuple[Beat, float]] = {}
        self._observing_since: float | None = None
        self._answered_at: float | None = None
        self._outgoing: Verdict | None = None
        self._answered, self._closed = threading.Event(), threading.Event()
        self.verdict: Verdict | None = None
        """Why the job ends, once some rank has said so."""
        self.is_refused = False
        """Whether the store was there and is gone."""

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def close(self) -> None:
        """Ends the thread, without waiting for it."""
        self._closed.set()

    @property
    def is_connected(self) -> bool:
        """Whether the store has ever answered."""
        return self._answered_at is not None

    def silent_s(self) -> float:
        """Returns for how long the store has not answered; 0 before it ever has."""
        return 0.0 if self._answered_at is None else max(0.0, time.monotonic() - self._answered_at - BEAT_S)

    def observe(self, wanted: bool, anew: bool = False) -> float:
        """Reads the heartbeats of all ranks from now on, or no longer; returns since when, seconds.

        Args:
            wanted: Whether to.
            anew: What was seen before says nothing now: this process itself was stopped meanwhile.
        """
        if not wanted:
            self._observing_since = None
        elif self._observing_since is None or anew:
            self._observing_since = now = time.monotonic()
            seen = dict(self._seen)  # at once: the thread goes on noting
            self._seen = {rank: (beat, now) for rank, (beat, _) in seen.items()}
        return 0.0 if self._observing_since is None else time.monotonic() - self._observing_since

    def standings(self) -> dict[int, Standing]:
        """Returns what is known of the other ranks."""
        answered_at = self._answered_at or 0.0
        return {rank: Standing(beat, max(0.0, answered_at - at)) for rank, (beat, at) in dict(self._seen).items()}

    def say(self, verdict: Verdict, timeout_s: float = BEAT_S + 1.0) -> Verdict:
        """Says why the job ends; returns what some rank has said before, else `verdict`."""
        self._outgoing = verdict
        self._answered.wait(timeout_s)
        return self.verdict or verdict

    def _run(self) -> None:
        while not self._closed.wait(BEAT_S / 4):
            if not self.is_connected and not _listens(self._address):
                continue
            with contextlib.suppress(td.DistError, RuntimeError, OSError):
                board = Board(*self._address)
                while True:
                    self._round(board)
                    if self._closed.wait(BEAT_S / 4 if self._outgoing else BEAT_S):
                        return
            if self.is_connected:
                self.is_refused = True
                return

    def _round(self, board: Board) -> None:
        board.publish(self._pulse.beat())
        for beat in board.read(self._always if self._observing_since is None else self._others):
            known = self._seen.get(beat.rank)
            if known is None or known[0].number != beat.number:
                self._seen[beat.rank] = (beat, time.monotonic())
        outgoing = self._outgoing  # once: what is said from here on is for the next round
        if outgoing is not None and self.verdict is None:
            self.verdict = board.conclude(outgoing)
        else:
            self.verdict = self.verdict or board.verdict()
        if outgoing is not None:
            self._answered.set()
        self._answered_at = time.monotonic()


def _listens(address: tuple[str, int]) -> bool:
    """Returns whether the store is up yet: torch's own client complains on stderr while it is not."""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=SILENT_S):
        return True
    return False
