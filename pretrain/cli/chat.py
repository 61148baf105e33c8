"""`pretrain chat`: a conversation with a model, typed or piped in; `generate --chat` holds it likewise."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

from typer import Option

from pretrain.cli.options import Device, ModelPath
from pretrain.errors import ConfigError
from pretrain.utils.log import printable
from pretrain.utils.status_line import status_line

if TYPE_CHECKING:
    from pretrain.artifact.open import Artifact
    from pretrain.generation.generation_options import Options


def chat_command(
    model: ModelPath,
    system: Annotated[str, Option(help="Turn of the system, before all others.")] = "",
    max_tokens: Annotated[int | None, Option(min=1, help="Of an answer. Default: the model's, or 128.")] = None,
    temperature: Annotated[float | None, Option(help="0 is greedy. Default: 0.8.")] = None,
    top_p: Annotated[float | None, Option(help="Nucleus sampling: total probability.")] = None,
    seed: Annotated[int, Option(help="Seed of sampling.")] = 0,
    device: Device = "auto",
) -> None:
    """Talk with a model: a line is a turn, /reset begins anew, Ctrl-D or Ctrl-C ends.

    As `generate --chat`, which has further options. Lines that are piped in are one conversation.

    Example: pretrain chat runs/chat --system "Answer in one word."
    """
    status_line().enter("importing torch")
    from pretrain.artifact.model_path import open_source
    from pretrain.artifact.open import load_artifact
    from pretrain.generation.generation_options import Options
    from pretrain.generation.text import find_prompts

    options = Options(max_tokens, temperature, None, top_p)
    status_line().enter(f"reading {model}")
    artifact = load_artifact(open_source(model), device)
    status_line().close()
    note_limits(artifact, max_tokens)
    lines = find_prompts([], None) or typed_lines()
    hold_conversation(artifact, options, iter(artifact.normalized(lines)), seed, system)


def hold_conversation(
    artifact: "Artifact", options: "Options", prompts: Iterator[str] | None, seed: int, system: str = ""
) -> None:
    """Answers turns as they come, after the turn of the system, if any. Raises: ConfigError."""
    from pretrain.generation.chat import ChatCodec, converse

    assert prompts is not None, "they are typed, or piped in"
    codec = ChatCodec(artifact.codec, system)
    converse(artifact.model, codec, artifact.generation, options, prompts, sys.stdout, notes=sys.stderr, seed=seed)


def typed_lines(as_json: bool = False) -> Iterator[str]:
    """Yields the lines that a user types, until the end of the input. Raises: ConfigError: No terminal."""
    if as_json or not sys.stdin.isatty():
        raise ConfigError("a conversation needs a terminal", fix="give --prompt, --file, or pipe prompts in")
    importlib.import_module("readline")  # edits lines of `input`
    print("a line is a turn; /reset begins anew, Ctrl-D ends", file=sys.stderr)
    with suppress(EOFError):
        while True:
            if line := input("> "):
                yield line


def note_limits(artifact: "Artifact", max_tokens: int | None) -> None:
    """Says which settings of a release and which length do not hold."""
    # Not an error: a released model may name settings that only its own library has.
    for setting in artifact.generation.not_honoured:
        print(printable(f"note: the model's own {setting} is not honoured"), file=sys.stderr)
    most = artifact.model.max_seq_len
    if max_tokens is not None and max_tokens > most and artifact.model.is_causal:
        text = f"note: texts are shorter than --max-tokens {max_tokens}: model.max_seq_len is {most}"
        print(text, file=sys.stderr)


def note_stdin(given: list[str] | None, file: str | None, found: object, option: str, is_chat: bool = False) -> None:
    """Says that standard input is read, where no option asks for it: in a script it may be another's, or stay open."""
    if not given and file is None and found is not None:
        how = "is one conversation, a turn a line" if is_chat else "is read to its end, a line each"
        print(f"note: standard input {how}; {option} gives a text instead", file=sys.stderr, flush=True)
