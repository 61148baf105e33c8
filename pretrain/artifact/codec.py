"""Text to the ids that a model reads, and back, with the tokenizer that a run trained."""

from tokenizers import Tokenizer, models

from pretrain.data.tokenizer import special_tokens_of


class PlainCodec:
    """A tokenizer of `pretrain prepare`: training text has no special tokens but the one that ends a document.

    Attributes:
        eos_ids: That token, or nothing where the tokenizer has none.
        mask_id: Token that stands for one to be filled in, if there is one. The only one that a text can name.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        special = special_tokens_of(tokenizer)
        self.eos_ids: tuple[int, ...] = () if special.eos is None else (special.eos,)
        self.mask_id: int | None = special.mask
        self._mask = None if special.mask is None else tokenizer.id_to_token(special.mask)
        # A word brings its space with it, and so does one that a mask stands for; a character does not.
        self._takes_space = not isinstance(tokenizer.model, models.WordLevel)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, with that of the mask where the text has its name."""
        if self._mask is None or self.mask_id is None:
            return self._encode(text)
        *before, last = text.split(self._mask)
        ids: list[int] = []
        for part in before:
            ids += [*self._encode(part.removesuffix(" ") if self._takes_space else part), self.mask_id]
        return ids + self._encode(last)

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
