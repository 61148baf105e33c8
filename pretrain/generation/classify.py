"""`pretrain classify`: labels of texts, or of their words, with probabilities.

texts    a line each: label, probability, text, with tabs between; line breaks become \\n
words    a line each text: word/LABEL word/LABEL ...
--json   an object a line, with the probability of every label of a text
"""

import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TextIO

import torch
from torch import Tensor

from pretrain.errors import ConfigError
from pretrain.generation.constraints import Codec
from pretrain.generation.incremental_decoder import check_prompt
from pretrain.model import LanguageModel
from pretrain.preparation.filters import Label
from pretrain.preparation.labelling import first_tokens
from pretrain.types import Batch


@dataclass(frozen=True, slots=True)
class LabelledText:
    """A text with its most probable label, and the probability of each."""

    text: str
    label: str
    probability: float
    probabilities: dict[str, float]


@dataclass(frozen=True, slots=True)
class LabelledWord:
    """A word, by white space, with its most probable label."""

    word: str
    label: str
    probability: float


@dataclass(frozen=True, slots=True)
class LabelledWords:
    """A text with the labels of its words; a word without a token has none, and is left out."""

    text: str
    words: list[LabelledWord]


def run_classify(
    model: LanguageModel,
    codec: Codec,
    labels: list[str],
    texts: Iterable[str],
    out: TextIO,
    *,
    of_words: bool = False,
    batch_size: int = 16,
    as_json: bool = False,
) -> None:
    """Writes the labels of each text, a batch at a time. Raises: ConfigError, as `classify`."""
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="backslashreplace")  # the terminal may lack a character
    for labelled in classify(model, codec, labels, texts, of_words=of_words, batch_size=batch_size):
        if as_json:
            line = json.dumps(asdict(labelled), ensure_ascii=False)
        elif isinstance(labelled, LabelledText):
            text = labelled.text.replace("\r", "\\r").replace("\n", "\\n")
            line = f"{labelled.label}\t{labelled.probability:.4f}\t{text}"
        else:
            line = " ".join(f"{one.word}/{one.label}" for one in labelled.words)
        out.write(line + "\n")
        out.flush()


@torch.no_grad()
def classify(
    model: LanguageModel,
    codec: Codec,
    labels: list[str],
    texts: Iterable[str],
    *,
    of_words: bool = False,
    batch_size: int = 16,
) -> Iterator[LabelledText | LabelledWords]:
    """Yields the texts in order with their labels, or those `of_words`; `labels` are the model's, by number.

    Raises: ConfigError: The model labels nothing, or a text is too long or has no tokens.
    """
    if model.head is None or not model.head.scores_labels:
        raise ConfigError("the model labels nothing: its head is not over labels", fix="use a classifier")
    numbered = enumerate(texts, start=1)
    while batch := list(islice(numbered, batch_size)):
        encoded = [codec.encode_placed(text) for _, text in batch]
        for (number, _), (ids, _) in zip(batch, encoded, strict=True):
            check_prompt(model, ids, where=f"text {number}", name="text")
        scores_BTV = _scores(model, [ids for ids, _ in encoded]).softmax(dim=-1).cpu()
        for (_, text), (_, spans), scores_TV in zip(batch, encoded, scores_BTV, strict=True):
            if of_words:
                yield LabelledWords(text, _label_words(text, spans, scores_TV, labels))
            else:
                by_label = dict(zip(labels, scores_TV[0].tolist(), strict=True))
                best = max(by_label, key=by_label.__getitem__)
                yield LabelledText(text, best, by_label[best], by_label)


def _scores(model: LanguageModel, rows: list[list[int]]) -> Tensor:
    """Returns the scores of padded rows, fp32 [B, T, V]; of a text they are at its first token."""
    device = model.embedding.weight.device
    lengths_B = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    tokens_BT = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    logits_BTV = model(Batch(tokens_BT, tokens_BT, lengths_B=lengths_B).to(device)).logits_BTV
    assert logits_BTV is not None and model.head is not None
    return logits_BTV[..., : model.head.num_scores].float()


def _label_words(text: str, spans: list[tuple[int, int]], scores_TV: Tensor, labels: list[str]) -> list[LabelledWord]:
    words = [Label("", *match.span()) for match in re.finditer(r"\S+", text)]
    labelled = []
    for word, place in zip(words, first_tokens(words, spans).tolist(), strict=True):
        if place < len(spans):
            best = int(scores_TV[place].argmax())
            labelled.append(LabelledWord(text[word.start : word.end], labels[best], float(scores_TV[place, best])))
    return labelled
