"""Replaced-token detection against its definition: rows, samples of the generator, loss and gradients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, linear

from pretrain.config.lengths import RowLengths
from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.config.objective import ObjectiveConfig
from pretrain.data.loader import build_batch
from pretrain.errors import ConfigError
from pretrain.evaluation.row_loss import ModelLoss
from pretrain.kinds.objectives.replaced import ReplacedConfig
from pretrain.objective import RowContext, build_loss, build_rows
from pretrain.objective.masked import masked_rows
from pretrain.objective.replaced import replaced_rows, sample_tokens
from pretrain.rows import IGNORE_INDEX, select_rows
from pretrain.types import Batch
from tests.unit.model.tiny import build, encoder_config
from tests.unit.objective.test_masked import SIZE, VOCABULARY, random_rows

SEED, SEQ_LEN = 3, 24
CONTEXT = RowContext(SEED, VOCABULARY, RowLengths(SEQ_LEN, SEQ_LEN))
OBJECTIVE = ObjectiveConfig(kind="replaced", replaced=ReplacedConfig(rate=0.4))
HEAD = HeadConfig(kind="replaced", transform=True, bias=True)


def pair_config(generator_heads: int = 2, **stack: object) -> ModelConfig:
    """An encoder with a generator, and tables of another width than both."""
    sizes = {"width": 48, "heads": 4, "kv_heads": 2, "ff_width": 64, "embedding_width": 20, "input_norm": True}
    encoder = encoder_config(position="learned", token_types=2, **sizes | stack).encoder
    update = {"encoder": encoder, "vocab_size": SIZE, "head": HEAD, "generator_heads": generator_heads}
    return ModelConfig.model_validate(encoder_config().model_dump() | update)


def batch_of(padded: bool = True, packed: bool = True) -> Batch:
    rows = random_rows(6, SEQ_LEN, padded=padded)
    rows = rows if packed else replace(rows, starts=rows.starts[:0])
    return build_batch(replaced_rows(rows, OBJECTIVE.replaced, CONTEXT))


@pytest.mark.parametrize("padded", [False, True])
def test_every_token_is_a_target_and_each_masked_one_has_a_number(padded):
    rows = random_rows(9, SEQ_LEN, padded=padded)
    found = replaced_rows(rows, OBJECTIVE.replaced, CONTEXT)
    masked = masked_rows(rows, OBJECTIVE.replaced, VOCABULARY, SEED, document_mask=True)
    assert np.array_equal(found.tokens_BT, masked.tokens_BT)
    assert np.array_equal(found.target_positions_P, masked.target_positions_P)
    lengths = np.full(9, SEQ_LEN) if rows.num_tokens_B is None else rows.num_tokens_B
    real = np.arange(SEQ_LEN) < lengths[:, None]
    assert np.array_equal(found.targets_BT, np.where(real, rows.tokens_BT[:, :-1].astype(int), IGNORE_INDEX))
    assert found.num_targets() == found.num_tokens() == real.sum()
    assert found.draws_P.dtype == np.float64 and len(found.draws_P) == len(found.target_positions_P) > 20
    assert (found.draws_P >= 0).all() and (found.draws_P < 1).all()
    chosen = np.arange(9) % 2 == 0
    alone = replaced_rows(select_rows(rows, chosen), OBJECTIVE.replaced, CONTEXT)
    of_chosen = chosen[found.target_positions_P // SEQ_LEN]
    assert np.array_equal(alone.draws_P, found.draws_P[of_chosen])
    other = replaced_rows(rows, OBJECTIVE.replaced, replace(CONTEXT, seed=4))
    assert not np.array_equal(other.draws_P[:10], found.draws_P[:10])


def test_a_tokenizer_without_a_mask_token_is_refused():
    context = replace(CONTEXT, vocabulary=replace(VOCABULARY, mask=None))
    with pytest.raises(ConfigError, match="replaced needs a mask token"):
        build_rows(OBJECTIVE, context)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_have_the_probabilities_of_the_scores(dtype):
    generator = torch.Generator().manual_seed(0)
    scores_V = torch.randn(50, generator=generator) * 2
    scores_V[7] = scores_V[0] = -torch.inf
    count = 100_000
    draws_P = torch.arange(count, dtype=torch.float64) / count  # 0 is among them
    hidden_P1 = torch.ones(count, 1, dtype=dtype)
    weight_V1 = scores_V[:, None].to(dtype)
    found = sample_tokens(hidden_P1, lambda hidden: weight_V1.T.expand(len(hidden), -1), draws_P, 4096)
    shares_V = torch.bincount(found, minlength=50).double() / count
    assert shares_V[[0, 7]].sum() == 0
    torch.testing.assert_close(shares_V, weight_V1[:, 0].double().softmax(0), rtol=0, atol=3e-5)
    largest = torch.full((3,), 1 - 2**-53, dtype=torch.float64)
    ends = sample_tokens(hidden_P1[:3], lambda hidden: weight_V1.T.expand(len(hidden), -1), largest, 4096)
    assert ends.tolist() == [49] * 3


def test_samples_do_not_depend_on_the_chunks():
    generator = torch.Generator().manual_seed(0)
    hidden_PD, weight_VD = torch.randn(30, 8, generator=generator), torch.randn(50, 8, generator=generator)
    draws_P = torch.rand(30, generator=generator, dtype=torch.float64)
    whole, cut = (sample_tokens(hidden_PD, lambda h: linear(h, weight_VD), draws_P, size) for size in (64, 7))
    assert torch.equal(whole, cut) and len(whole.unique()) > 10


def reference(model, batch: Batch, weight: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Minimised sum, loss of the model, and replaced tokens, with logits of all positions."""
    logits = model.generator(batch).logits_BTV[..., :SIZE].flatten(0, 1)[batch.target_positions_P]
    originals = batch.targets_BT.flatten()[batch.target_positions_P]
    of_generator = cross_entropy(logits, originals, reduction="sum")
    tokens = batch.tokens_BT.clone()
    for place, row, draw in zip(batch.target_positions_P.tolist(), logits.detach(), batch.draws_P, strict=True):
        passed = row.softmax(-1).cumsum(-1) > draw
        tokens.view(-1)[place] = int(passed.int().argmax())
    real = batch.targets_BT != IGNORE_INDEX
    scores = model(replace(batch, tokens_BT=tokens)).logits_BTV[..., 0][real]
    replaced = (tokens != batch.targets_BT)[real]
    of_model = binary_cross_entropy_with_logits(scores, replaced.to(scores.dtype), reduction="sum")
    return weight * of_model + of_generator / OBJECTIVE.replaced.rate, of_model, replaced


