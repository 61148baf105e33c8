"""`pretrain generate --chat`: prompts as turns of the user, answered by the assistant.

    prompt -> earlier turns, the user's turn, the beginning of the assistant's -> ids -> answer

The text around turns is that of the training: the template of a run, or a release's chat template.
"""

from collections.abc import Iterator
from typing import TextIO

from pretrain.generate.beam import Beams
from pretrain.generate.constraints import Codec
from pretrain.generate.generation_options import Options
from pretrain.generate.text import generate_text, stream_text
from pretrain.model import LanguageModel
from pretrain.types import GenerationDefaults


class ChatCodec:
    """A `Codec` whose prompts are turns of the user, after the conversation in `turns`."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.eos_ids = codec.eos_ids
        self.mask_id = codec.mask_id
        self.turns: list[tuple[str, str]] = []
        self.decode = codec.decode
        self.tokens = codec.tokens
        self.encode_chat = codec.encode_chat
        self.render_chat = codec.render_chat
        self.encode_rendered = codec.encode_rendered
        self.encode_placed = codec.encode_placed
        self.encode_target = codec.encode_target

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the conversation with one more turn of the user. Raises: ConfigError."""
        return self._codec.encode_chat([*self.turns, ("user", text)])


def trimmed(pieces: Iterator[str]) -> Iterator[str]:
    """Yields the pieces of a text without white space at its ends, which a template may have there."""
    held, begun = "", False
    for piece in pieces:
        held += piece
        if not begun:
            held = held.lstrip()
        if text := held.rstrip():
            yield text
            begun, held = True, held[len(text) :]


def converse(
    model: LanguageModel,
    codec: ChatCodec,
    defaults: GenerationDefaults,
    options: Options,
    lines: Iterator[str],
    out: TextIO,
    *,
    seed: int = 0,
) -> None:
    """Answers line by line, each with all turns before it, until the lines end.

    Raises: ConfigError: The model cannot chat, or the conversation is longer than its rows.
    """
    constraints = options.constraints(model, codec, defaults)
    method = options.method(model, defaults)
    for line in lines:
        if isinstance(method, Beams):
            (best, *_), *_ = generate_text(model, codec, [line], constraints, method, seed=seed)
            pieces = iter([best.text])
        else:
            pieces = stream_text(model, codec, line, constraints, method, seed=seed)
        answer = ""
        for piece in trimmed(pieces):
            answer += piece
            out.write(piece)
            out.flush()
        out.write("\n")
        out.flush()
        codec.turns += [("user", line), ("assistant", answer)]
