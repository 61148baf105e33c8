"""DeepSeek-V3's modules that predict further tokens, against a reference over layers of transformers (eager)."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

from pretrain.errors import CheckpointError
from pretrain.interop.release import open_release
from pretrain.interop.write import write_release
from pretrain.model.build import named_weights
from pretrain.objective.loss import sum_token_loss
from pretrain.types import IGNORE_INDEX
from tests.helpers.lent import build_imported, check_gradients, lend
from tests.parity.test_decoders import LENGTH, VOCAB, deepseek_v3
from tests.unit.model.tiny import packed_batch, random_batch

LAYERS = 2
WEIGHT = 0.3


class SharedHead(nn.Module):
    """The norm before the head; the head itself is that of the model."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm


def lend_predictors(folder, depth, tied=False):
    """A model whose last layers predict further tokens, in a folder with the names of the release."""
    torch.manual_seed(0)
    theirs = deepseek_v3(num_hidden_layers=LAYERS + depth, tie_word_embeddings=tied)
    theirs.config.num_hidden_layers, theirs.config.num_nextn_predict_layers = LAYERS, depth
    for layer in theirs.model.layers[LAYERS:]:
        width = theirs.config.hidden_size
        layer.enorm, layer.hnorm, last = (DeepseekV3RMSNorm(width) for _ in range(3))
        layer.eh_proj = nn.Linear(2 * width, width, bias=False)
        layer.shared_head = SharedHead(last)
    lent = lend(theirs, folder)
    tensors = load_file(folder / "model.safetensors")
    words = tensors["model.embed_tokens.weight"]
    for number in range(LAYERS, LAYERS + depth):
        tensors[f"model.layers.{number}.embed_tokens.weight"] = words.clone()
        tensors[f"model.layers.{number}.shared_head.head.weight"] = tensors.get("lm_head.weight", words).clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    release = open_release(folder)
    return lent._replace(release=release, ours=build_imported(release)), tensors


def reference(theirs, tokens, targets, depth):
    """Sums of the cross-entropy of one document: of the next token, and of each further one."""
    model = theirs.model
    embedded, positions = model.embed_tokens(tokens), torch.arange(tokens.shape[1])[None]
    rotation = model.rotary_emb(embedded, positions)
    length = tokens.shape[1]
    mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
    state = model(input_ids=tokens).last_hidden_state
    losses = [cross_entropy(theirs.lm_head(state)[0], targets[0], reduction="sum")]
    for number, layer in enumerate(model.layers[LAYERS : LAYERS + depth], start=1):
        # Positions whose further token is within the document; later ones change none before them.
        following = torch.cat((embedded[:, number:], torch.zeros_like(embedded[:, :number])), dim=1)
        state = layer.eh_proj(torch.cat((layer.enorm(following), layer.hnorm(state)), dim=-1))
        state = layer(state, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
        scores = theirs.lm_head(layer.shared_head.norm(state))
        losses.append(cross_entropy(scores[0, : length - number], targets[0, number:], reduction="sum"))
    return losses


@pytest.mark.parametrize(("depth", "tied"), [(1, False), (2, True)])
def test_losses_and_gradients_agree_on_packed_documents(tmp_path, depth, tied):
    lent, _ = lend_predictors(tmp_path / "theirs", depth, tied)
    assert lent.release.config.multi_token == depth
    lengths = [9, 1, 2, 18, 10]
    batch = packed_batch([lengths], vocab_size=VOCAB)
    # The last token of a document has no next one.
    ends = torch.tensor([lengths]).cumsum(1) - 1
    batch = replace(batch, targets_BT=batch.targets_BT.scatter(1, ends, IGNORE_INDEX))
    parts = zip(batch.tokens_BT[0].split(lengths), batch.targets_BT[0].split(lengths), strict=True)
    sums = [reference(lent.theirs, tokens[None], targets[None], depth) for tokens, targets in parts]
    first, *further = (sum(losses) for losses in zip(*sums, strict=True))
    total = first + WEIGHT / depth * sum(further)
    total.backward()
    found = sum_token_loss(lent.ours.train(), batch, multi_token_weight=WEIGHT)
    torch.testing.assert_close(found.loss_sum, total, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.nll_sum, first.detach(), rtol=1e-5, atol=0)
    nll, _, counts = found.ahead.T
    torch.testing.assert_close(nll, torch.stack(further).detach().double(), rtol=1e-5, atol=0)
    assert counts.tolist() == [sum(max(0, length - 1 - number) for length in lengths) for number in range(1, depth + 1)]
    found.loss_sum.backward()
    check_gradients(lent)


def test_evaluation_and_scores_leave_the_modules_out(tmp_path):
    lent, _ = lend_predictors(tmp_path / "theirs", 1)
    batch = random_batch(2, LENGTH, vocab_size=VOCAB)
    found = lent.ours(batch)
    torch.testing.assert_close(found.logits_BTV[..., :VOCAB], lent.theirs(batch.tokens_BT).logits, rtol=1e-5, atol=1e-5)
    assert found.ahead == () and sum_token_loss(lent.ours, batch).ahead is None


@pytest.mark.parametrize("tied", [False, True])
def test_an_export_has_every_tensor_of_the_release_bit_for_bit(tmp_path, tied):
    lent, tensors = lend_predictors(tmp_path / "theirs", 2, tied)
    weights = {name: weight.detach() for name, weight in named_weights(lent.ours)}
    write_release(lent.release.config, weights.__getitem__, tmp_path / "ours")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert [name for name, tensor in tensors.items() if not torch.equal(written[name], tensor)] == []
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["num_nextn_predict_layers"] == 2
    assert open_release(tmp_path / "ours").config == lent.release.config


def test_a_release_without_the_modules_has_none_and_copies_must_be_equal(tmp_path):
    _, tensors = lend_predictors(tmp_path / "theirs", 1)
    path = tmp_path / "theirs" / "model.safetensors"
    name = f"model.layers.{LAYERS}.shared_head.head.weight"
    save_file(tensors | {name: tensors[name] + 1}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"lm_head.weight and {name} differ, and are one in models of deepseek"):
        open_release(tmp_path / "theirs").read("head.weight")
    bare = {name: tensor for name, tensor in tensors.items() if f"layers.{LAYERS}." not in name}
    save_file(bare, path, {"format": "pt"})
    release = open_release(tmp_path / "theirs")
    assert release.config.multi_token == 0 and release.ignored == []
