"""What passes the network in a step: our engine as one rank of many that are not there, against `pretrain plan`.

torch's `fake` process group answers every collective at once, so that any number of ranks fits a laptop.
"""

import math
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as td
from torch import nn

from benchmarks.simulated_ranks import (
    ALIKE,
    CASES,
    EXCHANGES,
    RINGS,
    Recorder,
    join,
    measured,
    planned,
    simulate,
    start_rank,
)
from pretrain.config.engine import PLAIN_ENGINE, EngineConfig
from pretrain.config.lengths import RowLengths
from pretrain.config.model import ModelConfig
from pretrain.config.objective import ObjectiveConfig
from pretrain.config.presets import expand_preset
from pretrain.data.loader import cut_columns
from pretrain.dist import World
from pretrain.engine import build
from pretrain.engine.engine import Engine
from pretrain.model.build import build_model, initial_weight
from pretrain.objective import build_loss
from pretrain.optim.groups import group_parameters
from pretrain.plan import gathers
from pretrain.plan.activations import exchanged_bytes
from pretrain.plan.params import count_parameters
from pretrain.plan.roofline import Traffic, collected_bytes, plan_work, routed_bytes, wire_bytes
from pretrain.plan.task import ParallelLayout, TrainingTask
from pretrain.types import Batch, Columns, Fragment
from tests.helpers.ranks import run_in_ranks

ACCUMULATION, LENGTH = 3, 8
MODEL: dict[str, Any] = {"preset": "llama-5m", "vocab_size": 512, "max_seq_len": LENGTH}
SMALL = MODEL | {"decoder": {"layers": 2}}


def traffic(
    world: World,
    ranks: int,
    cases: list[tuple[int, str]],
    model: dict[str, Any],
    sequence: int = 1,
    hpz: int = 1,
    tensor: int = 1,
    **changes: int,
) -> list[dict[str, Any]]:
    """Trains as rank 0 of `ranks`, of which `sequence` share rows, for each stage and dtype of gradients.

    `changes` are of DeepSpeed's ZeRO section. Returns the collectives of the second step, and the elements that rank 0
    saves.
    """
    rank_0 = join(0, ranks, sequence, tensor)
    configured = build.deepspeed_config

    def with_changes(*arguments: Any) -> dict[str, Any]:
        config = configured(*arguments)
        return config | {"zero_optimization": config["zero_optimization"] | changes}

    with mock.patch.object(build, "deepspeed_config", with_changes):
        return [_step(rank_0, stage, gradients, model, hpz) for stage, gradients in cases]


def places(world: World, of: list[int], ranks: int, stages: list[int]) -> list[list[list[int]]]:
    """Starts the engine as one of `ranks`, by the number of this process; returns by stage what it has.

    A line is what a stage shards evenly: a parameter, or a group of them, one after the other. A place is the line, its
    length, and the first and last element of it on this rank.
    """
    one_of = join(of[world.rank], ranks)
    whole = build_model(ModelConfig.model_validate(expand_preset(SMALL)), PLAIN_ENGINE, torch.device("cpu"))
    groups = [list(group.names) for group in group_parameters(whole)]
    found = []
    for stage in stages:
        built, engine = _start(one_of, stage, "compute", SMALL)
        shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in built.named_parameters()}
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        lines = groups if stage in (1, 2) else [[name] for group in groups for name in group]
        pieces = {fragment.name: fragment for fragment in engine.state.owned_fragments()}
        assert all(pieces[name].shape == shapes[name] for name in pieces)
        found.append([_place(number, line, sizes, pieces) for number, line in enumerate(lines)])
    return found


def _place(number: int, line: list[str], sizes: dict[str, int], pieces: dict[str, Fragment]) -> list[int]:
    before = dict(zip(line, accumulate((sizes[name] for name in line), initial=0), strict=False))
    kept = [(before[name] + pieces[name].offset, pieces[name].length) for name in line if name in pieces]
    start = stop = kept[0][0] if kept else -1
    for first, length in kept:
        assert first == stop, "the pieces of a line are one piece"
        stop += length
    return [number, sum(sizes[name] for name in line), start, stop]


