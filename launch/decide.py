"""Whether a job goes on after its ranks have ended: pure, so that every case is a line of a test.

0                                     end: the run is done
cancelled by the user                 end
64 65 66 69 73 74 77 126 127          end: a restart cannot help
70 and no new checkpoint              end: the bug would be met again
else (75, 76, a signal, a lost node)  again, unless restart after restart brings no new checkpoint
"""

from dataclasses import dataclass
from typing import Literal

from pretrain.errors import (
    EXIT_BUG,
    EXIT_CHECKPOINT,
    EXIT_DATA,
    EXIT_DISK,
    EXIT_DIVERGED,
    EXIT_LOCKED,
    EXIT_OK,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
)

FINAL = {EXIT_USAGE, EXIT_DATA, EXIT_CHECKPOINT, EXIT_UNAVAILABLE, EXIT_LOCKED, EXIT_DISK, EXIT_DIVERGED, 126, 127}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a start ended.

    Attributes:
        code: Exit code of the ranks.
        reason: Of it, one line.
        has_progressed: Whether there is a newer checkpoint than at its beginning.
        idle_restarts: In a row without one, this included.
        is_cancelled: The user wants no more of it.
        may_requeue: The site lets a job requeue itself.
    """

    code: int
    reason: str
    has_progressed: bool
    idle_restarts: int
    is_cancelled: bool = False
    may_requeue: bool = True


@dataclass(frozen=True, slots=True)
class Decision:
    """What the job does now: `requeue`, `next` (it ends, the next job of its chain goes on), or `end`."""

    kind: Literal["requeue", "next", "end"]
    code: int
    reason: str


def decide(outcome: Outcome, max_idle_restarts: int) -> Decision:
    """Returns what to do after a start has ended.

    Args:
        outcome: How.
        max_idle_restarts: So many restarts in a row without a new checkpoint are enough.
    """
    code, reason = outcome.code, outcome.reason
    if code == EXIT_OK:
        return Decision("end", code, reason)
    if outcome.is_cancelled:
        return Decision("end", code, f"cancelled by the user ({reason})")
    if code in FINAL or (code == EXIT_BUG and not outcome.has_progressed):
        return Decision("end", code, reason)
    if outcome.idle_restarts >= max_idle_restarts:
        return Decision("end", code, f"{outcome.idle_restarts} restarts in a row without a new checkpoint: {reason}")
    return Decision("requeue" if outcome.may_requeue else "next", code, reason)
