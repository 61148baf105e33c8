"""A start up to its first step: the modules that a process imports, and the importer of each heavy package."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cli import run_cli
from tests.helpers.fork_server import ROOT
from tests.helpers.runs import RunMaker

HEAVY = (
    "torch._dynamo",
    "torch._inductor",
    "sympy",
    "transformers",
    "wandb",
    "boto3",
    "mlflow",
    "datasets",
    "rich.table",
    "deepspeed",
    "PIL",
)
"""Packages of hundreds of modules each, or for others than the first step."""
WATCHED = f"""
import json, os, sys, traceback
from pathlib import Path

HEAVY = {HEAVY}
importers = {{}}


class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in HEAVY:
            frames = [frame for frame in traceback.extract_stack() if "importlib" not in frame.filename]
            importers.setdefault(name, [f"{{frame.filename}}:{{frame.lineno}}" for frame in frames[-4:-1]])


sys.meta_path.insert(0, Watch())
before = set(sys.modules)
os.register_at_fork(after_in_child=lambda: before.update(sys.modules))

from torch.optim.optimizer import register_optimizer_step_post_hook


def note(*_):
    facts = {{
        "modules": len(sys.modules),
        "own": sorted(set(sys.modules) - before),
        "importers": {{name: importers.get(name) for name in HEAVY if sys.modules.get(name)}},
    }}
    Path(os.environ["NOTED"], os.environ["RANK"] + ".json").write_text(json.dumps(facts))
    hook.remove()


hook = register_optimizer_step_post_hook(note)
"""
"""An extension that notes the modules behind the first step of the optimizer."""


def noted(make_run: RunMaker, folder: Path, command: list[str], *overrides: str) -> list[dict]:
    """What each rank noted behind its first step."""
    (folder / "watched_start.py").write_text(WATCHED)
    arguments = [
        *command,
        str(make_run.config("start")),
        "extend=[watched_start]",
        "train.steps=1",
        "model.decoder.dropout=0",
        *overrides,
    ]
    done = run_cli(*arguments, cwd=folder, NOTED=str(folder))
    assert done.code == 0, done.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9].json"))]


def test_the_help_comes_without_the_parser_of_configs():
    """Every completion of a shell waits for the same imports."""
    command = [sys.executable, "-X", "importtime", "-m", "pretrain", "--help"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    names = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert not {"pydantic", "pydantic_core", "yaml", "numpy", "pretrain.run.folder"} & set(names)
    assert len(names) <= 400


ON_A_LOGIN_NODE = {
    "pretrain.shards.index": {"torch", "numpy"}, "pretrain.config.presets": {"torch"}, "pretrain.run.lease": {"torch"},
    "pretrain.plan.flops": {"torch"}, "pretrain.plan.memory": {"torch"}, "pretrain.plan.params": {"torch"},
    "pretrain.training.rollback": {"torch"},
}  # fmt: skip
"""Modules, and packages that must not come with them and those before."""


def test_what_a_login_node_reads_comes_without_torch():
    names = [*ON_A_LOGIN_NODE]
    code = f"import importlib, sys\nfor name in {names}:\n    importlib.import_module(name); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    for line, (name, heavy) in zip(done.stdout.splitlines(), ON_A_LOGIN_NODE.items(), strict=True):
        assert not heavy & set(line.split()), name


@pytest.mark.parametrize(
    ("engine", "most", "needed"),  # 3,256 and 4,582 where the compiler, transformers, boto3 and wandb were among them
    [
        ("{kind: single, zero_stage: 0}", 1_950, set()),
        pytest.param("{kind: deepspeed, zero_stage: 2}", 2_450, {"deepspeed"}, marks=pytest.mark.long),
    ],
)
def test_the_first_step_comes_without_packages_that_it_does_not_use(make_run, tmp_path, engine, most, needed):
    (facts,) = noted(make_run, tmp_path, ["train"], f"engine={engine}", "tracking.wandb=auto")
    assert facts["importers"].keys() == needed, facts["importers"]  # and the last lines on the way to each
    assert facts["modules"] <= most


def test_ranks_of_a_launcher_are_forks_that_import_next_to_nothing(make_run, tmp_path):
    ranks = noted(make_run, tmp_path, ["launch", "local", "--ranks", "2"], "tracking.wandb=auto")
    assert [rank["importers"].keys() for rank in ranks] == [{"deepspeed"}, {"deepspeed"}], ranks
    assert all(len(rank["own"]) <= 10 for rank in ranks), [rank["own"] for rank in ranks]
    assert all(rank["modules"] <= 2_450 for rank in ranks)