def _start(world: World, stage: int, gradients: str, model: dict[str, Any], hpz: int = 1) -> tuple[nn.Module, Engine]:
    config = EngineConfig(
        kind="deepspeed", zero_stage=stage, zero_hpz=hpz, precision="bf16", gradients=gradients, device="cpu"
    )
    model_config = ModelConfig.model_validate(expand_preset(model))

    def draw(name: str, shape: torch.Size) -> torch.Tensor:
        return initial_weight(name, shape, model_config, 0)

    return start_rank(world, config, model_config, ACCUMULATION, draw)


def _step(world: World, stage: int, gradients: str, model: dict[str, Any], hpz: int = 1) -> dict[str, Any]:
    _, engine = _start(world, stage, gradients, model, hpz)
    size = count_parameters(ModelConfig.model_validate(expand_preset(model)))
    tokens = torch.randint(0, 512, (1, LENGTH))
    batch = Batch(tokens, tokens)
    if "generator_heads" in model:
        places = torch.arange(0, LENGTH, 4)
        batch = replace(batch, target_positions_P=places, draws_P=torch.full((len(places),), 0.5, dtype=torch.float64))
    if world.row_ranks > 1:
        batch = cut_columns(batch, Columns(0, world.row_ranks))
    with mock.patch(ALIKE, lambda *_: None):
        for _ in range(2):
            with Recorder() as recorder:
                for number in range(ACCUMULATION):
                    engine.forward_backward(batch, 1.0, number + 1 == ACCUMULATION)
                reads = recorder.reads
                engine.update(1e-3)
    owned = sum(fragment.length for fragment in engine.state.owned_fragments())
    by_group = [[name, group, size] for (name, group), size in recorder.by_group.items()]
    found = {"bytes": dict(recorder.bytes), "groups": by_group, "parameters": size, "owned": owned}
    return found | {"reads": [reads, recorder.reads - reads]}


STAGES = ((0, "compute"), (1, "compute"), (2, "compute"), (3, "compute"))
EVERY_CASE = (*STAGES, (2, "fp32"), (3, "fp32"))


@cache
def steps(ranks: int, cases: tuple[tuple[int, str], ...], is_small: bool) -> list[dict[str, Any]]:
    """A step of each case, by one process for several tests."""
    arguments = {"ranks": ranks, "cases": cases, "model": SMALL if is_small else MODEL}
    (found,) = run_in_ranks("tests.integration.test_collectives:traffic", 1, arguments)
    return found


@pytest.mark.parametrize(
    ("ranks", "cases", "is_small"),
    [
        (8, EVERY_CASE, True),
        (1024, STAGES[3:], True),
        pytest.param(1024, STAGES[:3], True, marks=pytest.mark.long),
        pytest.param(1024, EVERY_CASE, False, marks=pytest.mark.long),
    ],
)
def test_a_step_sends_what_the_plan_says(ranks, cases, is_small):
    model = SMALL if is_small else MODEL
    for (stage, gradients), step in zip(cases, steps(ranks, cases, is_small), strict=True):
        size = step["parameters"]
        sent = sum(RINGS[name] * count for name, count in step["bytes"].items())
        # Norms and flags are small; shares are filled up to a whole number of elements each.
        wanted = traffic_of(model, stage, gradients, ranks).total(ACCUMULATION)
        assert sent == pytest.approx(wanted, rel=0.01, abs=2 * 64 * ranks), (stage, step)
        assert step["owned"] == pytest.approx(size / ranks, rel=0.02, abs=64), stage


def traffic_of(model: dict[str, Any], stage: int, gradients: str, ranks: int, hpz: int = 1) -> Traffic:
    """Returns the bytes of a step that `plan` counts."""
    engine = EngineConfig(zero_stage=stage, zero_hpz=hpz, precision="bf16", gradients=gradients)
    task = TrainingTask(ModelConfig.model_validate(expand_preset(model)), RowLengths(LENGTH, LENGTH))
    return wire_bytes(plan_work(task, ParallelLayout(engine, 1, ACCUMULATION), ranks, "cpu"), ranks)


