"""Tokens in words: stretches of a text whose words together are the text, special tokens told from what spells them."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby

from tokenizers import Tokenizer

from pretrain.tokenizer import display_tokens

CONTEXT_TOKENS = 16
"""Before a stretch, which decide its spaces and whole characters; so that long rows are not decoded again and again."""


def spell_stretches(stretches: Iterable[Sequence[int]], tokenizer: Tokenizer) -> Iterator[str]:
    """Yields what consecutive stretches of one text say.

    A character whose bytes are cut by the border of two stretches is shown as broken on both sides.

    Args:
        stretches: Ids; negative ones say nothing.
        tokenizer: Of the data.
    """
    before: list[int] = []
    for stretch in stretches:
        ids = [number for number in stretch if number >= 0]
        known, whole = _decode(tokenizer, before), _decode(tokenizer, before + ids)
        text = whole[len(known) :] if whole.startswith(known) else _decode(tokenizer, ids)
        if _BROKEN in text and len(ids) == 1:
            (text,) = display_tokens(tokenizer, ids)
        yield text
        before = (before + ids)[-CONTEXT_TOKENS:]


def split_special(ids: Sequence[int], special: Collection[int]) -> list[list[int]]:
    """Returns runs of ids that are all special tokens, or all not; at least one run."""
    return [list(run) for _, run in groupby(ids, key=lambda number: number in special)] or [[]]


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


_BROKEN = "\ufffd"
"""What bytes that are not a whole character decode to."""
