"""Ends a job that stands still, and says why: which rank, where it runs, in which phase, at which line of Python.

    each second     this rank's heartbeat -> the job's store               nothing else, while the job moves
    stands still    all heartbeats are read; after the phase's limit       -> verdict.py -> the store -> all exit 76
    a rank fails    its error -> the store                                 -> the others say it, and exit as it does

Two threads: one talks to the store and may stay there for ever (the store's process is frozen), the other looks at the
clock. `engine.timeout_s` is the limit of a phase of a step; start, load, compile, evaluate, save and close may take
three times as long. The process group's own timeout comes later: it would name nobody.

Cost: a mark is one assignment; a heartbeat takes 0.2 ms of another thread, once a second. A rank of a job that moves
reads one heartbeat besides its own, so that the store's load grows with the number of ranks, not with its square.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pretrain.errors import EXIT_HANG, EXIT_UNAVAILABLE
from pretrain.run.heartbeat import (
    BEAT_S,
    SILENT_S,
    Messenger,
    Verdict,
    describe_store,
    find_missing,
    judge,
    judge_alone,
    num_collectives,
)
from pretrain.run.phase import Progress, Pulse, limit_of
from pretrain.utils.log import redact

TICK_S = 0.25
OBSERVE_S = SILENT_S + 2 * BEAT_S
STORE_GONE_S = 5.0
LAST_WORDS_S = 15.0
"""So long a rank may take to say why it ends, and to note it: the disk may be busy, or dead."""
STORE_STAYS_S = 2.0
"""So long the rank that keeps the store stays after a verdict, for the others to read it."""


class Watchdog:
    """Watches this rank, and with those of the other ranks the job.

    Args:
        progress: What the main thread marks.
        rank: This rank.
        world_size: Ranks. Alone, nothing is published; a main thread that hangs is found all the same.
        timeout_s: `engine.timeout_s`.
    """

    def __init__(self, progress: Progress, rank: int, world_size: int, timeout_s: float) -> None:
        self._progress, self._rank, self._world_size = progress, rank, world_size
        self._timeout_s = timeout_s
        self._pulse = Pulse(progress, rank, timeout_s, num_collectives)
        self._address = (os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0")))
        # torchrun keeps the store in its agent.
        self._store_rank = None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
        self._messenger = Messenger(self._pulse, rank, world_size, self._address, self._store_rank)
        self._is_failing = False
        self._closed = threading.Event()
        self.log_file: Path | None = None
        """Takes the last words too."""
        self.farewell: Callable[[int, str], object] = lambda exit_code, reason: None
        """Called with exit code and reason before the process ends."""

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
        """Tells the other ranks why this one ends, unless another has told them of an earlier error."""
        self._is_failing = True
        if self._messenger.is_connected:
            self._messenger.say(Verdict(f"rank {self._rank} failed first: {error}", exit_code, (self._rank,)))
            self._let_others_read(time.monotonic())

    def explain(self) -> Verdict:
        """Says what became of the ranks that this one has lost; takes the seconds in which a heartbeat is missed."""
        self._is_failing = True
        messenger, started = self._messenger, time.monotonic()
        messenger.observe(True, anew=True)
        while time.monotonic() - started < OBSERVE_S and not messenger.is_refused and messenger.verdict is None:
            time.sleep(TICK_S)
        if messenger.verdict is not None:
            self._let_others_read(time.monotonic())
            return messenger.verdict
        if (verdict := self._judge_store()) is not None:
            return verdict
        standings = messenger.standings()
        left = [s.beat for s in standings.values() if s.beat.phase == "close"]
        if not left and (missing := find_missing(self._pulse.beat(), standings, self._world_size)) is not None:
            return missing
        text = "\n".join(f"rank {beat.rank} left at step {beat.step}" for beat in left)
        return Verdict(text or "no rank is missing: the network may be down")

    def _watch(self) -> None:
        last_tick = time.monotonic()
        while not self._closed.wait(TICK_S):
            now, mark = time.monotonic(), self._progress.now
            limit, stalled = limit_of(mark.phase, self._timeout_s), now - mark.since
            was_stopped, last_tick = now - last_tick > SILENT_S, now
            if self._is_failing:
                continue
            if mark.phase == "close":  # the others may have left
                self._end(judge_alone(self._pulse.beat()) if stalled > limit else None)
            elif self._messenger.verdict is not None:
                self._follow(self._messenger.verdict)
            elif self._messenger.is_refused and stalled > STORE_GONE_S:
                self._end(self._judge_store())
            else:
                observed = self._messenger.observe(stalled > limit - OBSERVE_S, anew=was_stopped)
                if stalled > limit and observed > OBSERVE_S:
                    self._end(self._judge_store() or self._judge())

    def _judge_store(self) -> Verdict | None:
        """Returns the verdict where the store is the trouble, or the rank that keeps it."""
        messenger, place = self._messenger, "{}:{}".format(*self._address)
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

    def _judge(self) -> Verdict | None:
        return judge(self._pulse.beat(), self._messenger.standings(), self._world_size)

    def _end(self, verdict: Verdict | None) -> None:
        """Says the verdict to the other ranks, and ends this one; does nothing where there is none."""
        if verdict is None:
            return
        if self._messenger.is_connected and not self._messenger.is_refused and self._messenger.silent_s() < SILENT_S:
            verdict = self._messenger.say(verdict)
        self._leave(verdict, verdict.text)

    def _follow(self, verdict: Verdict) -> None:
        """Ends this rank, because another has said why the job ends."""
        if verdict.exit_code != EXIT_HANG:
            # What fails on one rank mostly fails on all (bad data, a full disk): this one may say so itself.
            time.sleep(BEAT_S)
            if self._is_failing or self._closed.is_set():
                return
        is_long = self._rank == 0 or self._rank in verdict.culprits
        self._leave(verdict, verdict.text if is_long else verdict.text.splitlines()[0])

    def _leave(self, verdict: Verdict, text: str) -> None:
        # On a thread of its own: a pipe that nobody empties, or a dead disk, must not hold the process.
        last_words = threading.Thread(target=self._say, args=(verdict, text), daemon=True)
        last_words.start()
        started = time.monotonic()
        last_words.join(LAST_WORDS_S)
        self._let_others_read(started)
        os._exit(verdict.exit_code)

    def _let_others_read(self, since: float) -> None:
        """Stays, where this rank keeps the store, until the others have had time to read a verdict of that moment."""
        if self._rank == self._store_rank and self._world_size > 1:
            time.sleep(max(0.0, STORE_STAYS_S - (time.monotonic() - since)))

    def _say(self, verdict: Verdict, text: str) -> None:
        words = redact(f"error: {text}\n" if self._rank == 0 else f"error: rank {self._rank}: {text}\n").encode()
        files = [2]
        with contextlib.suppress(OSError):
            files += [os.open(self.log_file, os.O_WRONLY | os.O_APPEND)] if self.log_file else []
        for file in files:
            with contextlib.suppress(OSError):
                os.write(file, words)
                if self._rank in verdict.culprits:
                    faulthandler.dump_traceback(file, all_threads=True)
        self.farewell(verdict.exit_code, text.splitlines()[0])
        sys.stdout.flush()