def test_weights_that_are_too_many_to_stay_are_gathered_for_each_pass(monkeypatch):
    """As above DeepSpeed's 10^9 parameters, with bounds that a small model exceeds; the tied head between them."""
    few = 1000
    arguments = {"ranks": 8, "cases": [(3, "compute")], "model": SMALL}
    arguments |= {"stage3_max_live_parameters": few, "stage3_max_reuse_distance": few}
    ((step,),) = run_in_ranks("tests.integration.test_collectives:traffic", 1, arguments)
    gathers._pass.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(gathers, "MAX_LIVE", few)
        wanted = traffic_of(SMALL, 3, "compute", 8).total(ACCUMULATION)
    gathers._pass.cache_clear()
    sent = sum(RINGS[name] * count for name, count in step["bytes"].items())
    assert sent == pytest.approx(wanted, rel=0.001)
    assert wanted > 1.3 * traffic_of(SMALL, 3, "compute", 8).total(ACCUMULATION)


def test_all_gathers_but_the_first_of_a_step_stay_within_a_node():
    arguments = {"ranks": 64, "cases": [(3, "compute")], "model": SMALL, "hpz": 8}
    ((step,),) = run_in_ranks("tests.integration.test_collectives:traffic", 1, arguments)
    wanted = traffic_of(SMALL, 3, "compute", 64, 8)
    among = dict.fromkeys((8, 64), 0)
    for name, group, size in step["groups"]:
        among[group] += RINGS[name] * size
    assert among[8] == pytest.approx(ACCUMULATION * wanted.inside, rel=0.01)
    assert among[64] == pytest.approx(ACCUMULATION * wanted.often + wanted.once, rel=0.01)
    assert wanted.inside > 0
    assert wanted.total(ACCUMULATION) == traffic_of(SMALL, 3, "compute", 64).total(ACCUMULATION)


LONG_MODES = [pytest.param(mode, marks=pytest.mark.long) for mode in ("experts", "none", "compiled", "tensor")]


@pytest.mark.parametrize("mode", ["full", *LONG_MODES])
def test_a_rank_of_a_large_model_sends_and_holds_what_is_planned(mode):
    """Weights of more than DeepSpeed's bounds, at their true size: without memory and without numbers."""
    ((found, wanted),) = run_in_ranks("tests.integration.test_collectives:large", 1, {"mode": mode})
    assert wanted["bytes"] == pytest.approx(found["bytes"], rel=1e-4)
    assert wanted["exchanged"] == found["exchanged"]
    assert wanted["peak"] == pytest.approx(found["peak"], rel=0.1)
    assert wanted["state"] == pytest.approx(found["state"], rel=0.02)


def large(world: World, mode: str) -> list[dict[str, Any]]:
    """Simulates two layers of a case on 80 ranks, by which no matrix divides; returns what is measured and planned."""
    case = replace(CASES["experts" if mode == "experts" else "dense"], ranks=80)
    case = replace(case, model=case.of_layers(2))
    if mode == "tensor":
        case = replace(case, sequence=1, tensor=8)
    checkpointing = "none" if mode == "none" else "full"
    kind = {"kind": "deepspeed", "zero_stage": 3, "device": "cpu", "compile": mode == "compiled"}
    config = EngineConfig(**kind, activation_checkpointing=checkpointing)
    found = simulate(case, join(0, case.ranks, case.sequence, case.tensor), 2, config)
    return [measured(found), planned(case, 2, config)]


def test_the_fragments_of_1024_ranks_cover_every_element_once():
    """A rank has the n-th of equal parts: seen on four of them, it holds for those between."""
    ranks, stages = 1024, [0, 1, 2, 3]
    of = [0, 1, 517, ranks - 1]
    arguments = {"of": of, "ranks": ranks, "stages": stages}
    found = run_in_ranks("tests.integration.test_collectives:places", len(of), arguments)
    for stage, *places_of_ranks in zip(stages, *found, strict=True):
        for on_ranks in zip(*places_of_ranks, strict=True):
            numbers, lengths, *_ = zip(*on_ranks, strict=True)
            assert len(set(numbers)) == len(set(lengths)) == 1
            length = lengths[0]
            part = on_ranks[0][3]  # the end of the first
            for rank, (*_, start, stop) in zip(of, on_ranks, strict=True):
                if stage == 0:
                    wanted = length * rank // ranks, length * (rank + 1) // ranks
                else:
                    wanted = min(length, part * rank), min(length, part * (rank + 1))
                # A rank without a piece has no place.
                assert (start, stop) == (wanted if wanted[0] < wanted[1] else (-1, -1)), (stage, rank, numbers)
            assert stage == 0 or part * ranks >= length


