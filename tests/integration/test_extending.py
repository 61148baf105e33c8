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


ARRIVALS = {
    "An objective": ["kinds/objectives/__init__.py", "kinds/objectives/echo.py", "objective/echo.py"],
    "An array of a batch": ["rows.py"],
    "An optimizer": ["kinds/optimizers/__init__.py", "kinds/optimizers/momentum.py", "optim/momentum.py"],
    "A family": ["families/__init__.py", "families/decoders/starcoder2.py"],
    "A part of the model": [
        *("config/model/parts/feedforward.py", "config/model/stack.py"),
        *("families/unreleased.py", "model/parts/feedforward.py"),
    ],
}
"""Source files that an arrival opens, by the section of the document; a test and a page come to them."""
FAMILY = "families/decoders/starcoder2.py"

READING_AGES = """
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import torch
from pretrain.config.data import BatchConfig, plan_batch
from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.lengths import RowLengths
from pretrain.config.model import parse_model
from pretrain.config.objective import ObjectiveConfig
from pretrain.config.presets import expand_preset
from pretrain.data.loader import TrainLoader
from pretrain.data.mixture import MixtureOrder, MixtureStream
from pretrain.data.stream import TokenStream
from pretrain.model import build_model
from pretrain.objective import build_loss, build_rows
from pretrain.objective.row_maker import RowContext
from pretrain.rows import Vocabulary
from pretrain.shards.index import load_index

index = load_index(Path(sys.argv[1]))
texts = TokenStream(Path(sys.argv[1]), index, "train", seq_len=16)

def read(positions):
    rows = texts.read(positions)
    return replace(rows, ages_B=rows.tokens_BT[:, 0].astype(np.int64))

stream = MixtureStream([SimpleNamespace(read=read)] * 2, MixtureOrder([(0, [0.4, 0.6])]))
objective = ObjectiveConfig(mixture=[{"kind": "causal", "weight": 1}, {"kind": "prefix", "weight": 1}])
vocabulary = Vocabulary(index.vocab_size, index.eos_id, np.zeros(index.vocab_size, bool))
make_rows = build_rows(objective, RowContext(1, vocabulary, RowLengths(16, 16)))
plan = plan_batch(BatchConfig(global_tokens=256, seq_len=16, micro=16), 1)
loader = TrainLoader(stream, make_rows, plan, rank=0, world_size=1, length_at=lambda step: 8)
(batch,) = next(loader).micro_batches
loader.close()
shape = parse_model(expand_preset({"preset": "llama-tiny", "vocab_size": index.vocab_size}))
model = build_model(shape, PLAIN_ENGINE, torch.device("cpu"))

def check(module, inputs):
    (read,) = inputs
    print(read.ages_B[::2].tolist() == read.tokens_BT[::2, 0].tolist())

model.register_forward_pre_hook(check)
build_loss(objective)(model, batch.to(torch.device("cpu")))
"""


def blocks_of(section):
    return [block for block in read_blocks("docs/extending.md", section) if block.file]


def with_change(text, change):
    """Applies a `diff`: lines behind a line of context, or in the place of lines; each of these is there once."""
    lines = text.splitlines()
    at = 0
    for line in change.splitlines():
        if line.startswith("+"):
            lines.insert(at, line[1:])
            at += 1
            continue
        assert lines.count(line[1:]) == 1, line
        at = lines.index(line[1:])
        if line.startswith("-"):
            del lines[at]
        else:
            at += 1
    return "\n".join(lines) + "\n"


def arrive(section, root):
    """Writes the blocks of a section below `root`, a copy of `pretrain/`."""
    for block in blocks_of(section):
        path = root / block.file
        if block.language == "python":
            assert not path.exists()
            path.write_text(block.text)
        else:
            path.write_text(with_change(path.read_text(), block.text))


def leave(section, root):
    """Takes the changes of a section back."""
    for block in blocks_of(section):
        path, lines = root / block.file, block.text.splitlines()
        added = [f"-{line[1:]}" for line in lines if line.startswith("+")]
        removed = [f"+{line[1:]}" for line in lines if line.startswith("-")]
        path.write_text(with_change(path.read_text(), "\n".join([*added, *removed])))


@pytest.fixture
def copied(tmp_path):
    for name in ("pretrain", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def run_in(folder, *command, by="-m"):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, by, *command], cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("section", ARRIVALS)
def test_an_arrival_opens_so_many_files_and_its_changes_fit_them(section, tmp_path):
    files = {block.file for block in blocks_of(section)}
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / "pretrain" / file).exists():
            shutil.copy(ROOT / "pretrain" / file, tmp_path / file)
    if section == "A family":
        leave(section, tmp_path)
        files.add(FAMILY)
    arrive(section, tmp_path)
    assert sorted(files) == sorted(ARRIVALS[section])


@pytest.mark.long
def test_an_objective_and_an_optimizer_arrive_as_the_document_says(copied, corpus):
    for section in ("An objective", "An optimizer"):
        arrive(section, copied / "pretrain")
    command = ["pretrain", "train", "quickstart", *TINY, f"data.path={corpus}", "optim.muon=null"]
    choices = ["objective.kind=echo", "optim.kind=momentum", "optim.lr=0.1", "train.steps=30"]
    done = run_in(copied, *command, *choices)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float.fromhex(row.loss) for row in read_audit(copied / "runs/quickstart/audit.jsonl")]
    assert len(losses) == 30 and losses[-1] < losses[0] - 0.5


@pytest.mark.long
def test_an_array_of_the_data_is_at_the_model_with_one_line(copied, corpus):
    arrive("An array of a batch", copied / "pretrain")
    done = run_in(copied, READING_AGES, corpus, by="-c")
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@pytest.mark.long
def test_a_family_arrives_as_the_document_says(copied):
    leave("A family", copied / "pretrain")
    file = copied / "pretrain" / FAMILY
    text = file.read_text()
    file.unlink()
    from tests.helpers.theirs import build_theirs  # transformers, for this test alone

    build_theirs("starcoder2").save_pretrained(copied / "theirs")
    refused = run_in(copied, "pretrain", "import", "theirs", "ours")
    assert refused.returncode == 64
    assert "starcoder2" in refused.stderr and "the nearest family" in refused.stderr
    arrive("A family", copied / "pretrain")
    file.write_text(text)
    for command in (["import", "theirs", "ours"], ["export", "ours", "out"]):
        done = run_in(copied, "pretrain", *command)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "starcoder2" in (copied / "out/config.json").read_text()


@pytest.mark.long
def test_a_part_of_the_model_arrives_as_the_document_says(copied, corpus):
    arrive("A part of the model", copied / "pretrain")
    shutil.copytree(ROOT / "tests", copied / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copied)
    counts = run_in(copied, "pytest", "tests/unit/plan/test_counts.py", "-k", "gain-tiny", "-p", "no:cacheprovider")
    assert counts.returncode == 0 and "3 passed" in counts.stdout, counts.stdout + counts.stderr
    run = run_in(copied, "pretrain", "train", "quickstart", *TINY, f"data.path={corpus}", "model={preset: gain-tiny}")
    assert run.returncode == 0, run.stdout + run.stderr
    refused = run_in(copied, "pretrain", "export", "runs/quickstart", "out")
    assert refused.returncode == 64 and "output_gain" in refused.stderr, refused.stdout + refused.stderr


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
