"""What is told to Slurm: one script for all, options that are checked, no shell."""

import json
import stat
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pydantic
import pytest

from pretrain.errors import ConfigError
from pretrain_launch.job_start import choose_nodes, step_command
from pretrain_launch.site import EXPORTED, SiteConfig, load_site, slurm_folder
from pretrain_launch.spec import LaunchSpec, load_spec, write_spec
from pretrain_launch.submit import format_time, sbatch_command, script_path
from tests.helpers.hostile_names import hostile_names

ROOT = Path(__file__).parents[3]
FACTS = {
    "name": "night",
    "run": "/data/runs/night",
    "cwd": "/data",
    "python": "/env/bin/python",
    "nodes": 4,
    "node_counts": [4],
    "ranks_per_node": 8,
    "gpus_per_node": 8,
    "time_s": 86_400,
    "signal_s": 120,
    "chain": "0123456789ab",
}


def spec(**facts) -> LaunchSpec:
    return LaunchSpec.model_validate({**FACTS, **facts})


def options(one: LaunchSpec, elements: Sequence[int] = ()) -> list[str]:
    command = sbatch_command(one, one.path, elements)
    return command[: command.index(str(script_path()))]


def test_the_command_names_script_spec_interpreter_and_modules():
    command = sbatch_command(spec(site={"modules": ["cuda/12.8", "gcc"]}), Path("/x/spec.json"))
    assert command[0] == "sbatch"
    assert command[-5:] == [str(script_path()), "/x/spec.json", "/env/bin/python", "cuda/12.8", "gcc"]


def test_a_job_asks_for_what_it_needs():
    found = options(spec())
    assert found[:2] == ["sbatch", "--parsable"]
    assert set(found[2:]) == {
        "--job-name=night", "--nodes=4", "--ntasks-per-node=1", "--time=1-00:00:00", "--signal=B:USR1@120",
        "--output=/data/runs/night/logs/slurm-%j.out", "--chdir=/data", f"--export={','.join(EXPORTED)}",
        "--gpus-per-node=8", "--cpus-per-task=8", "--requeue",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("site", "expected"),
    [
        ({"gpus": "gres", "gpu_type": "h100"}, "--gres=gpu:h100:8"),
        ({"gpu_type": "h100"}, "--gpus-per-node=h100:8"),
        ({"partition": "a,b"}, "--partition=a,b"),
        ({"constraint": "ib&h100"}, "--constraint=ib&h100"),
        ({"account": "x", "qos": "y", "reservation": "z"}, "--qos=y"),
        ({"exclusive": True}, "--exclusive"),
        ({"cpus_per_node": 96}, "--cpus-per-task=96"),
        ({"mem": "0"}, "--mem=0"),
        ({"requeue": False}, "--no-requeue"),
        ({"sbatch": ["--comment=x"]}, "--comment=x"),
    ],
)
def test_a_site_changes_the_options(site, expected):
    assert expected in options(spec(site=site))


def test_a_site_without_gpu_requests_gets_none():
    assert not any("gpu:" in option or "gpus" in option for option in options(spec(site={"gpus": "none"})))
    assert not any("gpus" in option for option in options(spec(gpus_per_node=0)))


