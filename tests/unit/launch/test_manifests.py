"""Jobs for Kubernetes, SkyPilot and torchx: their documents, and the refusal of those that would lose the run."""

import ast
import subprocess
from string import Template

import yaml

from pretrain.config.load import load_config
from pretrain.errors import EXIT_HANG, EXIT_RESUME_ME
from pretrain_launch.job import FINAL
from pretrain_launch.preflight import LaunchRequest, plan_job
from pretrain_launch.site import SiteConfig
from tests.helpers.cli import run_light

CONFIG = ["quickstart", "batch.micro=4"]
TWO = ["--nodes", "2", "--ranks-per-node", "2", "--gpus-per-node", "2"]
SHARED = ["--volume", "training:/mnt", "--secret", "store"]
BUCKET = ["checkpoint.upload=s3://lab/runs", "data.path=s3://lab/data", "--gpu-type", "H100"]


def documents(tmp_path, *arguments: str) -> list[dict]:
    done = run_light("launch", "manifest", *CONFIG, *arguments, cwd=tmp_path)
    assert done.code == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def pod_of(document: dict) -> dict:
    if document["kind"] == "JobSet":
        return document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return document["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]


def test_a_job_set_has_a_pod_a_node_and_time_to_save(tmp_path):
    config, job = documents(tmp_path, *TWO, *SHARED)
    (tmp_path / "read.yaml").write_text(config["data"]["config.yaml"])
    assert load_config(tmp_path / "read.yaml") == load_config(*CONFIG[:1], CONFIG[1:])
    work = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (work["parallelism"], work["completions"], work["completionMode"]) == (2, 2, "Indexed")
    pod = pod_of(job)
    spec, _ = plan_job(
        load_config(CONFIG[0], CONFIG[1:]), LaunchRequest(2, "30d", 2, 2), SiteConfig(), str(tmp_path), "/", "/python"
    )
    assert pod["terminationGracePeriodSeconds"] == spec.signal_s
    (container,) = pod["containers"]
    assert container["command"][2] == (
        "exec python -m pretrain launch local /etc/pretrain/config.yaml --ranks 2 --nodes 2 "
        '--node-rank "$JOB_COMPLETION_INDEX" --address quickstart-node-0-0.quickstart --port 29500'
    )
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    assert container["workingDir"] == "/mnt" and container["envFrom"] == [{"secretRef": {"name": "store"}}]
    mounted = {volume["name"] for volume in pod["volumes"]}
    assert mounted == {mount["name"] for mount in container["volumeMounts"]} == {"config", "shm", "shared"}


def test_a_restart_is_for_what_it_can_help(tmp_path):
    _, job = documents(tmp_path, *TWO, *SHARED)
    work = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    (rule,) = work["podFailurePolicy"]["rules"]
    final = set(rule["onExitCodes"]["values"])
    assert final == FINAL | {70} and final.isdisjoint({EXIT_RESUME_ME, EXIT_HANG, 0, 137, 143})
    (of_set,) = job["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], of_set["action"]) == ("FailJob", "FailJobSet")
    (task,) = documents(tmp_path, *TWO, *BUCKET, "--to", "skypilot")
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [EXIT_RESUME_ME, EXIT_HANG]
    assert task["resources"]["accelerators"] == "H100:2" and task["num_nodes"] == 2
    assert '--node-rank "$SKYPILOT_NODE_RANK"' in task["run"] and "s3://lab/runs" in task["setup"]


def test_a_pytorch_job_has_a_master_and_workers(tmp_path):
    _, job = documents(tmp_path, *TWO, *SHARED, "--to", "pytorchjob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {role: part["replicas"] for role, part in replicas.items()} == {"Master": 1, "Worker": 1}
    (container,) = pod_of(job)["containers"]
    assert container["name"] == "pytorch"  # the operator looks for it
    assert '--node-rank "$RANK" --address "$MASTER_ADDR"' in container["command"][2]
    _, alone = documents(tmp_path, *SHARED, "--to", "pytorchjob", "--gpus-per-node", "0")
    assert "Worker" not in alone["spec"]["pytorchReplicaSpecs"]
    assert pod_of(alone)["containers"][0]["command"][2].endswith("launch local /etc/pretrain/config.yaml --ranks 1")


def test_the_script_of_a_component_of_torchx_writes_the_config_that_was_given(tmp_path):
    text = "tracking.notes=pays $5, ${app_id} and 'quotes'"
    done = run_light("launch", "manifest", *CONFIG, text, *TWO, *SHARED[:2], "--to", "torchx", cwd=tmp_path)
    assert done.code == 0, done.stderr
    body = {type(node): node for node in ast.parse(done.stdout).body}
    script = ast.literal_eval(body[ast.Assign].value)
    # As torchx does for machine 1.
    script = Template(script).safe_substitute(replica_id="1", rank0_env="TORCHX_RANK0_HOST", app_id="lost")
    *written, command = script.splitlines(keepends=True)
    here = "".join(written).replace("cd /mnt\n", "").replace("$(mktemp -d)", ".")
    subprocess.run(["/bin/sh", "-c", here], cwd=tmp_path, check=True)
    assert load_config(tmp_path / "config.yaml") == load_config(CONFIG[0], [*CONFIG[1:], text])
    assert written[1] == "cd /mnt\n" and command == (
        'exec python -m pretrain launch local "$config" --ranks 2 --nodes 2 --node-rank 1 '
        '--address "${TORCHX_RANK0_HOST:=localhost}" --port 29500\n'
    )
    (role, app) = (node.value for node in body[ast.FunctionDef].body[1:])
    values = {keyword.arg: ast.unparse(keyword.value) for keyword in role.keywords}
    assert (values["num_replicas"], values["max_retries"]) == ("2", "100")
    assert values["resource"] == "specs.Resource(cpu=-1, gpu=2, memMB=-1)"
    assert values["mounts"] == "[specs.VolumeMount(src='training', dst_path='/mnt')]"
    assert ast.unparse(app) == "specs.AppDef(name='quickstart', roles=[node])"


def test_a_job_that_would_lose_the_run_is_refused_in_one_line(tmp_path):
    cases = {
        "": "error: --volume: without a volume the run is lost with its pods; name a claim",
        "--volume x": "error: --volume: 'x' is no volume; write the name of a claim and a folder",
        "--to helm": "error: --to: unknown scheduler 'helm'; use jobset, pytorchjob, skypilot or torchx",
        "--to torchx": "error: --volume: without a volume the run is lost with its pods",
        "--to torchx --secret store": "error: --secret: a component of torchx names no secret; give the machines",
        "--to skypilot": "error: checkpoint.upload: a machine of SkyPilot takes its disk with it; set it",
        "--to skypilot checkpoint.upload=s3://a/b": 'error: data.path: "data/stdlib" is a folder of this machine',
        "--to skypilot " + " ".join(BUCKET[:2]): "error: --gpu-type: SkyPilot needs the kind of the 2 GPUs of a node",
    }
    for arguments, line in cases.items():
        done = run_light("launch", "manifest", *CONFIG, *TWO, *arguments.split(), cwd=tmp_path)
        assert (done.code, done.stdout) == (64, "") and done.stderr.startswith(line), done.stderr


def test_several_machines_need_a_place_to_meet(tmp_path):
    done = run_light("launch", "local", "quickstart", "--nodes", "2", cwd=tmp_path)
    assert done.code == 64
    assert done.stderr.startswith(
        "error: --nodes: several machines have to meet; give --address and --port of machine 0"
    )
