"""Tokenizers: trained here (byte-level BPE, characters) or given as a `tokenizer.json`, all through `tokenizers`.

    train_bpe / train_char / load_tokenizer  ->  Tokenizer  ->  dump_tokenizer -> tokenizer.json
    build_encoder                            ->  Encoder.encode: one integer array a text

Invariants: training twice on the same texts gives the same bytes; text never becomes a special token, even where it
spells one ("<|endoftext|>" in a corpus is thirteen ordinary characters); nothing is truncated or padded.
Not here: which texts to train on (prepare.py), where the end-of-document token goes (part.py).
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from pretrain.errors import ConfigError, DataError

EOS = "<|endoftext|>"
UNK = "<unk>"
KNOWN_EOS = (EOS, "</s>", "<|end_of_text|>", "<|eot_id|>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
"""Special tokens that released tokenizers end a document with, the most specific first."""

MIN_BPE_VOCAB_SIZE = 256 + 1
"""Every byte, and the end of a document."""

BATCH_CHARS = 1 << 18
"""Characters handed to the encoder at once. An encoding takes a hundred bytes a token, so this bounds memory."""

PIECE_CHARS = 1 << 13
"""Longer texts are encoded in pieces of about this many characters, a few per cent faster than whole ones."""

# A byte-level pre-token is one run of a single class, with at most one space before it. So none holds a non-space
# followed by a space, and a cut there leaves the tokens of both sides as they were.
_SAFE_CUT = re.compile(r"(?<=\S)(?=[ \t\n])")


def check_bpe_size(vocab_size: int) -> None:
    """Raises: ConfigError, where a byte-level BPE of this size has no room for the bytes."""
    if vocab_size < MIN_BPE_VOCAB_SIZE:
        raise ConfigError(
            f"vocab_size={vocab_size} has no room for the 256 bytes and {EOS}", fix=f"use {MIN_BPE_VOCAB_SIZE} or more"
        )


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE (Sennrich et al. 2016; GPT-2's pre-tokenizer, Radford et al. 2019, 2.2).

    Any text round-trips: the 256 bytes are in the vocabulary. The vocabulary is smaller than `vocab_size` if the texts
    run out of pairs that occur twice. About 4 MB/s of text.

    Raises:
        ConfigError: `vocab_size` has no room for the bytes.
    """
    check_bpe_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    return _encode_plain_text(tokenizer)


def train_char(texts: Iterable[str]) -> Tokenizer:
    """Builds a character-level tokenizer: id = rank of the character among those seen, by code point.

    `<unk>`, which stands for a character never seen, and the end of a document come last. Only text without unseen
    characters round-trips.
    """
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    vocab = {character: number for number, character in enumerate(sorted(characters))}
    vocab[UNK] = len(vocab)
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(UNK, special=True), AddedToken(EOS, special=True)])
    return _encode_plain_text(tokenizer)


def _encode_plain_text(tokenizer: Tokenizer) -> Tokenizer:
    """Switches off whatever makes of a text something else than its tokens. Not saved in tokenizer.json."""
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def dump_tokenizer(tokenizer: Tokenizer) -> bytes:
    """Returns the content of the tokenizer's `tokenizer.json`."""
    return (tokenizer.to_str(pretty=True) + "\n").encode()


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads a `tokenizer.json`.

    Raises:
        DataError: No such file, or not a tokenizer.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read the tokenizer: {error.strerror or error}", where=str(path), fix="give a tokenizer.json"
        ) from error
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # `tokenizers` raises plain Exception and ValueError
        raise DataError(
            f"not a tokenizer: {error}", where=str(path), fix="give a tokenizer.json as `tokenizers` saves it"
        ) from error
    return _encode_plain_text(tokenizer)


def tokenizer_hash(path: Path) -> str:
    """Returns the sha256 of the file, in hex: the identity of a vocabulary across shards, runs and checkpoints."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Returns one more than the largest id (ids need not be dense)."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def eos_id(tokenizer: Tokenizer) -> int:
    """Returns the id of the special token that ends a document.

    Raises:
        DataError: None of `KNOWN_EOS` is a special token of this tokenizer.
    """
    special = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    for content in KNOWN_EOS:
        if content in special:
            return special[content]
    raise DataError(
        f"the tokenizer has no end-of-document token; its special tokens are {sorted(special) or 'none'}",
        fix=f"add {EOS} to it with add_special_tokens",
    )


def token_dtype(size: int) -> str:
    """Returns the name of the smallest dtype that holds ids below `size`: uint16 or uint32."""
    return "uint16" if size <= 1 << 16 else "uint32"


def cut_text(text: str, piece_chars: int = PIECE_CHARS) -> Iterator[str]:
    """Cuts a text where no token of `train_bpe` or `train_char` can span, into pieces of at least `piece_chars`.

    The tokens of the pieces, one after another, are the tokens of the text. A text with no white space stays whole.
    """
    start = 0
    while len(text) - start > piece_chars:
        cut = _SAFE_CUT.search(text, start + piece_chars)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:] if start else text


@dataclass(frozen=True, slots=True)
class Encoder:
    """A tokenizer with what writing tokens needs, computed once.

    Attributes:
        tokenizer: Encodes plain text.
        eos: The end-of-document token, an array of one; its dtype is that of all tokens.
    """

    tokenizer: Tokenizer
    eos: np.ndarray

    def encode(self, texts: list[str]) -> Iterator[np.ndarray]:
        """Encodes texts together; yields the ids of each, without special tokens.

        Single-threaded where TOKENIZERS_PARALLELISM=false. The cost is that of `encode_batch_fast`.
        """
        for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            yield np.fromiter(encoding.ids, self.eos.dtype, len(encoding))


def build_encoder(tokenizer: Tokenizer) -> Encoder:
    """Returns an encoder. Raises: DataError, where the tokenizer has no end-of-document token."""
    return Encoder(tokenizer, np.array([eos_id(tokenizer)], token_dtype(vocabulary_size(tokenizer))))
