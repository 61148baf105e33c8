"""What is refused before a job is submitted, and what a job is asked for."""

import pytest

from pretrain.config.load import load_config
from pretrain.config.run import RunConfig
from pretrain.errors import ConfigError
from pretrain_launch.preflight import (
    LaunchRequest,
    align_array,
    node_counts,
    parse_vary,
    plan_job,
    plan_ranks,
    plan_signal,
    plan_time,
)
from pretrain_launch.site import SiteConfig

QUICKSTART = "configs/run/quickstart.yaml"


def config(*overrides: str) -> RunConfig:
    return load_config(QUICKSTART, overrides)


def plan(*overrides: str, nodes: int = 2, site: SiteConfig | None = None, **request):
    asked = LaunchRequest(nodes=nodes, **{"time": "1d", **request})
    return plan_job(config(*overrides), asked, site or SiteConfig(), "/runs/x", "/data", "/bin/python")


def test_a_rank_is_a_gpu_unless_said_otherwise():
    gpu, cpu = config("engine.device=auto"), config("engine.device=cpu")
    assert plan_ranks(gpu, LaunchRequest(1, "1d", gpus_per_node=8)) == (8, 8)
    assert plan_ranks(gpu, LaunchRequest(1, "1d", ranks_per_node=4)) == (4, 4)
    assert plan_ranks(gpu, LaunchRequest(1, "1d")) == (1, 1)
    assert plan_ranks(gpu, LaunchRequest(1, "1d", ranks_per_node=2, gpus_per_node=0)) == (2, 0)
    assert plan_ranks(cpu, LaunchRequest(1, "1d", ranks_per_node=4)) == (4, 0)


def test_a_larger_model_is_asked_to_save_earlier():
    small = plan_signal(config(), SiteConfig())
    large = plan_signal(
        config("model={preset: llama3-8b}", "batch.seq_len=512", "batch.global_tokens=4096"), SiteConfig()
    )
    assert small == 60
    assert 200 < large < 1000
    assert plan_signal(config(), SiteConfig(signal_s=45)) == 45
    assert plan_signal(config(), SiteConfig(), 2.0) == 60 and plan_signal(config(), SiteConfig(), 100.0) == 330


def test_the_signal_before_the_limit_leaves_time_for_saves_as_long_as_the_last_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 5, "checkpoint_write_s": 50.0}\n{"step": 10, "checkpoint_write_s": 200.0}\n{"step": 11, "loss": 1}\n'
    )
    request = LaunchRequest(nodes=1, time="2h")
    spec, _ = plan_job(config(), request, SiteConfig(), str(tmp_path), "/work", "/usr/bin/python3")
    assert spec.signal_s == 630


@pytest.mark.parametrize("text", ["", "soon", "1x", "x-5", "1:2:3:4", "1d; rm", "$(x)", "0", "80s", "60d"])
def test_a_time_that_is_none_or_too_short_is_refused(text):
    with pytest.raises(
        ConfigError, match=r"--time: .*(is no time; write 3d|; a job saves 60 s before its end; give at)"
    ):
        plan_time(text, 60)


@pytest.mark.parametrize(("text", "seconds"), [("10m", 600), ("1-12:00:00", 129_600), ("2:30:00", 9000), ("91s", 91)])
def test_a_time_is_read_as_slurm_reads_it(text, seconds):
    assert plan_time(text, 60) == seconds


def test_a_batch_that_does_not_divide_is_a_problem_with_its_number_and_a_fix():
    _, problems = plan("batch.global_tokens=4096", "batch.seq_len=256", "batch.micro=4", nodes=3)
    assert [problem.kind for problem in problems] == ["batch"]
    assert "must be a multiple of seq_len 256 x micro 4 x ranks 3 = 3072" in problems[0].what


def test_a_model_that_does_not_fit_is_a_problem_of_memory():
    big = ("model={preset: llama3-70b}", "engine.device=auto", "engine.zero_stage=2", "engine.precision=bf16",
           "batch={global_tokens: 65536, seq_len: 4096, micro: 1}")  # fmt: skip
    _, problems = plan(*big, gpus_per_node=8, site=SiteConfig(gpu="h100"))
    assert [problem.kind for problem in problems] == ["memory"]


def test_an_elastic_job_may_train_on_every_number_of_nodes_that_divides_the_batch():
    divides = ("batch.global_tokens=6144", "batch.seq_len=256", "batch.micro=2", "engine.device=cpu")
    assert node_counts(config(*divides), 4, 1, elastic=True) == [1, 2, 3, 4]
    assert node_counts(config(*divides), 4, 3, elastic=True) == [1, 2, 4]
    assert node_counts(config(*divides), 4, 3, elastic=False) == [4]
    spec, problems = plan(*divides, "launch.elastic=true", nodes=5)
    assert spec.elastic
    assert (spec.nodes, spec.node_counts, problems) == (5, [1, 2, 3, 4], [])


def test_a_job_takes_its_facts_from_config_request_and_site():
    site = SiteConfig(python="/env/bin/python", partition="gpu")
    spec, _ = plan("run.name=night", "launch.max_idle_restarts=5", nodes=2, site=site, mode="srun")
    assert (spec.name, spec.run, spec.cwd, spec.python) == ("night", "/runs/x", "/data", "/env/bin/python")
    assert (spec.mode, spec.max_idle_restarts, spec.site.partition, spec.time_s) == ("srun", 5, "gpu", 86_400)
    assert spec.chain != plan()[0].chain


def test_an_array_varies_keys():
    assert parse_vary([]) == [()]
    assert parse_vary(["optim.lr=1e-3,3e-4"]) == [("optim.lr=1e-3",), ("optim.lr=3e-4",)]
    pairs = parse_vary(["optim.lr=1e-3,3e-4", "seed=1,2"])
    assert pairs == [(lr, seed) for lr in ("optim.lr=1e-3", "optim.lr=3e-4") for seed in ("seed=1", "seed=2")]
    for text in ("", "optim.lr", "optim.lr=", "optim.lr=1e-3", "=1,2"):
        with pytest.raises(ConfigError, match=r"--vary: .* names no values; for example --vary optim.lr=1e-3,3e-4"):
            parse_vary([text])
    with pytest.raises(ConfigError, match=r"run.name is not varied"):
        parse_vary(["run.name=a,b"])
    numbers = ",".join(map(str, range(40)))
    with pytest.raises(ConfigError, match="--vary: more than 1000 runs; vary fewer values"):
        parse_vary([f"seed={numbers}", f"data.lanes={numbers}"])


def test_the_runs_of_an_array_share_nodes_and_save_as_early_as_the_slowest():
    specs = {number: plan(f"run.name=night-{number}")[0] for number in (0, 3)}
    slow = specs[3].model_copy(update={"signal_s": 500})
    assert {number: spec.signal_s for number, spec in align_array({0: specs[0], 3: slow}).items()} == {0: 500, 3: 500}
    for key, value, said in (("elastic", True, "elastic is True"), ("run", "/other/x", "run.dir is /other")):
        other = specs[3].model_copy(update={key: value})
        with pytest.raises(ConfigError, match=f"launch slurm: {said} for night-3, .* for the first run; runs of"):
            align_array({0: specs[0], 3: other})
