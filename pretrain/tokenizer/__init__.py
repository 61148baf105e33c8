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
