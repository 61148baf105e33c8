"""Text to the ids that a model reads, and back, with the tokenizer that a run trained."""

import re

from tokenizers import Tokenizer, models

from pretrain.tokenizer import nameable_tokens, special_tokens_of


class PlainCodec:
    """A tokenizer of `pretrain prepare`: training text has no special tokens but the one that ends a document.

    Args:
        tokenizer: That of the run.
        ends_sources: A text ends like a document, as what an encoder reads for a decoder did in training.

    Attributes:
        eos_ids: The token that ends a document, or nothing where the tokenizer has none.
        mask_id: Token that stands for one to be filled in, if there is one.
    """

    def __init__(self, tokenizer: Tokenizer, ends_sources: bool = False) -> None:
        self._tokenizer = tokenizer
        special = special_tokens_of(tokenizer)
        self.eos_ids: tuple[int, ...] = () if special.eos is None else (special.eos,)
        self.mask_id: int | None = special.mask
        self._end = list(self.eos_ids) if ends_sources else []
        self._named = nameable_tokens(tokenizer)
        self._names = re.compile("|".join(map(re.escape, sorted(self._named, key=len, reverse=True))))
        # A word brings its space with it, and so does one that a mask stands for; a character does not.
        self._takes_space = not isinstance(tokenizer.model, models.WordLevel)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, with those special tokens that it names: masks, sentinels, modes."""
        ids: list[int] = []
        first = 0
        for match in self._names.finditer(text) if self._named else ():
            part = text[first : match.start()]
            ids += [*self._encode(part.removesuffix(" ") if self._takes_space else part), self._named[match[0]]]
            first = match.end()
        return ids + self._encode(text[first:]) + self._end

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_target(self, text: str) -> list[int]:
        """The same as `encode`: there is one language."""
        return self.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids, without special tokens."""
        return str(self._tokenizer.decode(ids))

    def tokens(self, ids: list[int]) -> list[str]:
        """Returns what each id stands for, one string each, for display."""
        return [str(self._tokenizer.decode([number], skip_special_tokens=False)) for number in ids]
