"""The character level."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models

from pretrain.tokenizer.layout import CHAR_DOCUMENT, Layout, finish
from pretrain.tokenizer.rules import PLAIN, TextRules, split_characters


def train_char(texts: Iterable[str], layout: Layout = CHAR_DOCUMENT, rules: TextRules = PLAIN) -> Tokenizer:
    """Builds a character-level tokenizer: ids are in the order of the characters seen, by code point.

    Without roles, an id is the rank of its character, and `<unk>`, which stands for a character never seen, and the
    end of a document come last. Only text without unseen characters round-trips.
    """
    assert layout.unk is not None
    normalizer = rules.normalize()
    characters: set[str] = set()
    for text in texts:
        characters.update(text if normalizer is None else normalizer.normalize_str(text))
    entries = [*layout.first, *sorted(characters)]
    if layout.unk not in layout.first:
        entries.append(layout.unk)
    vocab = {entry: number for number, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=layout.unk))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = split_characters()
    tokenizer.decoder = decoders.Fuse()
    return finish(tokenizer, layout)
