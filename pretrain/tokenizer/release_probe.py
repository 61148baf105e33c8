"""Probes of what a stranger's tokenizer runs, in a process with limits of CPU and memory.

    tokenizer.json -> check_patterns      its regular expressions, over long runs of characters
    chat template  -> check_renderings    a conversation, by our sandbox and by transformers itself

`tokenizers` backtracks without a limit of time, and transformers renders without any. This file is
the program too, which imports little; an answer is kept, as one start asks for it several times.
"""

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from pretrain.errors import DataError
from pretrain.utils.process import start_program
from pretrain.utils.safe_read import parse_json

CPU_S = 2.0
"""CPU of one text or rendering, in seconds; usual patterns take milliseconds."""
MEMORY_BYTES = 512 * 2**20
"""Address space for what is run, besides the imports."""
RUN_CHARS = 1 << 12
"""Length of a probed text: twice the pieces that documents are cut into."""
_MOST_CHARACTERS = 64
_MESSAGE_CHARS = 200
_NO_MEMORY = 3  # exit code
_FIX = "correct a copy of it, and give that as a .jinja file (template)"
_ENDS = "\0"  # matched by nothing that matches the run before it

_STEPS = ("normalizer", "pre_tokenizer", "decoder")
# Letters, digits, white space and marks, which classes of a pattern stand for; and mixtures.
_RUNS = ("a", "A", "1", " ", "\n", "\t", "\r", "!", "'", "_", "\u00e9", "\u0301", "\u4e2d")
_MIXED = ("a ", "aA", "a1", " \n", "\r\n", "a'", "'s", "!a", "a\u0301")

DAY = "2024-07-26"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks <up>",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
    }
]
_CALL = {"type": "function", "id": "call00001", "function": {"name": "look", "arguments": {"x": 1}}}
# Each beginning of it is a conversation.
CONVERSATION: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "Be  brief.\n"},
    {"role": "user", "content": " a <b> & 'c' \"d\"\n\u00e9\u4e2d "},
    {"role": "assistant", "content": "1", "reasoning_content": "so"},
    {"role": "user", "content": "2"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": "look", "tool_call_id": "call00001", "content": "3"},
    {"role": "assistant", "content": "4"},
)


def check_patterns(content: bytes, where: str) -> None:
    """Runs the regular expressions of a tokenizer.json. Raises: DataError: They take too much."""
    try:
        described = parse_json(content) if b'"Regex"' in content else None
    except ValueError:
        return  # for the one who parses it
    steps = {name: described.get(name) for name in _STEPS} if isinstance(described, dict) else {}
    patterns = [*_patterns_of(steps)]
    if not patterns:
        return
    texts = _texts_for("".join(patterns))
    answers, death = _ask({"steps": steps, "texts": texts})
    refused = next((number for number, error in enumerate(answers) if error), len(answers))
    if refused == len(texts):
        return
    reason = answers[refused] if refused < len(answers) else death
    spelled = f"{RUN_CHARS:,} characters, {texts[refused][:12]!r}..."
    text = f"its regular expressions ({', '.join(patterns)[:100]!r}) cannot be run: over {spelled}, they {reason}"
    raise DataError(text, where=where, fix="choose another tokenizer: a text would hold up a run")


def _patterns_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("Regex"), str):
            yield value["Regex"]
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _patterns_of(one)


def _texts_for(pattern: str) -> list[str]:
    """Returns runs of the characters and words of a pattern, and of what classes stand for."""
    characters = [one for one in dict.fromkeys(pattern) if not one.isspace()]
    words = re.findall(r"\w{2,16}", pattern)[:_MOST_CHARACTERS]
    runs = dict.fromkeys((*_RUNS, *_MIXED, *characters[:_MOST_CHARACTERS], *words))
    return [(run * RUN_CHARS)[:RUN_CHARS] + _ENDS for run in runs]


def check_renderings(
    value: Mapping[str, str], theirs: Any, where: str, tools: Sequence[Any] = (None, TOOLS)
) -> list[str]:
    """Returns the texts of a conversation by a chat template, alike by the sandbox and transformers.

    `value` is the resolved template, and `theirs` the tokenizer of transformers that has it.
    Raises: DataError: A text differs, or takes too much.
    """
    from pretrain.config.texts.templates import DATE_KEY
    from pretrain.tokenizer.chat_template import load_chat_template

    ours = load_chat_template({**value, DATE_KEY: DAY})
    cases = [*product(range(1, len(CONVERSATION) + 1), tools, (False, True))]
    rendered: list[tuple[str, str | None]] = []
    for num_turns, listed, prompt in cases:
        try:
            parts = ours.render(CONVERSATION[:num_turns], listed, generation_prompt=prompt)
            rendered.append(("".join(part.text for part in parts), None))
        except ValueError as error:  # a ChatTemplateError
            rendered.append(("", str(error)))
    templates = [theirs.get_chat_template(tools=listed) for _, listed, _ in cases]
    tokens = theirs.special_tokens_map
    answers, death = _ask({"tokens": tokens, "templates": templates, "cases": cases})
    answers += [["", f"it would {death}"]] * (len(cases) - len(answers))
    for case, mine, other in zip(cases, rendered, answers, strict=True):
        if mine[0] != other[0] or (mine[1] is None) != (other[1] is None):
            raise DataError(_say(case, mine, other), where=where, fix=_FIX)
    return [text for text, error in rendered if error is None]


