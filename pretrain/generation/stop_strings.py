"""Stop strings: texts that end a row, however its tokens are cut. They are no part of its text.

    tokens of a row  ->  StopStrings.are_in    whether its newest tokens complete one: it ends
    its whole text   ->  StopStrings.cut       up to the first one
    its pieces       ->  StopFilter            the same, held back while a stop string may have begun

Only new text counts: one that begins in the prompt stops nothing. A name of a special token is that
token, whose text `decode` leaves out: `split_special` finds its id.
"""

from collections.abc import Callable, Sequence

from pretrain.errors import ConfigError

Decode = Callable[[list[int]], str]


def check_stops(stops: Sequence[str], where: str = "--stop") -> None:
    """Refuses a stop string without a character. Raises: ConfigError."""
    if not all(stops):
        raise ConfigError("a stop string is empty", where=where, fix="give a text")


def split_special(
    encode: Callable[[str], list[int]], decode: Decode, stops: Sequence[str]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the ids of stop strings that are special tokens, and the others.

    `encode` and `decode` are `encode_rendered` and `decode` of a codec.
    """
    ids_of = {stop: encode(stop) for stop in stops}
    special = {stop: ids[0] for stop, ids in ids_of.items() if len(ids) == 1 and not decode(ids)}
    return tuple(special.values()), tuple(stop for stop in stops if stop not in special)


class StopStrings:
    """The stop strings of all rows; none where `stops` is empty."""

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        # A token adds a byte at least, and the text of the first ones depends on those before them.
        self._reach = max((len(stop.encode()) for stop in stops), default=0)

    def are_in(self, tokens: Sequence[int]) -> bool:
        """Returns whether one ends in the newest token of a row's new ones. Costs two short decodings."""
        if not self._stops:
            return False
        tail = list(tokens[-2 * self._reach :])
        before, text = self._decode(tail[: -self._reach]), self._decode(tail)
        return any(stop in text[len(before) :] for stop in self._stops)

    def cut(self, text: str) -> str:
        """Returns a text up to the first stop string."""
        return text[: min(_places(self._stops, text), default=None)]


class StopFilter:
    """Passes the pieces of a text on up to the first stop string, of which nothing comes out.

    Attributes:
        is_found: There is one: the text has ended.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_found = False

    def add(self, piece: str) -> str:
        """Returns what is known to come before any stop string, often empty."""
        self._held += piece
        places = _places(self._stops, self._held)
        self.is_found = bool(places)
        end = min(places) if places else len(self._held) - self._num_open()
        text, self._held = self._held[:end], self._held[end:]
        return text

    def rest(self) -> str:
        """Returns what was held back, at the end of a text."""
        return "" if self.is_found else self._held

    def _num_open(self) -> int:
        parts = (stop[:size] for stop in self._stops for size in range(1, len(stop)))
        return max((len(part) for part in parts if self._held.endswith(part)), default=0)


def _places(stops: Sequence[str], text: str) -> list[int]:
    return [place for stop in stops if (place := text.find(stop)) >= 0]
