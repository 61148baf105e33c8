"""The worked example of docs/extending.md, run as it stands there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.tracking.audit import read_audit
from tests.helpers.cli import run_warm
from tests.helpers.documents import read_blocks

TINY = [
    "model={preset: llama-tiny}",
    "batch={global_tokens: 384, seq_len: 96, micro: 2}",
    "optim.schedule.warmup_steps=1",
    "train.steps=3",
    "eval.every_steps=0",
    "engine={kind: single, zero_stage: 0, device: cpu}",
    "tracking={wandb: off}",
]


@pytest.mark.long
def test_the_example_of_a_new_attention_kernel_works(tmp_path, corpus):
    for block in read_blocks("docs/extending.md"):
        path = tmp_path / block.file
        path.parent.mkdir(exist_ok=True)
        path.write_text(block.text)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(*command):
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    run(sys.executable, "-m", "pytest", "-q", "my_lab/test_query_blocks.py", "--rootdir", ".")
    # Not `-m pretrain`, which would put the current folder on the path by itself.
    train = [
        str(Path(sys.executable).with_name("pretrain")),
        "train",
        "my_lab/query_blocks.yaml",
        f"data.path={corpus}",
        *TINY,
    ]
    run(*train, "engine.attention=query_blocks")
    run(*train, "engine.attention=eager", "run.name=eager")
    ours, reference = (read_audit(tmp_path / "runs" / name / "audit.jsonl") for name in ("query-blocks", "eager"))
    assert len(ours) == 3
    for row, expected in zip(ours, reference, strict=True):
        assert row.digest == expected.digest
        # fp32, summed in another order: a few units in the last place of 24 bits.
        assert float.fromhex(row.loss) == pytest.approx(float.fromhex(expected.loss), rel=1e-5)


@pytest.mark.long
def test_a_module_may_add_an_objective_and_an_optimizer(tmp_path, corpus):
    (tmp_path / "lab.py").write_text(
        "from pretrain.config.objective import NEEDS\n"
        "from pretrain.config.optim import OPTIMIZER_KINDS\n"
        "from pretrain.objective import OBJECTIVES\n"
        "from pretrain.optim.build import OPTIMIZERS\n"
        "NEEDS['next'] = NEEDS['causal']\n"
        "OBJECTIVES['next'] = OBJECTIVES['causal']\n"
        "OPTIMIZER_KINDS.add('adam')\n"
        "OPTIMIZERS['adam'] = OPTIMIZERS['adamw']\n"
    )
    command = [str(Path(sys.executable).with_name("pretrain")), "train", "configs/run/quickstart.yaml", *TINY]
    names = ["objective.kind=next", "optim.kind=adam"]
    run = subprocess.run(
        [*command, f"data.path={corpus}", "extend=[lab]", *names], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    refused = run_warm(*command[1:], *names, cwd=tmp_path)
    assert refused.code == 64
    assert "unknown name 'next'; use prefix, or add it by a module under extend" in refused.stderr
    assert "unknown name 'adam'; use adamw or adafactor, or add it by a module under extend" in refused.stderr
