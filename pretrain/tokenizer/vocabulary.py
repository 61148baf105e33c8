"""How large a vocabulary is, and the dtype of its ids."""

from tokenizers import Tokenizer


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Returns one more than the largest id (ids need not be dense)."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def token_dtype(size: int) -> str:
    """Returns the name of the smallest dtype that holds ids below `size`: uint16 or uint32."""
    return "uint16" if size <= 1 << 16 else "uint32"
