"""Chat templates of transformers (Jinja): a conversation to its text, and the parts that have a loss.

    {jinja, bos_token, ...} -> load_chat_template -> render    the text of `apply_chat_template`
                                                  -> segments  that text in parts, learned or not

The assistant's parts are those in `{% generation %}`. Of a template without that tag they are what
a rendering with the turn has beyond one that ends with the generation prompt before it; a template
whose renderings do not continue each other is refused.

The template is a stranger's program: it runs in Jinja's sandbox, on strings, numbers, lists and
dicts alone. Not here: turning text into tokens (`Encoder.encode_conversation`).
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import date, datetime
from functools import lru_cache
from itertools import chain, groupby, pairwise
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pretrain.config.texts.templates import DATE_KEY, JINJA_KEY, SPECIAL_KEY
from pretrain.errors import ConfigError

ASSISTANT = "assistant"
Message = Mapping[str, Any]

# Noncharacters of Unicode, which no text has: around what is generated, and around what a
# conversation spells like a special token.
_LEARNED = ("\ufdd0", "\ufdd1")
_SPELLED = ("\ufdd2", "\ufdd3")
_MARKS = re.compile(f"[{''.join((*_LEARNED, *_SPELLED))}]")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

# Names of a message's reasoning: templates read the first, some the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplateError(ValueError):
    """A conversation that a chat template cannot write, or whose parts cannot be distinguished."""


class ChatPart(NamedTuple):
    """A part of a rendered conversation."""

    text: str
    is_learned: bool  # the assistant's: its tokens have a loss
    is_spelled: bool = False  # a message spells a special token, which stays text


class _GenerationTag(Extension):
    """`{% generation %}`: what the assistant writes, between two marks."""

    tags = {"generation"}  # noqa: RUF012  Jinja reads a set of the class

    def parse(self, parser: Parser) -> nodes.Node:
        """Returns the body of the tag, within `_mark`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        return f"{_LEARNED[0]}{caller()}{_LEARNED[1]}"


