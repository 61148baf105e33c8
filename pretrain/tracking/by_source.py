"""The loss of each source of a mixture, between two rows of metrics: a mean over all its targets since the last row.

A single step may have few targets of a rare source, or none; what a row says of it is exact all the same.
"""

from collections.abc import Sequence


class SourceLosses:
    """Adds up what the ranks agree on.

    Args:
        names: Of the sources, in the order of the config.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._sums = [0.0] * (2 * len(names))

    def add(self, by_source: Sequence[float]) -> None:
        """Takes a step: the sum of -log p(target) over each source, then the targets of each; nothing: one source."""
        for place, value in enumerate(by_source):
            self._sums[place] += value

    def take(self) -> dict[str, float]:
        """Returns `loss_NAME` of each source that had targets since the last call."""
        count = len(self._names)
        sums, self._sums = self._sums, [0.0] * (2 * count)
        pairs = zip(self._names, sums[:count], sums[count:], strict=True)
        return {f"loss_{name}": total / targets for name, total, targets in pairs if targets}
