"""The command line itself: help, completion, what it imports, and what `prepare`, `config` and `inspect` print."""

import contextlib
import json
import os
import pty
import re
import select
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import pretrain
from pretrain.config.load import load_config
from tests.helpers.cli import LIGHT, run_cli, run_light, run_warm
from tests.helpers.waiting import LIMIT_S

COMMANDS = [[], ["prepare"], ["config"], ["train"], ["launch"], ["launch", "local"], ["launch", "slurm"],
            ["launch", "manifest"], ["launch", "status"], ["launch", "logs"], ["launch", "cancel"],
            ["launch", "resubmit"], ["runs"],
            ["inspect"], ["generate"], ["classify"], ["import"], ["export"], ["serve"], ["average"], ["evaluate"],
            ["attention"], ["data"], ["data", "verify"], ["data", "show"], ["data", "stats"], ["data", "dialogue"],
            ["plan"], ["rollback"],
            ["release"], ["continue"], ["verify-release"], ["reproduce"],
            ["drill"], ["doctor"], ["report"], ["chat"], ["finetune"], ["distill"], ["embed"],
            ["pretrain"], ["translate"], ["quickstart"], ["recipes"], ["recipes", "cp"], ["presets"],
            ["scale"], ["scale", "plan"], ["scale", "run"], ["scale", "fit"], ["scale", "score"],
            ["scale", "coordinates"]]  # fmt: skip


def test_the_list_of_commands_under_test_is_complete():
    import typer.main

    from pretrain.cli import app

    group = typer.main.get_command(app)
    groups = {"launch", "data", "recipes", "scale"}
    names = {name for name in group.commands if name not in groups}
    names |= {f"{inner} {name}" for inner in groups for name in group.commands[inner].commands}
    assert names == {" ".join(words) for words in COMMANDS} - {"", *groups}


def test_flags_take_no_value_and_commands_are_grouped_by_use(tmp_path):
    done = run_light("--help", cwd=tmp_path)
    assert "<bool>" not in done.stdout
    panels = re.findall(r"\u256d\u2500 ([A-Z][a-z ]+) \u2500", done.stdout)
    assert panels == [
        "Options",
        "Begin",
        "Prepare data",
        "Train",
        "Follow runs",
        "Use models",
        "Share runs",
        "Check machines",
    ]
    assert "<bool>" not in run_light("inspect", "--help", cwd=tmp_path).stdout
    launch = run_light("launch", "--help", cwd=tmp_path).stdout
    assert re.findall(r"\u2502 ([a-z]+) ", launch) == [
        "local",
        "slurm",
        "manifest",
        "status",
        "logs",
        "cancel",
        "resubmit",
    ]


def test_a_quickstart_that_cannot_write_says_so_in_one_line(tmp_path):
    (tmp_path / "data").touch()
    done = run_light("quickstart", cwd=tmp_path)
    assert done.code == 74
    assert done.stderr == "error: data/stdlib: cannot create the folder: Not a directory; check the path\n"
    assert done.stdout == "\n$ pretrain prepare --output data/stdlib --vocab-size 2048\n"


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_is_shown(tmp_path, option):
    assert run_light(option, cwd=tmp_path).stdout == f"pretrain {pretrain.__version__}\n"


