"""Heartbeats of the ranks: the phase of each, and their exchange through the job's store.

    Progress    phase of the main thread; a mark costs one assignment, half a microsecond
    Pulse       heartbeats of this rank: its mark, collectives and call stack
    Board       heartbeats and verdict of the job, in the store that initialised the process group
    Messenger   the thread that talks to the store

Every rank makes the same marks in the same order, so that the rank with the fewest is behind.
"""

import contextlib
import gc
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType
from typing import NamedTuple, get_type_hints

import torch.distributed as td

from pretrain.errors import EXIT_DIVERGED, EXIT_HANG, EXIT_RESUME_ME, EXIT_USAGE
from pretrain.utils.safe_read import check_fields, parse_json

FAILURES = [code for code in range(EXIT_USAGE, EXIT_DIVERGED + 1) if code != EXIT_RESUME_ME]
"""Exit codes that a verdict may have."""
MAX_VERDICT_CHARS = 2**14
SILENT_S = 3.0
LONG_PHASES = {"start", "import", "load", "compile", "evaluate", "save", "close"}
LONG_FACTOR = 3
STACK_DEPTH = 8


class Mark(NamedTuple):
    """An entered phase: running number, name, step, and time of entry (monotonic clock)."""

    number: int
    phase: str
    step: int
    since: float


class Progress:
    """Phase of the main thread. Safe to read from other threads: `now` is replaced as a whole."""

    def __init__(self) -> None:
        self.now = Mark(0, "start", 0, time.monotonic())

    def enter(self, phase: str, step: int | None = None) -> None:
        """Marks that a phase begins.

        Phases: start, meet, load, compile, data, forward-backward, update, evaluate, save, close.
        """
        last = self.now
        step = last.step if step is None else step
        self.now = Mark(last.number + 1, phase, step, time.monotonic())

    def go_on(self) -> None:
        """Marks progress within a phase: its time limit restarts."""
        self.enter(self.now.phase)


