"""`pretrain generate --chat`: prompts as turns of the user, answered by the assistant.

    prompt -> earlier turns, the user's turn, the beginning of the assistant's -> ids -> answer

Lines that are typed, or piped in, are turns of one conversation (`converse`); prompts of --prompt
and --file are conversations of their own.

The text around turns is that of the training: the template of a run, or a release's chat template.
"""

import io
from collections.abc import Iterator
from typing import TextIO

from pretrain.generation.beam import Beams
from pretrain.generation.constraints import Codec
from pretrain.generation.generation_options import Options
from pretrain.generation.text import generate_text, stream_text
from pretrain.model import LanguageModel
from pretrain.types import GenerationDefaults
from pretrain.utils.units import plural

RESET = "/reset"
"""Line by which a conversation begins anew."""


class ChatCodec:
    """A `Codec` whose prompts are turns of the user, after the conversation in `turns`; `system` begins it."""

    def __init__(self, codec: Codec, system: str = "") -> None:
        self._codec = codec
        self._first = [("system", system)] if system else []
        self.eos_ids = codec.eos_ids
        self.mask_id = codec.mask_id
        self.turns: list[tuple[str, str]] = [*self._first]
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

    def begin_anew(self) -> None:
        """Drops all turns but the first one of the system."""
        self.turns = [*self._first]

    def drop_oldest(self, text: str, room: int) -> int:
        """Drops exchanges from the beginning, after a system's turn, until the next turn fits.

        `room` is the most tokens of a prompt. An exchange is a turn of the user with its answer, as
        many templates refuse a conversation that begins otherwise. Returns the dropped turns.
        """
        first = int(self.turns[:1] != [] and self.turns[0][0] == "system")
        num_before = len(self.turns)
        while len(self.turns) > first and len(self.encode(text)) > room:
            del self.turns[first : first + 2]
        return num_before - len(self.turns)


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
    notes: TextIO,
    seed: int = 0,
) -> None:
    """Answers line by line, each with the turns before it that the model has room for.

    An answer has room for the most tokens that are asked for, up to half of the model's row: the
    oldest exchanges are dropped for it, which `notes` say, and all of them at a line `/reset`.
    Ctrl-C ends the line of an unfinished answer.

    Raises: ConfigError: The model cannot chat, or one turn is longer than its rows.
    """
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="backslashreplace")  # the terminal may lack a character
    constraints = options.constraints(model, codec, defaults)
    method = options.method(model, defaults)
    row = min(model.max_seq_len, constraints.max_length or model.max_seq_len)
    room = row - min(constraints.max_new_tokens, row // 2)
    for line in lines:
        if line.strip() == RESET:
            codec.begin_anew()
            notes.write("note: the conversation begins anew\n")
            notes.flush()
            continue
        if num_dropped := codec.drop_oldest(line, room):
            text = "the conversation has no more room for its oldest"
            notes.write(f"note: {text} {plural(num_dropped, 'turn')}\n")
            notes.flush()
        if isinstance(method, Beams):
            (best, *_), *_ = generate_text(model, codec, [line], constraints, method, seed=seed)
            pieces = iter([best.text])
        else:
            pieces = stream_text(model, codec, line, constraints, method, seed=seed)
        answer = ""
        try:
            for piece in trimmed(pieces):
                answer += piece
                out.write(piece)
                out.flush()
        finally:
            out.write("\n")
            out.flush()
        codec.turns += [("user", line), ("assistant", answer)]
