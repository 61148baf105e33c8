"""Special tokens: their place in a trained vocabulary, and plain text that never becomes one.

    0 ..  first | learned entries | <unused_N> | last

`roles` chooses them: an end of document alone; those of BERT, at their ids; or those of T5, whose
sentinels have the highest ids, downwards: <extra_id_0> is the last entry, as in the released
vocabularies (32,099 of 32,100).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers, processors

from pretrain.config.prepare import TokenizerConfig
from pretrain.errors import ConfigError


def encode_plain_text(tokenizer: Tokenizer) -> Tokenizer:
    """Turns off truncation, padding and special tokens in texts, in place; returns the tokenizer."""
    # `encode_special_tokens` stops the search for special tokens in a text. A model may still reach
    # one in its own vocabulary: the Unigram model of T5 finds its piece "</s>" in the text "</s>".
    # There a last pre-tokenizer splits every such spelling after its first character. Tokenizers that
    # are trained here need no split.
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    decoder = tokenizer.get_added_tokens_decoder()
    special = [(token.content, number) for number, token in decoder.items() if token.special]
    spelled = sorted(content for content, number in special if _becomes(tokenizer, content, number))
    if spelled:
        pattern = "|".join(f"{re.escape(content[0])}(?={re.escape(content[1:])})" for content in spelled)
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        before = tokenizer.pre_tokenizer
        tokenizer.pre_tokenizer = split if before is None else pre_tokenizers.Sequence([before, split])
    return tokenizer


def _becomes(tokenizer: Tokenizer, content: str, number: int) -> bool:
    """True if a text of two characters or more is one token with this id."""
    encoding = tokenizer.encode(content, add_special_tokens=False)
    places = zip(encoding.ids, encoding.offsets, strict=True)
    # An unknown character is the unknown token too, but not the whole text.
    spans = (end - start for token, (start, end) in places if token == number)
    return len(content) > 1 and any(span >= len(content) for span in spans)


EOS = "<|endoftext|>"
UNK = "<unk>"
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
T5_TOKENS = ("<pad>", "</s>", UNK)
SENTINEL = "<extra_id_{}>"
UNUSED = "<unused_{}>"

# Brackets around a word: no pre-tokenizer here keeps those together, so that no learned token
# spells one; Unigram has its own rule.
_SPECIAL = re.compile(r"(?=[!-~]*[A-Za-z0-9])(<[!-~]+>|\[[!-~]+\])")

_UNUSED = re.compile(r"<unused_\d+>")


@dataclass(frozen=True, slots=True)
class SpecialTokenLayout:
    """The special tokens of a vocabulary: `first` with ids from 0, `last` with the highest ids.

    The unknown token is one of `first`, or the last of the learned entries. Released models put
    `begin` and `end` around a text; empty: none. The vocabulary is filled up to a `multiple`.
    """

    first: tuple[str, ...]
    last: tuple[str, ...] = ()
    unk: str | None = None
    begin: str = ""
    end: str = ""
    multiple: int = 1

    @property
    def num_special(self) -> int:
        """Number of special tokens, fillers not counted."""
        return len({*self.first, *self.last, *([self.unk] if self.unk else [])})

    def is_reserved(self, content: str) -> bool:
        """True if a learned entry must not be spelled so."""
        return content in (*self.first, *self.last) or _UNUSED.fullmatch(content) is not None


def plan_layout(config: TokenizerConfig) -> SpecialTokenLayout:
    """Returns the layout of a trained vocabulary. Raises: ConfigError: A special token is refused."""
    further = tuple(config.special_tokens)
    layout = _plan(config, further)
    for content in further:
        if not _SPECIAL.fullmatch(content) or _UNUSED.fullmatch(content):
            raise ConfigError(
                f"tokenizer.special_tokens: {content!r} could be confused with text",
                fix="write it in brackets and ASCII, without spaces, like <|name|> or [NAME]",
            )
        if (*layout.first, *layout.last, layout.unk).count(content) > 1:
            raise ConfigError(f"tokenizer.special_tokens: {content} is there already", fix="name each once")
    return layout


def _plan(config: TokenizerConfig, further: tuple[str, ...]) -> SpecialTokenLayout:
    multiple = config.vocab_multiple
    if config.roles == "bert":
        return SpecialTokenLayout((*BERT_TOKENS, *further), (), "[UNK]", "[CLS]", "[SEP]", multiple)
    if config.roles == "t5":
        sentinels = tuple(SENTINEL.format(number) for number in reversed(range(config.sentinels)))
        return SpecialTokenLayout((*T5_TOKENS, *further), sentinels, UNK, "", "</s>", multiple)
    if config.kind == "char":
        return SpecialTokenLayout((), (EOS, *further), UNK, multiple=multiple)
    if config.kind == "bpe":
        return SpecialTokenLayout((EOS, *further), multiple=multiple)
    unk = "[UNK]" if config.kind == "wordpiece" else UNK
    return SpecialTokenLayout((unk, EOS, *further), unk=unk, multiple=multiple)


def finish(tokenizer: Tokenizer, layout: SpecialTokenLayout) -> Tokenizer:
    """Adds the special tokens of a layout to a trained tokenizer, in place; returns it for plain text.

    `first` and `unk` are in the model's vocabulary already.
    """
    present = list(layout.first)
    if layout.unk and layout.unk not in layout.first:
        present.append(layout.unk)
    add_special(tokenizer, present)
    fill_up(tokenizer, layout.multiple, room=len(layout.last))
    add_special(tokenizer, layout.last)
    if layout.end:
        begin = [layout.begin] if layout.begin else []
        # The second of two texts is in the second segment where the model has segments.
        second = "1" if begin else "0"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", layout.end],
            pair=[*begin, "$A", layout.end, f"$B:{second}", f"{layout.end}:{second}"],
            special_tokens=[(content, tokenizer.token_to_id(content)) for content in (*begin, layout.end)],
        )
    return encode_plain_text(tokenizer)


def add_special(tokenizer: Tokenizer, contents: Iterable[str]) -> None:
    """Adds special tokens that the vocabulary lacks, and marks those that it has."""
    tokenizer.add_special_tokens([AddedToken(content, special=True) for content in contents])


def fill_up(tokenizer: Tokenizer, multiple: int, room: int = 0) -> None:
    """Adds <unused_N> until the vocabulary, with `room` entries more, is a multiple."""
    missing = -(tokenizer.get_vocab_size() + room) % multiple
    present = tokenizer.get_vocab()
    free = (UNUSED.format(number) for number in range(len(present) + missing))
    names = [name for name in free if name not in present][:missing]
    add_special(tokenizer, names)
