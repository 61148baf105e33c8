"""The part of a run's state that is not tensors: a few numbers and the hashes of what they refer to.

There is no random-generator state, because dropout is seeded by counters, and no schedule state, because the learning
rate is a function of the step. The data position points at what was trained on, not at what was prefetched.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from pretrain.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class TrainState:
    """Where a run stands.

    Attributes:
        step: Optimizer steps done (skipped ones counted).
        optimizer_step: Optimizer steps applied; differs from `step` by the skipped ones.
        tokens: Target tokens trained on.
        position: Next global sample position of the data order.
        data_hash: Identity of the token shards.
        tokenizer_hash: Identity of the tokenizer.
        skips: Ranges [from, to) of positions that the run leaves out, ascending.
        losses: Last finite losses, oldest first, the window of the spike detector; at most 128.
        spikes: Losses that were spikes.
        spikes_in_a_row: Spikes of the last steps, without a gap.
        bad_steps_in_a_row: Last steps that were skipped because they were not finite.
        empty_steps: Steps without a single target.
        base_hash: Identity of the weights that adapters are trained beside; empty where there are none.
        next_digest: Digest of the sample ids of the next step, as in the ledger; empty where unknown.
    """

    step: int = 0
    optimizer_step: int = 0
    tokens: int = 0
    position: int = 0
    data_hash: str = ""
    tokenizer_hash: str = ""
    skips: tuple[tuple[int, int], ...] = ()
    losses: tuple[float, ...] = ()
    spikes: int = 0
    spikes_in_a_row: int = 0
    bad_steps_in_a_row: int = 0
    empty_steps: int = 0
    base_hash: str = ""
    next_digest: str = ""

    def leaving_out(self, skips: tuple[tuple[int, int], ...]) -> "TrainState":
        """Returns the state of a run that leaves out these ranges of positions: others may come next then."""
        return replace(self, skips=skips, next_digest=self.next_digest if skips == self.skips else "")

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any], where: str) -> "TrainState":
        """Reads what `to_json` returned; what an earlier version did not know is as in a new run.

        Raises:
            CheckpointError: A value is missing, or is not one.
        """
        try:
            lists = {
                "skips": tuple((int(first), int(end)) for first, end in values.get("skips", ())),
                "losses": tuple(float(loss) for loss in values.get("losses", ())),
            }
            return TrainState(**{**values, **lists})
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the training state is damaged: {error}", where=where, fix="use another one"
            ) from None
