"""Where the special tokens of a new vocabulary lie.

    0 ..  first | what training learns | <unused_N> | last

`roles` says which there are. An end of document alone; those of BERT, at their ids; or those of T5, whose sentinels
have the highest ids, downwards: <extra_id_0> is the last entry, as in the released vocabularies (32,099 of 32,100).
"""

import re
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, processors

from pretrain.config.prepare import TokenizerConfig
from pretrain.errors import ConfigError
from pretrain.tokenizer.plain import encode_plain_text

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
class Layout:
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


DOCUMENT = Layout()
"""Of byte-level BPE."""

CHAR_DOCUMENT = Layout(first=(), last=(EOS,), unk=UNK)
"""Of the character level: an id is the rank of its character."""


def plan_layout(config: TokenizerConfig) -> Layout:
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


def _plan(config: TokenizerConfig, further: tuple[str, ...]) -> Layout:
    if config.roles == "bert":
        return Layout((*BERT_TOKENS, *further), unk="[UNK]", begin="[CLS]", end="[SEP]", multiple=config.vocab_multiple)
    if config.roles == "t5":
        sentinels = tuple(SENTINEL.format(number) for number in reversed(range(config.sentinels)))
        return Layout((*T5_TOKENS, *further), sentinels, unk="<unk>", end="</s>", multiple=config.vocab_multiple)
    if config.kind == "char":
        return Layout((), (EOS, *further), unk=UNK, multiple=config.vocab_multiple)
    if config.kind == "bpe":
        return Layout((EOS, *further), multiple=config.vocab_multiple)
    unk = "[UNK]" if config.kind == "wordpiece" else UNK
    return Layout((unk, EOS, *further), unk=unk, multiple=config.vocab_multiple)


def finish(tokenizer: Tokenizer, layout: Layout) -> Tokenizer:
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
