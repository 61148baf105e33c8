"""Chat templates of transformers (Jinja): a conversation to its text, and the parts that have a loss.

    {jinja, bos_token, ...} -> load_chat_template -> render    the text of `apply_chat_template`
                                                  -> segments  that text in parts, learned or not

The assistant's parts are those in `{% generation %}`. Of a template without that tag they are what
a rendering with the turn has beyond one that ends with the generation prompt before it. Where
earlier turns are written otherwise than last ones, the texts are compared from the words of a turn
on; a template whose texts differ there too is refused.

Not here: the limits of a stranger's program (template_sandbox.py), and turning text into tokens
(`Encoder.encode_conversation`).
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain, groupby, pairwise
from typing import Any, NamedTuple

from pretrain.config.texts.templates import DATE_KEY, JINJA_KEY, SPECIAL_KEY, TOOLS_KEY
from pretrain.errors import ConfigError
from pretrain.tokenizer.assistant_spans import (
    ASSISTANT,
    REASONING,
    ChatTemplateError,
    Conversation,
    Message,
    added_spans,
    exceeded,
    tagged_spans,
)
from pretrain.tokenizer.template_sandbox import TemplateFacts, TemplateLimitError, sandbox

# Noncharacters of Unicode, which no text has: around spelled special tokens of a conversation.
_SPELLED = ("\ufdd2", "\ufdd3")
_SPELLING = re.compile("[\ufdd2\ufdd3]")
_MARKS = re.compile("[\ufdd0-\ufdef]")


class ChatPart(NamedTuple):
    """A part of a rendered conversation."""

    text: str
    is_learned: bool  # the assistant's: its tokens have a loss
    is_spelled: bool = False  # a message spells a special token, which stays text


class ChatTemplate:
    """A compiled chat template. Built by `load_chat_template`."""

    def __init__(self, value: Mapping[str, str], special: Collection[str]) -> None:
        self._date = value.get(DATE_KEY)
        self._tokens = {name: token for name, token in value.items() if name.endswith("_token")}
        longest_first = sorted(map(re.escape, special), key=len, reverse=True)
        self._special = re.compile("|".join(longest_first) or "(?!)")
        self._jinja = value[JINJA_KEY]
        self._of_tools = value.get(TOOLS_KEY, self._jinja)
        self._text = f"{self._jinja}\n{self._of_tools}"
        self._facts = {text: _compile(text) for text in (self._jinja, self._of_tools)}
        self._names = frozenset().union(*(facts.names for facts in self._facts.values()))
        self._variables = frozenset().union(*(facts.variables for facts in self._facts.values()))

    def reads(self, name: str) -> bool:
        """Returns whether the template names a key of messages."""
        return name in self._names

    def takes(self, name: str) -> bool:
        """Returns whether the template names a variable, such as `tools`."""
        return name in self._variables

    def names_role(self, role: str) -> bool:
        """Returns whether the template has a role among its strings."""
        return role in self._names

    def tests(self, name: str, kinds: str) -> bool:
        """Returns whether the template asks for a value's type, such as `content is string`."""
        pattern = rf"\b{name}['\"]?\]?\)?\s+is\s+(?:not\s+)?(?:{kinds})\b"
        return re.search(pattern, self._text) is not None

    @property
    def takes_parts(self) -> bool:
        """True if the template reads the texts of content in parts."""
        return re.search(r"\[['\"]text['\"]\]|\.text\b|get\(['\"]text['\"]", self._text) is not None

    def render(
        self, messages: Sequence[Message], tools: Any = None, *, generation_prompt: bool = False
    ) -> list[ChatPart]:
        """Returns the text of a conversation, by default without the beginning of an answer.

        Nothing in it is learned; the segments tell what spells a special token. Raises:
        ChatTemplateError: The template refuses. DataError: It takes too much CPU or memory.
        """
        one = self._conversation(messages, tools)
        one.raw = one.whole(generation_prompt=generation_prompt)
        self._check_spelled(one, messages, tools, generation_prompt=generation_prompt)
        return list(_cut(one.raw, []))

    def segments(self, messages: Sequence[Message], tools: Any = None, silent: Collection[int] = ()) -> list[ChatPart]:
        """Returns the text of a conversation in parts, learned but for the turns `silent`.

        Learned is what is the assistant's.

        Raises:
            ChatTemplateError: The template refuses the conversation, or what it writes of a turn
                cannot be found in the whole.
            DataError: It takes too much CPU or memory.
        """
        one = self._conversation(messages, tools)
        if self._facts[one.jinja].is_tagged:
            spans = tagged_spans(one, silent)
        else:
            turns = [turn for turn, message in enumerate(messages) if message["role"] == ASSISTANT]
            learned = [turn for turn in turns if turn not in silent]
            spans = list(added_spans(one, learned, self._tokens.get("eos_token", "")))
        self._check_spelled(one, messages, tools, generation_prompt=False)
        return list(_cut(one.raw, spans))

    def _conversation(self, messages: Sequence[Message], tools: Any, *, marks_spelled: bool = True) -> Conversation:
        special = self._special if marks_spelled else None
        try:
            prepared = [_prepare_message(message, special) for message in messages]
            variables = {**self._tokens, "tools": _mark(tools, special), "documents": None}
        except RecursionError:
            raise ChatTemplateError("a message is nested too deeply") from None
        jinja = self._jinja if tools is None else self._of_tools
        return Conversation(jinja, self._date, variables, prepared, self._special)

    def _check_spelled(
        self, one: Conversation, messages: Sequence[Message], tools: Any, *, generation_prompt: bool
    ) -> None:
        """Checks that marks of spelled special tokens leave the text as transformers writes it."""
        content = json.dumps([one.messages, one.variables], default=str, ensure_ascii=False)
        if not _SPELLING.search(content):
            return
        plain = self._conversation(messages, tools, marks_spelled=False)
        if _SPELLING.sub("", one.raw) != plain.whole(generation_prompt=generation_prompt):
            raise ChatTemplateError(
                "a message spells a special token, at which the chat template divides it",
            )