@pytest.mark.parametrize("padded", [False, True])
def test_loss_and_gradients_are_those_of_the_definition(padded):
    model = build(pair_config(), dtype=torch.float64, scale=2.0)
    batch = batch_of(padded=padded)
    found = build_loss(OBJECTIVE)(model, batch)
    found.loss_sum.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    minimised, of_model, replaced = reference(model, batch, 50.0)
    minimised.backward()
    torch.testing.assert_close(found.loss_sum, minimised.detach(), rtol=1e-12, atol=0, check_dtype=False)
    torch.testing.assert_close(found.nll_sum, of_model.detach(), rtol=1e-12, atol=0, check_dtype=False)
    assert found.shown_M[1] == replaced.sum() > 0
    assert gradients.keys() == {name for name, _ in model.named_parameters()}
    for name, weight in model.named_parameters():
        torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-9, atol=1e-9, msg=name)


def test_what_is_shown_counts_tokens_that_were_found():
    model = build(pair_config(), scale=2.0)
    batch = batch_of()
    for bias, found_share in ((1e4, 1.0), (-1e4, 0.0)):
        with torch.no_grad():
            model.head.bias.fill_(bias)
        found = build_loss(OBJECTIVE)(model, batch)
        _, replaced, hits = found.shown_M.tolist()
        assert hits == found_share * replaced
        assert found.num_correct == (replaced if bias > 0 else batch.num_targets() - replaced)


def test_rows_by_themselves_have_the_sums_of_the_batch():
    model = build(pair_config(), dtype=torch.float64).eval()
    batch = batch_of()
    measured = ModelLoss(model, build_loss(OBJECTIVE))
    torch.testing.assert_close(measured.evaluate_rows(batch).sum(0), measured.evaluate(batch)[:2])


def test_a_batch_without_a_masked_token_trains_the_model_alone():
    model = build(pair_config())
    batch = batch_of()
    none = torch.zeros(0, dtype=torch.int64)
    empty = replace(batch, tokens_BT=batch.targets_BT.clamp(min=0), target_positions_P=none, draws_P=none.double())
    found = build_loss(OBJECTIVE)(model, empty)
    found.loss_sum.backward()
    assert found.shown_M[:2].tolist() == [0, 0] and found.nll_sum > 0
    assert all(weight.grad is not None for weight in model.parameters())


def test_a_generator_has_the_tables_of_its_model_and_is_as_much_narrower_as_it_has_fewer_heads():
    config = pair_config(2)
    model = build(config)
    assert model.generator is not None and model.generator.encoder is not None and model.encoder is not None
    assert model.generator.embedding.weight is model.generator.head.weight is model.embedding.weight
    for name in ("position.weight", "token_type.weight", "input_norm.weight"):
        assert model.generator.encoder.get_parameter(name) is model.encoder.get_parameter(name)
    stack = config.generator.last_stack
    assert (stack.layers, stack.heads, stack.kv_heads, stack.width) == (config.last_stack.layers, 2, 1, 24)
    assert (stack.ff_width, stack.table_width, stack.per_head_width) == (32, 20, 12)
    drawn = dict(model.named_parameters())
    ours, theirs = (drawn[f"{name}encoder.blocks.0.attention.qkv.weight"].flatten() for name in ("", "generator."))
    assert not torch.equal(ours[:50], theirs[:50])


@pytest.mark.parametrize(
    ("update", "words"),
    [
        ({"generator_heads": 3}, "must leave whole sizes"),
        ({"generator_heads": 8}, "must leave whole sizes"),
        ({"generator_heads": 2, "head": {"kind": "lm"}}, "needs an encoder without experts and head.kind=replaced"),
    ],
)
def test_sizes_that_do_not_divide_and_other_heads_are_refused(update, words):
    with pytest.raises(ValueError, match=words):
        ModelConfig.model_validate(pair_config().model_dump() | update)


def test_settings_of_predicted_tokens_are_refused():
    for name in ("label_smoothing", "z_loss"):
        with pytest.raises(ValueError, match=f"{name} is of predicted tokens, and kind=replaced finds"):
            ObjectiveConfig.model_validate({"kind": "replaced", name: 0.1})
    with pytest.raises(ValueError, match="replaced does not go with kind=masked"):
        ObjectiveConfig.model_validate({"kind": "masked", "replaced": {"weight": 2}})
