"""What each rank keeps of the training state at every ZeRO stage, over engines that cut tensors as DeepSpeed does."""

import pytest
import torch

from pretrain.config.optim import OptimConfig
from pretrain.engine import replicated
from pretrain.optim.build import build_optimizer
from pretrain.optim.groups import group_parameters
from tests.helpers.fake_deepspeed import DTYPES
from tests.helpers.tables import pairwise
from tests.helpers.thread_ranks import Ranks
from tests.unit.engine.toy import SHAPES, Toy, adamw, assemble, fakes, load, train, working

CASES = [
    *((0, precision) for precision in ("fp32", "bf16")),
    *((stage, precision) for stage in (1, 2, 3) for precision in ("fp32", "bf16", "fp16")),
]
LAYOUTS = [(size, *case) for size in (1, 2, 3, 4) for case in CASES]
PRECISIONS = [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp32")]
KINDS = ("weight", "exp_avg", "exp_avg_sq")
# Of each of three ranks: (parameter, slot, offset in the parameter, start in the slot's tensor, length).
CUT_GROUPS = [  # 92 values and 4 of padding are three times 32; 4 and 2 three times 2, of which the last is all padding
    [("embedding", 0, 0, 0, 21), ("wide", 0, 0, 21, 11), ("gain", 1, 0, 0, 1), ("bias", 1, 0, 1, 1)],
    [("wide", 0, 11, 0, 32), ("bias", 1, 1, 0, 2)],
    [("wide", 0, 43, 0, 12), ("square", 0, 0, 12, 16)],
]
CUT_PARAMETERS = [  # 21, 55, 16, 1 and 3 values are at most 7, 19, 6, 1 and 1 a rank
    [
        ("embedding", 0, 0, 0, 7),
        ("wide", 0, 0, 7, 19),
        ("square", 0, 0, 26, 6),
        ("gain", 1, 0, 0, 1),
        ("bias", 1, 0, 1, 1),
    ],
    [("embedding", 0, 7, 0, 7), ("wide", 0, 19, 7, 19), ("square", 0, 6, 26, 6), ("bias", 1, 1, 1, 1)],
    [("embedding", 0, 14, 0, 7), ("wide", 0, 38, 7, 17), ("square", 0, 12, 26, 4), ("bias", 1, 2, 1, 1)],
]
WHOLE = [
    [
        (name, slot, 0, 0, length)
        for slot, (name, length) in enumerate(
            [("embedding", 21), ("wide", 55), ("square", 16), ("gain", 1), ("bias", 3)]
        )
    ]
] * 3


def initial(precision):
    """The master weights of a run that begins: in 16 bits, those that have been rounded."""
    return {name: p.detach().to(DTYPES[precision]).float() for name, p in Toy().named_parameters()}


def without_decay(module):
    return adamw(module, decay=0.0)


@pytest.mark.parametrize(("size", "stage", "precision"), LAYOUTS)
def test_the_ranks_save_every_element_once_and_have_moments_before_the_first_step(size, stage, precision):
    ranks = Ranks(size)
    saved = assemble([store for _, store, _ in fakes(ranks, stage, precision, without_decay)])
    assert saved.keys() == {(name, kind) for name in SHAPES for kind in KINDS}
    for name, weight in initial(precision).items():
        assert torch.equal(saved[name, "weight"], weight)
        assert not saved[name, "exp_avg"].any()
        assert not saved[name, "exp_avg_sq"].any()


@pytest.mark.parametrize(
    ("stage", "spans"), [(0, WHOLE), (1, CUT_GROUPS), (2, CUT_GROUPS), (3, CUT_PARAMETERS)], ids=range(4)
)
def test_a_rank_knows_where_its_parts_of_parameters_lie(stage, spans):
    for expected, (_, store, _) in zip(spans, fakes(Ranks(3), stage, "fp32"), strict=True):
        assert [tuple(piece.span) for piece in store._pieces] == expected


@pairwise(size=[1, 2, 3, 4], other_stage=range(4), stage=range(4))
def test_what_one_layout_saved_another_loads_and_goes_on_alike(size, stage, other_stage):
    """Every stage from every stage and world size; precisions and the other world size take turns."""
    other_size = 1 + (size + other_stage) % 4
    precision, other_precision = PRECISIONS[(size + stage + other_stage) % 3]
    if precision == "fp16" and not stage:
        precision = "fp32"
    ranks, other = Ranks(size), Ranks(other_size)
    built, targets = fakes(ranks, stage, precision), fakes(other, other_stage, other_precision)
    stores, other_stores = [store for _, store, _ in built], [store for _, store, _ in targets]
    ranks.run(lambda world: train(built[world.rank][0], range(2)))
    other.run(lambda world: train(targets[world.rank][0], range(5, 7)))  # what is loaded is laid over other values
    saved = assemble(stores)
    load(other_stores, other, saved, 2)
    loaded = assemble(other_stores)
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)
    for read in working([(engine.module, names) for engine, _, names in targets], other):
        for name, weight in read.items():
            assert torch.equal(weight, saved[name, "weight"].to(DTYPES[other_precision]))
    if precision == other_precision == "fp32":  # elsewhere means over 3 ranks are rounded, over 1, 2 and 4 they are not
        ranks.run(lambda world: train(built[world.rank][0], range(2, 4)))
        other.run(lambda world: train(targets[world.rank][0], range(2, 4)))
        followed, again = assemble(stores), assemble(other_stores)
        assert not any(torch.equal(followed[key], saved[key]) for key in saved)
        assert all(torch.allclose(again[key], followed[key], rtol=1e-5, atol=0.0) for key in saved)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_the_step_count_of_all_state_is_what_was_loaded(size, stage, precision):
    ranks = Ranks(size)
    built = fakes(ranks, stage, precision)
    stores = [store for _, store, _ in built]
    load(stores, ranks, assemble(stores), 17)
    for engine, _, _ in built:
        counts = [float(state["step"]) for state in engine.basic_optimizer.state.values()]
        assert counts
        assert set(counts) == {17.0}
    ranks.run(lambda world: train(built[world.rank][0], range(1)))
    assert max(float(state["step"]) for state in built[-1][0].basic_optimizer.state.values()) == 18.0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_loss_scale_of_fp16_is_saved_loaded_and_of_no_use_elsewhere(stage):
    ranks = Ranks(2)
    built = fakes(ranks, stage, "fp16")
    scale = {"cur_scale": 512.0, "cur_iter": 70, "last_overflow_iter": 33, "cur_hysteresis": 1}
    fresh = [store.scalars() for _, store, _ in built]
    assert (
        fresh
        == [
            {"loss_scale.cur_scale": 65536.0, "loss_scale.cur_iter": 0}
            | {"loss_scale.last_overflow_iter": -1, "loss_scale.cur_hysteresis": 2}
        ]
        * 2
    )
    for engine, _, _ in built:
        vars(engine.optimizer.loss_scaler).update(scale)
    stores = [store for _, store, _ in built]
    scalars = stores[0].scalars()
    assert scalars == {f"loss_scale.{key}": value for key, value in scale.items()}
    saved = assemble(stores)
    for other_stage, precision in CASES:
        targets = [store for _, store, _ in fakes(ranks, other_stage, precision)]
        load(targets, ranks, saved, 1, **scalars)
        assert [store.scalars() for store in targets] == [scalars if precision == "fp16" else {}] * 2
    load(stores, ranks, saved, 1)  # from a run that had no scale
    assert [store.scalars() for store in stores] == [scalars] * 2


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parameters_that_stage_3_keeps_whole_are_gathered_by_the_next_forward_pass(size):
    ranks = Ranks(size)
    built = fakes(ranks, 3, "bf16", persistent=16)
    ranks.run(lambda world: train(built[world.rank][0], range(1)))
    saved = {(name, kind): torch.full(shape, 1.25) for name, shape in SHAPES.items() for kind in KINDS}
    load([store for _, store, _ in built], ranks, saved, 1)
    kept = ("gain", "bias", "square")
    assert not any(getattr(engine.module, name).numel() for engine, _, _ in built for name in kept)
    ranks.run(torch.no_grad()(lambda world: built[world.rank][0](torch.tensor(1.0))))
    for engine, _, _ in built:
        whole = {name: parameter.data for name, parameter in engine.module.named_parameters()}
        assert {name for name, data in whole.items() if data.numel()} == set(kept)
        assert all(torch.equal(whole[name], torch.full(SHAPES[name], 1.25, dtype=torch.bfloat16)) for name in kept)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_group_that_stage_3_cuts_into_several_tensors_is_saved_and_loaded(size):
    ranks = Ranks(size)
    built = fakes(ranks, 3, "bf16", sub_group_size=14)
    stores = [store for _, store, _ in built]
    slots = {piece.span.name: piece.span.slot for store in stores for piece in store._pieces}
    # 21, then 55, then 16 values; of which the second begins a row where the first is 14 a rank, on one rank alone.
    assert (
        list(slots.items())
        == {
            1: [("embedding", 0), ("wide", 1), ("square", 2), ("gain", 3), ("bias", 3)],
            2: [("embedding", 0), ("wide", 0), ("square", 1), ("gain", 2), ("bias", 2)],
            3: [("embedding", 0), ("wide", 0), ("square", 1), ("gain", 2), ("bias", 2)],
            4: [("embedding", 0), ("wide", 0), ("square", 1), ("gain", 2), ("bias", 2)],
        }[size]
    )
    ranks.run(lambda world: train(built[world.rank][0], range(2)))
    saved = assemble(stores)
    ranks.run(lambda world: train(built[world.rank][0], range(2, 3)))
    load(stores, ranks, saved, 2)
    assert all(torch.equal(tensor, saved[key]) for key, tensor in assemble(stores).items())
    for read in working([(engine.module, names) for engine, _, names in built], ranks):
        assert all(torch.equal(weight, saved[name, "weight"].bfloat16()) for name, weight in read.items())


