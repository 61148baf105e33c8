"""What needs a GPU of an engine: fp16, and state in host memory while weights are on the device. Through real runs."""

import json

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = ("engine.device=cuda", "train.steps=40", "optim.lr=3e-3")


def losses(run) -> list[float]:
    """Training losses of a run, as its metrics have them."""
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp16_trains_and_its_loss_scale_is_resumed(make_run, stage):
    options = (*CUDA, "engine.precision=fp16", f"engine.zero_stage={stage}")
    make_run.complete("half", *options, "train.stop_after=20", ranks=1)
    newest = max(make_run.folder("half").checkpoints.glob("step-*"))
    scalars = json.loads((newest / "manifest.json").read_text())["content"]["scalars"]
    assert scalars["loss_scale.cur_scale"] >= 2**8
    assert scalars["loss_scale.cur_iter"] == 20
    make_run.complete("half", *options, ranks=1)
    seen = losses(make_run.folder("half"))
    assert seen[-1] < seen[0] - 0.3


@pytest.mark.parametrize(
    "options",
    [
        ("engine.zero_stage=2", "engine.offload_optimizer=cpu"),
        ("engine.zero_stage=3", "engine.offload_optimizer=cpu", "engine.offload_params=cpu"),
    ],
)
def test_masters_in_host_memory_train_like_those_on_the_device(make_run, options):
    """Where they are is checked by the engine at its start."""
    output = make_run.complete("host", *CUDA, "engine.precision=bf16", *options, ranks=1)
    assert "in host memory" in output
    make_run.complete("device", *CUDA, "engine.precision=bf16", options[0], ranks=1)
    # bf16 weights, and dropout that is seeded by the step: the same up to rounding in two kernels of AdamW.
    assert losses(make_run.folder("host")) == pytest.approx(losses(make_run.folder("device")), rel=2e-2)


@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_optimizers_of_whole_matrices_train_on_a_gpu(make_run, optimizer, stage):
    options = (*CUDA, "optim.lr=2e-2", "engine.precision=bf16", f"optim.kind={optimizer}", f"engine.zero_stage={stage}")
    make_run.complete("whole", *options, ranks=1)
    seen = losses(make_run.folder("whole"))
    assert seen[-1] < seen[0] - 0.1
