"""Texts that a config gives a run to read, brought to what its data look like: normalised, then tokenized."""

from collections.abc import Callable
from dataclasses import dataclass

from pretrain.artifact.codec import PlainCodec
from pretrain.artifact.normalize import normalize_of_data
from pretrain.model import LanguageModel
from pretrain.prepare.normalize import build_normalizers
from pretrain.shards.dataset import Dataset
from pretrain.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class TextReader:
    """What a text goes through.

    Attributes:
        normalize: Done to a text, or the source of a pair.
        normalize_target: Done to the target of a pair.
        codec: The tokenizer.
    """

    normalize: Callable[[str], str]
    normalize_target: Callable[[str], str]
    codec: PlainCodec


def build_reader(dataset: Dataset, model: LanguageModel) -> TextReader:
    """Builds what reads texts as the data of a run were read.

    Raises:
        DataError: The tokenizer cannot be read.
        LaunchError: A package is missing that normalised the data.
    """
    tokenizer = load_tokenizer(dataset.tokenizer_path)
    codec = PlainCodec(tokenizer, ends_sources=model.encoder is not None and model.is_causal)
    steps = normalize_of_data([source.folder for source in dataset.sources])
    source, target = (str, str) if steps is None else build_normalizers(steps)
    return TextReader(source, target, codec)


def has_evaluations(dataset: Dataset) -> bool:
    """Returns whether there is anything to evaluate on, after which texts and pictures come."""
    return any("validation" in source.index.splits for source in dataset.sources)
