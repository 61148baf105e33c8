"""Text of tokens as they come, character by character and never a broken one."""

from collections.abc import Sequence

from pretrain.generate.codec import Codec

_BROKEN = "\ufffd"


class Detokenizer:
    """Turns one token after another into text.

    What a token stands for depends on its neighbours: a character may take several tokens, and a first word loses its
    space. So the text of a token is what it adds to the text of those just before it, and nothing is given out while it
    ends within a character. All pieces together are the text of all tokens, unless the byte fallback of a sentencepiece
    model meets bytes that are no UTF-8. A token costs two calls of the codec with a few tokens; before the first piece
    the context is among them.

    Args:
        codec: The tokenizer.
        context: Ids before the first, whose text is not given out.
    """

    def __init__(self, codec: Codec, context: Sequence[int] = ()) -> None:
        self._codec, self._ids, self._given = codec, list(context), len(context)

    def add(self, token: int) -> str:
        """Returns the text that is certain with one more token, often empty."""
        self._ids.append(token)
        text = self._pending()
        if not text or text.endswith(_BROKEN):
            return ""
        self._ids, self._given = self._ids[self._given :], len(self._ids) - self._given
        return text

    def rest(self) -> str:
        """Returns what was held back, at the end: characters that never became whole."""
        text = self._pending()
        self._ids, self._given = [], 0
        return text

    def _pending(self) -> str:
        before = self._codec.decode(self._ids[: self._given])
        return self._codec.decode(self._ids)[len(before) :]


def text_after(codec: Codec, context: Sequence[int], ids: Sequence[int]) -> str:
    """Returns the text that `ids` add to that of `context`: all that a `Detokenizer` gives out, at once."""
    before = codec.decode(list(context))
    return codec.decode([*context, *ids])[len(before) :]