# What takes long to import; the seconds themselves would gate on the load of the machine.
@pytest.mark.parametrize(
    ("slow", "arguments", "code"),
    [
        ("torch,transformers,wandb", ["config", "configs/run/quickstart.yaml", "optim.lr=1"], 0),
        ("torch,transformers,wandb", ["config", "configs/run/quickstart.yaml", "optim.lrr=1"], 64),
        ("torch,numpy,transformers,wandb", ["plan", "configs/run/quickstart.yaml", "--search"], 0),
        ("torch,transformers,wandb", ["train", "configs/run/quickstart.yaml", "optim.lrr=1"], 64),
        ("torch,transformers,wandb", ["launch", "local", "configs/run/quickstart.yaml", "--ranks", "3"], 64),
        ("torch,transformers,wandb", ["launch", "local", "configs/run/quickstart.yaml", "--ranks", "2"], 65),
        ("torch,transformers,wandb", ["inspect", "."], 65),
        ("torch,transformers,wandb,PIL", ["prepare", "--input", "nope.txt", "--output", "out"], 65),
        ("torch,transformers", ["export", "run", "/"], 64),
        ("torch,transformers", ["import", "model", "/"], 64),
        ("torch,transformers", ["average", "run", "--last", "2", "--output", "/"], 64),
    ],
)
def test_what_a_login_node_runs_imports_nothing_slow(tmp_path, slow, arguments, code):
    done = run_light(*arguments, cwd=tmp_path, without=slow.split(","))
    assert done.code == code, done.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(words) or "pretrain")
def test_every_command_has_help_with_an_example_and_imports_nothing_slow(tmp_path, command):
    done = run_warm(*command, "--help", cwd=tmp_path, without=("torch", "numpy", "yaml"), server=LIGHT)
    assert (done.code, done.stderr) == (0, "")
    assert f"Example: pretrain {' '.join(command) or 'launch'}" in re.sub(r"\s+", " ", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["generat"], "pretrain: No such command 'generat'. Did you mean 'generate'?; see `pretrain --help`"),
        (["config"], "pretrain config: Missing argument 'CONFIG'; see `pretrain config --help`"),
        (["prepare"], "pretrain prepare: Missing option '--output'; see `pretrain prepare --help`"),
        (
            ["inspect", "x", "--jsn"],
            "pretrain inspect: No such option: --jsn (Possible options: --json); see `pretrain",
        ),
        (["launch", "local", "x", "--ranks", "0"], "pretrain launch local: Invalid value for '--ranks'"),
        (["launch", "slur"], "pretrain launch: No such command 'slur'"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_one_line(tmp_path, arguments, line):
    result = run_light(*arguments, cwd=tmp_path)
    assert result.code == 64
    assert result.stderr.startswith(f"error: {line}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [[], ["launch"]], ids=["pretrain", "launch"])
def test_no_command_at_all_gets_the_help(tmp_path, command):
    result = run_cli(*command, cwd=tmp_path)
    assert result.code == 64
    assert "Usage: pretrain" in result.stdout
    assert result.stderr == ""


KINDS = {"auto", "deepspeed", "ddp", "single"}


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("pretrain ", {" ".join(words) for words in COMMANDS if len(words) == 1}),
        ("pretrain pre", {"prepare", "presets", "pretrain"}),
        ("pretrain launch ", {"local", "slurm", "manifest", "status", "logs", "cancel", "resubmit"}),
        ("pretrain launch local x --ra", {"--ranks"}),
        ("pretrain prepare --tok", {"--tokenizer"}),
        ("pretrain train qu", {"quickstart"}),
        ("pretrain train mi", {"mine.yaml"}),
        ("pretrain prepare stdlib", {"stdlib_bert", "stdlib_t5"}),
        ("pretrain recipes cp prepare/mul", {"prepare/multi30k"}),
        ("pretrain train quickstart train.", {"train.steps=", "train.stop_after="}),
        ("pretrain launch local quickstart engine.k", {"engine.kind=", *(f"engine.kind={kind}" for kind in KINDS)}),
        ("pretrain train quickstart engine.kind =", KINDS),
        ("pretrain train quickstart engine.kind = d", KINDS - {"auto", "single"}),
        ("pretrain train quickstart engine.kind=s", {"engine.kind=single"}),
        ("pretrain train quickstart optim.kind = a", {"adamw", "adafactor"}),
        ("pretrain train quickstart objective.kind=m", {"objective.kind=masked", "objective.kind=masked_patches"}),
        ("pretrain train quickstart model.preset = llama3.1", {"llama3.1-8b", "llama3.1-70b"}),
        ("pretrain train quickstart train.steps=9 optim.lr", {"optim.lr="}),
        ("pretrain prepare text inputs.0.pa", {"inputs.0.path=", "inputs.0.paired_path="}),
        ("pretrain config --explain optim.lr", {"optim.lr"}),
        ("pretrain config --explain tokenizer.ki", {"tokenizer.kind"}),
        ("pretrain report ", {"runs/one"}),
        ("pretrain generate other/", {"other/two"}),
        ("pretrain inspect data", set()),
    ],
)
def test_the_shell_completes_commands_options_configs_keys_and_runs(tmp_path, words, offered):
    (tmp_path / "mine.yaml").touch()
    for run in ("runs/one", "other/two"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "run.json").touch()
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = run_light(cwd=tmp_path, _PRETRAIN_COMPLETE="complete_bash", **asked)
    assert set(done.stdout.split()) == offered