def _prepare_message(message: Message, special: re.Pattern[str] | None) -> dict[str, Any]:
    """Returns a message as transformers gives it to a template, special tokens in it marked."""
    marked = {key: _mark(value, special) for key, value in message.items() if value is not None}
    reasoning = next((marked[key] for key in REASONING if key in marked), None)
    if reasoning is None:
        return marked
    return {"thinking": reasoning, **marked, "reasoning_content": reasoning}


def _mark(value: Any, special: re.Pattern[str] | None) -> Any:
    if isinstance(value, str):
        if _MARKS.search(value):
            raise ChatTemplateError("a message has the noncharacters U+FDD0 to U+FDEF")
        return value if special is None else special.sub(f"{_SPELLED[0]}\\g<0>{_SPELLED[1]}", value)
    if isinstance(value, Mapping):
        return {key: _mark(one, special) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_mark(one, special) for one in value]
    return value


def _cut(raw: str, spans: Sequence[tuple[int, int]]) -> Iterable[ChatPart]:
    """Yields the parts of a marked text, learned within the spans; marks are left out."""
    marks = [match.start() for match in _SPELLING.finditer(raw)]
    cuts = sorted({0, len(raw), *chain.from_iterable(spans), *marks, *(place + 1 for place in marks)})
    parts = []
    is_spelled = False
    for start, stop in pairwise(cuts):
        text = raw[start:stop]
        if text in _SPELLED:
            is_spelled = text == _SPELLED[0]
        else:
            is_learned = any(first <= start < last for first, last in spans)
            parts.append(ChatPart(text, is_learned, is_spelled))
    for (is_learned, is_spelled), group in groupby(parts, lambda part: part[1:]):
        yield ChatPart("".join(part.text for part in group), is_learned, is_spelled)


def join_segments(
    parts: Iterable[ChatPart],
) -> Iterable[tuple[str, tuple[tuple[int, int], ...], bool]]:
    """Yields texts to be encoded as a whole, the characters of each that are learned, and if it is spelled."""
    for is_spelled, group in groupby(parts, lambda part: part.is_spelled):
        text = ""
        spans = []
        for part in group:
            if part.is_learned:
                spans.append((len(text), len(text) + len(part.text)))
            text += part.text
        yield text, tuple(spans), is_spelled


def _compile(jinja: str) -> TemplateFacts:
    """Returns what a template has. Raises: ConfigError: No Jinja. DataError: It takes too much."""
    try:
        return sandbox().compile(jinja)
    except ValueError as error:
        raise ConfigError(
            f"the chat template is no Jinja: {error}",
            fix="correct it, or choose another template",
        ) from None
    except TemplateLimitError as error:
        raise exceeded(error) from None


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
