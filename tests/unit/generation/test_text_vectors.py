"""Vectors of texts: as the model has them, whatever their batch, cut to widths and lengths."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import ModelConfig
from pretrain.config.presets import expand_preset
from pretrain.errors import ConfigError
from pretrain.generation.text_vectors import embed_texts
from pretrain.model import build_model, init_weights
from pretrain.types import Batch

CODEC = SimpleNamespace(
    eos_ids=(1,), encode_placed=lambda text: ([2, *(3 + ord(one) % 90 for one in text), 1], [(0, 0)])
)
TEXTS = ["b", "a longer text", "cc", "a longer text than the model reads at once, and so it is cut", "d d"]


def make(preset="bert-tiny", **head):
    values = {"preset": preset, "vocab_size": 100, "max_seq_len": 24, "tied_embeddings": False, "head": head}
    config = ModelConfig.model_validate(expand_preset(values | ({"pooler": False} if preset == "bert-tiny" else {})))
    model = build_model(config, PLAIN_ENGINE, torch.device("cpu"))
    init_weights(model, config, 3)
    return model.eval()


@pytest.mark.parametrize(("preset", "mean"), [("bert-tiny", True), ("bert-tiny", False), ("llama-tiny", False)])
def test_a_vector_is_that_of_its_text_alone_whatever_the_batch(preset, mean):
    model, bare = make(preset, kind="vectors", mean=mean), make(preset, kind="none")
    vectors = embed_texts(model, CODEC, TEXTS, batch_size=2)
    assert vectors.dtype == np.float32
    for text, vector in zip(TEXTS, vectors, strict=True):
        ids = CODEC.encode_placed(text)[0]
        ids = torch.tensor([ids if len(ids) <= 24 else [*ids[:23], 1]])
        with torch.no_grad():
            hidden = bare(Batch(ids, ids), logits=False).hidden_BTD[0]
        wanted = hidden.mean(0) if mean else hidden[0] if preset == "bert-tiny" else hidden[-1]
        np.testing.assert_allclose(vector, wanted / wanted.norm(), atol=1e-5)
    np.testing.assert_allclose(vectors, embed_texts(model, CODEC, TEXTS, batch_size=5), atol=1e-6)


def test_prefixes_are_read_and_widths_cut_before_the_length_is_made_one():
    model = make(kind="vectors", mean=True)
    whole = embed_texts(model, CODEC, ["q: a", "q: b"])
    np.testing.assert_array_equal(embed_texts(model, CODEC, ["a", "b"], prefix="q: "), whole)
    cut = embed_texts(model, CODEC, ["q: a", "q: b"], width=16)
    np.testing.assert_allclose(cut, whole[:, :16] / np.linalg.norm(whole[:, :16], axis=1, keepdims=True), atol=1e-6)
    assert embed_texts(model, CODEC, []).shape == (0, whole.shape[1])


def test_a_model_without_vectors_and_a_width_beyond_them_are_refused():
    with pytest.raises(ConfigError, match=r"the model makes no vectors: its head is another; use one with head\.kind"):
        embed_texts(make(kind="none"), CODEC, ["a"])
    with pytest.raises(ConfigError, match=r"--width 999 is more than the \d+ of the model's vectors; use a smaller"):
        embed_texts(make(kind="vectors"), CODEC, ["a"], width=999)
