"""Text to the ids that a model reads, and back: all that decoding knows of a tokenizer."""

from typing import Protocol


class Codec(Protocol):
    """A tokenizer, with what a model expects around a text.

    Attributes:
        eos_ids: Ids that end a text; there may be several, or none.
        mask_id: Id that stands for a token to be filled in; None: there is none.
    """

    eos_ids: tuple[int, ...]
    mask_id: int | None

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, with the special tokens that the model's inputs have."""
        ...

    def encode_target(self, text: str) -> list[int]:
        """Returns the ids of what the decoder of two stacks is to say; a translator's, in the target's language."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids, without special tokens."""
        ...

    def tokens(self, ids: list[int]) -> list[str]:
        """Returns what each id stands for, one string each, for display."""
        ...