def test_names_of_variables_are_told_and_values_never(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary")
    export = next(option for option in options(spec(site={"export": ["MY_KEY", "HOME"]})) if "export" in option)
    names = export.removeprefix("--export=").split(",")
    assert names == [*EXPORTED, "MY_KEY"]
    assert "WANDB_API_KEY" in names
    assert not any("canary" in option for option in options(spec()))


def test_a_site_with_modules_has_the_variables_by_which_they_are_found(monkeypatch):
    for name in ("BASH_ENV", "MODULEPATH", "LMOD_PKG", "MODULESHOME", "MODULES_CMD"):
        monkeypatch.setenv(name, "/x")
    found = [next(option for option in options(spec(site=site)) if "export" in option).removeprefix("--export=")
             for site in ({"modules": ["gcc"]}, {})]  # fmt: skip
    added = set(found[0].split(",")) - set(found[1].split(","))
    assert {"BASH_ENV", "MODULEPATH", "LMOD_PKG", "MODULESHOME", "MODULES_CMD"} <= added
    assert found[1] == ",".join(EXPORTED)


def test_arrays_elastic_jobs_and_singletons_say_so():
    found = options(spec(name="night-0", run="/data/runs/night-0"), range(3))
    assert "--array=0-2" in found
    assert "--job-name=night" in found
    assert "--output=/data/runs/night-%a/logs/slurm-%A_%a.out" in found
    assert "--array=1-3,5,8-9" in options(spec(name="night-1"), [1, 2, 3, 5, 8, 9])
    assert "--array=4" in options(spec(name="night-4"), [4])
    elastic = options(spec(elastic=True, node_counts=[1, 2, 4], mode="srun"))
    assert {"--nodes=1-4", "--mincpus=8"} <= set(elastic)
    assert not any("tasks" in option for option in elastic)  # Slurm would give the fewest nodes
    assert "--dependency=singleton" in options(spec(singleton=True))


@pytest.mark.parametrize(("mode", "expected"), [("torchrun", 8), ("accelerate", 8), ("deepspeed", 8), ("srun", 1)])
def test_without_a_cluster_s_file_every_rank_has_a_cpu(mode, expected):
    assert f"--cpus-per-task={expected}" in options(spec(mode=mode))
    assert not any("cpu" in option for option in options(spec(mode=mode, site={"exclusive": True})))


def test_srun_mode_has_a_task_for_each_rank():
    found = options(spec(mode="srun", site={"cpus_per_node": 96}))
    assert "--ntasks-per-node=8" in found
    assert "--cpus-per-task=12" in found


@pytest.mark.parametrize(
    ("seconds", "text"), [(60, "0-00:01:00"), (61, "0-00:02:00"), (86_400, "1-00:00:00"), (95_400, "1-02:30:00")]
)
def test_a_limit_is_written_as_slurm_reads_it(seconds, text):
    assert format_time(seconds) == text


def test_a_step_runs_on_the_nodes_that_are_chosen():
    command = step_command(
        spec(site={"srun": ["--mpi=none"], "container": {"image": "a#b:1", "mounts": ["/x:/x", "/y"]}}), ["n1", "n3"], 1
    )
    assert command[0] == "srun"
    assert {"--nodes=2", "--ntasks=2", "--nodelist=n1,n3", "--export=ALL", "--mpi=none"} <= set(command)
    assert {"--container-image=a#b:1", "--container-mounts=/x:/x,/y", "--container-workdir=/data"} <= set(command)


def test_an_elastic_job_takes_the_most_nodes_that_divide_the_batch():
    elastic = spec(elastic=True, node_counts=[1, 2, 4])
    assert choose_nodes(elastic, ["a", "b", "c"]) == ("a", "b")
    assert choose_nodes(elastic, ["a", "b", "c", "d"]) == ("a", "b", "c", "d")
    with pytest.raises(ConfigError, match="3 nodes of 8 ranks do not divide the batch; it can be trained on 4 nodes"):
        choose_nodes(spec(), ["a", "b", "c"])


def test_a_spec_is_read_back_and_its_owner_s_alone(tmp_path):
    one = spec(run=str(tmp_path / "night"))
    write_spec(one, "seed: 1\n")
    assert load_spec(one.path) == one
    assert stat.S_IMODE(one.path.stat().st_mode) == 0o600
    assert one.config.read_text() == "seed: 1\n"
    assert one.folder.logs.is_dir()  # Slurm does not make the folder of an output file


def test_a_spec_that_is_not_sound_is_refused(tmp_path):
    path = tmp_path / "spec.json"
    with pytest.raises(ConfigError, match="there is no spec of a job; submit the run with `pretrain launch slurm`"):
        load_spec(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="not the spec of a job"):
        load_spec(path)
    path.write_text(json.dumps({**FACTS, "mode": "ssh"}))
    with pytest.raises(ConfigError, match="not the spec of a job: mode"):
        load_spec(path)


HOSTILE = hostile_names(Path("canary"))


def test_there_are_a_hundred_hostile_names():
    assert len(set(HOSTILE)) >= 100


@pytest.mark.parametrize(
    "field", ["name", "partition", "account", "qos", "reservation", "constraint", "gpu_type", "interface", "mem"]
)
def test_hostile_names_are_refused(field):
    for text in HOSTILE:
        with pytest.raises(pydantic.ValidationError):
            spec(name=text) if field == "name" else spec(site={field: text})


@pytest.mark.parametrize("field", ["modules", "export", "sbatch", "srun"])
def test_hostile_items_of_lists_are_refused(field):
    # To a module and to a variable these are names like others: no shell reads them.
    harmless = {"modules": {"a/b", "a/../b"}, "export": {"_x"}}.get(field, set())
    for text in [*HOSTILE, "--x=$(y)", "--x=a b", "--x=a;b", "--x=`y`", "--x=a\nb"]:
        if text not in harmless:
            with pytest.raises(pydantic.ValidationError):
                spec(site={field: [text]})


@pytest.mark.parametrize("option", ["--wrap=x", "--output=/x", "--export=ALL", "--array=1", "--job-name=x", "--wrap"])
def test_options_that_are_ours_are_not_a_site_s(option):
    with pytest.raises(pydantic.ValidationError, match=r"is set by `pretrain launch`; leave it out"):
        SiteConfig(sbatch=[option])


@pytest.mark.parametrize("path", ["/a%jb", "/a\\b", "/a\nb", "a/b", "", "/a\x7fb"])
def test_paths_that_slurm_would_read_otherwise_are_refused(path):
    for field in ("run", "cwd", "python"):
        with pytest.raises(pydantic.ValidationError):
            spec(**{field: path})


def test_the_script_is_constant_and_sound_bash():
    text = script_path().read_text()
    assert script_path() == ROOT / "slurm" / "train.sbatch.tmpl"
    assert not any(mark in text for mark in ("{{", "}}", "{%", "eval ", "__"))
    subprocess.run(["bash", "-n", str(script_path())], check=True)


INIT = """
module() {
    [ "$2" != absent ] || return 1
    echo "$*" >> "$LOADED"; : "$UNSET"
}
"""


def run_script(tmp_path, *modules: str, **variables: str) -> subprocess.CompletedProcess:
    """Runs the batch script, with `echo` for Python."""
    command = ["/bin/bash", str(script_path()), "SPEC", "/bin/echo", *modules]
    environment = {"PATH": "/usr/bin:/bin", "LOADED": str(tmp_path / "loaded"), **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("place", ["BASH_ENV", "MODULESHOME", "LMOD_PKG"])
def test_modules_are_loaded_where_module_is_a_function_that_a_batch_script_lacks(tmp_path, place):
    init = tmp_path / "init" / "bash"
    init.parent.mkdir()
    init.write_text(INIT)
    home = str(init if place == "BASH_ENV" else tmp_path)
    done = run_script(tmp_path, "cuda/12.8", "gcc", **{place: home})
    assert (done.returncode, done.stdout) == (0, "-m pretrain_launch.job SPEC\n"), done.stderr
    assert (tmp_path / "loaded").read_text() == "load cuda/12.8\nload gcc\n"
    done = run_script(tmp_path, "gcc", "absent", **{place: home})
    assert (done.returncode, done.stdout) == (69, "")
    assert done.stderr.startswith("error: modules: module load absent failed on ")


def test_a_node_without_module_is_told_with_what_was_tried(tmp_path):
    if Path("/etc/profile.d/modules.sh").exists() or Path("/etc/profile.d/lmod.sh").exists():
        pytest.skip("this machine has modules")
    done = run_script(tmp_path, "gcc", MODULESHOME=str(tmp_path))
    assert (done.returncode, done.stdout) == (69, "")
    assert done.stderr.startswith(
        f"error: modules: there is no command module; tried: {tmp_path}/init/bash /etc/profile.d"
    )
    remedy = "set MODULESHOME, or without modules the key `python` of the cluster's file\n"
    assert done.stderr.endswith(f"/init/bash; {remedy}")
    assert run_script(tmp_path).returncode == 0  # none are asked for


def test_the_wheel_carries_the_script_to_where_it_is_looked_for():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]["slurm"] == "pretrain/slurm"


def test_clusters_that_come_with_the_package_load():
    files = sorted((slurm_folder() / "clusters").glob("*.yaml"))
    assert files
    for path in files:
        assert load_site(path.stem) == load_site(str(path))
    assert load_site(None) == SiteConfig()


def test_a_cluster_s_file_is_checked_like_a_config(tmp_path):
    path = tmp_path / "lab.yaml"
    path.write_text("partition: gpu\npartiton: x\n")
    with pytest.raises(ConfigError, match=r"lab.yaml:2:1: unknown key 'partiton'; did you mean 'partition'\?"):
        load_site(str(path))
    with pytest.raises(ConfigError, match=r"--cluster: there is no cluster 'nowhere'; give a YAML file"):
        load_site("nowhere")
    with pytest.raises(ConfigError, match="no such config file"):
        load_site(str(tmp_path / "absent.yaml"))
