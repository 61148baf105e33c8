"""The worked example of docs/extending.md, run as it stands there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from pretrain.tracking.audit import read_audit
from tests.helpers.cli import run_warm
from tests.helpers.documents import ROOT, read_blocks
from tests.unit.artifact.runs import TEXTS, write_text_run, write_texts

TINY = [
    "model={preset: llama-tiny}",
    "batch={global_tokens: 384, seq_len: 96, micro: 2}",
    "optim.schedule.warmup_steps=1",
    "train.steps=3",
    "eval.every_steps=0",
    "engine={kind: single, zero_stage: 0, device: cpu}",
    "tracking={wandb: off}",
]
OPENING = {
    "generate": ["generate", ".", "--prompt", "x"],
    "export": ["export", ".", "out"],
    "evaluate": ["evaluate", "."],
    "attention": ["attention", ".", "--text", "x", "--json"],
    "plan": ["plan", "config.yaml"],
    "config": ["config", "config.yaml"],
    "show": ["data", "show", "."],
    "drill": ["drill", "config.yaml"],
    "manifest": ["launch", "manifest", "config.yaml"],
    "dry run": ["launch", "slurm", "config.yaml", "--dry-run"],
    "doctor": ["doctor", "config.yaml"],
}


@pytest.mark.long
def test_the_example_of_a_new_attention_kernel_works(tmp_path, corpus):
    for block in read_blocks("docs/extending.md"):
        if not block.file.startswith("my_lab/"):
            continue
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


MOST_FILES = {"objective": 3, "optimizer": 3}
"""Source files that an arrival opens; with a test and a page an objective has 5, an optimizer 4."""


@pytest.mark.long
def test_an_objective_and_an_optimizer_arrive_as_the_document_says(tmp_path, corpus):
    for name in ("pretrain", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    opened: dict[str, set[str]] = {"objective": set(), "optimizer": set()}
    for block in read_blocks("docs/extending.md"):
        if not block.file or block.file.startswith("my_lab/"):
            continue
        opened["objective" if "objective" in block.file else "optimizer"].add(block.file)
        path = tmp_path / "pretrain" / block.file
        if block.language == "python":
            assert not path.exists()
            path.write_text(block.text)
            continue
        text, anchor = path.read_text(), ""
        for line in block.text.splitlines():
            if line.startswith("+"):
                text = text.replace(f"{anchor}\n", f"{anchor}\n{line[1:]}\n")
            else:
                anchor = line[1:]
                assert text.count(f"{anchor}\n") == 1, anchor
        path.write_text(text)
    assert {kind: len(files) for kind, files in opened.items()} == MOST_FILES
    command = [sys.executable, "-m", "pretrain", "train", "quickstart", *TINY, f"data.path={corpus}", "optim.muon=null"]
    done = subprocess.run(
        [*command, "objective.kind=echo", "optim.kind=momentum", "optim.lr=0.1", "train.steps=30"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float.fromhex(row.loss) for row in read_audit(tmp_path / "runs/quickstart/audit.jsonl")]
    assert len(losses) == 30 and losses[-1] < losses[0] - 0.5


@pytest.mark.long
def test_a_module_may_add_an_objective_and_an_optimizer(tmp_path, corpus):
    (tmp_path / "lab.py").write_text(
        "from pretrain.kinds.objectives import OBJECTIVES, Objective\n"
        "from pretrain.kinds.optimizers import OPTIMIZERS, Optimizer\n"
        "OBJECTIVES['next'] = Objective(shapes=('decoder',), data=('text',), rows='lab:build_rows')\n"
        "OPTIMIZERS['adam'] = Optimizer(build='lab:build_momentum', moments=('momentum_buffer',))\n"
        "def build_rows(section, context):\n"
        "    from pretrain.objective.causal import build_causal\n"
        "    return build_causal(section, context)\n"
        "def build_momentum(groups, config, device):\n"
        "    from torch.optim import SGD\n"
        "    from pretrain.optim.rules import torch_groups\n"
        "    return SGD(torch_groups(groups, config), lr=config.lr, momentum=config.beta1)\n"
    )
    command = [str(Path(sys.executable).with_name("pretrain")), "train", "configs/run/quickstart.yaml", *TINY]
    names = ["objective.kind=next", "optim.kind=adam", "optim.muon=null"]
    run = subprocess.run(
        [*command, f"data.path={corpus}", "extend=[lab]", *names], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (weights,) = tmp_path.glob("runs/**/step-00000003/*.safetensors")
    with safe_open(weights, "pt") as saved:
        names_of_state = {key.rpartition("/")[2].partition("@")[0] for key in saved.keys()}  # noqa: SIM118
    assert names_of_state == {"weight", "momentum_buffer"}
    refused = run_warm(*command[1:], *names, cwd=tmp_path)
    assert refused.code == 64
    assert "unknown name 'next'; use prefix, or add it by a module under extend" in refused.stderr
    assert (
        "unknown name 'adam'; use adafactor or adamw or lion or muon or soap, or add it by a module under extend"
        in refused.stderr
    )


@pytest.fixture(scope="module")
def foreign_run(tmp_path_factory):
    """The run folder of somebody else, with a module that the config names beside it."""
    folder = tmp_path_factory.mktemp("foreign")
    write_texts(folder / "texts", TEXTS * 8)
    write_text_run(folder / "run", folder / "texts", "llama-tiny", "causal")
    (folder / "run/foreign_module.py").write_text("open('executed', 'w')\n")
    config = folder / "run/config.yaml"
    config.write_text(config.read_text().replace("extend: []", "extend: [foreign_module]"))
    return folder / "run"


@pytest.mark.parametrize("command", OPENING)
def test_a_run_that_is_only_opened_executes_no_module_of_its_own(foreign_run, warm, command):
    done = warm(*OPENING[command], cwd=foreign_run)
    assert done.code == 64, done.stderr
    assert (
        "config.yaml" in done.stderr and "extend: the module 'foreign_module' may be code of a stranger" in done.stderr
    )
    assert "pretrain --extend 'foreign_module' COMMAND" in done.stderr
    assert not (foreign_run / "executed").exists()


def test_a_module_of_a_run_is_imported_where_the_command_line_names_it(foreign_run, warm, tmp_path):
    (tmp_path / "foreign_module.py").write_text("open('imported', 'w')\n")
    command = ["generate", str(foreign_run), "--prompt", "x", "--max-tokens", "1"]
    done = warm("--extend", "foreign_module", *command, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.code == 0, done.stderr
    assert (tmp_path / "imported").exists()
    run = foreign_run.parent / "moved"
    shutil.copytree(foreign_run, run)
    shown = ["launch", "manifest", str(run / "config.yaml"), "--volume", f"runs:{run.parent}"]
    job = warm("--extend", "foreign_module", *shown, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert job.code == 0 and f"dir: {run.parent}" in job.stdout, job.stderr  # where the run is today
    absent = warm("--extend", "no_such_module", *command, cwd=tmp_path)
    assert (absent.code, absent.errors[0]) == (
        64,
        "--extend: extend: there is no module 'no_such_module'; correct the name, or put its folder on PYTHONPATH",
    )