MIXERS = {"layers": 4, "mixers": ["delta", "mamba2", "convolution", "attention"]}
MIXERS |= {"mamba2": {"heads": 8, "head_width": 16, "state_width": 12, "groups": 2}}


@pytest.mark.parametrize(
    ("sequence", "mixers"),
    [(2, {}), *(pytest.param(*case, marks=pytest.mark.long) for case in ((8, {}), (2, MIXERS), (8, MIXERS)))],
)
def test_ranks_that_share_rows_exchange_what_the_plan_says_and_send_nothing_else_more(sequence, mixers):
    heads = {"decoder": {"layers": 2, "heads": 8, "kv_heads": 4, "head_width": 16} | mixers}
    arguments = {"ranks": 8, "cases": [(2, "compute"), (3, "compute")], "model": MODEL | heads}
    (alone,) = run_in_ranks("tests.integration.test_collectives:traffic", 1, arguments)
    (shared,) = run_in_ranks("tests.integration.test_collectives:traffic", 1, {**arguments, "sequence": sequence})
    model = ModelConfig.model_validate(expand_preset(MODEL | heads))
    task = TrainingTask(model, RowLengths(LENGTH, LENGTH), sequence=sequence)
    for mine, its in zip(shared, alone, strict=True):
        exchanged = mine["bytes"].pop("all_to_all_single")
        assert exchanged == ACCUMULATION * exchanged_bytes(task, EngineConfig(precision="bf16"), 1)
        # Without the key there is no such collective, and the others are the same.
        assert mine["bytes"] == its["bytes"]


@pytest.mark.parametrize(
    ("tensor", "mixers"),
    [(2, {}), pytest.param(4, {}, marks=pytest.mark.long), pytest.param(2, MIXERS, marks=pytest.mark.long)],
)
def test_ranks_that_share_matrices_send_what_the_plan_says(tensor, mixers):
    heads = {"decoder": {"layers": 2, "heads": 8, "kv_heads": 4, "head_width": 16} | mixers}
    cases = [(1, "compute"), (2, "compute"), (3, "compute")]
    arguments = {"ranks": 8, "cases": cases, "model": MODEL | heads, "tensor": tensor}
    (found,) = run_in_ranks("tests.integration.test_collectives:traffic", 1, arguments)
    task = TrainingTask(
        ModelConfig.model_validate(expand_preset(MODEL | heads)), RowLengths(LENGTH, LENGTH), tensor=tensor
    )
    for (stage, _), step in zip(cases, found, strict=True):
        engine = EngineConfig(zero_stage=stage, precision="bf16")
        collected = sum(step["bytes"].pop(name) for name in EXCHANGES[1:])
        assert collected == ACCUMULATION * collected_bytes(task, engine, 1)
        sent = sum(RINGS[name] * count for name, count in step["bytes"].items())
        wanted = wire_bytes(plan_work(task, ParallelLayout(engine, 1, ACCUMULATION), 8, "cpu"), 8)
        assert sent == pytest.approx(wanted.total(ACCUMULATION), rel=0.01), (stage, step)
        # Of matrices and of the rest a rank keeps an eighth of the whole.
        assert step["owned"] == pytest.approx(step["parameters"] / 8, rel=0.02)


MIXTURE = SMALL | {"decoder": {"layers": 2, "experts": {"count": 8, "top_k": 2, "width": 256}}}