def limit_of(phase: str, timeout_s: float) -> float:
    """Returns how long a rank may stay in a phase without a mark, seconds."""
    return timeout_s * LONG_FACTOR if phase in LONG_PHASES else timeout_s


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat."""

    rank: int
    host: str  # name of its machine
    pid: int  # process id
    number: int  # number of the heartbeat; it stops growing when the process is stopped or dead
    marks: int  # phases entered so far
    collectives: int  # collectives begun so far
    phase: str
    step: int
    for_s: float  # seconds since the phase was entered
    limit_s: float  # time limit of the phase, seconds
    # Call stack of the main thread, `folder/file.py:line function` each, outermost first.
    stack: list[str]

    def where(self) -> str:
        """Returns phase, step and duration as part of a sentence."""
        return f"in {self.phase} of step {self.step} for {self.for_s:.0f} s"

    @staticmethod
    def from_json(content: str | bytes) -> "Beat | None":
        """Reads a heartbeat of the store, to which a stranger may write; None: no rank has written it."""
        with contextlib.suppress(ValueError):
            values = check_fields(parse_json(content), _BEAT_TYPES)
            is_whole = values.keys() == _BEAT_TYPES.keys() and None not in values.values()
            if is_whole and all(isinstance(call, str) for call in values["stack"]):
                return Beat(**values)
        return None


_BEAT_TYPES: dict[str, type] = get_type_hints(Beat) | {"stack": list}


class Pulse:
    """Builds this rank's heartbeats."""

    def __init__(self, progress: Progress, rank: int, timeout_s: float, num_collectives: Callable[[], int]) -> None:
        self._progress = progress
        self._rank = rank
        self._timeout_s = timeout_s
        self._num_collectives = num_collectives
        self._main_thread = threading.main_thread().ident
        self._host = socket.gethostname()
        self._number = 0
        self._looking = threading.Lock()

    def beat(self) -> Beat:
        """Returns the next heartbeat."""
        self._number += 1
        mark = self._progress.now
        return Beat(
            rank=self._rank,
            host=self._host,
            pid=os.getpid(),
            number=self._number,
            marks=mark.number,
            collectives=self._num_collectives(),
            phase=mark.phase,
            step=mark.step,
            for_s=time.monotonic() - mark.since,
            limit_s=float(limit_of(mark.phase, self._timeout_s)),
            stack=self._stack(),
        )

    def _stack(self) -> list[str]:
        with self._looking:  # called by two threads: messenger and watchdog
            is_collecting = gc.isenabled()
            # Before Python 3.11.9 `sys._current_frames` locks what a finalizer may wait for: a
            # deadlock (cpython issue 106883).
            gc.disable()
            try:
                frame: FrameType | None = sys._current_frames().get(self._main_thread or 0)
            finally:
                if is_collecting:
                    gc.enable()
        calls: list[str] = []
        while frame is not None and len(calls) < STACK_DEPTH:
            path = "/".join(frame.f_code.co_filename.split("/")[-3:])
            calls.append(f"{path}:{frame.f_lineno} {frame.f_code.co_name}")
            frame = frame.f_back
        return calls[::-1]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Cause of the end of a job."""

    text: str  # message for the user; its first line is the summary
    exit_code: int = EXIT_HANG  # exit code of every rank
    culprits: tuple[int, ...] = ()  # ranks at fault

    @staticmethod
    def from_json(content: str | bytes) -> "Verdict":
        """Reads a verdict of the store, to which a stranger may write: always one of failure."""
        try:
            values = parse_json(content)
            text, code = str(values["text"]), values["exit_code"]
            culprits = tuple(int(rank) for rank in values["culprits"])
        except (ValueError, KeyError, TypeError, OverflowError):
            return Verdict("the verdict in the store of the job cannot be read: no rank has written it")
        text = "".join(char for char in text[:MAX_VERDICT_CHARS] if char.isprintable() or char == "\n")
        return Verdict(text or "(no text)", next((kind for kind in FAILURES if kind == code), EXIT_HANG), culprits)


class Standing(NamedTuple):
    """Last heartbeat of another rank, and the seconds since it was new."""

    beat: Beat
    silent_s: float


CONNECT_S = 5.0
ANSWER_S = 1e6
"""Effectively no timeout: the process of the store may be stopped for a while; the watchdog
measures its silence. torch waits for at most 2^31 milliseconds."""


class Board:
    """Heartbeats and verdict of one job: keys in the store that initialised the process group.

    Over a connection of its own, so that nothing waits behind the main thread's. A call may block
    without limit when the store's process is frozen: only a thread that may be abandoned makes
    them. Raises: DistError, in every method, where the store cannot be reached.
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
        self._store.set(f"beat-{beat.rank}", json.dumps(asdict(beat)))

    def read(self, ranks: Iterable[int]) -> list[Beat]:
        """Returns the heartbeats of `ranks`, as far as they have one."""
        keys = [f"beat-{rank}" for rank in ranks]
        # One request for all: a rank is asked about one by one only while some have none yet.
        is_there = bool(keys) and self._store.check(keys)
        present = keys if is_there else [key for key in keys if self._store.check([key])]
        beats = map(Beat.from_json, self._store.multi_get(present) if present else [])
        return [beat for beat in beats if beat is not None]

    def take_turn(self, key: str, expected: str, mine: str) -> str:
        """Writes `mine` if a turn has the expected value, "" of none; returns its value then."""
        return self._store.compare_set(key, expected, mine).decode(errors="replace")

    def verdict(self) -> Verdict | None:
        """Returns the verdict, if there is one."""
        is_there = self._store.check(["verdict"])
        return Verdict.from_json(self._store.get("verdict")) if is_there else None

    def conclude(self, verdict: Verdict) -> Verdict:
        """Publishes a verdict unless there is one; returns the one that is published."""
        text = json.dumps(asdict(verdict))
        return Verdict.from_json(self._store.compare_set("verdict", "", text))


def num_collectives() -> int:
    """Returns the number of collectives begun by this process, over all groups; 0 without any."""
    from torch.distributed import distributed_c10d

    with contextlib.suppress(AttributeError, RuntimeError):
        groups = list(distributed_c10d._world.pg_map)
        return sum(group._get_sequence_number_for_group() for group in groups)
    return 0


BEAT_S = 1.0
TURNS = 8
"""Ranks that read all heartbeats of a job that stands still: all of one node's."""