PRETRAIN = Path(sys.executable).with_name("pretrain")


@cache
def bash_script() -> str:
    """What `pretrain --show-completion` gives a bash to read."""
    source = {**os.environ, "_PRETRAIN_COMPLETE": "source_bash"}
    return subprocess.run([PRETRAIN], env=source, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout


def type_in_bash(folder: Path, line: str) -> str:
    """What a terminal with bash shows of a line, completed at its end by a tab and entered."""
    command = folder / "bin/pretrain"
    command.parent.mkdir()
    command.write_text(f'#!/bin/bash\n[ "$_PRETRAIN_COMPLETE" ] && exec "{PRETRAIN}"\nprintf "<%s>" "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "INPUTRC": "/dev/null"}
    (folder / "bin/rc").write_text(f"PS1=\n{bash_script()}\n")
    terminal, inside = pty.openpty()
    bash = subprocess.Popen(
        ["bash", "--noprofile", "--rcfile", "bin/rc", "-i"],
        cwd=folder,
        env=environment,
        stdin=inside,
        stdout=inside,
        stderr=inside,
    )
    os.close(inside)
    os.write(terminal, f"{line}\t\nexit\n".encode())
    shown = b""
    with contextlib.suppress(OSError):  # no bytes are left, and bash has ended
        while select.select([terminal], [], [], LIMIT_S)[0]:
            shown += os.read(terminal, 4096)
    os.close(terminal)
    bash.kill()
    bash.wait()
    return shown.decode()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train my", ["train", "my run.yaml"]),
        ("train 'my", ["train", "my run.yaml"]),
        pytest.param('train "my', ["train", "my run.yaml"], marks=pytest.mark.long),
        ("train my\\ r", ["train", "my run.yaml"]),
        ("train it", ["train", "it's $HOME.yaml"]),
        pytest.param("train 'it", ["train", "it's $HOME.yaml"], marks=pytest.mark.long),
        ('train "it', ["train", "it's $HOME.yaml"]),
        ("train 'my run.yaml' engine.kind=si", ["train", "my run.yaml", "engine.kind=single"]),
        pytest.param("train my\\ configs/", ["train", "my configs/other one.yaml"], marks=pytest.mark.long),
        ("generate my\\ runs/", ["generate", "my runs/one"]),
        ('generate "my runs/', ["generate", "my runs/one"]),
    ],
)
def test_bash_inserts_a_name_with_spaces_or_quotes_as_one_word(tmp_path, line, words):
    for name in ("my run.yaml", "it's $HOME.yaml", "my configs/other one.yaml", "my runs/one/run.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    shown = type_in_bash(tmp_path, f"pretrain {line}")
    assert "".join(f"<{word}>" for word in words) in shown, shown


def test_what_is_built_in_is_listed_and_a_recipe_copied(tmp_path):
    done = run_warm("recipes", cwd=tmp_path, without=("torch", "numpy", "yaml"), server=LIGHT)
    listed = done.stdout
    assert re.search(r"^quickstart +Decoder of 1.6M parameters on Python source, by Muon", listed, re.MULTILINE)
    names = [one["name"] for one in json.loads(run_light("recipes", "--json", cwd=tmp_path).stdout)]
    assert {"run/quickstart", "finetune/chat", "prepare/chat", "engine/zero2"} <= set(names)
    presets = run_light("presets", "--vocab-size", "128256", cwd=tmp_path, without=("torch", "numpy")).stdout
    assert presets.splitlines()[0].split()[-2:] == ["V", "size"]
    assert re.search(r"^llama3-8b +decoder +32 +4096 +32 +8192 +128,256 +8.03 B *$", presets, re.MULTILINE)
    presets = run_light("presets", cwd=tmp_path, without=("torch", "numpy")).stdout
    assert re.search(r"^modded-2m .* 2,048 +1.59 M *$", presets, re.MULTILINE)
    assert re.search(r"^qwen3-0.6b .* 151,936 +596 M *$", presets, re.MULTILINE)
    done = run_light("recipes", "cp", "quickstart", "mine.yaml", cwd=tmp_path)
    assert "\npretrain train mine.yaml; " in done.stdout
    config = run_light("config", "mine.yaml", cwd=tmp_path).stdout
    assert config == run_light("config", "quickstart", "run.name=mine", cwd=tmp_path).stdout


def test_a_shortened_run_is_taken_and_its_warm_up_is_cut_with_a_warning(tmp_path):
    result = run_light("config", "quickstart", "train.steps=8", cwd=tmp_path)
    assert result.stderr == (
        "warning: the warm-up of 10 steps is cut to 2, as the schedule has 8 steps in all; "
        "set optim.schedule.warmup_steps=2, or raise train.steps\n"
    )
    assert "warmup_steps: 10," in result.stdout, "what was asked for"


def test_a_resolved_config_loads_as_the_same(tmp_path):
    result = run_cli("config", "configs/run/quickstart.yaml", "optim.lr=1e-4", "run.name=no", cwd=tmp_path)
    (tmp_path / "a.yaml").write_text(result.stdout)
    assert result.stderr == ""
    expected = load_config("configs/run/quickstart.yaml", ["optim.lr=1e-4", "run.name=no"])
    assert load_config(tmp_path / "a.yaml") == expected


@pytest.fixture
def texts(tmp_path) -> Path:
    """A folder with three texts."""
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"the text of {name}, " * 50)
    return tmp_path