def shared_experts(world: World, experts: int, stages: list[int]) -> list[dict[str, Any]]:
    """The collectives of a step of a mixture on ranks that are there, as rows come from all of them."""
    found = []
    for stage in stages:
        step = _step(replace(world, experts=experts), stage, "compute", MIXTURE)
        # The lengths of what a rank gets depend on the others' tokens; what all pass is known.
        passed = torch.tensor(step["bytes"].pop("all_to_all_single", 0) + step["bytes"].pop("alltoall_base_", 0))
        td.all_reduce(passed)
        found.append(step | {"passed": int(passed)})
    return found


@pytest.mark.parametrize(
    ("experts", "stages"), [(1, [1, 2, 3]), (2, [3]), pytest.param(2, [1, 2], marks=pytest.mark.long)], ids=str
)
def test_ranks_that_share_experts_send_what_the_plan_says(experts, stages):
    """What a rank keeps and sends of experts is its part: it reduces and gathers that with the ranks that have it."""
    model = ModelConfig.model_validate(expand_preset(MIXTURE))
    engine, task = EngineConfig(precision="bf16"), TrainingTask(model, RowLengths(LENGTH, LENGTH), experts=experts)
    if experts == 1:  # whatever its tokens choose: the others need not be there
        arguments = {"ranks": 4, "cases": STAGES[1:], "model": MIXTURE}
        found = run_in_ranks("tests.integration.test_collectives:traffic", 1, arguments)
    else:
        arguments = {"experts": experts, "stages": stages}
        found = run_in_ranks("tests.integration.test_collectives:shared_experts", 4, arguments)
    for stage, *ranks in zip(stages, *found, strict=True):
        layout = ParallelLayout(engine.model_copy(update={"zero_stage": stage}), 1, ACCUMULATION)
        wanted = wire_bytes(plan_work(task, layout, 4, "cpu"), 4).total(ACCUMULATION)
        routed = 4 * ACCUMULATION * routed_bytes(task, engine, 1)
        for step in ranks:
            sent = sum(RINGS[name] * count for name, count in step["bytes"].items())
            assert sent == pytest.approx(wanted, rel=0.01), (stage, step)
            assert step["owned"] == pytest.approx(step["parameters"] / 4, rel=0.02)
            assert routed <= step.get("passed", 0) < 1.5 * routed if experts > 1 else routed == 0


PAIR: dict[str, Any] = {
    "preset": "electra-tiny",
    "vocab_size": 512,
    "max_seq_len": LENGTH,
    "tied_embeddings": False,
    "head": {"kind": "replaced", "transform": True, "bias": True},
    "encoder": {"width": 512, "heads": 8, "ff_width": 2048, "embedding_width": 384},
    "generator_heads": 4,
}
"""A model of replaced tokens, whose generator reads some of its weights before it does."""


def of_pair(world: World, ranks: int, stages: list[int]) -> list[dict[str, Any]]:
    """The collectives of a step by stage, a quarter of the tokens masked."""
    rank_0 = join(0, ranks)

    loss = build_loss(ObjectiveConfig(kind="replaced"))
    with mock.patch("benchmarks.simulated_ranks.build_loss", lambda _: loss):
        return [_step(rank_0, stage, "compute", PAIR) for stage in stages]


@pytest.mark.parametrize("stages", [[3], pytest.param([2], marks=pytest.mark.long)], ids=str)
def test_a_generator_of_replaced_tokens_is_gathered_as_the_plan_says(stages):
    (found,) = run_in_ranks("tests.integration.test_collectives:of_pair", 1, {"ranks": 8, "stages": stages})
    for stage, step in zip(stages, found, strict=True):
        sent = sum(RINGS[name] * count for name, count in step["bytes"].items())
        wanted = traffic_of(PAIR, stage, "compute", 8).total(ACCUMULATION)
        assert sent == pytest.approx(wanted, rel=1e-4), stage


MOST_READS = {0: 5, 1: 4, 2: 4, 3: 2}
"""Numbers that the host reads in an update, by stage: the norms of groups, and whether they are finite."""


def test_the_host_reads_nothing_in_a_micro_batch_and_few_numbers_in_an_update():
    for (stage, _), step in zip(EVERY_CASE, steps(8, EVERY_CASE, True), strict=True):
        of_micro_batches, of_update = step["reads"]
        assert of_micro_batches == 0 and of_update <= MOST_READS[stage], (stage, step["reads"])
