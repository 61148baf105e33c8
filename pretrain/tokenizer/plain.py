"""Plain text stays plain: no truncation, no padding, and no text becomes a special token.

`encode_special_tokens` stops the search for special tokens in the text. What remains is a model whose own vocabulary
holds one and reaches it: the Unigram model of T5, say, finds its piece "</s>" in the text "</s>". There a last
pre-tokenizer tears every such spelling after its first character. A given tokenizer.json stays as it is: all this is
done to what was read from it. Tokenizers that are trained here need no tearing.
"""

import re
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, pre_tokenizers


def encode_plain_text(tokenizer: Tokenizer) -> Tokenizer:
    """Switches off, in place, whatever makes of a text something else than its tokens; returns the tokenizer."""
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if spelled := _spelled_special_tokens(tokenizer):
        tear = _tear(spelled)
        before = tokenizer.pre_tokenizer
        tokenizer.pre_tokenizer = tear if before is None else pre_tokenizers.Sequence([before, tear])
    return tokenizer


def _spelled_special_tokens(tokenizer: Tokenizer) -> list[str]:
    """Special tokens that their own spelling becomes, of two characters or more."""
    special = [(number, token) for number, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    return sorted(token.content for number, token in special if _becomes(tokenizer, token.content, number))


def _becomes(tokenizer: Tokenizer, content: str, number: int) -> bool:
    """Whether a text is one token with this id: an unknown character is the unknown token too, but not all of it."""
    found = tokenizer.encode(content, add_special_tokens=False)
    spans = (end - start for token, (start, end) in zip(found.ids, found.offsets, strict=True) if token == number)
    return len(content) > 1 and any(span >= len(content) for span in spans)


def _tear(contents: Iterable[str]) -> pre_tokenizers.PreTokenizer:
    """Cuts a text within each of `contents`, after its first character."""
    pattern = "|".join(f"{re.escape(content[0])}(?={re.escape(content[1:])})" for content in contents)
    return pre_tokenizers.Split(Regex(pattern), "isolated")