class _TemplateNamespace(Namespace):
    """Jinja's namespace without attributes of Python's own, as in transformers."""

    def __init__(self, /, *pairs: Any, **attributes: Any) -> None:
        super().__init__()
        for name, value in dict(*pairs, **attributes).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot store {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes the characters of HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _build_environment(today: str | None) -> ImmutableSandboxedEnvironment:
    """Returns the environment of transformers; `today` is the date that a template reads (ISO)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json

    def strftime_now(form: str) -> str:
        now = datetime.now() if today is None else date.fromisoformat(today)
        return now.strftime(form)

    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": strftime_now,
        "namespace": _TemplateNamespace,
        # Not the class itself, whose attributes lead out of the sandbox.
        "dict": lambda *pairs, **items: dict(*pairs, **items),
    }
    return environment


class ChatTemplate:
    """A compiled chat template. Built by `load_chat_template`."""

    def __init__(self, value: Mapping[str, str], special: Collection[str]) -> None:
        text = value[JINJA_KEY]
        try:
            self._template = _build_environment(value.get(DATE_KEY)).from_string(text)
        except jinja2.TemplateSyntaxError as error:
            what = f"the chat template is no Jinja: line {error.lineno}: {error.message}"
            raise ConfigError(what, fix="correct it, or choose another template") from None
        self._tokens = {name: token for name, token in value.items() if name.endswith("_token")}
        self._has_tag = _GENERATION.search(text) is not None
        longest_first = sorted(map(re.escape, special), key=len, reverse=True)
        self._special = re.compile("|".join(longest_first) or "(?!)")

    def render(
        self, messages: Sequence[Message], tools: Any = None, *, generation_prompt: bool = False
    ) -> list[ChatPart]:
        """Returns the text of a conversation, by default without the beginning of an answer.

        Nothing in it is learned; the segments tell what spells a special token. Raises:
        ChatTemplateError.
        """
        raw = self._render(self._marked(messages), self._marked(tools), generation_prompt)
        return list(_cut(raw, []))

    def segments(self, messages: Sequence[Message], tools: Any = None, first: int = 0) -> list[ChatPart]:
        """Returns the text of a conversation in parts, the assistant's from turn `first` on learned.

        Raises: ChatTemplateError: The template refuses the conversation, or its renderings of the
        first turns do not continue each other.
        """
        marked = self._marked(messages)
        tools = self._marked(tools)
        raw = self._render(marked, tools)
        if self._has_tag:
            begin, end = _LEARNED
            starts = [place for place, character in enumerate(raw) if character == begin]
            ends = [place for place, character in enumerate(raw) if character == end]
            # A template has the tag in a loop over the turns: a span each.
            skipped = sum(message["role"] == ASSISTANT for message in marked[:first])
            return list(_cut(raw, list(zip(starts, ends, strict=True))[skipped:]))
        return list(_cut(raw, list(self._find_spans(raw, marked, tools, first))))

    def _find_spans(self, raw: str, messages: Sequence[Message], tools: Any, first: int) -> Iterable[tuple[int, int]]:
        """Yields the characters of each turn of the assistant, by renderings of the turns so far."""
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT or number < first:
                continue
            if number == 0:
                what = "the first turn is the assistant's, before which there is nothing to render"
                raise ChatTemplateError(what)
            before = self._render(messages[:number], tools, generation_prompt=True)
            if not raw.startswith(before):
                raise _disagreement(raw, before, number, "the turns before it, with the generation prompt")
            until = raw
            if number + 1 < len(messages):
                until = self._render(messages[: number + 1], tools)
                if not raw.startswith(until):
                    # Some templates end a text, and not a turn, with this token (Phi-3).
                    until = until.removesuffix(self._tokens.get("eos_token", ""))
                if not raw.startswith(until):
                    raise _disagreement(raw, until, number, "the turns up to it")
            yield len(before), len(until)

    def _render(self, messages: Sequence[Message], tools: Any, generation_prompt: bool = False) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._tokens,
            )
        except Exception as error:  # of a stranger's program: Jinja's errors, and any of Python's
            raise ChatTemplateError(f"the chat template refuses it: {error}") from None

    def _marked(self, value: Any) -> Any:
        """Returns messages or tools as transformers gives them to a template, special tokens in them marked."""
        if isinstance(value, str):
            if _MARKS.search(value):
                raise ChatTemplateError("a message has the noncharacters U+FDD0 to U+FDD3")
            return self._special.sub(f"{_SPELLED[0]}\\g<0>{_SPELLED[1]}", value)
        if isinstance(value, Mapping):
            found = {key: self._marked(one) for key, one in value.items() if one is not None}
            reasoning = next((found[key] for key in _REASONING if key in found), None)
            if "role" not in found or reasoning is None:
                return found
            return {"thinking": reasoning, **found, "reasoning_content": reasoning}
        if isinstance(value, list | tuple):
            return [self._marked(one) for one in value]
        return value


def _disagreement(raw: str, found: str, number: int, what: str) -> ChatTemplateError:
    """Builds the error of a rendering that does not begin the whole one."""
    same = next((place for place, (a, b) in enumerate(zip(raw, found, strict=False)) if a != b), 0)
    same = same or min(len(raw), len(found))
    whole, part = (_MARKS.sub("", text[same : same + 24]) for text in (raw, found))
    return ChatTemplateError(
        f"turn {number} has no place in the chat template's text: a rendering of {what} has {part!r} where the whole "
        f"conversation has {whole!r}"
    )


def _cut(raw: str, spans: Sequence[tuple[int, int]]) -> Iterable[ChatPart]:
    """Yields the parts of a marked text, learned within the spans; marks are left out."""
    marks = [match.start() for match in _MARKS.finditer(raw)]
    cuts = sorted({0, len(raw), *chain.from_iterable(spans), *marks, *(place + 1 for place in marks)})
    parts = []
    is_spelled = False
    for start, stop in pairwise(cuts):
        text = raw[start:stop]
        if text in _SPELLED:
            is_spelled = text == _SPELLED[0]
        elif text not in _LEARNED:
            is_learned = any(first <= start < last for first, last in spans)
            parts.append(ChatPart(text, is_learned, is_spelled))
    for (is_learned, is_spelled), group in groupby(parts, lambda part: part[1:]):
        yield ChatPart("".join(part.text for part in group), is_learned, is_spelled)


def join_segments(parts: Iterable[ChatPart]) -> Iterable[tuple[str, tuple[tuple[int, int], ...], bool]]:
    """Yields texts to be encoded as a whole, the characters of each that are learned, and if it is spelled."""
    for is_spelled, group in groupby(parts, lambda part: part.is_spelled):
        text = ""
        spans = []
        for part in group:
            if part.is_learned:
                spans.append((len(text), len(text) + len(part.text)))
            text += part.text
        yield text, tuple(spans), is_spelled


def load_chat_template(value: Mapping[str, str], special: Collection[str] | None = None) -> ChatTemplate:
    """Compiles a resolved template of a config; kept, as each record needs it.

    `special` are the tokenizer's special tokens (None: those that the value lists). Raises:
    ConfigError: It is no Jinja.
    """
    if special is None:
        special = value.get(SPECIAL_KEY, "").splitlines()
    return _load(tuple(value.items()), tuple(special))


@lru_cache(maxsize=16)
def _load(items: tuple[tuple[str, str], ...], special: tuple[str, ...]) -> ChatTemplate:
    return ChatTemplate(dict(items), special)
