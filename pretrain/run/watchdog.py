"""End of a job that hangs, with its cause: rank, host, phase and line of Python.

    each second     heartbeat of this rank -> store of the job    no other traffic while the job moves
    job hangs       all heartbeats -> `judge` past a limit -> store   -> all ranks exit with 76
    a rank fails    its error -> store        -> the others log it, and exit with its code

The messenger talks to the store, in calls that may never return (the store's process may be
frozen); the watchdog reads the clock. `engine.timeout_s` is the time limit of a phase of a step;
start, load, compile, evaluate, save and close get three times as much. The process group's own
timeout is longer, as it names no rank. The verdict is a pure function of the heartbeats:

    no heartbeat any more                 ->  frozen or gone: stopped or killed, or its host is dead
    fewest marks, then fewest collectives ->  hangs: all others wait for it, and are never blamed
    all in the same place                 ->  no culprit: every rank reports its position

A heartbeat takes 0.2 ms of another thread, once a second. While the job moves, a rank reads one
heartbeat besides its own, and where it hangs a few ranks read all, so that the load of the store
grows linearly with the number of ranks.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pretrain.errors import EXIT_HANG, EXIT_UNAVAILABLE
from pretrain.run.heartbeat import (
    BEAT_S,
    SILENT_S,
    Beat,
    Messenger,
    Progress,
    Pulse,
    Standing,
    Verdict,
    limit_of,
    num_collectives,
)
from pretrain.utils.log import redact

MAX_NAMED = 4
TICK_S = 0.25
OBSERVE_S = SILENT_S + 2 * BEAT_S
STORE_GONE_S = 5.0
LAST_WORDS_S = 15.0
"""Time limit for the last message and note of a rank: the disk may be busy, or dead."""
STORE_STAYS_S = 2.0
"""Time that the rank with the store stays up after a verdict, for the others to read it."""


def find_missing(own: Beat, others: Mapping[int, Standing], world_size: int) -> Verdict | None:
    """Returns the verdict on ranks without a recent heartbeat; None where all have one."""
    absent = [rank for rank in range(world_size) if rank != own.rank and rank not in others]
    if absent and own.phase in ("start", "import", "meet"):
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
    """Returns the verdict on the ranks behind; None while they are within the limit of their phase.

    Called by a rank that has waited for longer than its own phase may take.
    """
    if (missing := find_missing(own, others, world_size)) is not None:
        return missing
    beats = [own, *(standing.beat for standing in others.values())]
    place = min((beat.marks, beat.collectives) for beat in beats)
    behind = [beat for beat in beats if (beat.marks, beat.collectives) == place]
    if len(behind) == world_size > 1:
        text = f"all {world_size} ranks stand still at the same place: none can be named"
        text += f"; {_IMPORTS if all(map(_is_importing, beats)) else 'the network may be down'}"
        lines = [f"  {_name(beat)} is {beat.where()}, at:\n{_stack(beat)}" for beat in beats[:MAX_NAMED]]
        return Verdict("\n".join([text, *lines]))
    if any(beat.for_s < beat.limit_s for beat in behind):
        return None
    waiting = world_size - len(behind)
    lines = [_describe_hung(beat, waiting) for beat in behind[:MAX_NAMED]]
    return Verdict("\n".join(lines), EXIT_HANG, tuple(beat.rank for beat in behind))


_IMPORTS = (
    "they import Python packages: the disk with them is slow, or the machine busy; "
    "start again, or raise engine.timeout_s"
)


def _is_importing(beat: Beat) -> bool:
    return beat.phase == "import" or any("<frozen importlib" in call for call in beat.stack)


def describe_silent(standing: Standing) -> str:
    """Describes a rank whose heartbeat has stopped."""
    beat = standing.beat
    return (
        f"{_name(beat)} is frozen or gone: no heartbeat for {standing.silent_s:.0f} s (its process was stopped or "
        f"killed, or its host is dead); it was last seen {beat.where()}, at:\n{_stack(beat)}"
    )


def describe_store(place: str, holder: Beat | None, silent_s: float | None) -> str:
    """Describes a store that has been silent, or (None) has closed.

    `holder`: last heartbeat of the rank that keeps it; None: no rank does, or none has come.
    """
    if holder is None:
        says = "has closed" if silent_s is None else f"has not answered for {silent_s:.0f} s"
        return f"the store of the job at {place} {says}: who keeps it is frozen, gone, or unreachable"
    if silent_s is None:
        place = f"the store of the job, which it keeps at {place}, has closed"
        return f"{_name(holder)} is gone: {place}; it was last seen {holder.where()}, at:\n{_stack(holder)}"
    return describe_silent(Standing(holder, silent_s))


def _describe_hung(beat: Beat, waiting: int) -> str:
    wait = ""
    if waiting:
        wait = f", while {waiting} {'ranks wait' if waiting > 1 else 'rank waits'} for it"
    return f"{_name(beat)} hangs: {beat.where()} (limit {beat.limit_s:.0f} s){wait}, at:\n{_stack(beat)}"


def _name(beat: Beat) -> str:
    return f"rank {beat.rank} ({beat.host}, process {beat.pid})"


def _name_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:MAX_NAMED])
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{', ...' if len(ranks) > MAX_NAMED else ''}"


def _stack(beat: Beat) -> str:
    return "\n".join(f"    {call}" for call in beat.stack)


class Watchdog:
    """Watches this rank and, through the heartbeats of the others, the job.

    With one rank nothing is published; a hang of the main thread is found all the same.
    """

    def __init__(self, progress: Progress, rank: int, world_size: int, timeout_s: float) -> None:
        self._progress = progress
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._pulse = Pulse(progress, rank, timeout_s, num_collectives)
        self._address = (os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0")))
        # torchrun keeps the store in its agent.
        self._store_rank = None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
        self._messenger = Messenger(self._pulse, rank, world_size, self._address, self._store_rank)
        self._is_failing = False
        self._closed = threading.Event()
        self.log_file: Path | None = None
        """Log file, which gets the last message too."""
        self.farewell: Callable[[int, str], object] = lambda exit_code, reason: None
        """Called with exit code and reason before the process ends."""

    @property
    def is_failing(self) -> bool:
        """Whether this rank ends by an error, or has read another's."""
        return self._is_failing or self._messenger.verdict is not None

    def start(self) -> None:
        """Starts the threads."""
        if self._world_size > 1:
            self._messenger.start()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Ends the threads, without waiting for them."""
        self._closed.set()
        self._messenger.close()

    def tell(self, exit_code: int, error: str) -> None:
        """Publishes the error that ends this rank, unless another rank was first."""
        self._is_failing = True
        if self._messenger.is_connected:
            text = f"rank {self._rank} failed first: {error}"
            self._messenger.say(Verdict(text, exit_code, (self._rank,)))
            self._let_others_read(time.monotonic())

    def explain(self) -> Verdict:
        """Returns the verdict on the ranks that this one has lost; waits for a missed heartbeat.

        All ranks give that of the first: the store ends with its keeper, who may be the first.
        """
        self._is_failing = True
        messenger = self._messenger
        started = time.monotonic()
        messenger.observe(True, anew=True, purpose="loss")
        of_store = None
        while not messenger.is_refused and messenger.verdict is None and of_store is None:
            if time.monotonic() - started >= OBSERVE_S:
                of_store = self._judge_store()
                if messenger.has_watched:
                    break
            time.sleep(TICK_S)
        since = time.monotonic()
        verdict = messenger.verdict or of_store or self._judge_store()
        verdict = verdict or self._publish(self._judge_lost())
        self._let_others_read(since)
        return verdict

    def _judge_lost(self) -> Verdict:
        standings = self._messenger.standings()
        ends = [s.beat for s in standings.values() if s.beat.phase == "close"]
        if not ends and (missing := find_missing(self._pulse.beat(), standings, self._world_size)) is not None:
            return missing
        text = "\n".join(f"rank {beat.rank} left at step {beat.step}" for beat in ends)
        text = text or "no rank is missing: the network may be down"
        return Verdict(text, culprits=tuple(beat.rank for beat in ends))

    def _watch(self) -> None:
        last_tick = time.monotonic()
        while not self._closed.wait(TICK_S):
            now = time.monotonic()
            mark = self._progress.now
            limit = limit_of(mark.phase, self._timeout_s)
            stalled = now - mark.since
            # After a gap between ticks this process itself was stopped, and the silence of the
            # others is its own.
            was_stopped = now - last_tick > SILENT_S
            last_tick = now
            if self._is_failing:
                continue
            if mark.phase == "close":  # the others may have ended, and their silence is no failure
                if stalled > limit:  # and no other waits for this one
                    text = _describe_hung(self._pulse.beat(), 0)
                    self._end(Verdict(text, EXIT_HANG, (self._rank,)))
            elif self._messenger.verdict is not None:
                self._follow(self._messenger.verdict)
            elif self._messenger.is_refused and stalled > STORE_GONE_S:
                self._end(self._judge_store())
            else:
                # Heartbeats of all ranks are read only shortly before the limit, long enough to
                # miss one.
                observed = self._messenger.observe(stalled > limit - OBSERVE_S, anew=was_stopped)
                if stalled > limit and observed > OBSERVE_S:
                    verdict = self._judge_store()
                    if verdict is None and self._messenger.has_watched:
                        standings = self._messenger.standings()
                        verdict = judge(self._pulse.beat(), standings, self._world_size)
                    self._end(verdict)

    def _judge_store(self) -> Verdict | None:
        """Returns the verdict where the store, or the rank that runs it, is at fault."""
        messenger = self._messenger
        place = "{}:{}".format(*self._address)
        if self._world_size == 1:
            return None
        if not messenger.is_connected:
            text = f"the rank that keeps the store at {place} never came up, or cannot be reached from here"
            return Verdict(text, EXIT_UNAVAILABLE)
        if not messenger.is_refused and messenger.silent_s() < SILENT_S:
            return None
        keeper = None if self._store_rank is None else messenger.standings().get(self._store_rank)
        silent_s = None if messenger.is_refused else messenger.silent_s()
        if keeper is None:
            return Verdict(describe_store(place, None, silent_s))
        return Verdict(describe_store(place, keeper.beat, silent_s), EXIT_HANG, (keeper.beat.rank,))

    def _end(self, verdict: Verdict | None) -> None:
        if verdict is None:
            return
        verdict = self._publish(verdict)
        self._leave(verdict, verdict.text)

    def _publish(self, verdict: Verdict) -> Verdict:
        messenger = self._messenger
        is_answered = messenger.is_connected and not messenger.is_refused and messenger.silent_s() < SILENT_S
        return messenger.say(verdict) if is_answered else verdict

    def _follow(self, verdict: Verdict) -> None:
        if verdict.exit_code != EXIT_HANG:
            # Most errors (bad data, a full disk) occur on all ranks: this one gets a moment to
            # report its own.
            time.sleep(BEAT_S)
            if self._is_failing or self._closed.is_set():
                return
        is_long = self._rank == 0 or self._rank in verdict.culprits
        self._leave(verdict, verdict.text if is_long else verdict.text.splitlines()[0])

    def _leave(self, verdict: Verdict, text: str) -> None:
        # In a separate thread: a full pipe without a reader, or a dead disk, would block the exit.
        last_words = threading.Thread(target=self._say, args=(verdict, text), daemon=True)
        last_words.start()
        started = time.monotonic()
        last_words.join(LAST_WORDS_S)
        self._let_others_read(started)
        os._exit(verdict.exit_code)

    def _let_others_read(self, since: float) -> None:
        """Waits, on the rank with the store, until the others can have read a verdict."""
        if self._rank == self._store_rank and self._world_size > 1:
            time.sleep(max(0.0, STORE_STAYS_S - (time.monotonic() - since)))

    def _say(self, verdict: Verdict, text: str) -> None:
        rank = "" if self._rank == 0 else f"rank {self._rank}: "
        words = redact(f"error: {rank}{text}\n").encode()
        files = [2]
        with contextlib.suppress(OSError):
            files += [os.open(self.log_file, os.O_WRONLY | os.O_APPEND)] if self.log_file else []
        for file in files:
            with contextlib.suppress(OSError):
                os.write(file, words)
                if self._rank in verdict.culprits:
                    faulthandler.dump_traceback(file, all_threads=True)
        self.farewell(verdict.exit_code, text.splitlines()[0].removesuffix(", at:"))
        sys.stdout.flush()
