"""What the README tells a newcomer to type, typed: in a fresh clone, with an empty HOME and no environment active.

The distributions too: built from that clone, installed elsewhere, used from an empty folder.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretrain.errors import EXIT_OK, EXIT_RESUME_ME
from pretrain.tracking.audit import read_audit
from tests.helpers.documents import ROOT, pretrain_arguments, read_blocks, read_commands

pytestmark = pytest.mark.long


class Newcomer:
    """A clone of the last commit, and an environment with nothing of ours in it."""

    def __init__(self, folder: Path) -> None:
        self.clone = folder / "pretrain"
        home = folder / "home"
        home.mkdir()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(self.clone)], check=True)
        outside = [part for part in os.environ["PATH"].split(":") if not Path(part).is_relative_to(sys.prefix)]
        # How packages are found is the user's set-up, and a cache saves downloading torch twice; nothing else is kept.
        pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        cache = Path("~/.cache/pip").expanduser()
        self._env = {
            "PIP_CACHE_DIR": str(cache),
            **pip,
            "HOME": str(home),
            "PATH": ":".join(outside),
            "PYTHON": sys._base_executable,
        }

    def run(self, command: str, *, activated: bool = False, cwd: Path | None = None, **env: str) -> str:
        """Runs a shell command, in the clone or in another folder; returns what it printed. Fails where it does."""
        path = f"{self.clone}/.venv/bin:{self._env['PATH']}" if activated else self._env["PATH"]
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=cwd or self.clone,
            env={**self._env, "PATH": path, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout[-6000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory) -> Iterator[Newcomer]:
    newcomer = Newcomer(tmp_path_factory.mktemp("newcomer"))
    yield newcomer
    shutil.rmtree(newcomer.clone / ".venv", ignore_errors=True)  # gigabytes, which pytest would keep three times


def test_the_quickstart_prepares_trains_stops_resumes_and_generates(newcomer):
    output = newcomer.run("make quickstart")
    train = "pretrain launch local quickstart --ranks 2"
    shown = [line[2:] for line in output.splitlines() if line.startswith("$ ")]
    prompt = "class Reader:\n    def"
    drawn = "--top-p 0.9 --repetition-penalty 1.1"
    generate = f"pretrain generate runs/quickstart --prompt '{prompt}' {drawn}"
    prepare = "pretrain prepare --output data/stdlib --vocab-size 2048"
    report = "pretrain report runs/quickstart --output runs/quickstart/report.html"
    assert shown == [prepare, train, train, generate.splitlines()[0], report]
    assert "-- the quickstart is over, after " in output and (newcomer.clone / report.split()[-1]).is_file()
    assert output.rpartition(f"$ {generate}\n")[2].startswith(prompt)

    run = newcomer.clone / "runs/quickstart"
    attempts = json.loads((run / "run.json").read_text())["attempts"]
    assert [attempt["exit_code"] for attempt in attempts] == [EXIT_RESUME_ME, EXIT_OK]
    assert "DeepSpeed ZeRO-2" in attempts[0]["engine"] and attempts[0]["world_size"] == 2
    audit = read_audit(run / "audit.jsonl")
    assert [row.step for row in audit] == list(range(1, 701))
    assert {row.attempt for row in audit} == {1, 2}
    assert attempts[1]["from_step"] == sum(row.attempt == 1 for row in audit)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    validation = [row["val_loss"] for row in rows if "val_loss" in row]
    # A uniform guess over 2048 tokens is 7.62.
    assert validation == sorted(validation, reverse=True) and validation[-1] < 3.3
    assert (run / "wandb/SYNC.txt").is_file()


def test_a_second_quickstart_finds_nothing_to_train(newcomer):
    before = (newcomer.clone / "runs/quickstart/audit.jsonl").read_bytes()
    output = newcomer.run("make quickstart")
    assert "is complete: nothing to do" in output
    assert "runs/quickstart is finished" in output
    assert "pip install" not in output
    assert (newcomer.clone / "runs/quickstart/audit.jsonl").read_bytes() == before


def test_the_commands_of_the_readme_run_in_order(newcomer):
    """As written, with 2 ranks for 8, and each attempt ended two steps after the one before."""
    newcomer.run("make .venv/.run")  # there after a quickstart, but not where this test runs alone
    extras = "--editable '.[gguf,onnx]'"  # docs/release.md names them before its exports
    newcomer.run(f"python -m pip install --quiet --constraint .ci/constraints.txt {extras}", activated=True)
    shutil.copytree(newcomer.clone / "pretrain", newcomer.clone / "corpus")
    (config,) = [block.text for block in read_blocks("README.md") if block.language == "yaml"]
    (newcomer.clone / "mine.yaml").write_text(config)
    attempts, outputs = 0, {}
    documents = ("README.md", "docs/train.md", "docs/release.md", "docs/released_runs.md")
    for line in [line for document in documents for line in read_commands(document)]:
        command = re.sub(r"(--ranks|--nproc-per-node|--num_processes|--num_gpus) 8", r"\1 2", line)
        if pretrain_arguments(line)[0] in ("train", "launch"):
            attempts += 1
            command += f" train.stop_after={2 * attempts}"
        elif pretrain_arguments(line)[0] == "continue":
            command += f" train.stop_after={2 * attempts + 2}"
        # The deepspeed launcher counts GPUs by itself, unless it is told that there are none to count.
        outputs[line] = newcomer.run(command, activated=True, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    assert attempts >= 5

    run = newcomer.clone / "runs/mine"
    record = json.loads((run / "run.json").read_text())["attempts"]
    assert [attempt["from_step"] for attempt in record] == [2 * number for number in range(attempts)]
    assert {attempt["exit_code"] for attempt in record} == {EXIT_OK}
    assert [row.step for row in read_audit(run / "audit.jsonl")] == list(range(1, 2 * attempts + 1))
    (sample,) = [output for line, output in outputs.items() if " generate " in line]
    assert "Once" in sample

    named = [line.split() for line in (ROOT / "docs/train.md").read_text().splitlines()]
    named = [words[0] for words in named if words and words[0].startswith("runs/mine/")]
    assert len(named) == 10
    missing = [path for path in named if not (newcomer.clone / path).exists()]
    assert missing == ["runs/mine/bad_step.json"]  # every step was finite


def test_the_shards_are_read_with_webdataset_alone(newcomer):
    (code,) = [block.text for block in read_blocks("docs/data.md") if block.language == "python"]
    (newcomer.clone / "read.py").write_text(code)
    output = newcomer.run("python read.py", activated=True, WDS_SECURE="1")
    assert re.match(r"\d+ tokens, \d+ documents: ", output)


def test_the_sdist_and_the_wheel_install_alike_and_run_the_quickstart_by_name(newcomer, tmp_path):
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", tmp_path], cwd=newcomer.clone, check=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    (wheel,) = tmp_path.glob("*.whl")
    folder = tmp_path / "empty"
    folder.mkdir()
    try:
        newcomer.run(f'"$PYTHON" -m venv {tmp_path}/venv')
        pip = f"{tmp_path}/venv/bin/python -m pip install"
        newcomer.run(f"{pip} --constraint .ci/constraints.txt '{sdist}[deepspeed]'", cwd=newcomer.clone)
        (record,) = tmp_path.glob("venv/lib/*/site-packages/pretrain_transformers-*.dist-info/RECORD")
        of_sdist = _files_of(record)
        newcomer.run(f"{pip} --force-reinstall --no-deps {wheel}", cwd=folder)
        assert _files_of(record) == of_sdist and len(of_sdist) > 300
        output = newcomer.run("../venv/bin/pretrain quickstart", cwd=folder)
        assert "the same command continues" in output and "700/700" in output
        assert output.rpartition("--repetition-penalty 1.1\n")[2].startswith("class Reader:\n    def")
        assert sorted(path.name for path in folder.iterdir()) == ["data", "runs"]
    finally:
        shutil.rmtree(tmp_path / "venv", ignore_errors=True)


def test_uv_plans_the_pinned_versions(newcomer, tmp_path):
    newcomer.run(f'"$PYTHON" -m venv {tmp_path}/venv && {tmp_path}/venv/bin/pip install --quiet uv')
    uv = f"UV_SYSTEM_CERTS=1 {tmp_path}/venv/bin/uv"
    install = "--constraint .ci/constraints.txt --editable '.[deepspeed]'"
    output = newcomer.run(f"{uv} venv {tmp_path}/env && {uv} pip install --python {tmp_path}/env --dry-run {install}")
    pins = set((newcomer.clone / ".ci/constraints.txt").read_text().split())
    planned = set(re.findall(r"^ \+ (\S+==\S+)$", output, re.MULTILINE))
    assert len(planned) > 80 and planned <= pins, planned - pins


def _files_of(record: Path) -> set[str]:
    """Returns path, hash and size of each installed file, without those that tell where it came from."""
    lines = record.read_text().splitlines()
    of_install = re.compile(r"(\S+/__pycache__/|\S+\.dist-info/(RECORD|INSTALLER|direct_url\.json|REQUESTED)|\S+/bin/)")
    return {line for line in lines if not of_install.match(line)}
