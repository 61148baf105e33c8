"""The worlds of a job: ranks that live and end together, and others after them (`run.recover`).

    a rank is lost  ->  `may_follow`: its peers are killed at once, or else the job ends
    all have ended  ->  `follow`: places of the ranks of the next world; empty: the job ends

What recovers: a signal (a kill, a crash in native code), a freeze, a hang (76), and after the first
step of a world a bug (70) and a lack of memory (69). Nothing else: the next world would fail too.
"""

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pretrain.errors import EXIT_HANG, EXITS_INTERRUPTED, LaunchError, PretrainError
from pretrain.run.folder import RunDir
from pretrain.run.recovery import MAY_REPEAT, Recovery
from pretrain.utils.jsonl import last_row

SHARED_MEMORY = "/dev/shm"
MOST = 3
WITHIN_STEPS = 10
"""So many recoveries within so many steps are followed by none: the job is to be mended."""


class Worlds:
    """Decisions between the worlds of one launcher.

    `fits` returns whether the config can be trained on so many ranks; with `copies` there is a
    folder in memory for copies of the state.
    """

    def __init__(
        self, run: RunDir, mode: Literal["spare", "shrink"], fits: Callable[[int], bool], *, copies: bool = False
    ) -> None:
        self._run = run
        self._mode = mode
        self._fits = fits
        self._steps: list[int] = []  # last step done before each recovery
        self.recovery = Recovery(0)
        """The one that the present world began with."""
        self._copies = copies

    @contextlib.contextmanager
    def memory(self) -> Iterator[Path | None]:
        """Makes the folder of copies, for as long as the job lasts. Raises: LaunchError."""
        if not self._copies:
            yield None
            return
        try:
            folder = tempfile.mkdtemp(prefix="pretrain-", dir=SHARED_MEMORY)
        except OSError as error:
            raise LaunchError(
                f"run.recover_every_steps keeps copies in memory: {error.strerror}",
                where=SHARED_MEMORY,
                fix="set it to 0: recoveries continue from checkpoints",
            ) from None
        self.recovery = replace(self.recovery, memory=folder)
        try:
            yield Path(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def may_follow(self, code: int, main_pid: int) -> bool:
        """Returns whether another world may follow one that a rank with this exit code has ended.

        `code` is negative for a signal; `main_pid` is the process of rank 0.
        """
        is_lost = code == EXIT_HANG or (code < 0 and 128 - code not in EXITS_INTERRUPTED)
        if not is_lost and not (code in MAY_REPEAT and self._has_stepped(main_pid)):
            return False
        if len(self._steps) < MOST or self._run.last_step() - self._steps[-MOST] >= WITHIN_STEPS:
            return True
        said = f"launch: {MOST} recoveries within {WITHIN_STEPS} steps: the job ends"
        print(said, file=sys.stderr)
        return False

    def follow(self, places: list[int], lost: int, how: str, lost_at: float) -> list[int]:
        """Counts a recovery, and returns the places of its ranks: LOCAL_RANK of each, and so its GPU.

        Args:
            places: Those of the world that has ended, by rank.
            lost: The rank that ended it; a smaller world leaves out its place first.
            how: Rank, host, and how it was lost.
            lost_at: When, by the monotonic clock.
        """
        following = places
        if self._mode == "shrink":
            whole = [*places[:lost], *places[lost + 1 :]]
            following = whole[: next(filter(self._fits, range(len(whole), 0, -1)), 0)]
        if following:
            self._steps.append(self._run.last_step())
            self.recovery = Recovery(len(self._steps), how, lost_at, self.recovery.memory)
        return following

    def _has_stepped(self, main_pid: int) -> bool:
        """Returns whether the world of this rank 0 has done a step, by the ledger's last row."""
        with contextlib.suppress(PretrainError, OSError, LookupError):
            attempt = self._run.read_record()["attempts"][-1]
            row = last_row(self._run.audit) or {}
            return attempt.get("pid") == main_pid and row.get("attempt") == attempt["number"]
        return False
