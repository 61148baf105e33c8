"""Transfer against the papers' own form: a model with multipliers, and their table of rates, in float64."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from pretrain.config.load import load_config
from pretrain.config.model import ModelConfig
from pretrain.config.optim import OptimConfig
from pretrain.errors import ConfigError
from pretrain.kinds.optimizers import MuonConfig, TransferConfig
from pretrain.model import Transformer
from pretrain.model.build import initial_weight
from pretrain.optim.build import build_optimizer
from pretrain.optim.groups import Scale, group_parameters
from pretrain.optim.parametrization import scale_of
from pretrain.types import Batch
from tests.unit.model.tiny import build, encoder_config, random_batch, tiny_config

CPU = torch.device("cpu")
LR = 2e-3
# Epsilon as large as the gradients, so that its rule shows.
OPTIM = {"lr": LR, "weight_decay": 0.3, "eps": 1e-4, "grad_clip": 0.0}
COMPLETEP = TransferConfig(kind="completep", base_width=16, base_layers=2, base_head_width=8)
MUP = TransferConfig(kind="mup", base_width=32)


def fill(model: Transformer, config: ModelConfig, factor_of) -> Transformer:
    """Draws the weights as a run does, each times a factor of its name; biases are drawn too, to be seen."""
    model.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = initial_weight(name, parameter.shape, config, 3)
            if name.endswith("bias"):
                value = torch.linspace(-0.1, 0.1, len(value))
            parameter.copy_(value.double() * factor_of(name))
    return model


def losses(model: Transformer, optimizer: torch.optim.Optimizer, batches: list[Batch]) -> list[float]:
    found = []
    for batch in batches:
        logits = model(batch).logits_BTV[..., :61].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch.targets_BT.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def papers(config: ModelConfig, transfer: TransferConfig) -> tuple[Transformer, torch.optim.Optimizer]:
    """The form of CompleteP's Table 1 (alpha = 1) and of muP's Table 8: multipliers in the forward pass."""
    stack = config.last_stack
    width = stack.width / transfer.base_width
    depth = stack.layers / (transfer.base_layers or stack.layers)

    def factor_of(name: str) -> float:
        if not is_hidden(name):
            return 1.0
        # The deviation of residual outputs is that of the base, 1 / sqrt(2 base_layers).
        is_end = name.endswith(("attention.output.weight", "feedforward.down.weight"))
        return width**-0.5 * (math.sqrt(depth) if is_end and config.init_scaled else 1.0)

    model = fill(build(config), config, factor_of)
    model.head.register_forward_pre_hook(lambda module, args: (args[0] / width, *args[1:]))
    head_width = stack.per_head_width
    for block in model.stacks[0].blocks:
        block.attention.scale = math.sqrt(transfer.base_head_width or head_width) / head_width
        for end in (block.attention.output, block.feedforward.down):
            end.register_forward_hook(lambda module, args, out: out / depth)
    groups = []
    for name, parameter in model.named_parameters():
        in_block = ".blocks." in name
        group = {"params": [parameter], "lr": LR, "weight_decay": 0.0, "eps": OPTIM["eps"] / width}
        group["eps"] /= depth if in_block else 1.0
        if is_hidden(name):
            group |= {"lr": LR / width, "weight_decay": OPTIM["weight_decay"] * width}
        elif name == "head.weight":
            group["weight_decay"] = OPTIM["weight_decay"]
        groups.append(group)
    return model, torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=False)


def is_hidden(name: str) -> bool:
    return ".blocks." in name and name.endswith(("qkv.weight", "output.weight", "up.weight", "down.weight"))


def folded(config: ModelConfig, optim: OptimConfig) -> tuple[Transformer, torch.optim.Optimizer]:
    """What a run trains."""
    scale = partial(scale_of, config=optim, model=config)
    model = fill(build(config), config, lambda name: scale(name).init)
    groups = group_parameters(model, scale_of=scale)
    optimizer = build_optimizer(groups, optim, CPU)
    for group in optimizer.param_groups:
        group["lr"] = LR * group["lr_ratio"]
    return model, optimizer


@pytest.mark.parametrize("transfer", [COMPLETEP, MUP], ids=["completep", "mup"])
@pytest.mark.parametrize(
    ("values", "stack"),
    [
        ({}, {"layers": 5}),
        (
            {},
            {"layers": 3, "value_residual": True, "value_embeddings": 1, "residual_scalars": True, "layer_scale": 0.5},
        ),
        ({"tied_embeddings": True, "ngram_embeddings": 2}, {"bias": True, "norm": "layer"}),
        ({"init_scaled": False, "head": {"bias": True}}, {"qk_norm": True, "gated": False, "position": "learned"}),
    ],
)
def test_it_trains_as_the_papers_multipliers_do(transfer, values, stack):
    config = tiny_config(model=values, **stack)
    optim = OptimConfig(**OPTIM, transfer=transfer)
    batches = [random_batch(3, 12, seed=seed) for seed in range(6)]
    wanted = losses(*papers(config, transfer), batches)
    found = losses(*folded(config, optim), batches)
    # float64, rounded in another order; the fused kernel sums the decay in another.
    assert found == pytest.approx(wanted, rel=1e-10)
    assert found[-1] != pytest.approx(losses(*folded(config, OptimConfig(**OPTIM)), batches)[-1], rel=1e-4)


def test_at_the_size_of_the_base_nothing_changes():
    config = tiny_config(layers=2)
    for transfer in (
        TransferConfig(kind="mup", base_width=64),
        TransferConfig(kind="completep", base_width=64, base_layers=2, base_head_width=16),
    ):
        optim = OptimConfig(lr=LR, transfer=transfer)
        scale = partial(scale_of, config=optim, model=config)
        groups = group_parameters(build(config), scale_of=scale)
        assert [(group.name, group.scale, group.lr_ratio) for group in groups] == [
            ("decay", Scale(), 1.0),
            ("no_decay", Scale(), 1.0),
        ]


def test_an_encoder_with_layers_before_its_head_has_rules_for_each():
    config = encoder_config().model_copy(update={"pooler": True})
    config = config.model_copy(update={"head": config.head.model_copy(update={"transform": True})})
    rules = {name: scale_of(name, OptimConfig(lr=LR, transfer=MUP), config) for name, _ in named(config)}
    assert rules["head.transform.weight"] == rules["pooler.weight"] == Scale(2**-0.5, 0.5, 0.5)
    assert rules["head.weight"] == Scale(0.5, 0.5, 1.0)
    tied = config.model_copy(update={"tied_embeddings": True})
    rules = {name: scale_of(name, OptimConfig(lr=LR, transfer=MUP), tied) for name, _ in named(tied)}
    assert rules["head.norm.weight"] == Scale(0.5, 0.5, 1.0)
    assert rules["encoder.norm.weight"] == rules["embedding.weight"] == Scale(1.0, 1.0, 0.5)
    post = encoder_config(norm_placement="post").model_copy(update={"tied_embeddings": True})
    rules = {name: scale_of(name, OptimConfig(lr=LR, transfer=MUP), post) for name, _ in named(post)}
    assert rules["encoder.blocks.1.feedforward_norm.weight"] == Scale(0.5, 0.5, 1.0)
    assert rules["encoder.blocks.0.feedforward_norm.weight"] == Scale(1.0, 1.0, 0.5)


def named(config: ModelConfig) -> list[tuple[str, Tensor]]:
    return list(build(config).named_parameters())


def test_muon_keeps_the_rate_of_a_matrix_or_scales_it_by_the_root_of_the_width():
    config = tiny_config(layers=6)
    completep = TransferConfig(kind="completep", base_width=16, base_layers=2)
    rates = {}
    for adjust in ("original", "match_rms_adamw"):
        optim = OptimConfig(kind="muon", lr=LR, muon=MuonConfig(adjust_lr_fn=adjust), transfer=completep)
        groups = group_parameters(build(config), scale_of=partial(scale_of, config=optim, model=config))
        optimizer = build_optimizer(groups, optim, CPU)
        assert len(optimizer.param_groups) == len({group["name"] for group in optimizer.param_groups})
        of_name = {name: group.lr_ratio for group in groups for name in group.names}
        block = "decoder.blocks.1."
        names = [f"{block}attention.qkv.weight", f"{block}feedforward.down.weight", "head.weight", "embedding.weight"]
        rates[adjust] = [of_name[name] for name in names]
    assert rates["original"] == pytest.approx([1.0, 1 / 3, 1 / 4, 1.0])
    assert rates["match_rms_adamw"] == pytest.approx([1 / 2, 1 / 6, 1 / 4, 1.0])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.transfer={kind: completep, base_width: 64}"], "kind=completep needs base_layers"),
        (["optim.transfer={kind: mup, base_width: 64, base_layers: 2}"], "base_layers is for kind=completep"),
        (["optim.kind=adafactor"], "has no rule for optim.kind=adafactor; use adamw or lion or muon"),
        (["model={kind: recurrent, preset: null, decoder: {layers: 1, width: 8}}"], "no rule for recurrent models"),
        (["model.preset=t5-tiny", "objective.kind=span"], "no rule for models of two stacks"),
        (["model.init=xavier"], "optim.transfer.kind=mup has no rule for model.init=xavier; change that, or"),
        (["model.decoder.position=relative"], "no rule for position=relative"),
        (["model.decoder.norm=unweighted", "model.tied_embeddings=true"], "no rule for norm=unweighted with tied_emb"),
        (
            ["optim.transfer={kind: completep, base_layers: 2}", "model.decoder.norm_placement=sandwich"],
            "optim.transfer.kind=completep has no rule for norm_placement=sandwich",
        ),
        (["model.head.scaled=true"], "no rule for model.head.scaled=true"),
        (["finetune.kind=lora", "init.from=x"], "no rule for the adapters of finetune.kind=lora"),
    ],
)
def test_what_has_no_rule_is_refused(overrides, message):
    mup = "optim.transfer={kind: mup, base_width: 64}"
    with pytest.raises(ConfigError, match=message):
        load_config("configs/run/llama_1b.yaml", [mup, *overrides])


def test_a_parameter_without_a_rule_is_named():
    with pytest.raises(ConfigError, match=r"optim.transfer has no rule for decoder.blocks.0.router.weight; leave"):
        scale_of("decoder.blocks.0.router.weight", OptimConfig(lr=LR, transfer=MUP), tiny_config())
