"""Keys of the model beyond the presets train alike under every engine, and go on from a checkpoint bit for bit."""

import pytest

from tests.helpers.ranks import run_in_ranks
from tests.integration.workers import MODEL

KEYS = {
    "layers": 3,
    "activation": "relu2",
    "rope_fraction": 1 / 3,
    "residual_scalars": True,
    "value_residual": True,
    "value_embeddings": 1,
    "layer_scale": 0.5,
}
RECIPE = {**MODEL, "tied_embeddings": False, "init_output": "zero", "decoder": MODEL["decoder"] | KEYS}
RECIPE |= {"ngram_embeddings": 2, "ngram_rows": 60}
WORKER = "tests.integration.checkpoint_workers:resumed_losses"
STEPS = 4


OTHERS = [
    ["deepspeed", 0, "fp32", "adamw", "none"],
    ["deepspeed", 1, "fp32", "adamw", "none"],
    ["deepspeed", 2, "fp32", "adamw", "selective"],
    ["ddp", 0, "fp32", "adamw", "none"],
]


@pytest.mark.parametrize(
    "cases", [[["deepspeed", 3, "fp32", "adamw", "full"]], pytest.param(OTHERS, marks=pytest.mark.long)], ids=str
)
def test_every_engine_trains_alike_and_resumes_bit_for_bit(cases, tmp_path):
    arguments = {"model": RECIPE, "folder": str(tmp_path / "two"), "steps": STEPS}
    first, second = run_in_ranks(WORKER, 2, {"cases": cases, "micro": 3, **arguments})
    assert first == second, "all ranks must see the same global loss and gradient norm"
    alone = {**arguments, "cases": [["single", 0, "fp32", "adamw", "none"]], "micro": 12}
    (((reference,),),) = [run_in_ranks(WORKER, 1, alone | {"folder": str(tmp_path / "one")})]
    for case, found in zip(cases, first, strict=True):
        assert found["resumed"] == found["followed"], case
        expected = reference["rows"] + reference["followed"]
        for row, wanted in zip(found["rows"] + found["followed"], expected, strict=True):
            assert row[0] == pytest.approx(wanted[0], rel=1e-4), case
            assert row[1] == pytest.approx(wanted[1], rel=1e-3), case
    assert reference["followed"][-1][0] < reference["rows"][0][0] - 0.1


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_optimizers_of_whole_matrices_train_them_too(optimizer, tmp_path):
    cases = [["deepspeed", stage, precision, optimizer, "none"] for stage, precision in ((2, "fp32"), (3, "bf16"))]
    arguments = {"model": RECIPE, "folder": str(tmp_path), "steps": STEPS, "cases": cases, "micro": 3}
    for case, found in zip(cases, run_in_ranks(WORKER, 2, arguments)[0], strict=True):
        assert found["resumed"] == found["followed"], case
        assert found["followed"][-1][0] < found["rows"][0][0], case
