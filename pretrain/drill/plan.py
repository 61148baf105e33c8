"""What the drill kills and when: a pure function of (seed, number), so that it can be done in parts, and again."""

import random
from dataclasses import dataclass
from typing import Literal, get_args

Phase = Literal["start-up", "steps", "save"]
Target = Literal["rank", "launcher", "all", "any"]
PHASES: tuple[Phase, ...] = get_args(Phase)
_PHASE_WEIGHTS = (1, 2, 1)
_TARGET_WEIGHTS = {"rank": 4, "launcher": 1, "all": 1}


@dataclass(frozen=True, slots=True)
class Kill:
    """One SIGKILL, or several at once.

    Attributes:
        number: Of the drill, from 0.
        phase: What the attempt is doing then: it starts, it trains, it saves.
        moment: How far into that, in [0, 1).
        jitter: How far into the step, in [0, 1).
        target: A rank, the launcher, or all ranks at once.
        victim: Which rank, in [0, 1) of the number of ranks.
    """

    number: int
    phase: Phase
    moment: float
    jitter: float
    target: str
    victim: float

    def rank_of(self, num_ranks: int) -> int:
        """Returns the rank that is killed, of so many."""
        return int(self.victim * num_ranks)

    def describe(self, num_ranks: int) -> str:
        """Returns what is killed, for people."""
        return {"rank": f"rank {self.rank_of(num_ranks)}", "all": "all ranks"}.get(self.target, "the launcher")


def plan_kill(seed: int, number: int, target: Target = "rank") -> Kill:
    """Returns a kill of the drill with this seed; the same whatever was killed before.

    Args:
        seed: Of the drill.
        number: Which kill, from 0.
        target: What is killed; `any` draws one of the three, a rank in two cases of three.
    """
    rng = random.Random(f"{seed}/{number}")
    (phase,) = rng.choices(PHASES, _PHASE_WEIGHTS)
    moment, jitter, victim = rng.random(), rng.random(), rng.random()
    (drawn,) = rng.choices(list(_TARGET_WEIGHTS), list(_TARGET_WEIGHTS.values()))
    return Kill(number, phase, moment, jitter, drawn if target == "any" else target, victim)
