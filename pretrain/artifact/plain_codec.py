"""The codec of a run: text, conversations and ids, with the tokenizer and template of the training."""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property

from tokenizers import Tokenizer, models

from pretrain.config.texts.templates import DATE_KEY, JINJA_KEY, Template, is_jinja, to_jinja, turns_of
from pretrain.errors import ConfigError
from pretrain.preparation.readers.conversations import apply_template
from pretrain.preparation.readers.record_fields import RecordError
from pretrain.tokenizer.chat_template import (
    ChatPart,
    ChatTemplate,
    ChatTemplateError,
    join_segments,
    load_chat_template,
)
from pretrain.tokenizer.encoder import build_encoder
from pretrain.tokenizer.roles import nameable_tokens, special_ids, special_tokens_of

_EXCHANGE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "a"})
"""A conversation that any chat template writes."""


class PlainCodec:
    """A `Codec` over a tokenizer of `pretrain prepare`, with the special tokens of documents in training.

    With `ends_sources` it appends the end-of-document token, as in training of an encoder-decoder.
    `template` is that of the conversations of the training; `eos` ends a document (None: a known
    name), `begin` begins one (None: nothing).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        ends_sources: bool = False,
        template: Template | None = None,
        *,
        eos: int | None = None,
        begin: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        special = special_tokens_of(tokenizer)
        eos = special.eos if eos is None else eos
        self.eos_ids: tuple[int, ...] = () if eos is None else (eos,)
        self.mask_id: int | None = special.mask
        self._first = [] if begin is None else [begin]
        self._end = list(self.eos_ids) if ends_sources else []
        self._begin = [] if special.bos is None else [special.bos]
        self._named = nameable_tokens(tokenizer)
        longest_first = sorted(self._named, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, longest_first)))
        # A word's token includes the space before it, and so does its mask; a character's does not.
        self._takes_space = not isinstance(tokenizer.model, models.WordLevel)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text; spelled special tokens (masks, sentinels, modes) become their ids."""
        ids = [*self._first]
        first = 0
        for match in self._names.finditer(text) if self._named else ():
            part = text[first : match.start()]
            if self._takes_space:
                part = part.removesuffix(" ")
            ids += [*self._encode(part), self._named[match[0]]]
            first = match.end()
        return ids + self._encode(text[first:]) + self._end

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_placed(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the ids of a document as `prepare` writes a labelled one, and their character spans."""
        coded = self._tokenizer.encode(text, add_special_tokens=False)
        around = len(self._begin) * [(0, 0)], len(self.eos_ids) * [(len(text), len(text))]
        return [*self._begin, *coded.ids, *self.eos_ids], [*around[0], *coded.offsets, *around[1]]

    def encode_chat(self, turns: list[tuple[str, str]]) -> list[int]:
        """Returns the ids of a conversation as `prepare` writes it. Raises: ConfigError: There is no template."""
        self._check_template()
        assert self._template is not None
        if is_jinja(self._template):
            return self._encode_segments(self._render(turns, generation_prompt=True))[0]
        try:
            # The empty last turn stands for what the assistant is about to say.
            segments, markers = apply_template([*turns, ("assistant", "")], self._template)
        except RecordError as error:
            raise ConfigError(error.what, fix="use another model") from None
        texts = [text for text, _ in segments]
        if turns_of(self._template)["assistant"][1]:
            texts.pop()
        turns_begun = [number for number in markers if number < len(texts)]
        return [*self._first, *self._encode_turns(texts, turns_begun)]

    def render_chat(self, turns: list[tuple[str, str]], *, generation_prompt: bool = True) -> str:
        """Returns the text of a conversation. Raises: ConfigError: There is no template, or it refuses."""
        parts = self._render(turns, generation_prompt=generation_prompt)
        return "".join(part.text for part in parts)

    def encode_rendered(self, text: str) -> list[int]:
        """Returns the ids of a conversation's text, special tokens in it meant."""
        return self._encode_segments([ChatPart(text, is_learned=False)])[0]

    def _check_template(self) -> None:
        if self._template is None:
            raise ConfigError(
                "the run knows no chat template: its data were prepared without one",
                fix="write the prompt by hand, for `pretrain generate` without --chat",
            )

    def _render(self, turns: list[tuple[str, str]], *, generation_prompt: bool) -> list[ChatPart]:
        self._check_template()
        messages = [{"role": role, "content": text} for role, text in turns]
        try:
            return self._chat_template.render(messages, generation_prompt=generation_prompt)
        except ChatTemplateError as error:
            raise ConfigError(str(error), fix="use other turns, or another model") from None

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        assert self._template is not None
        begin = str(self._tokenizer.id_to_token(self._first[0])) if self._first else ""
        value = {JINJA_KEY: to_jinja(self._template, begin)}
        if isinstance(self._template, dict) and is_jinja(self._template):
            # Without the date of the data: a conversation is of today, as in transformers.
            value |= {key: text for key, text in self._template.items() if key != DATE_KEY}
        return load_chat_template(value, special_ids(self._tokenizer))

    def _encode_segments(self, parts: Iterable[ChatPart]) -> tuple[list[int], list[int]]:
        """Returns the ids of a rendered conversation, and those that are learned."""
        encoder = build_encoder(self._tokenizer, self.eos_ids[0] if self.eos_ids else None)
        ids: list[int] = []
        learned: list[int] = []
        for text, spans, is_spelled in join_segments(parts):
            tokens, mask = encoder.encode_conversation(text, spans, has_special=not is_spelled)
            ids += tokens
            learned += [token for token, is_learned in zip(tokens, mask, strict=True) if is_learned]
        return ids, learned

    def _encode_turns(self, texts: list[str], markers: Sequence[int]) -> list[int]:
        eos = self.eos_ids[0] if self.eos_ids else None
        return build_encoder(self._tokenizer, eos).encode(texts, markers).values.tolist()

    @property
    def ends_of_turn(self) -> tuple[int, ...]:
        """The special token that ends a turn of the assistant, where the template has one."""
        if self._template is None:
            return ()
        if is_jinja(self._template):
            special = {*special_ids(self._tokenizer).values()}
            try:
                _, learned = self._encode_segments(self._chat_template.segments(_EXCHANGE))
            except ChatTemplateError:
                return ()
            return tuple(token for token in learned if token in special)[:1]
        after = turns_of(self._template)["assistant"][1]
        first = self._encode_turns([after], [0])[:1]
        return tuple(token for token in first if token in special_ids(self._tokenizer).values())

    def encode_target(self, text: str) -> list[int]:
        """Returns the ids of a target, by `encode`: there is one language."""
        return self.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids, without special tokens."""
        return str(self._tokenizer.decode(ids))

    def tokens(self, ids: list[int]) -> list[str]:
        """Returns the text of each id, for display."""
        return [str(self._tokenizer.decode([number], skip_special_tokens=False)) for number in ids]
