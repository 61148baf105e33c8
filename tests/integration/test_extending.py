"""The worked example of docs/extending.md, run as it stands there."""

import os
import subprocess
import sys

import pytest

from pretrain.tracking.audit import read_audit
from tests.helpers.documents import ROOT, read_blocks

TINY = [
    "model={preset: llama-tiny}",
    "batch={global_tokens: 384, seq_len: 96, micro: 2}",
    "optim.schedule.warmup_steps=1",
    "train.steps=3",
    "eval.every_steps=0",
    "engine={kind: single, zero_stage: 0, device: cpu}",
    "tracking={wandb: off}",
]


def test_the_example_of_a_new_attention_kernel_works(tmp_path, corpus):
    for block in read_blocks("docs/extending.md"):
        path = tmp_path / block.file
        path.parent.mkdir(exist_ok=True)
        path.write_text(block.text)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "."}

    def run(*arguments):
        done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    run("-m", "pytest", "-q", "my_lab/test_query_blocks.py", "--rootdir", ".")
    train = ["-m", "pretrain", "train", "my_lab/query_blocks.yaml", f"data.path={corpus}", *TINY]
    run(*train, "engine.attention=query_blocks")
    run(*train, "engine.attention=eager", "run.name=eager")
    ours, reference = (read_audit(tmp_path / "runs" / name / "audit.jsonl") for name in ("query-blocks", "eager"))
    assert len(ours) == 3
    for row, expected in zip(ours, reference, strict=True):
        assert row.digest == expected.digest
        # fp32, summed in another order: a few units in the last place of 24 bits.
        assert float.fromhex(row.loss) == pytest.approx(float.fromhex(expected.loss), rel=1e-5)
