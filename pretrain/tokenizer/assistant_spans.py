"""Places of the assistant's turns in a conversation that a chat template has written.

    Conversation.whole          the text, and any other of the same template
    tagged_spans                what is within `{% generation %}`, of the turns that are learned
    added_spans                 without the tag: what each turn of the assistant adds to the text

What a turn adds is found by renderings of the first turns, which the whole text must begin with.
Where it does not, an anchor, a mark behind the last word of a turn, says where that is in each
text, and what follows it there is compared. An anchor that changes a text around it is not used.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pretrain.errors import DataError
from pretrain.tokenizer.template_sandbox import GENERATED, Rendering, TemplateLimitError, sandbox

ASSISTANT = "assistant"
Message = Mapping[str, Any]
Span = tuple[int, int]

# Names of a message's reasoning: templates read the first, some the second.
REASONING = ("reasoning_content", "thinking", "reasoning")

# The number of a turn in digits of their own, between two noncharacters.
_ANCHOR = re.compile("\ufdd4([\ufde0-\ufde9]+)\ufdd5")
_DIGITS = {ord(str(digit)): chr(0xFDE0 + digit) for digit in range(10)}
_THINKS = re.compile(r"<(think|thinking|thought|reasoning)>\s*(</\1>)?$")
_NEXT_TURN = {"role": "user", "content": "a"}
_REMEDY = "the parts that the assistant wrote cannot be found"


class ChatTemplateError(ValueError):
    """A conversation that a chat template cannot write, or whose parts cannot be distinguished."""


@dataclass
class Conversation:
    """Messages and the template that writes them; `variables` are what it reads besides."""

    jinja: str
    date: str | None
    variables: Mapping[str, Any]
    messages: list[dict[str, Any]]
    special: re.Pattern[str]  # tokens
    raw: str = ""  # the text, without the beginning of an answer, once it is rendered

    def whole(
        self,
        messages: list[dict[str, Any]] | None = None,
        *,
        generation_prompt: bool = False,
        marks: bool = False,
    ) -> str:
        """Returns the text of all messages. Raises: ChatTemplateError: It is refused. DataError."""
        chosen = self.messages if messages is None else messages
        [text] = self.texts([(len(chosen), generation_prompt)], chosen, marks=marks)
        if text.error is not None:
            raise ChatTemplateError(f"the chat template refuses it: {text.error}")
        return text.rest

    def texts(
        self,
        jobs: Sequence[tuple[int, bool]],
        messages: list[dict[str, Any]],
        *,
        marks: bool = False,
    ) -> list[Rendering]:
        """Returns a rendering for each job (see `TemplateSandbox.render`). Raises: DataError."""
        variables = {**self.variables, "messages": messages}
        try:
            return sandbox().render(self.jinja, self.date, variables, jobs, marks=marks)
        except TemplateLimitError as error:
            raise exceeded(error) from None

    def anchored(self) -> list[dict[str, Any]]:
        """Returns the messages with anchors behind their words."""
        return [_anchor(one, turn) for turn, one in enumerate(self.messages)]


def exceeded(error: TemplateLimitError) -> DataError:
    """Builds the error of a template that takes too much."""
    return DataError(
        f"the chat template {error}",
        fix="choose another: no conversation needs as much",
    )


def tagged_spans(one: Conversation, silent: Collection[int]) -> list[Span]:
    """Returns the characters of `one.raw` within `{% generation %}`, but for the turns `silent`.

    Raises: ChatTemplateError: The template changes what it has within the tag.
    """
    one.raw = one.whole()
    text, spans = _generated(one.whole(marks=True))
    if text != one.raw:
        reason = "the chat template changes what it has within {% generation %}"
        raise ChatTemplateError(f"{reason}: {_REMEDY}")
    if not silent:
        return spans
    with_anchors = one.anchored()
    text, anchored = _generated(one.whole(with_anchors, marks=True))
    places = _places(text)
    turns = [turn for turn, message in enumerate(one.messages) if message["role"] == ASSISTANT]
    wordless = {turn for turn in turns if with_anchors[turn] == one.messages[turn]}
    moved = [tuple(len(_ANCHOR.sub("", text[:edge])) for edge in span) for span in anchored]
    if _ANCHOR.sub("", text) != one.raw or moved != spans or not places.keys() | wordless >= {*turns}:
        reason = "the chat template's tags have no place among the turns"
        raise ChatTemplateError(f"{reason}: {_REMEDY}")
    return [span for span in spans if _turn_of(span, places, turns, wordless, silent) not in silent]


def _turn_of(
    span: Span,
    places: Mapping[int, int],
    own: Sequence[int],
    wordless: Collection[int],
    silent: Collection[int],
) -> int:
    """Returns the turn of a span: whose words it has, or the nearest of the assistant's.

    One that is `wordless` has no place, and is between the turns that have.
    """
    turns = [turn for turn, place in places.items() if span[0] < place <= span[1]]
    turns = turns or _neighbours(span, places, wordless, max(own) + 1)
    turns = [turn for turn in turns if turn in own] or turns
    if len({turn in silent for turn in turns}) != 1:
        text = "a part in {% generation %} is of two turns, one of them not learned"
        raise ChatTemplateError(f"{text}: {_REMEDY}")
    return turns[0]


def _neighbours(span: Span, places: Mapping[int, int], wordless: Collection[int], end: int) -> list[int]:
    """Returns the turns before and after a span, and those without words between them."""
    first, last = -1, end
    if before := [(place, turn) for turn, place in places.items() if place <= span[0]]:
        first = max(before)[1]
    if after := [(place, turn) for turn, place in places.items() if place > span[1]]:
        last = min(after)[1]
    turns = [first] if before else []
    turns += [turn for turn in wordless if first < turn < last]
    if after:
        turns.append(last)
    return turns


def _generated(marked: str) -> tuple[str, list[Span]]:
    """Returns a text without the marks of what is generated, and the characters between them."""
    parts = re.split(f"([{''.join(GENERATED)}])", marked)
    spans: list[Span] = []
    depth = start = place = 0
    for part in parts:
        if part == GENERATED[0]:
            start = start if depth else place
            depth += 1
        elif part == GENERATED[1]:
            depth -= 1
            spans += [(start, place)] if not depth else []
        else:
            place += len(part)
    return "".join(part for part in parts if part not in GENERATED), spans


def added_spans(one: Conversation, learned: Sequence[int], eos: str) -> Iterator[Span]:
    """Yields the characters of `one.raw` that each turn of `learned` adds; `eos` may end a text.

    Raises: ChatTemplateError: The texts of the first turns are not found in the whole.
    """
    last = len(one.messages) - 1
    jobs = [(last + 1, False)]
    for turn in learned:
        # Behind the last turn comes another: what is there without it alone is no turn's.
        jobs += [(turn, True), (turn + 1 + (turn == last), False)]
    whole, *texts = one.texts(jobs, [*one.messages, _NEXT_TURN])
    if whole.error is not None:
        raise ChatTemplateError(f"the chat template refuses it: {whole.error}")
    one.raw = whole.rest
    local = _Anchored(one, eos)
    for turn, before, until in zip(learned, texts[::2], texts[1::2], strict=True):
        if before.error is not None:
            reason = f"the chat template refuses the turns before turn {turn}: {before.error}"
            if turn == 0:
                reason = "the first turn is the assistant's, before which the template writes nothing"
            raise ChatTemplateError(reason)
        begin = before.num_same if not before.rest else local.begin(turn, before)
        if turn < last:
            if until.error is not None:
                reason = f"the chat template refuses the turns up to {turn}"
                raise ChatTemplateError(f"{reason}: {until.error}")
            end = _shared(until, one.raw, eos)
            yield begin, local.end(turn, until) if end is None else end
        else:
            if until.error is None and until.num_same < len(one.raw.removesuffix(eos)):
                local.check_tail(until)
            yield begin, len(one.raw)


def _shared(found: Rendering, raw: str, eos: str) -> int | None:
    """Returns the length of a text, without a last `eos`, that begins the whole; None: not."""
    if not found.rest:
        return found.num_same
    # Some templates end a text, and not a turn, with this token (Phi-3).
    text = found.text(raw)
    is_shared = bool(eos) and text.endswith(eos) and len(text) - len(eos) <= found.num_same
    return len(text) - len(eos) if is_shared else None


class _Anchored:
    """Places by the words of turns, of a conversation whose texts do not continue each other."""

    def __init__(self, one: Conversation, eos: str) -> None:
        self._one = one
        self._eos = eos

    @cached_property
    def _places(self) -> dict[int, int]:
        """Places behind the words of the turns in the whole text; none if anchors change it."""
        text = self._one.whole(self._one.anchored())
        return _places(text) if _ANCHOR.sub("", text) == self._one.raw else {}

    def _after(self, turn: int, job: tuple[int, bool]) -> str | None:
        """Returns what another text has behind the words of a turn."""
        [rendering] = self._one.texts([job], [*self._one.anchored(), _NEXT_TURN])
        text = "" if rendering.error is not None else rendering.rest
        place = _places(text).get(turn)
        return None if place is None else _ANCHOR.sub("", text)[place:]

    def begin(self, turn: int, before: Rendering) -> int:
        """Returns where a turn of the assistant begins: behind its header."""
        raw = self._one.raw
        start = self._places.get(turn - 1, 0)
        asked = before.text(raw) if turn == 0 else self._after(turn - 1, (turn, True))
        if asked is not None and (turn == 0 or turn - 1 in self._places):
            if raw.startswith(asked, start):
                return start + len(asked)
            # A generation prompt that opens the reasoning, or closes it, where the turn has none.
            header = _THINKS.sub("", asked.rstrip()).rstrip()
            if raw.startswith(header, start):
                place = len(header)
                while asked[place:][:1].isspace() and raw.startswith(asked[place], start + place):
                    place += 1
                return start + place
        raise _disagreement(raw, before, turn, "the turns before it, with the generation prompt")

    def end(self, turn: int, until: Rendering) -> int:
        """Returns where a turn of the assistant ends, with the token that ends it."""
        place = self._places.get(turn)
        after = self._after(turn, (turn + 1, False))
        if place is not None and after is not None:
            for rest in (after, after.removesuffix(self._eos)):
                if self._one.raw.startswith(rest, place):
                    return place + len(rest)
        raise _disagreement(self._one.raw, until, turn, "the turns up to it")

    def check_tail(self, longer: Rendering) -> None:
        """Refuses a text behind the last turn that is absent if another follows.

        Special tokens there may differ, as those that end a conversation.
        """
        last = len(self._one.messages) - 1
        place = self._places.get(last)
        after = self._after(last, (last + 2, False))
        if place is not None and after is not None:
            tail = self._one.raw[place:]
            is_special = not self._one.special.sub("", tail).strip()
            if is_special or after.startswith(tail.removesuffix(self._eos)):
                return
        raise _disagreement(self._one.raw, longer, last, "the turns with one more")


def _anchor(message: Mapping[str, Any], turn: int) -> dict[str, Any]:
    """Returns a message with an anchor behind its words; one without words as it is."""
    mark = f"\ufdd4{str(turn).translate(_DIGITS)}\ufdd5"

    def put(text: str) -> str:
        place = len(text.rstrip())  # templates trim white space
        return text[:place] + mark + text[place:]

    content = message.get("content")
    if isinstance(content, str) and content.strip():
        return {**message, "content": put(content)}
    if isinstance(content, list) and content and str(content[-1].get("text", "")).strip():
        last = {**content[-1], "text": put(content[-1]["text"])}
        return {**message, "content": [*content[:-1], last]}
    if message.get("tool_calls") and isinstance(message["tool_calls"][-1].get("function"), dict):
        *rest, call = message["tool_calls"]
        function = {**call["function"], "name": put(str(call["function"].get("name", "")))}
        return {**message, "tool_calls": [*rest, {**call, "function": function}]}
    return {**message}


def _places(text: str) -> dict[int, int]:
    """Returns the place of each anchor that is there once, in the text without anchors."""
    places: dict[int, int] = {}
    twice = set()
    removed = 0
    for match in _ANCHOR.finditer(text):
        turn = int("".join(str(ord(digit) - 0xFDE0) for digit in match[1]))
        twice |= {turn} & places.keys()
        places[turn] = match.start() - removed
        removed += len(match[0])
    return {turn: place for turn, place in places.items() if turn not in twice}


def _disagreement(raw: str, found: Rendering, turn: int, what: str) -> ChatTemplateError:
    """Builds the error of a rendering that does not begin the whole one."""
    texts = (raw[found.num_same :], found.rest)
    whole, part = (re.sub("[\ufdd0-\ufdef]", "", text[:24]) for text in texts)
    return ChatTemplateError(
        f"turn {turn} has no place in the chat template's text: a rendering of {what} has {part!r} "
        f"where the whole conversation has {whole!r}"
    )