def _say(case: tuple[int, Any, bool], ours: Sequence[Any], theirs: Sequence[Any]) -> str:
    """Says what is rendered otherwise, from the first character that differs."""
    place = 0
    for one, other in zip(ours[0], theirs[0], strict=False):
        if one != other:
            break
        place += 1
    turns = f"{case[0]} turn"
    if case[0] > 1:
        turns += "s"
    if case[1]:
        turns += " with tools"
    if case[2]:
        turns += " and a generation prompt"
    mine = _shown(ours[0], ours[1], place)
    other = _shown(theirs[0], theirs[1], place)
    return f"its chat template, for {turns}: {mine} here, and {other} in transformers"


def _shown(text: str, error: str | None, place: int) -> str:
    """Shows a rendering from a character on, or why there is none."""
    if error is not None:
        return f"refused ({error})"
    return repr(text[place : place + 40])


@lru_cache(maxsize=16)
def _answer(request: str) -> tuple[bytes, str]:
    """Returns what the program wrote, and what a request would do that ended it."""
    process = start_program(__file__)
    output, _ = process.communicate(request.encode())
    if process.returncode == 0:
        return output, ""
    if process.returncode == -signal.SIGPROF:
        return output, f"take more than {CPU_S:g} s of CPU"
    if process.returncode == _NO_MEMORY:
        return output, f"take more than {MEMORY_BYTES >> 20} MiB of memory"
    return output, f"end the process that runs it (exit code {process.returncode})"


def _ask(request: Mapping[str, Any]) -> tuple[list[Any], str]:
    """Returns the answers to the jobs of a request, and what the next one would do, if it ended."""
    limits = {"cpu_s": CPU_S, "memory_bytes": MEMORY_BYTES}
    output, death = _answer(json.dumps({**request, **limits}))
    return [parse_json(line) for line in output.splitlines()], death


# From here on: the program.


def _allow(request: Mapping[str, Any]) -> None:
    """Sets the limits of the next job, after which the kernel ends this process."""
    signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])


def _limit_memory(request: Mapping[str, Any]) -> None:
    """Allows some memory besides what the imports have."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + request["memory_bytes"]
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))


def _run_patterns(request: Mapping[str, Any]) -> Iterator[str]:
    """Yields an error for each text, or none: by its steps alone, with the text as a token."""
    from tokenizers import Tokenizer

    texts = request["texts"]
    vocabulary = {text: number for number, text in enumerate(texts)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": texts[0]}
    whole = {"version": "1.0", "added_tokens": [], "model": model, **request["steps"]}
    _allow(request)
    try:
        tokenizer = Tokenizer.from_str(json.dumps(whole))
    except Exception:  # for the one who parses it
        yield from [""] * len(texts)
        return
    for number, text in enumerate(texts):
        _allow(request)
        try:
            tokenizer.encode(text)
            tokenizer.decode([number])
        except MemoryError:
            raise
        except BaseException as error:  # a panic is no Exception
            yield f"end in {' '.join(str(error).split())[:_MESSAGE_CHARS]}"
        else:
            yield ""


def _render(request: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Yields the text of each conversation, or why it is refused, as `apply_chat_template` does."""
    from transformers.utils import chat_template_utils as utils

    class Then(datetime):
        """A clock that stands."""

        @classmethod
        def now(cls, tz: Any = None) -> "Then":
            return cls.fromisoformat(DAY)

    setattr(utils, "datetime", Then)  # noqa: B010  not one of its exports
    _limit_memory(request)
    for template, (num_turns, listed, prompt) in zip(request["templates"], request["cases"], strict=True):
        _allow(request)
        options = {"chat_template": template, "tools": listed, "add_generation_prompt": prompt}
        try:
            turns = [*CONVERSATION[:num_turns]]
            [text], _ = utils.render_jinja_template([turns], **options, **request["tokens"])
            yield text, None
        except MemoryError:
            raise
        except Exception as error:  # of a stranger's program
            yield "", " ".join(str(error).split())[:_MESSAGE_CHARS] or type(error).__name__


def _serve(request: Mapping[str, Any]) -> None:
    """Answers the jobs of a request, a line each."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    jobs: Iterator[Any] = _run_patterns(request) if "texts" in request else _render(request)
    try:
        for answer in jobs:
            signal.setitimer(signal.ITIMER_PROF, 0)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
    except MemoryError:
        os._exit(_NO_MEMORY)


if __name__ == "__main__":
    _serve(parse_json(sys.stdin.buffer.read()))
