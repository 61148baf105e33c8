"""Small tokenizers for tests of text: byte-level, of characters, and sentencepiece's way with spaces and bytes."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

END, MASK, PAD = "<|end|>", "<mask>", "<pad>"
TEXTS = [
    "The cat sat on the mat, and the dog sat on the cat.",
    "Na\u00efve caf\u00e9s serve cr\u00e8me br\u00fbl\u00e9e; \u00a35 or \u20ac6.",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3067\u3059\u3002",
    "Emoji \U0001f600 and \U0001f468\u200d\U0001f469\u200d\U0001f467, then text.\nA second line.",
]


class TinyCodec:
    """A `Codec` over a tokenizer of `tokenizers`; END, where it has one, ends its texts."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        end = tokenizer.token_to_id(END)
        self.eos_ids = () if end is None else (end,)
        self.mask_id = tokenizer.token_to_id(MASK)
        self.vocab_size = tokenizer.get_vocab_size()

    def encode(self, text):
        return self._tokenizer.encode(text).ids

    encode_target = encode

    def encode_rendered(self, text):
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        return self._tokenizer.decode(ids)

    def tokens(self, ids):
        return [self._tokenizer.id_to_token(number) for number in ids]


def byte_codec(*, appends_end=False):
    """Byte-level BPE: with so few merges most characters beyond ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[PAD, END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if appends_end:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {END}", special_tokens=[(END, tokenizer.token_to_id(END))]
        )
    return TinyCodec(tokenizer)


def sentencepiece_codec():
    """Spaces are part of the words that follow them, the first one is dropped; rare characters are bytes."""
    space = "\u2581"
    merges = [("t", "h"), ("th", "e"), (space, "the"), ("a", "t"), ("c", "at"), (space, "cat")]
    characters = sorted({*TEXTS[0], space} - {" "})
    pieces = [PAD, END, *(f"<0x{byte:02X}>" for byte in range(256)), *characters, *map("".join, merges)]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([PAD, END])
    return TinyCodec(tokenizer)
