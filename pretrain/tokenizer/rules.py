"""What happens to a text before a model sees its words: normalizers, and the pre-tokenizers that tear it into words."""

from dataclasses import dataclass
from typing import Literal

from tokenizers import Regex, normalizers, pre_tokenizers

from pretrain.config.prepare import TokenizerConfig

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
