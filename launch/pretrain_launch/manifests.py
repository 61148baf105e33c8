"""Jobs of a run for other schedulers than Slurm: a JobSet, a PyTorchJob, a task of SkyPilot, a component of torchx.

    LaunchSpec (the one of `launch slurm`)  ->  YAML, or Python for torchx, complete with the config
    a node: pretrain launch local CONFIG --nodes N --node-rank K --address NODE_0 --port 29500

    stop and save    SIGTERM at the end of a pod; its grace period is the time of some saves
    resume           a restart of the job; codes that a restart cannot help end it

`torchrun` is not used: it would turn every exit code into 1, and kill a save after 30 s.
"""

import json
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from pretrain.errors import EXIT_BUG, EXIT_HANG, EXIT_RESUME_ME, ConfigError
from pretrain_launch.job import FINAL
from pretrain_launch.spec import LaunchSpec

PORT = 29500
CONFIG = "/etc/pretrain/config.yaml"
KINDS = ("jobset", "pytorchjob", "skypilot", "torchx")
END_OF_CONFIG = "END_OF_CONFIG"
MAX_NAME = 40
"""Longest name: the names of pods, which add to it, have at most 63 characters."""


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """The parts of a job that its spec lacks."""

    spec: LaunchSpec
    config: str  # YAML, resolved
    image: str
    python: str = "python"  # interpreter in the image
    volume: tuple[str, str] | None = None  # claim of a shared volume, and the folder of it
    secret: str | None = None  # whose keys become variables, such as AWS_SECRET_ACCESS_KEY
    gpu_type: str | None = None  # of SkyPilot: `H100`
    max_restarts: int = 100

    @property
    def name(self) -> str:
        """The name of the run as Kubernetes takes it."""
        return re.sub("[^a-z0-9]+", "-", self.spec.name.lower()).strip("-")[:MAX_NAME].strip("-")

    def command(self, config: str, rank: str, address: str) -> str:
        """Returns the shell command of a node; `rank` and `address` may be expressions of a shell."""
        spec = self.spec
        nodes = f" --nodes {spec.nodes} --node-rank {rank} --address {address} --port {PORT}"
        ranks = f"{self.python} -m pretrain launch local {config} --ranks {spec.ranks_per_node}"
        # `exec`: a signal for the first process of a container reaches the launcher.
        return f"exec {ranks}{nodes if spec.nodes > 1 else ''}"


def parse_volume(text: str) -> tuple[str, str]:
    """Returns claim and folder of `CLAIM:/folder`. Raises: ConfigError."""
    match = re.fullmatch(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?):(/[\w./-]+)", text)
    if match is None or ".." in PurePosixPath(match[3]).parts:
        raise ConfigError(
            f"{text[:80]!r} is no volume",
            where="--volume",
            fix="write the name of a claim and a folder, as in training:/mnt",
        )
    return match[1], match[3]


def write_job(kind: str, job: ClusterJob) -> str:
    """Returns the file of a job for one of `KINDS`."""
    if kind == "torchx":
        return _torchx_component(job)
    if kind == "skypilot":
        return _dump([_sky_task(job)])
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{job.name}-config"},
        "data": {"config.yaml": job.config},
    }
    return _dump([config, _job_set(job) if kind == "jobset" else _pytorch_job(job)])


