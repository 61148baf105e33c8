"""FP8 products of the blocks: what is refused, losses beside bf16, and checkpoints that are those of bf16."""

import sys
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from pretrain.checkpoint.format import load_manifest
from pretrain.config.engine import EngineConfig
from pretrain.config.model import parse_model
from pretrain.config.presets import expand_preset
from pretrain.errors import ConfigError
from pretrain.model import build_model
from pretrain.model.build import convert_to_fp8
from tests.helpers.ranks import run_in_ranks
from tests.helpers.topologies import CONFIG, contents, ledger, newest, run_dir, write_run

JOBS = "tests.helpers.topologies:run_jobs"
LOSSES = "tests.integration.engine_workers:fp8_losses"
NEEDS_TORCHAO = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao: pip install -e '.[fp8]'")
SMALL = CONFIG.replace(
    "width: 36, heads: 6, kv_heads: 2, head_width: 6, ff_width: 50", "width: 32, heads: 4, ff_width: 48"
)
BF16 = "engine={kind: deepspeed, zero_stage: 2, precision: bf16}"
FP8 = "engine={kind: deepspeed, zero_stage: 1, precision: bf16, fp8: rowwise}"
TOLERANCE = 0.03
"""Largest relative difference of a loss to bf16. A factor of e4m3 is rounded by up to 2**-4, and losses fall by three
quarters in these twenty steps; 0.013 was seen."""


def test_fp8_without_torchao_is_refused_with_the_extra_that_has_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    message = r"engine.fp8=rowwise needs the torchao package: .*; use engine.fp8=off, or .* -e '\.\[fp8\]'"
    with pytest.raises(ConfigError, match=message):
        convert_to_fp8(nn.Sequential(nn.Linear(16, 16)), "rowwise", torch.device("cpu"))


def test_fp8_on_a_gpu_without_it_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    message = (
        "engine.fp8=tensorwise needs a GPU of compute capability 8.9 or more, this one has 8.0; use engine.fp8=off"
    )
    with pytest.raises(ConfigError, match=message):
        convert_to_fp8(nn.Sequential(nn.Linear(16, 16)), "tensorwise", torch.device("cuda"))


@pytest.mark.long
@NEEDS_TORCHAO
@pytest.mark.parametrize("preset", ["llama-tiny", "t5-tiny"])
def test_matrices_of_blocks_alone_have_fp8_products_and_parameters_stay(preset):
    config = parse_model(expand_preset({"preset": preset, "vocab_size": 64}))
    plain, fp8 = (
        build_model(config, EngineConfig(fp8=recipe, compile=False), torch.device("cpu"))
        for recipe in ("off", "rowwise")
    )
    kinds = {name: type(part).__name__ for name, part in fp8.named_modules() if isinstance(part, nn.Linear)}
    assert {kind for name, kind in kinds.items() if ".blocks." in name} == {"Float8Linear"}
    assert {kind for name, kind in kinds.items() if ".blocks." not in name} <= {"Linear"}
    facts = [{name: (value.shape, value.dtype) for name, value in model.state_dict().items()} for model in (plain, fp8)]
    assert facts[0] == facts[1]


@pytest.mark.long
@NEEDS_TORCHAO
def test_losses_follow_those_of_bf16_on_every_engine_that_takes_it():
    engines = [["deepspeed", stage] for stage in range(3)] + [["ddp", 0]]
    cases = [[*engines[2], "off", "none"], [*engines[2], "tensorwise", "none"]]
    cases += [[*engine, "rowwise", "none"] for engine in engines]
    cases.append(["deepspeed", 3, "rowwise", "full"])
    ranks = run_in_ranks(LOSSES, 2, {"cases": cases, "steps": 20, "micro": 2})
    assert ranks[0] == ranks[1]
    losses = [[row[0] for row in rows] for rows in ranks[0]]
    assert losses[0][-1] < 0.3 * losses[0][0]
    for case, found in zip(cases[1:], losses[1:], strict=True):
        assert found != losses[0], case
        assert found == pytest.approx(losses[0], rel=TOLERANCE), case


@pytest.mark.long
@NEEDS_TORCHAO
def test_recomputed_blocks_are_the_same_to_the_bit():
    cases = [["deepspeed", 1, "rowwise", mode] for mode in ("none", "full", "selective")]
    ((plain, *others),) = run_in_ranks(LOSSES, 1, {"cases": cases, "steps": 5, "micro": 4})
    assert others == [plain, plain]


@pytest.mark.long
@NEEDS_TORCHAO
@pytest.mark.parametrize(("first", "second"), [(FP8, BF16), (BF16, FP8)], ids=["fp8 to bf16", "bf16 to fp8"])
def test_a_run_goes_on_with_fp8_or_without(tmp_path, corpus, first, second):
    """The second attempt loads every bit, and its losses follow those of the run that stays."""
    origin = write_run(tmp_path / "origin", corpus, template=SMALL)
    jobs = [{"config": str(origin), "overrides": [first, "batch.micro=1", "train.stop_after=10"]}]
    assert run_in_ranks(JOBS, 1, {"jobs": jobs})[0][0][0] == 0
    saved = newest(run_dir(origin))
    assert set(load_manifest(saved).moments) == {"exp_avg", "exp_avg_sq"}
    stays, moves = (write_run(tmp_path / name, corpus, run_dir(origin), 10, SMALL) for name in ("stays", "moves"))
    jobs = [
        {
            "config": str(config),
            "overrides": [engine, "batch.micro=1", "train.stop_after=20"],
            "saved": str(config.parent / "loaded"),
        }
        for config, engine in ((stays, first), (moves, second))
    ]
    assert [code for code, _ in run_in_ranks(JOBS, 1, {"jobs": jobs})[0]] == [0, 0]
    before = contents(saved)
    (loaded,) = (tmp_path / "moves" / "loaded").glob("step-*")
    after = contents(loaded)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    rows = [ledger(run_dir(config)) for config in (stays, moves)]
    losses = [[float.fromhex(found[step]["loss"]) for step in sorted(found)] for found in rows]
    assert len(losses[0]) == 20
    assert losses[0][10:] != losses[1][10:]
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCE)
