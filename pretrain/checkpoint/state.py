"""The part of a run's state that is not tensors: a few integers and the hashes of what they refer to.

There is no random-generator state, because dropout is seeded by counters, and no schedule state, because the learning
rate is a function of the step. The data position points at what was trained on, not at what was prefetched.
"""

from dataclasses import asdict, dataclass
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
    """

    step: int = 0
    optimizer_step: int = 0
    tokens: int = 0
    position: int = 0
    data_hash: str = ""
    tokenizer_hash: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any], where: str) -> "TrainState":
        """Reads what `to_json` returned. Raises: CheckpointError."""
        try:
            return TrainState(**values)
        except TypeError as error:
            raise CheckpointError(
                f"the training state is damaged: {error}", where=where, fix="use another one"
            ) from None
