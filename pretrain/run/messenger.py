"""The thread that talks to the store: this rank's heartbeat out, those of the others in.

It may be left behind in a call that never returns; what it has learnt so far is read from other threads.
"""

import contextlib
import socket
import threading
import time

import torch.distributed as td

from pretrain.run.board import Board
from pretrain.run.progress import Beat, Pulse
from pretrain.run.verdict import SILENT_S, Standing, Verdict

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
