"""The wheel: its name, metadata and modules, and training from it without DeepSpeed; the install that messages name."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from pretrain import __version__
from pretrain.config.recipes import builtin_configs
from tests.helpers.cli import run_cli
from tests.helpers.fork_server import ROOT
from tests.helpers.waiting import LIMIT_S

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OF_OUR_NAME = re.compile(r"""pip["',\s]+install\s[^\n|;]*["'\s]pretrain(?![-\w]*/)""")
"""An install of a distribution `pretrain`, which is not ours."""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder of packages with the wheel in it, built from the working tree."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=LIMIT_S)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    wheel.unlink()
    return folder


@pytest.fixture(scope="module")
def metadata(site) -> Message:
    """The METADATA of the wheel."""
    return Parser().parsestr((site / f"pretrain_transformers-{__version__}.dist-info" / "METADATA").read_text())


def test_the_wheel_has_our_two_packages_and_their_files(site):
    names = {path.name for path in site.iterdir()}
    assert names == {"pretrain", "pretrain_launch", f"pretrain_transformers-{__version__}.dist-info"}
    assert (site / "pretrain/slurm/train.sbatch.tmpl").is_file()
    assert (site / "pretrain/py.typed").is_file()
    shipped = {path.relative_to(site / "pretrain/configs") for path in (site / "pretrain/configs").rglob("*.yaml")}
    assert shipped == {path.relative_to(builtin_configs()) for path in builtin_configs().rglob("*.yaml")}


def test_the_metadata_are_complete(site, metadata):
    assert (metadata["Name"], metadata["Version"]) == ("pretrain-transformers", __version__)
    assert metadata["Summary"].startswith("Distributed pretraining of Transformers")
    assert metadata["Author"] == "The pretrain contributors"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {"language model", "distributed training"} <= set(metadata["Keywords"].split(","))
    assert {"Operating System :: POSIX :: Linux", "Typing :: Typed"} <= set(metadata.get_all("Classifier"))
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith("# pretrain")
    licences = site / f"pretrain_transformers-{__version__}.dist-info" / "licenses"
    assert (licences / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert (licences.parent / "entry_points.txt").read_text().split() == [
        "[console_scripts]", "pretrain", "=", "pretrain.__main__:main",
    ]  # fmt: skip


def test_no_text_installs_the_name_that_is_not_ours():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=LIMIT_S)
    files = [ROOT / line for line in listed.stdout.splitlines() if Path(line).suffix in (".py", ".md", ".ipynb", ".sh")]
    texts = {file: file.read_text(encoding="utf-8") for file in files if file.is_file()}
    assert [str(file) for file, text in texts.items() if OF_OUR_NAME.search(text)] == []
    extras = {extra for text in texts.values() for extra in re.findall(r"""install_fix\(["'](\w+)""", text)}
    assert {"cloud", "deepspeed", "eval"} <= extras <= set(PROJECT["optional-dependencies"])


def test_the_images_copy_what_the_package_is_built_of_and_install_it_as_the_clone_does(site, tmp_path):
    docker = (ROOT / "slurm/Dockerfile").read_text()
    apptainer = (ROOT / "slurm/pretrain.def").read_text()
    copies = [line.split()[1:] for line in docker.splitlines() if line.startswith("COPY ")]
    copied = {source for *sources, _ in copies for source in sources}
    (files,) = re.findall(r"^%files\n((?: +.*\n)+)", apptainer, re.MULTILINE)
    assert {line.split()[0] for line in files.splitlines()} == copied
    (install,) = re.findall(r"RUN (python -m pip install .*)", docker)
    assert f"    {install}\n" in apptainer
    extras = re.search(r"'\.\[([\w,]+)\]'$", install)[1].split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"]) and "--constraint .ci/constraints.txt" in install
    base = re.search(r"^FROM (\S+)$", docker, re.MULTILINE)[1]
    assert f"From: {base}\n" in apptainer and not base.endswith("latest") and ":" in base
    for source in copied:
        target = tmp_path / "image" / source
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, target)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=tmp_path / "image", check=True, capture_output=True, timeout=LIMIT_S)
    (wheel,) = tmp_path.glob("*.whl")
    found = {name for name in zipfile.ZipFile(wheel).namelist() if "__pycache__" not in name}
    assert found == {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}


@pytest.fixture
def without_deepspeed(site, tmp_path) -> dict[str, str]:
    """An environment with the wheel, in which importing deepspeed fails."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['deepspeed'] = None\n")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(site)])}


@pytest.mark.long
def test_the_wheel_trains_without_deepspeed(make_run, without_deepspeed, tmp_path):
    common = ["train", str(make_run.config()), "train.steps=2", "optim.schedule.warmup_steps=1"]
    refused = run_cli(*common, cwd=tmp_path, **without_deepspeed)
    assert refused.code == 69
    assert "engine.kind=deepspeed needs the deepspeed package" in refused.stderr
    assert (
        "use engine.kind=ddp, or run in the clone of pretrain: python -m pip install -e '.[deepspeed]'"
        in refused.stderr
    )
    for kind in ("single", "ddp"):
        own = [f"engine.kind={kind}", "engine.zero_stage=0", f"run.name={kind}"]
        done = run_cli(*common, *own, cwd=tmp_path, **without_deepspeed)
        assert done.code == 0, done.stderr
        assert "step 2/2" in re.sub(r" +", " ", done.stderr)


def test_the_doctor_reads_the_versions_that_the_wheel_asks_for(site, tmp_path):
    code = (
        "from pretrain.doctor.versions import check_packages, own_versions\n"
        "print(check_packages(own_versions() | {'numpy': '1.0'}, False))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        check=True,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert "numpy 1.0, not <3,>=2" in done.stdout
    assert "python -m pip install -e ." in done.stdout