def test_prepare_says_what_it_made_and_a_second_run_that_there_is_nothing_to_do(texts):
    command = ["prepare", "--input", "*.txt", "--output", "out", "--tokenizer", "char", "--split", "tail:0.1"]
    command += ["--processes", "1"]  # those of a pool import for seconds each; the quickstart has one
    first, second = (run_warm(*command, cwd=texts) for _ in range(2))
    facts = json.loads(run_warm("inspect", "out", "--json", cwd=texts).stdout)
    train, validation = facts["train"], facts["validation"]
    assert (first.code, second.code) == (0, 0)
    assert first.stdout == second.stdout
    assert re.fullmatch(
        rf"out: {train['tokens']:,} training tokens, {validation['tokens']:,} validation tokens, "
        rf"3 documents, \d\.\d\d bytes per token\n",
        first.stdout,
    )
    assert "nothing to do" not in first.stderr
    assert "out is complete: nothing to do" in second.stderr


def test_a_glob_that_the_shell_expanded_means_what_it_says(texts):
    common = ["--tokenizer", "char", "--split", "tail:0.1", "--processes", "1"]
    expanded = ["--input", "a.txt", "b.txt", "c.txt", "--output", "expanded", *common]
    assert run_warm("prepare", *expanded, cwd=texts).code == 0
    assert run_warm("prepare", "--input", "*.txt", "--output", "quoted", *common, cwd=texts).code == 0
    assert (texts / "expanded/index.json").read_bytes() == (texts / "quoted/index.json").read_bytes()


