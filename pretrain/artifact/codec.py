"""Text to the ids that a model reads, and back, with the tokenizer that a run trained."""

from tokenizers import Tokenizer

from pretrain.data.tokenizer import KNOWN_EOS


class PlainCodec:
    """A tokenizer of `pretrain prepare`: training text has no special tokens but the one that ends a document.

    Attributes:
        eos_ids: That token, or nothing where the tokenizer has none.
        mask_id: Token that stands for one to be filled in, if there is one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        found = (tokenizer.token_to_id(content) for content in KNOWN_EOS)
        self.eos_ids: tuple[int, ...] = tuple(number for number in found if number is not None)[:1]
        self.mask_id: int | None = tokenizer.token_to_id("[MASK]")

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text."""
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
