"""A model of replaced tokens and its generator, exported: the losses of both are those of transformers' ELECTRA."""

import pytest
import torch
import transformers

from pretrain.artifact.source import ModelSource, take_apart
from pretrain.errors import ConfigError
from pretrain.interop.write import write_release
from pretrain.model.build import named_weights
from pretrain.objective import build_loss
from pretrain.rows import IGNORE_INDEX
from pretrain.types import GenerationDefaults
from tests.helpers.lent import quiet_transformers
from tests.unit.model.tiny import build
from tests.unit.objective.test_masked import SIZE
from tests.unit.objective.test_replaced import OBJECTIVE, batch_of, pair_config


@pytest.fixture(scope="module", params=[20, None], ids=["narrow tables", "wide tables"])
def pair(request, tmp_path_factory):
    """Our model with its generator, and both as transformers loads them."""
    stack = {"kv_heads": 4, "gated": False, "activation": "gelu", "norm": "layer", "bias": True}
    stack |= {"norm_placement": "post", "norm_eps": 1e-12, "embedding_width": request.param}
    config = pair_config(**stack)
    ours = build(config, scale=2.0).eval()
    weights = {name: weight.detach() for name, weight in named_weights(ours)}
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    folder = tmp_path_factory.mktemp("electra")
    source = ModelSource(folder, config, weights.__getitem__, shapes, lambda: None, list, GenerationDefaults())
    theirs = []
    for generator, name in ((False, "ElectraForPreTraining"), (True, "ElectraForMaskedLM")):
        part = take_apart(source, generator=generator)
        out = folder / name
        assert write_release(part.config, part.read, out, family="electra").architecture == name
        with quiet_transformers():
            loaded = getattr(transformers, name).from_pretrained(out, attn_implementation="eager")
        theirs.append(loaded.eval())
    return ours, *theirs


def test_both_losses_are_those_of_transformers(pair):
    ours, discriminator, generator = pair
    batch = batch_of(padded=False, packed=False)
    labels = torch.full_like(batch.tokens_BT, IGNORE_INDEX)
    labels.view(-1)[batch.target_positions_P] = batch.targets_BT.flatten()[batch.target_positions_P]
    with torch.no_grad():
        found = build_loss(OBJECTIVE)(ours, batch)
        of_generator = generator(batch.tokens_BT, labels=labels)
        scores = of_generator.logits.flatten(0, 1)[batch.target_positions_P]
        passed = scores.softmax(-1).cumsum(-1) > batch.draws_P[:, None]
        tokens = batch.tokens_BT.clone()
        tokens.view(-1)[batch.target_positions_P] = passed.int().argmax(-1)
        replaced = (tokens != batch.targets_BT).long()
        of_model = discriminator(tokens, labels=replaced)
    num_masked, num_tokens = len(batch.target_positions_P), batch.num_targets()
    assert found.shown_M[1] == replaced.sum() > 0
    mean = (found.loss_sum - 50 * found.nll_sum) * OBJECTIVE.replaced.rate / num_masked
    torch.testing.assert_close(found.nll_sum / num_tokens, of_model.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mean, of_generator.loss, rtol=1e-3, atol=1e-4)  # a difference of large numbers
    torch.testing.assert_close(ours.generator(batch).logits_BTV[..., :SIZE], of_generator.logits, rtol=1e-5, atol=1e-5)


def test_a_model_without_a_generator_has_none_to_export(tmp_path):
    config = pair_config().generator
    source = ModelSource(tmp_path, config, lambda name: None, {}, lambda: None, list, GenerationDefaults())
    with pytest.raises(ConfigError, match="has no generator of replaced tokens"):
        take_apart(source, generator=True)
    assert take_apart(source, generator=False) is source
