"""Which tokens begin a word, by how each kind of tokenizer marks that."""

import json

import numpy as np
from tokenizers import Tokenizer

_SPACES = ("\u2581", "\u0120", "\u010a", "\u0109")
"""How SentencePiece marks a space, and byte-level BPE a space, a newline and a tab."""


def begins_word(tokenizer: Tokenizer) -> np.ndarray:
    """Returns for each id whether it is the first token of a word, bool [V].

    WordPiece marks what continues a word; SentencePiece and byte-level BPE mark the space before it. There a token of
    neither letters nor digits is a word of its own too.
    """
    prefix = json.loads(tokenizer.to_str())["model"].get("continuing_subword_prefix")
    result = np.ones(tokenizer.get_vocab_size(with_added_tokens=True), dtype=bool)
    for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
        result[number] = not token.startswith(prefix) if prefix else _opens(token)
    return result


def _opens(token: str) -> bool:
    return token.startswith(_SPACES) or not token[:1].isalnum()
