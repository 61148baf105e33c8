"""Ends a job that hangs, and names the cause: rank, host, phase and line of Python.

    each second     heartbeat of this rank -> key-value store of the job   no other traffic while the job moves
    job hangs       all heartbeats are read; past the phase's time limit   -> `judge` -> store -> all ranks exit 76
    a rank fails    its error -> store                                     -> the others log it, and exit with its code

Two threads: the messenger talks to the store, in calls that may never return (the store's process may be frozen); the
watchdog reads the clock. `engine.timeout_s` is the time limit of a phase of a step; start, load, compile, evaluate,
save and close get three times as much. The process group's own timeout is longer, as it names no rank.

Cost: a mark is one assignment; a heartbeat takes 0.2 ms of another thread, once a second. While the job moves, a rank
reads one heartbeat besides its own, so that the load of the store grows linearly with the number of ranks.
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
"""Time limit for the last message and note of a rank: the disk may be busy, or dead."""
STORE_STAYS_S = 2.0
"""Time that the rank with the store stays up after a verdict, for the others to read it."""


class Watchdog:
    """Watches this rank and, through the heartbeats of the others, the job.

    Args:
        progress: Phase of the main thread.
        rank: This rank.
        world_size: Number of ranks. With one, nothing is published; a hang of the main thread is found all the same.
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
        """Log file, which gets the last message too."""
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
        """Publishes the error that ends this rank, unless another rank has published an earlier one."""
        self._is_failing = True
        if self._messenger.is_connected:
            self._messenger.say(Verdict(f"rank {self._rank} failed first: {error}", exit_code, (self._rank,)))
            self._let_others_read(time.monotonic())

    def explain(self) -> Verdict:
        """Returns the verdict on ranks that this one has lost; takes as long as it takes to miss a heartbeat."""
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
            now = time.monotonic()
            mark = self._progress.now
            limit = limit_of(mark.phase, self._timeout_s)
            stalled = now - mark.since
            # A gap between ticks: this process itself was stopped, and the silence of the others is its own.
            was_stopped = now - last_tick > SILENT_S
            last_tick = now
            if self._is_failing:
                continue
            if mark.phase == "close":  # the others may have ended, and their silence is no failure
                self._end(judge_alone(self._pulse.beat()) if stalled > limit else None)
            elif self._messenger.verdict is not None:
                self._follow(self._messenger.verdict)
            elif self._messenger.is_refused and stalled > STORE_GONE_S:
                self._end(self._judge_store())
            else:
                # Heartbeats of all ranks are read only shortly before the limit, long enough to miss one.
                observed = self._messenger.observe(stalled > limit - OBSERVE_S, anew=was_stopped)
                if stalled > limit and observed > OBSERVE_S:
                    self._end(self._judge_store() or self._judge())

    def _judge_store(self) -> Verdict | None:
        """Returns the verdict where the store, or the rank that runs it, is at fault."""
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
        """Publishes a verdict and ends this rank; does nothing without one."""
        if verdict is None:
            return
        if self._messenger.is_connected and not self._messenger.is_refused and self._messenger.silent_s() < SILENT_S:
            verdict = self._messenger.say(verdict)
        self._leave(verdict, verdict.text)

    def _follow(self, verdict: Verdict) -> None:
        """Ends this rank after the verdict of another."""
        if verdict.exit_code != EXIT_HANG:
            # Most errors (bad data, a full disk) occur on all ranks: this one gets a moment to report its own.
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
        """Waits, on the rank that runs the store, until the others have had time to read a verdict from `since`."""
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
