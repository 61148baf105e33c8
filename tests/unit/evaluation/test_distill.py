"""Scores of a teacher: each token once, with what comes before it in its document, as the model gives them."""

import numpy as np
import pytest
import torch

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import parse_model
from pretrain.config.presets import expand_preset
from pretrain.evaluation.distill import DistillOptions, _score_member, _windows
from pretrain.model import build_model, init_weights
from pretrain.types import Batch


@pytest.mark.parametrize("length", [4, 7, 8, 100])
def test_each_token_is_scored_once_with_half_a_window_before_it_or_its_whole_document(length):
    starts = np.array([0, 3, 4, 20])
    bounds = {3: 0, 4: 3, 20: 4, 31: 20}
    scored = []
    for begin, end, first in _windows(starts, 31, length):
        start = max(one for one in starts.tolist() if one <= first)
        assert begin == start or first - begin == length // 2
        assert end - begin <= length and end <= next(stop for stop in bounds if stop > first)
        scored += range(first, end)
    assert scored == list(range(31))


def test_scores_are_those_of_the_model_and_the_mass_of_the_others():
    config = parse_model(expand_preset({"preset": "llama-tiny", "vocab_size": 90, "max_seq_len": 16}))
    model = build_model(config, PLAIN_ENGINE, torch.device("cpu"))
    init_weights(model, config, 1)
    model.eval()
    tokens = np.random.default_rng(0).integers(90, size=21).astype(np.uint16)
    options = DistillOptions(top_k=5, temperature=2.0, batch_tokens=32)
    found = _score_member(model, tokens, np.array([0, 9]), options, 16)
    for start, end in ((0, 9), (9, 21)):
        ids = torch.from_numpy(tokens[None, start:end].astype(np.int64))
        with torch.no_grad():
            logits = model(Batch(ids, ids), logits=True).logits_BTV[0, :, :90]
        values, places = logits.topk(5, dim=1)
        assert found.ids[start:end].tolist() == places.tolist()
        np.testing.assert_allclose(found.scores[start:end], values - values[:, :1], atol=1e-5)
        np.testing.assert_allclose(found.rest[start:end, 0], values[:, 0], atol=1e-5)
        mass = (logits / 2).softmax(dim=1).scatter(1, places, 0.0).sum(dim=1)
        np.testing.assert_allclose(found.rest[start:end, 1], mass.log(), atol=1e-5)