class Messenger:
    """Knowledge of the other ranks, from a thread that talks to the store.

    The thread may be abandoned in a call that never returns; its results so far are read from
    other threads. `store_rank` keeps the store; None: the launcher does.

    Of the ranks that observe the others only a few read all heartbeats, or the store would have to
    answer ranks x ranks questions a second: each of `TURNS` keys has the rank whose turn it is,
    which writes another number beside itself every second. A number that stays lets the next rank
    in, whose observation begins then. The others wait for a verdict.
    """

    def __init__(
        self, pulse: Pulse, rank: int, world_size: int, address: tuple[str, int], store_rank: int | None
    ) -> None:
        self._pulse = pulse
        self._rank = rank
        self._address = address
        self._others = [other for other in range(world_size) if other != rank]
        self._always = [other for other in self._others if other == store_rank]
        self._seen: dict[int, tuple[Beat, float]] = {}
        self._observing_since: float | None = None
        self._read_all_at = 0.0
        self._purpose = ""
        self._turn: tuple[str, str] | None = None  # key and value, while it is this rank's turn
        self._num_turns = 0
        self._turn_of_another = ("", 0.0)  # value, and when it was new
        self._answered_at: float | None = None
        self._outgoing: Verdict | None = None
        self._answered = threading.Event()
        self._closed = threading.Event()
        self.verdict: Verdict | None = None
        """Cause of the end of the job, once a rank has published it."""
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
        """Returns for how long the store has not answered; 0 before the first answer."""
        if self._answered_at is None:
            return 0.0
        return max(0.0, time.monotonic() - self._answered_at - BEAT_S)

    def observe(self, wanted: bool, anew: bool = False, purpose: str = "limit") -> float:
        """Reads the heartbeats of all ranks from now on, or no longer; returns for how long.

        `anew` restarts the clock, as after a stop of this process itself. Ranks take turns with
        those of the same purpose, whose verdict is theirs.
        """
        self._purpose = purpose
        if not wanted:
            self._observing_since = None
        elif self._observing_since is None or anew:
            self._observing_since = time.monotonic()
            self._forgive()
        return 0.0 if self._observing_since is None else time.monotonic() - self._observing_since

    def _forgive(self) -> None:
        """Counts the silence of all ranks from now on."""
        now = time.monotonic()
        seen = dict(self._seen)  # a copy: the thread adds to it
        self._seen = {rank: (beat, now) for rank, (beat, _) in seen.items()}

    @property
    def has_watched(self) -> bool:
        """Whether a rank without a heartbeat since the observation began would be known by now.

        By the answers to this rank, not by its clock: on a busy machine they come late. Never of a
        rank whose turn it is not.
        """
        if not self._others:
            return True
        if self._turn is None or self._answered_at is None:
            return False
        has_read_all = self._read_all_at >= (self._observing_since or math.inf)
        return has_read_all and self._answered_at - self._read_all_at >= SILENT_S

    def standings(self) -> dict[int, Standing]:
        """Returns the last heartbeat of each other rank."""
        answered_at = self._answered_at or 0.0
        seen = dict(self._seen)
        return {rank: Standing(beat, max(0.0, answered_at - at)) for rank, (beat, at) in seen.items()}

    def say(self, verdict: Verdict, timeout_s: float = BEAT_S + 1.0) -> Verdict:
        """Publishes a verdict; returns an earlier one of another rank, else `verdict`."""
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
        since = self._observing_since
        reads_all = self._take_turn(board) if since is not None else self._end_turn(board)
        for beat in board.read(self._others if reads_all else self._always):
            earlier = self._seen.get(beat.rank)
            if earlier is None or earlier[0].number != beat.number:
                self._seen[beat.rank] = (beat, time.monotonic())
        if reads_all and self._read_all_at < (since or 0.0):
            self._read_all_at = time.monotonic()
        outgoing = self._outgoing  # read once: another thread may set it during this round
        if outgoing is not None and self.verdict is None:
            self.verdict = board.conclude(outgoing)
        else:
            self.verdict = self.verdict or board.verdict()
        if outgoing is not None:
            self._answered.set()
        self._answered_at = time.monotonic()

    def _take_turn(self, board: Board) -> bool:
        """Keeps this rank's turn, or takes one of a rank that is gone; returns whether it has one."""
        if len(self._others) < TURNS:
            self._turn = ("", "")  # each rank has one, which needs no key
            return True
        key = f"turn-{self._purpose}-{self._rank % TURNS}"
        if self._turn is not None and self._turn[0] != key:
            self._end_turn(board)
        self._num_turns += 1
        mine = f"{self._rank}: {self._num_turns}"
        value, seen_at = self._turn_of_another
        is_stale = time.monotonic() - seen_at >= SILENT_S
        expected = value if is_stale else ""
        if self._turn is not None:
            expected = self._turn[1]
        now_there = board.take_turn(key, expected, mine)
        if now_there != mine:
            self._turn = None
            if now_there != value:
                self._turn_of_another = (now_there, time.monotonic())
            return False
        if self._turn is None:
            self._read_all_at = 0.0
            self._forgive()
        self._turn = (key, mine)
        return True

    def _end_turn(self, board: Board) -> bool:
        """Lets another rank have the turn; returns False: this one has none."""
        turn, self._turn = self._turn, None
        if turn is not None and turn[0]:
            board.take_turn(*turn, "")
        return False


def _listens(address: tuple[str, int]) -> bool:
    """Returns whether the store is up: torch's own client complains on stderr before that."""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=SILENT_S):
        return True
    return False