def test_inspect_prints_json_that_a_program_can_read(texts):
    prepare = ("prepare", "--input", ".", "--output", "out", "--tokenizer", "char", "--processes", "1")
    assert run_warm(*prepare, cwd=texts).code == 0
    facts = json.loads(run_warm("inspect", "out", "--json", cwd=texts).stdout)
    assert (facts["kind"], facts["dtype"]) == ("shards", "uint16")
    table = run_warm("inspect", "out", cwd=texts)
    assert table.code == 0
    assert f"{facts['train']['tokens']:,}" in table.stdout


def test_an_option_that_is_a_key_is_answered_with_the_override(tmp_path):
    (line,) = run_light("train", "quickstart", "--steps", "3", cwd=tmp_path).errors
    assert line == "pretrain train: No such option: --steps: write train.steps=VALUE; see `pretrain train --help`"
    (line,) = run_light("train", "quickstart", "--seq-len", "3", cwd=tmp_path).errors
    assert "No such option: --seq-len: write batch.seq_len=VALUE; see" in line
    (line,) = run_light("prepare", "--labels", "a", cwd=tmp_path).errors
    assert line.startswith("pretrain prepare: No such option: --labels: write labels=VALUE after a CONFIG; see")
    (line,) = run_light("prepare", "kind=pairs", "output=x", cwd=tmp_path).errors
    assert line.startswith("kind=pairs: an override without a config before it; name a YAML file, or a recipe")
    (line,) = run_light("train", "quickstart", "--hepl", cwd=tmp_path).errors
    assert line == "pretrain train: No such option: --hepl; see `pretrain train --help`"


def test_an_option_of_another_command_is_no_key_of_that_name(tmp_path):
    (line,) = run_light("plan", "quickstart", "--ranks", "8", cwd=tmp_path).errors
    assert line == "pretrain plan: No such option: --ranks: write --gpus-per-node; see `pretrain plan --help`"
    (line,) = run_light("train", "quickstart", "--ranks", "2", cwd=tmp_path).errors
    assert "No such option: --ranks: `pretrain launch local` has it; see" in line
    (line,) = run_light("train", "quickstart", "--temperature", "2", cwd=tmp_path).errors
    assert line == "pretrain train: No such option: --temperature; see `pretrain train --help`"


def test_the_traceback_of_an_error_is_shown_on_request_only(tmp_path):
    assert "Traceback" not in run_light("config", "nope.yaml", cwd=tmp_path).stderr
    shown = run_light("--debug", "config", "nope.yaml", cwd=tmp_path)
    assert shown.code == 64
    assert "Traceback" in shown.stderr
    (line,) = shown.errors
    assert line.startswith("nope.yaml: no such config file; check the path")


POLICY, MEMORY = "OMP_WAIT_POLICY", "PYTORCH_ALLOC_CONF"


@pytest.mark.parametrize(
    ("environment", "policy", "memory"),
    [
        ({}, "PASSIVE", "expandable_segments:True"),
        ({POLICY: "ACTIVE", MEMORY: "backend:native"}, "ACTIVE", "backend:native"),
        ({"GOMP_SPINCOUNT": "9", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "None", "None"),
    ],
)
def test_threads_and_memory_have_defaults_unless_the_user_says_how(tmp_path, environment, policy, memory):
    names = f"os.environ.get('{POLICY}'), os.environ.get('{MEMORY}')"
    (tmp_path / "told.py").write_text(f"import os\nprint('told:', {names})\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result = run_cli("--extend", "told", "config", "quickstart", cwd=tmp_path, PYTHONPATH=path, **environment)
    assert result.code == 0 and f"told: {policy} {memory}\n" in result.stdout, result.stderr


def test_a_fork_has_the_environment_of_the_test_that_asks_for_it(tmp_path, monkeypatch):
    for code in (3, 4):  # the process that forks is the same
        monkeypatch.setenv("CODE", str(code))
        shell = {"args": ["sh", "-c", "exit $CODE"]}
        pids = LIGHT.start("subprocess:call", [shell], [(tmp_path / "out", tmp_path / "err")])
        assert LIGHT.wait(pids) == [code]
