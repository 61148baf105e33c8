"""Labels of documents and of words: rows, and what the model makes of them."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from pretrain.config.model import ModelConfig
from pretrain.config.objective import ObjectiveConfig
from pretrain.config.presets import expand_preset
from pretrain.data.loader import build_batch
from pretrain.objective import build_loss, build_rows
from pretrain.objective.masked import label_rows
from pretrain.rows import IGNORE_INDEX, TokenRows
from pretrain.types import Batch
from tests.unit.model.tiny import build
from tests.unit.objective.texts import context_of

NAMES = ["a", "b", "c"]
HEADS = {
    "bert": ("bert-tiny", {"head": {"kind": "labels", "transform": False, "labels": NAMES}, "pooler": True}),
    "modernbert": ("modernbert-tiny", {"head": {"kind": "labels", "labels": NAMES, "mean": True}}),
    "first": ("modernbert-tiny", {"head": {"kind": "labels", "labels": NAMES}}),
    "both": ("bert-tiny", {"head": {"kind": "labels", "labels": NAMES, "mean": True}, "pooler": True}),
}


def labelled_rows(seed: int, seq_len: int = 24, num_rows: int = 6, *, tagged: bool = False) -> TokenRows:
    """Rows of whole documents with a document of padding behind them, as `BinStream` makes them; one row is full."""
    rng = np.random.default_rng(seed)
    tokens = np.full((num_rows, seq_len + 1), 1, np.uint16)
    labels = np.full(tokens.shape, IGNORE_INDEX, np.int16)
    starts, sizes = [], []
    for row in range(num_rows):
        at = 0
        while at < seq_len - 9:
            size = int(rng.integers(1, 10)) if row else seq_len
            tokens[row, at : at + size] = rng.integers(10, 60, size)
            labels[row, at] = rng.integers(3)
            if tagged:
                found = rng.integers(3, size=size)
                labels[row, at : at + size] = np.where(rng.random(size) < 0.6, found, IGNORE_INDEX)
            starts.append(row * (seq_len + 1) + at)
            at += size
        sizes.append(at)
        if at < seq_len:
            starts.append(row * (seq_len + 1) + at)
    return TokenRows(tokens, np.arange(num_rows), np.array(starts), np.array(sizes), labels_BT=labels)


def documents_of(rows: TokenRows) -> list[tuple[np.ndarray, np.ndarray, int, int]]:
    """Tokens, labels, row and column of each document, one by one."""
    width, found = rows.tokens_BT.shape[1], []
    for row in range(len(rows.tokens_BT)):
        size = int(rows.num_tokens_B[row])
        starts = [start - row * width for start in rows.starts.tolist() if start // width == row]
        edges = [start for start in starts if start < size] + [size]
        for a, b in pairwise(edges):
            found.append((rows.tokens_BT[row, a:b].astype(np.int64), rows.labels_BT[row, a:b].astype(np.int64), row, a))
    return found


def model_of(name: str):
    preset, keys = HEADS[name]
    values = {"preset": preset, "vocab_size": 61, "tied_embeddings": False, "encoder": {"dropout": 0.0}, **keys}
    config = ModelConfig.model_validate(expand_preset(values))
    return build(config, attention="eager").double()


@pytest.mark.parametrize("tagged", [False, True])
def test_rows_are_what_going_through_their_documents_one_by_one_gives(tagged):
    for seed in range(20):
        rows = labelled_rows(seed, tagged=tagged)
        made = label_rows(rows, document_mask=True)
        inputs = np.full(made.tokens_BT.shape, 1)
        targets = np.full(made.tokens_BT.shape, IGNORE_INDEX)
        positions, documents = np.zeros_like(inputs), np.full(inputs.shape, -1)
        numbers = dict.fromkeys(range(len(inputs)), 0)
        for tokens, labels, row, first in documents_of(rows):
            for offset, (token, label) in enumerate(zip(tokens, labels, strict=True)):
                inputs[row, first + offset], targets[row, first + offset] = token, label
                positions[row, first + offset], documents[row, first + offset] = offset, numbers[row]
            numbers[row] += 1
        real = documents >= 0
        assert (made.tokens_BT == inputs).all() and (made.targets_BT == targets).all()
        assert (made.documents_BT == documents).all() and (made.positions_BT[real] == positions[real]).all()
        assert made.target_positions_P.tolist() == np.flatnonzero(targets != IGNORE_INDEX).tolist()
        assert (made.num_targets(), made.num_padding) == (len(made.target_positions_P), int((~real).sum()))
        assert made.tokens_BT.dtype == made.targets_BT.dtype == np.int64


def test_rows_that_are_one_document_each_take_the_dense_path():
    rows = labelled_rows(0, num_rows=1)
    made = label_rows(rows, document_mask=True)
    assert made.positions_BT is None and made.documents_BT is None and made.num_padding == 0


@pytest.mark.parametrize("name", sorted(HEADS))
def test_a_packed_document_has_the_scores_that_it_has_alone(name):
    model, rows = model_of(name), labelled_rows(3)
    model.eval()
    made = label_rows(rows, document_mask=True)
    with torch.no_grad():
        packed_BTV = model(build_batch(made)).logits_BTV
        for tokens, _, row, first in documents_of(rows):
            alone_BT = torch.from_numpy(tokens)[None]
            scores_V = model(Batch(alone_BT, alone_BT)).logits_BTV[0, 0]
            torch.testing.assert_close(packed_BTV[row, first], scores_V, atol=1e-12, rtol=1e-12)
            padded_BT = torch.nn.functional.pad(alone_BT, (0, 3))
            lengths_B = torch.tensor([len(tokens)], dtype=torch.int32)
            scores_V = model(Batch(padded_BT, padded_BT, lengths_B=lengths_B)).logits_BTV[0, 0]
            torch.testing.assert_close(packed_BTV[row, first], scores_V, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", sorted(HEADS))
def test_the_loss_is_the_cross_entropy_of_the_labels_and_knows_how_many_are_right(name):
    model, rows = model_of(name), labelled_rows(5)
    batch = build_batch(label_rows(rows, document_mask=True))
    smoothing = 0.1 if name == "bert" else 0.0
    found = build_loss(ObjectiveConfig(kind="classify", label_smoothing=smoothing))(model, batch)
    logits, targets = model(batch).logits_BTV.flatten(0, 1), batch.targets_BT.flatten()
    assert logits.shape[1] == len(NAMES)
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(found.loss_sum, expected, atol=1e-9, rtol=1e-9)
    assert found.num_correct == (logits.argmax(1) == targets).sum()
    parameters = dict(model.named_parameters())
    ours = torch.autograd.grad(found.loss_sum, list(parameters.values()), allow_unused=True)
    theirs = torch.autograd.grad(expected, list(parameters.values()), allow_unused=True)
    for parameter, one, other in zip(parameters, ours, theirs, strict=True):
        assert (one is None) == (other is None), parameter
        if one is not None:
            torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-8, msg=parameter)
    assert {name for name, grad in zip(parameters, ours, strict=True) if grad is None} <= {"encoder.token_type.weight"}


@pytest.mark.parametrize("kind", ["classify", "tag"])
def test_a_batch_without_a_label_has_a_loss_of_zero_and_gradients_of_zero(kind):
    rows = labelled_rows(1)
    blank = TokenRows(
        rows.tokens_BT, rows.sample_ids_B, rows.starts, rows.num_tokens_B, labels_BT=np.full_like(rows.labels_BT, -100)
    )
    config, context = context_of(24, num_stacks=1, document_mask=True, kind=kind)
    made = build_rows(config, context)(blank)
    model = model_of("first")
    found = build_loss(config)(model, build_batch(made))
    found.loss_sum.backward()
    assert found.loss_sum == 0 and made.num_targets() == 0
    assert all(p.grad is not None and not p.grad.any() for p in (model.head.weight, model.head.transform.weight))


def test_dropout_of_the_head_is_drawn_in_training_only():
    preset, keys = HEADS["first"]
    head = keys["head"] | {"dropout": 0.5}
    values = {"preset": preset, "vocab_size": 61, "tied_embeddings": False, "head": head}
    model = build(ModelConfig.model_validate(expand_preset(values)), attention="eager")
    batch = build_batch(label_rows(labelled_rows(2), document_mask=True))
    first, second = model.train()(batch).logits_BTV, model(batch).logits_BTV
    assert not torch.equal(first, second)
    assert torch.equal(model.eval()(batch).logits_BTV, model(batch).logits_BTV)