# What optimizers over whole matrices keep: (parameter, kind) and its shape.
WEIGHTS = {(name, "weight"): shape for name, shape in SHAPES.items()}
MATRIX_STATE = {
    "muon": {("wide", "momentum_buffer"): (5, 11), ("square", "momentum_buffer"): (4, 4)}
    | {(name, kind): SHAPES[name] for name in ("embedding", "gain", "bias") for kind in ("exp_avg", "exp_avg_sq")},
    "adafactor": {
        ("embedding", "row_var.0"): (7,),
        ("embedding", "col_var.0"): (3,),
        ("wide", "row_var.0"): (5,),
        ("wide", "col_var.0"): (11,),
        ("square", "row_var.0"): (4,),
        ("square", "col_var.0"): (4,),
        ("gain", "variance"): (1,),
        ("bias", "variance"): (3,),
    },
}


@pytest.mark.parametrize("kind", MATRIX_STATE)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_state_of_whole_matrices_is_saved_once_and_loaded_by_any_layout(monkeypatch, kind, stage, size):
    """The ranks agree on an owner for each matrix, which alone keeps, saves and loads its state."""
    config, ranks = OptimConfig(kind=kind, lr=0.05), Ranks(size)
    monkeypatch.setattr(replicated.dist, "gather_objects", ranks.gather)
    cpu = torch.device("cpu")
    built = fakes(ranks, stage, "bf16", lambda module: build_optimizer(group_parameters(module), config, cpu))
    stores = [store for _, store, _ in built]
    fresh = assemble(stores)
    assert {key: tuple(tensor.shape) for key, tensor in fresh.items()} == WEIGHTS | MATRIX_STATE[kind]
    assert not any(tensor.any() for (_, key), tensor in fresh.items() if key != "weight")
    generator = torch.Generator().manual_seed(1)
    saved = {key: torch.randn(tensor.shape, generator=generator) for key, tensor in fresh.items()}
    load(stores, ranks, saved, 17)
    loaded = assemble(stores)
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)
    for engine, _, _ in built:
        rules = [rule._optimizer for rule in engine.basic_optimizer._rules.values() if rule._optimizer]
        states = [state for optimizer in (engine.basic_optimizer, *rules) for state in optimizer.state.values()]
        assert {float(state["step"]) for state in states if "step" in state} <= {17.0}
