"""Tokenizers: trained here or given, all through `tokenizers`.

    TokenizerConfig -> check_tokenizer
      bpe, wordpiece, unigram, char  train_tokenizer(texts, config) -> dump_tokenizer -> tokenizer.json
      given                          read_given(config)                               -> tokenizer.json
    tokenizer.json -> load_tokenizer -> build_encoder -> Encoder.encode: integers for each text

Training twice on the same texts gives the same bytes; text never becomes a special token, even
where it spells one ("<|endoftext|>" in a corpus is thirteen ordinary characters); nothing is
truncated or padded. Not here: the sample of texts to train on, and the place of the
end-of-document token (`preparation/`).
"""

from pretrain.tokenizer.chat_template import (
    ASSISTANT,
    ChatPart,
    ChatTemplate,
    ChatTemplateError,
    join_segments,
    load_chat_template,
)
from pretrain.tokenizer.encoder import BATCH_CHARS, Encoder, build_encoder, display_tokens
from pretrain.tokenizer.file import (
    GivenTokenizer,
    check_template_of,
    dump_tokenizer,
    fit_documents,
    fit_start,
    load_tokenizer,
    own_template,
    parse_tokenizer,
    read_given,
    read_release,
    resolve_template,
    tokenizer_hash,
)
from pretrain.tokenizer.roles import (
    KNOWN_EOS,
    describe_vocabulary,
    eos_id,
    nameable_tokens,
    sentinel_ids,
    separator_ids,
    special_ids,
    special_tokens_of,
    start_id,
    token_dtype,
    unknown_id,
    vocabulary_size,
)
from pretrain.tokenizer.special_tokens import EOS, UNK
from pretrain.tokenizer.train import DEFAULT_VOCAB_SIZE, TRAINED_KINDS, check_tokenizer, train_tokenizer
from pretrain.tokenizer.words import PIECE_CHARS, cut_text, is_cut_safe

__all__ = [
    "ASSISTANT",
    "BATCH_CHARS",
    "DEFAULT_VOCAB_SIZE",
    "EOS",
    "KNOWN_EOS",
    "PIECE_CHARS",
    "TRAINED_KINDS",
    "UNK",
    "ChatPart",
    "ChatTemplate",
    "ChatTemplateError",
    "Encoder",
    "GivenTokenizer",
    "build_encoder",
    "check_template_of",
    "check_tokenizer",
    "cut_text",
    "describe_vocabulary",
    "display_tokens",
    "dump_tokenizer",
    "eos_id",
    "fit_documents",
    "fit_start",
    "is_cut_safe",
    "join_segments",
    "load_chat_template",
    "load_tokenizer",
    "nameable_tokens",
    "own_template",
    "parse_tokenizer",
    "read_given",
    "read_release",
    "resolve_template",
    "sentinel_ids",
    "separator_ids",
    "special_ids",
    "special_tokens_of",
    "start_id",
    "token_dtype",
    "tokenizer_hash",
    "train_tokenizer",
    "unknown_id",
    "vocabulary_size",
]
