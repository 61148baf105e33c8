"""Trains small tokenizers for tests."""

import io
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, normalizers, processors

from pretrain.config.prepare import TokenizerConfig
from pretrain.tokenizer.train import train_tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with an end of document."""
    return train_tokenizer(texts, TokenizerConfig(kind="bpe", vocab_size=vocab_size))


def train_char(texts: Iterable[str]) -> Tokenizer:
    """A character-level tokenizer with an end of document."""
    return train_tokenizer(texts, TokenizerConfig(kind="char"))


def train_sentencepiece(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A BPE of SentencePiece with fallback to bytes, as LLaMA 2 has it: <unk>, <s>, </s>, bytes, pieces."""
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
    from transformers.convert_slow_tokenizer import generate_merges

    stored = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=stored, vocab_size=vocab_size, model_type="bpe",
        byte_fallback=True, split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True, character_coverage=0.99, num_threads=1, minloglevel=2,
    )  # fmt: skip
    pieces = SentencePieceProcessor(model_proto=stored.getvalue())
    vocab = {pieces.id_to_piece(number): number for number in range(pieces.get_piece_size())}
    special = ["<unk>", "<s>", "</s>"]
    scores = {piece: pieces.get_score(number) for piece, number in vocab.items()}
    merges = generate_merges(vocab, scores, special)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens(special)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    spaces = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(spaces)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer
