"""Keys of a stack that do not fit together are refused, with the reason and a way out."""

import re

import pytest
from pydantic import ValidationError

from pretrain.config.fields import walk_fields
from pretrain.config.model import MODEL_SECTIONS, ModelConfig, StackConfig

SIZES = {"layers": 4, "width": 32, "heads": 2, "ff_width": 8}
DELTA = ["delta", "attention"]
LATENT = {"kv_rank": 8, "rope_width": 6, "value_width": 8}
GROUPED = {"count": 8, "top_k": 2, "groups": 4, "top_groups": 2}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_fraction": 0.5, "position": "learned"}, "rope_fraction=0.5 needs position=rotary, not learned"),
        (
            {"rope_scaling": {"kind": "yarn", "factor": 4}, "position": "learned"},
            "rope_scaling needs position=rotary, not learned",
        ),
        ({"rope_scaling": {"kind": "yarn", "factor": 0.5}}, "greater than or equal to 1"),
        (
            {"rope_fraction": 0.33},
            "rope_fraction=0.33 rotates 5 of 16 dimensions of a head; choose one that gives an even number, 2 or more",
        ),
        ({"rope_fraction": 0.01}, "rope_fraction=0.01 rotates 0 of 16 dimensions"),
        ({"rope_fraction": 0.0}, "greater than 0"),
        ({"rope_fraction": 1.5}, "less than or equal to 1"),
        ({"layers": 1, "residual_scalars": True}, "residual_scalars=true needs 2 layers or more"),
        ({"layers": 1, "value_residual": True}, "value_residual=true needs 2 layers or more"),
        (
            {"layers": 5, "value_embeddings": 3},
            "value_embeddings=3 are for as many first and as many last layers: use 2 or fewer with layers=5",
        ),
        ({"head_width": 15}, "rotary positions need an even head width, not 15"),
        ({"global_layers": [1]}, "global_layers=.1. needs a window"),
        ({"window": 3, "global_every": 2, "global_layers": [1]}, "global_every and global_layers name the same layers"),
        ({"unrotated_layers": [1], "position": "none"}, "unrotated_layers=.1. needs position=rotary, not none"),
        ({"norm_offset": True, "norm": "layer"}, "norm_offset=true is for norm=rms, not layer"),
        ({"norm_bias": True}, "norm_bias=true is for norm=layer, not rms"),
        ({"score_factor": 0.1, "scaled_attention": False}, "score_factor and scaled_attention=false both scale scores"),
        ({"parallel": "one_norm", "norm_placement": "post"}, "parallel=one_norm needs norm_placement=pre, not post"),
        ({"score_cap": 0.0}, "greater than 0"),
        ({"norm_offset": True, "latent": LATENT}, "latent attention does not go with norm_offset=true"),
        (
            {"rope_scaling": {"kind": "longrope", "factor": 2.0}},
            "short_factors are positive numbers with kind=longrope",
        ),
        (
            {"rope_scaling": {"kind": "linear", "factor": 2.0, "long_factors": [1.0]}},
            "long_factors are positive numbers with kind=longrope, and left out with others",
        ),
        (
            {"rope_scaling": {"kind": "longrope", "factor": 2.0, "short_factors": [1.0], "long_factors": [2.0] * 8}},
            "rope_scaling.short_factors are 1 numbers, for 8 pairs of dimensions",
        ),
        (
            {"rope_scaling": {"kind": "dynamic", "factor": 2.0}, "head_width": 2},
            "rope_scaling.kind=dynamic needs 4 rotated dimensions, not 2",
        ),
    ],
)
def test_keys_that_do_not_fit_are_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        StackConfig(**SIZES | values)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ({"count": 4, "top_k": 5}, "top_k=5 exceeds count=4; use 4 or fewer"),
        ({"count": 1, "top_k": 1}, "greater than or equal to 2"),
        ({"count": 4, "top_k": 2, "balance": "bias", "balance_weight": 0.1}, "balance_weight=0.1 needs balance=loss"),
        ({"count": 4, "top_k": 2, "balance_rate": 0.1}, "balance_rate=0.1 needs balance=bias; leave it out"),
        ({"count": 4, "top_k": 2, "scores": "sigmoid", "z_loss": 0.1}, "z_loss=0.1 needs scores=softmax"),
        ({"top_k": 2}, "count"),
    ],
)
def test_experts_that_do_not_fit_are_refused(experts, message):
    with pytest.raises(ValidationError, match=message):
        StackConfig(**SIZES, experts=experts)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"window": 4, "global_every": 2, "global_first": 2}, "global_first=2 must be less than global_every=2"),
        ({"window": 4, "global_first": 1}, "global_first=1 must be less than global_every=None"),
        ({"latent": LATENT | {"rope_width": 7}}, "rope_width=7, an even number, and value_width=8 must be at most"),
        ({"latent": LATENT | {"value_width": 17}}, "value_width=17 must be at most head_width=16"),
        ({"latent": LATENT, "kv_heads": 1}, "latent attention does not go with kv_heads=1; leave one of them out"),
        ({"latent": LATENT, "attention_sinks": True}, "latent attention does not go with attention_sinks=true"),
        ({"latent": LATENT, "position": "learned"}, "latent attention does not go with position=learned"),
        ({"experts": GROUPED | {"groups": 3}}, "groups=3 must divide count=8 into groups of 2 or more"),
        ({"experts": GROUPED | {"top_k": 5}}, "top_groups=2 of groups=4 must be groups that have top_k=5 experts"),
        ({"experts": GROUPED | {"first": 4}}, "experts.first=4 leaves no layer of 4 with experts"),
        ({"gated": False, "gate_limit": 7.0}, "gate_limit and gate_shift are for gated=true; leave them out"),
        (
            {"mixers": ["delta", "delta", "attention"]},
            r"mixers=\[delta, delta, attention\] repeats every 3 layers, which does not divide layers=4; change either",
        ),
        ({"mixers": []}, "at least 1 item"),
        (
            {"mixers": ["delta", "mamba"]},
            "unknown name .mamba.; use attention or convolution or delta or mamba2, or add",
        ),
        ({"delta": {"kernel": 3}}, "delta has the sizes of mixers=delta, and no layer is one; set mixers, or leave"),
        ({"mixers": ["attention"], "delta": {"kernel": 3}}, "delta has the sizes of mixers=delta, and no layer is one"),
        ({"mixers": DELTA, "delta": {"kernel": 1}}, "greater than or equal to 2"),
        ({"mixers": DELTA, "delta": {"heads": 2, "value_heads": 3}}, "value_heads=3 must be a multiple of heads=2"),
        ({"mixers": DELTA, "delta": {"value_heads": 5}}, "delta.value_heads=5 must be a multiple of delta.heads=2"),
        ({"mixers": DELTA, "delta": {"heads": 60}}, "delta.key_width of width=32 and 60 heads is 0; set delta.key_wid"),
        ({"mixers": DELTA, "value_embeddings": 1}, "value_embeddings=1 does not go with mixers=delta; leave one of"),
        ({"mixers": DELTA, "value_residual": True}, "value_residual=true does not go with mixers=delta; leave one of"),
        ({"ff_width": 0, "experts": GROUPED}, "ff_width=0 leaves experts without a width; set experts.width"),
        ({"ff_width": 0, "parallel": True}, "ff_width=0 leaves nothing beside attention for parallel=True; leave one"),
        ({"gated": False, "gate_shift": 1.0}, "gate_limit and gate_shift are for gated=true; leave them out"),
    ],
)
def test_keys_that_need_another_are_refused_without(keys, message):
    with pytest.raises(ValidationError, match=message):
        StackConfig(**SIZES | keys)


def test_experts_are_as_wide_as_the_dense_layer_unless_told():
    experts = {"count": 4, "top_k": 2}
    assert StackConfig(**SIZES, experts=experts).expert_width == 8
    assert StackConfig(**SIZES, experts=experts | {"width": 2}).expert_width == 2


def test_layers_without_a_window_may_begin_later():
    stack = StackConfig(**SIZES | {"layers": 5}, window=4, global_every=2, global_first=1)
    assert stack.windows == (4, None, 4, None, 4)


def test_experts_are_for_models_of_one_stack():
    stack = StackConfig(**SIZES)
    with pytest.raises(ValidationError, match="balanced over the tokens of one stack, and this model has two"):
        ModelConfig(encoder=stack, decoder=StackConfig(**SIZES, experts={"count": 4, "top_k": 2}))
    mixture = StackConfig(**SIZES, experts={"count": 4, "top_k": 2})
    assert ModelConfig(encoder=mixture).decoder is None
    with pytest.raises(ValidationError, match="experts are balanced over tokens, and input"):
        ModelConfig(encoder=mixture, input={"image": 16, "size": 8}, head={"kind": "none"})


def test_a_fraction_of_a_head_is_a_whole_number_in_spite_of_rounding():
    # 0.58 * 100 is 57.99999999999999.
    assert StackConfig(**SIZES, head_width=100, rope_fraction=0.58).rotary_width == 58


def test_any_set_of_layers_has_a_window():
    stack = StackConfig(**SIZES, window=5, global_layers=[0, 3, 9])
    assert stack.windows == (None, 5, 5, None)
    assert StackConfig(**SIZES, window=5, global_layers=[]).windows == (5,) * 4


def test_every_size_of_a_model_has_a_limit():
    """Torch would be asked for a tensor of any size, and a loop over layers would have no end."""
    fields = [
        field
        for kind, section in MODEL_SECTIONS.items()
        for field in walk_fields(section, model_kind=kind, repeats=True)
    ]
    sizes = [field for field in fields if re.search(r"\binteger\b", field.type) and "list" not in field.type]
    assert len(sizes) > 70 and [field.key for field in sizes if "<=" not in field.type] == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("decoder.layers", value) for value in (2001, 10**9, 10**30)),
        *(("decoder.width", value) for value in (2**20 + 1, 10**12)),
        *(
            (key, 10**12)
            for key in ("decoder.ff_width", "decoder.heads", "decoder.head_width", "decoder.position_offset")
        ),
        *((key, 10**12) for key in ("vocab_size", "max_seq_len", "ngram_rows", "special_tokens.eos")),
    ],
)
def test_a_size_that_no_model_has_is_refused(key, value):
    values = {"vocab_size": 100, "decoder": {"layers": 2, "width": 32, "heads": 2, "ff_width": 64}}
    *sections, name = key.split(".")
    target = values
    for section in sections:
        target = target.setdefault(section, {})
    target[name] = value
    with pytest.raises(ValidationError, match=rf"{key}.*\s+Input should be less than or equal to \d+"):
        ModelConfig.model_validate(values)