def _job_set(job: ClusterJob) -> dict[str, Any]:
    """Returns a JobSet of one indexed Job with a pod a node."""
    nodes = job.spec.nodes
    command = job.command(CONFIG, '"$JOB_COMPLETION_INDEX"', f"{job.name}-node-0-0.{job.name}")
    pod = _pod(job, "train", command)
    pod["spec"]["restartPolicy"] = "Never"
    final = {"containerName": "train", "operator": "In", "values": sorted({*FINAL, EXIT_BUG})}
    work = {
        "parallelism": nodes,
        "completions": nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # one pod alone cannot come back: the set restarts all of them
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": final}]},
        "template": pod,
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": job.max_restarts,
                # Of a code that a restart cannot help; each other failure restarts the set.
                "rules": [
                    {
                        "name": "final",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": work}}],
        },
    }


def _pytorch_job(job: ClusterJob) -> dict[str, Any]:
    """Returns a PyTorchJob, whose operator sets RANK, of the pod, and MASTER_ADDR."""
    replicas = {}
    for role, count in (("Master", 1), ("Worker", job.spec.nodes - 1)):
        if count:
            pod = _pod(job, "pytorch", job.command(CONFIG, '"$RANK"', '"$MASTER_ADDR"'))
            replicas[role] = {"replicas": count, "restartPolicy": "OnFailure", "template": pod}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": job.name},
        "spec": {
            # The operator does not look at exit codes: each failure is a restart.
            "runPolicy": {"backoffLimit": job.max_restarts, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": replicas,
        },
    }


def _pod(job: ClusterJob, container: str, command: str) -> dict[str, Any]:
    """Returns the template of the pod of a node."""
    shown: dict[str, Any] = {
        "name": container,
        "image": job.image,
        "command": ["/bin/sh", "-c", command],
        "volumeMounts": [
            {"name": "config", "mountPath": str(PurePosixPath(CONFIG).parent), "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": f"{job.name}-config"}},
        # NCCL and the workers of a loader need more than the 64 MiB of a container.
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    if job.volume:
        claim, folder = job.volume
        shown["volumeMounts"].append({"name": "shared", "mountPath": folder})
        shown["workingDir"] = folder  # of relative paths of the config
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": claim}})
    if job.secret:
        shown["envFrom"] = [{"secretRef": {"name": job.secret}}]
    if job.spec.gpus_per_node:
        shown["resources"] = {"limits": {"nvidia.com/gpu": job.spec.gpus_per_node}}
    grace = {"terminationGracePeriodSeconds": job.spec.signal_s}
    return {"spec": {**grace, "containers": [shown], "volumes": volumes}}


def _sky_task(job: ClusterJob) -> dict[str, Any]:
    """Returns a task of SkyPilot, for `sky jobs launch`, which begins anew on another machine."""
    spec = job.spec
    address = '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"'
    resources: dict[str, Any] = {
        "image_id": f"docker:{job.image}",
        "job_recovery": {
            "max_restarts_on_errors": 0,
            "recover_on_exit_codes": [EXIT_RESUME_ME, EXIT_HANG],
        },
    }
    if spec.gpus_per_node:
        resources["accelerators"] = f"{job.gpu_type}:{spec.gpus_per_node}"
    run = job.command("config.yaml", '"$SKYPILOT_NODE_RANK"', address)
    return {
        "name": job.name,
        "num_nodes": spec.nodes,
        "resources": resources,
        "setup": _written_config("config.yaml", job),
        "run": f"{run}\n",
    }


def _written_config(path: str, job: ClusterJob) -> str:
    return f"cat > {path} <<'{END_OF_CONFIG}'\n{job.config}{END_OF_CONFIG}\n"


_COMPONENT = '''\
"""A run of pretrain for torchx: torchx run --scheduler kubernetes FILE:train"""

from torchx import specs

# Runs once a machine. torchx replaces ${{...}}, and $$ by $.
SCRIPT = (
{script}
)


def train() -> specs.AppDef:
    """Trains {name}; a restart continues the run."""
    node = specs.Role(
        name="node",
        image={image!r},
        entrypoint="/bin/sh",
        args=["-c", SCRIPT],
        num_replicas={nodes},
        max_retries={retries},
        retry_policy=specs.RetryPolicy.APPLICATION,  # one machine alone cannot come back
        resource=specs.Resource(cpu=-1, gpu={gpus}, memMB=-1),  # -1: the default of the scheduler
        port_map={{"rendezvous": {port}}},
        mounts=[{mounts}],
    )
    return specs.AppDef(name={name!r}, roles=[node])
'''


def _torchx_component(job: ClusterJob) -> str:
    """Returns a file of torchx, whose function returns an AppDef of a role with a replica a machine."""
    enter = f"cd {job.volume[1]}\n" if job.volume else ""  # base of relative paths of the config
    # The replicas of torchx's local scheduler share a folder.
    written = "config=$(mktemp -d)/config.yaml\n" + _written_config('"$config"', job)
    # torchx names the variable that has the address of machine 0, if it is another one.
    command = job.command('"$config"', "${replica_id}", '"$${${rank0_env}:=localhost}"')
    script = f"set -e\n{enter}{written}".replace("$", "$$") + command + "\n"
    return _COMPONENT.format(
        script="\n".join(f"    {line!r}" for line in script.splitlines(keepends=True)),
        name=job.name,
        image=job.image,
        nodes=job.spec.nodes,
        retries=job.max_restarts,
        gpus=job.spec.gpus_per_node or -1,
        port=PORT,
        mounts="specs.VolumeMount(src={!r}, dst_path={!r})".format(*job.volume) if job.volume else "",
    )


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _dump(documents: list[dict[str, Any]]) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=100)


def check_job(kind: str, job: ClusterJob, *, has_upload: bool, data: list[str]) -> None:
    """Checks that a job of another scheduler can continue where it was. Raises: ConfigError."""
    if not job.name:
        raise ConfigError(
            f"{job.spec.name!r} has no letter or digit for the name of a job",
            where="run.name",
            fix="give another name",
        )
    if kind == "skypilot":
        _check_sky_task(job, has_upload=has_upload, data=data)
    if kind == "torchx" and job.secret:
        raise ConfigError(
            "a component of torchx names no secret",
            where="--secret",
            fix="give the machines their variables by the scheduler",
        )
    if kind != "skypilot" and not job.volume and not has_upload:
        raise ConfigError(
            "without a volume the run is lost with its pods",
            where="--volume",
            fix="name a claim, as in --volume training:/mnt, or set checkpoint.upload",
        )


def _check_sky_task(job: ClusterJob, *, has_upload: bool, data: list[str]) -> None:
    if not has_upload:
        raise ConfigError(
            "a machine of SkyPilot takes its disk with it",
            where="checkpoint.upload",
            fix="set it: checkpoint.upload=s3://...",
        )
    if local := [path for path in data if "://" not in path]:
        raise ConfigError(
            f"{json.dumps(local[0])} is a folder of this machine",
            where="data.path",
            fix="upload the shards, and give their address",
        )
    if job.spec.gpus_per_node and not job.gpu_type:
        raise ConfigError(
            f"SkyPilot needs the kind of the {job.spec.gpus_per_node} GPUs of a node",
            where="--gpu-type",
            fix="name it, as in --gpu-type H100",
        )
