"""The state of a run that is no tensor: a few numbers, and hashes of data and tokenizer.

There is no random-generator state, because dropout is seeded by counters, and no schedule state,
because the learning rate is a function of the step. The data position follows the trained samples,
not the prefetched ones.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from pretrain.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class TrainState:
    """Progress of a run."""

    step: int = 0  # optimizer steps done (skipped ones counted)
    optimizer_step: int = 0  # optimizer steps applied; differs from `step` by the skipped ones
    tokens: int = 0  # target tokens trained on
    position: int = 0  # next global sample position of the data order
    data_hash: str = ""  # identity of the token shards
    tokenizer_hash: str = ""  # identity of the tokenizer
    # Ranges [from, to) of positions that the run leaves out, ascending.
    skips: tuple[tuple[int, int], ...] = ()
    # Last finite losses, oldest first, the window of the spike detector; at most 128.
    losses: tuple[float, ...] = ()
    spikes: int = 0  # losses that were spikes
    spikes_in_a_row: int = 0  # spikes of the last steps, without a gap
    bad_steps_in_a_row: int = 0  # last steps that were skipped because they were not finite
    empty_steps: int = 0  # steps without a single target
    # Identity of the weights under adapters; empty where there are none.
    base_hash: str = ""
    # Digest of the sample ids of the next step, as in the ledger; empty where unknown.
    next_digest: str = ""

    def leaving_out(self, skips: tuple[tuple[int, int], ...]) -> "TrainState":
        """Returns the state of a run without these ranges: other samples may come next then."""
        return replace(self, skips=skips, next_digest=self.next_digest if skips == self.skips else "")

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any], where: str) -> "TrainState":
        """Reads a saved state of this or an earlier version. Raises: CheckpointError."""
        try:
            lists = {
                "skips": tuple((int(first), int(end)) for first, end in values.get("skips", ())),
                "losses": tuple(float(loss) for loss in values.get("losses", ())),
            }
            return TrainState(**{**values, **lists})
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the training state is damaged: {error}",
                where=where,
                fix="use another one",
            ) from None
