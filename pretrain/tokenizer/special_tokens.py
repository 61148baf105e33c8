"""Plain text stays plain: no truncation, no padding, and no text becomes a special token.

`encode_special_tokens` stops the search for special tokens in the text. What remains is a model whose own vocabulary
holds one and reaches it: the Unigram model of T5, say, finds its piece "</s>" in the text "</s>". There a last
pre-tokenizer tears every such spelling after its first character. A given tokenizer.json stays as it is: all this is
done to what was read from it. Tokenizers that are trained here need no tearing.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors

from pretrain.config.prepare import TokenizerConfig
from pretrain.errors import ConfigError


def encode_plain_text(tokenizer: Tokenizer) -> Tokenizer:
    """Switches off, in place, whatever makes of a text something else than its tokens; returns the tokenizer."""
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if spelled := _spelled_special_tokens(tokenizer):
        tear = _tear(spelled)
        before = tokenizer.pre_tokenizer
        tokenizer.pre_tokenizer = tear if before is None else pre_tokenizers.Sequence([before, tear])
    return tokenizer


def _spelled_special_tokens(tokenizer: Tokenizer) -> list[str]:
    """Special tokens that their own spelling becomes, of two characters or more."""
    special = [(number, token) for number, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    return sorted(token.content for number, token in special if _becomes(tokenizer, token.content, number))


def _becomes(tokenizer: Tokenizer, content: str, number: int) -> bool:
    """Whether a text is one token with this id: an unknown character is the unknown token too, but not all of it."""
    found = tokenizer.encode(content, add_special_tokens=False)
    spans = (end - start for token, (start, end) in zip(found.ids, found.offsets, strict=True) if token == number)
    return len(content) > 1 and any(span >= len(content) for span in spans)


def _tear(contents: Iterable[str]) -> pre_tokenizers.PreTokenizer:
    """Cuts a text within each of `contents`, after its first character."""
    pattern = "|".join(f"{re.escape(content[0])}(?={re.escape(content[1:])})" for content in contents)
    return pre_tokenizers.Split(Regex(pattern), "isolated")


# What happens to a text before a model sees its words: normalizers, and the pre-tokenizers that
# tear it into words.


SPACE = "\u2581"

"""How the pieces of SentencePiece spell a space. A text that holds this character itself is read as having a space."""


@dataclass(frozen=True, slots=True)
class TextRules:
    """Options that all kinds share.

    Attributes:
        normalizer: Unicode normalisation, which comes first.
        lowercase: Lower-cases.
        split_digits: A number is one word a digit.
    """

    normalizer: Literal["none", "nfc", "nfkc"] = "none"
    lowercase: bool = False
    split_digits: bool = False

    def normalize(self) -> normalizers.Normalizer | None:
        """Returns the normalizer of every kind but WordPiece; None: texts stay as they are."""
        steps = self._unicode()
        if self.lowercase:
            steps.append(normalizers.Lowercase())
        return _one(steps)

    def normalize_bert(self) -> normalizers.Normalizer:
        """Returns that of BERT: control characters go, Chinese characters stand alone, all white space is a space.

        Where it lower-cases, accents go too, as in the uncased BERT.
        """
        found = _one([*self._unicode(), normalizers.BertNormalizer(lowercase=self.lowercase)])
        assert found is not None
        return found

    def _unicode(self) -> list[normalizers.Normalizer]:
        if self.normalizer == "none":
            return []
        return [normalizers.NFC() if self.normalizer == "nfc" else normalizers.NFKC()]

    def split_bytes(self) -> pre_tokenizers.PreTokenizer:
        """Returns the pre-tokenizer of byte-level BPE (GPT-2): runs of one class, with a space before them."""
        return self._after_digits([pre_tokenizers.ByteLevel(add_prefix_space=False)])

    def split_bert(self) -> pre_tokenizers.PreTokenizer:
        """Returns that of BERT: white space parts words and is dropped, each punctuation mark is a word."""
        return self._after_digits([pre_tokenizers.BertPreTokenizer()])

    def split_pieces(self) -> pre_tokenizers.PreTokenizer:
        """Returns that of Unigram: a word begins with its space, further spaces are a word, and so is a run of lines.

        Nothing is put before a text, so that none is lost: " a" and "a" are different.
        """
        words = pre_tokenizers.Split(Regex(r"[\t-\r]+| +(?= )| ?[^ \t-\r]+| +"), "isolated")
        space = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=False)
        return pre_tokenizers.Sequence([words, *self._digits(), space])

    def _digits(self) -> list[pre_tokenizers.PreTokenizer]:
        return [pre_tokenizers.Digits(individual_digits=True)] if self.split_digits else []

    def _after_digits(self, steps: list[pre_tokenizers.PreTokenizer]) -> pre_tokenizers.PreTokenizer:
        steps = [*self._digits(), *steps]
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


def _one(steps: list[normalizers.Normalizer]) -> normalizers.Normalizer | None:
    if not steps:
        return None
    return steps[0] if len(steps) == 1 else normalizers.Sequence(steps)


def split_characters() -> pre_tokenizers.PreTokenizer:
    """Returns the pre-tokenizer of the character level."""
    return pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")


def plan_rules(config: TokenizerConfig) -> TextRules:
    """Returns the rules of a tokenizer that is trained."""
    return TextRules(config.normalizer, config.lowercase, config.split_digits)


PLAIN = TextRules()

"""Texts as they are."""


# Where the special tokens of a new vocabulary lie.
#
#     0 ..  first | what training learns | <unused_N> | last
#
# `roles` says which there are. An end of document alone; those of BERT, at their ids; or those of
# T5, whose sentinels have the highest ids, downwards: <extra_id_0> is the last entry, as in the
# released vocabularies (32,099 of 32,100).


EOS = "<|endoftext|>"

UNK = "<unk>"

BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

T5_TOKENS = ("<pad>", "</s>", "<unk>")

SENTINEL = "<extra_id_{}>"

UNUSED = "<unused_{}>"

# Brackets around a word: no pre-tokenizer here keeps those together, so that no learned token spells one. Unigram
# makes its own provision.
_SPECIAL = re.compile(r"(?=[!-~]*[A-Za-z0-9])(<[!-~]+>|\[[!-~]+\])")

_UNUSED = re.compile(r"<unused_\d+>")


@dataclass(frozen=True, slots=True)
class SpecialTokenLayout:
    """The special tokens of a vocabulary.

    Attributes:
        first: Ids from 0, in order.
        last: The highest ids, in order.
        unk: Stands for what the vocabulary cannot spell. One of `first`, or at the end of what is learned.
        begin: What others put before a text to make a row for the model. Empty: nothing.
        end: What they put after it.
        multiple: The vocabulary is filled up to a multiple of this.
    """

    first: tuple[str, ...] = (EOS,)
    last: tuple[str, ...] = ()
    unk: str | None = None
    begin: str = ""
    end: str = ""
    multiple: int = 1

    @property
    def num_special(self) -> int:
        """Entries of the vocabulary that are not learned, those that fill it up not counted."""
        return len({*self.first, *self.last, *([self.unk] if self.unk else [])})

    def is_reserved(self, content: str) -> bool:
        """Whether a learned entry must not be spelled so."""
        return content in self.first or content in self.last or _UNUSED.fullmatch(content) is not None


DOCUMENT = SpecialTokenLayout()

"""Of byte-level BPE."""

CHAR_DOCUMENT = SpecialTokenLayout(first=(), last=(EOS,), unk=UNK)

"""Of the character level: an id is the rank of its character."""


def plan_layout(config: TokenizerConfig) -> SpecialTokenLayout:
    """Returns the layout of a vocabulary that is trained.

    Raises:
        ConfigError: A further special token is not in brackets, or there twice.
    """
    further = tuple(config.special_tokens)
    layout = _plan(config, further)
    for content in further:
        if not _SPECIAL.fullmatch(content) or _UNUSED.fullmatch(content):
            raise ConfigError(
                f"tokenizer.special_tokens: {content!r} could not be told from text",
                fix="write it in brackets and ASCII, without spaces, like <|name|> or [NAME]",
            )
        if (*layout.first, *layout.last, layout.unk).count(content) > 1:
            raise ConfigError(f"tokenizer.special_tokens: {content} is there already", fix="name each once")
    return layout


def _plan(config: TokenizerConfig, further: tuple[str, ...]) -> SpecialTokenLayout:
    if config.roles == "bert":
        return SpecialTokenLayout(
            (*BERT_TOKENS, *further), unk="[UNK]", begin="[CLS]", end="[SEP]", multiple=config.vocab_multiple
        )
    if config.roles == "t5":
        sentinels = tuple(SENTINEL.format(number) for number in reversed(range(config.sentinels)))
        return SpecialTokenLayout(
            (*T5_TOKENS, *further), sentinels, unk="<unk>", end="</s>", multiple=config.vocab_multiple
        )
    if config.kind == "char":
        return SpecialTokenLayout((), (EOS, *further), unk=UNK, multiple=config.vocab_multiple)
    if config.kind == "bpe":
        return SpecialTokenLayout((EOS, *further), multiple=config.vocab_multiple)
    unk = "[UNK]" if config.kind == "wordpiece" else UNK
    return SpecialTokenLayout((unk, EOS, *further), unk=unk, multiple=config.vocab_multiple)


def finish(tokenizer: Tokenizer, layout: SpecialTokenLayout) -> Tokenizer:
    """Adds to a trained tokenizer, in place, all that its layout says; returns it, ready for plain text.

    `first`, and `unk` if there is one, are in the model's vocabulary already.
    """
    present = [*layout.first, *([layout.unk] if layout.unk and layout.unk not in layout.first else [])]
    tokenizer.add_special_tokens([AddedToken(content, special=True) for content in present])
    fill_up(tokenizer, layout.multiple, room=len(layout.last))
    tokenizer.add_special_tokens([AddedToken(content, special=True) for content in layout.last])
    if layout.end:
        begin = [layout.begin] if layout.begin else []
        # The second of two texts is of the second segment where the model tells them apart.
        second = "1" if begin else "0"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", layout.end],
            pair=[*begin, "$A", layout.end, f"$B:{second}", f"{layout.end}:{second}"],
            special_tokens=[(content, tokenizer.token_to_id(content)) for content in (*begin, layout.end)],
        )
    return encode_plain_text(tokenizer)


def fill_up(tokenizer: Tokenizer, multiple: int, room: int = 0) -> None:
    """Adds <unused_N> until the vocabulary, with `room` entries more, is a multiple."""
    missing = -(tokenizer.get_vocab_size() + room) % multiple
    present = tokenizer.get_vocab()
    free = (UNUSED.format(number) for number in range(len(present) + missing))
    names = [name for name in free if name not in present][:missing]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
