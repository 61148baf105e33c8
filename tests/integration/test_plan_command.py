"""`pretrain plan` as a user runs it: tables, JSON, data on disk, a run that was measured, and what is refused."""

import json
import re

import pytest

from pretrain import cli
from tests.helpers.cli import run_cli, run_light
from tests.helpers.shards import make_shards

QUICKSTART = "configs/run/quickstart.yaml"
BATCH = "batch={global_tokens: 4096, seq_len: 256, micro: 8}"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # what was measured on this machine is not for tests
    return tmp_path


def facts_of(capsys, *arguments):
    assert cli.run(["plan", QUICKSTART, BATCH, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_shortest_command_works_in_any_folder_and_says_what_it_assumed(tmp_path):
    result = run_cli("plan", QUICKSTART, cwd=tmp_path, COLUMNS="100")
    assert (result.code, result.stderr) == (0, "")
    for text in ("Model:", "Memory of a rank:", "Time: bound by", "Checkpoints, jobs, failures", "32,768 is assumed"):
        assert text in result.stdout
    assert all(line.isascii() for line in result.stdout.splitlines())
    # Of cores, not of a cluster, unless one is asked for.
    told = ("GPU-hours", "a failure every", "by Young")
    assert not any(text in result.stdout for text in told)
    for option, expected in (("--mtbf-node-days=9", told[1:]), ("--gpu=h100", told)):
        shown = run_light("plan", QUICKSTART, option, cwd=tmp_path, COLUMNS="100").stdout
        assert [text for text in told if text in shown] == list(expected)


def test_the_gpu_is_said_to_be_assumed_where_none_is_given(here, capsys):
    assert cli.run(["plan", QUICKSTART, "engine.precision=bf16"]) == 0
    assert "On 1 x 2 H100 SXM 80GB (assumed; for others --gpu and --nodes): " in capsys.readouterr().out
    # A run in fp32 is one for the cores of this machine.
    assert cli.run(["plan", QUICKSTART]) == 0
    assert re.search(r"On 1 x \d CPU core \(assumed; for others --gpu and --nodes\): ", capsys.readouterr().out)
    assert not facts_of(capsys, "--gpu", "h100")["cluster"]["assumed"]
    assert not facts_of(capsys, "engine.device=cpu", "engine.precision=fp32")["cluster"]["assumed"]


def test_a_model_of_images_is_planned_where_its_data_are_not(here, capsys):
    assert cli.run(["plan", "configs/run/vit_digits.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "FLOPs a token" in shown and "vocabulary" not in shown and "compute-optimal" not in shown


def test_json_of_a_growing_batch_has_the_rows_of_the_first_step(here, capsys):
    growing = "batch.schedule=[{tokens: 65536, global_tokens: 16384}]"
    layout = facts_of(capsys, growing)["layout"]
    assert layout == facts_of(capsys)["layout"] and layout["rows"] > 0


def test_json_has_every_number(here, capsys):
    facts = facts_of(
        capsys,
        "--gpu",
        "h100",
        "--nodes",
        "1",
        "--gpus-per-node",
        "2",
        "--time",
        "2d",
        "--mfu",
        "0.4",
        "train.steps=90",
    )
    assert facts["layout"]["accumulation"] == 1
    assert facts["memory"]["total"] < facts["memory"]["limit"]
    assert set(facts["rates"]) == {"predicted", "assumed"}
    assert facts["rates"]["assumed"]["mfu"] == 0.4
    assert facts["rates"]["assumed"]["days"] * 86_400 == pytest.approx(90 * facts["rates"]["assumed"]["step_s"])
    assert facts["course"]["jobs"]["count"] == 1
    assert facts["data"]["stored"] is None


def test_vocabulary_and_epochs_are_those_of_the_data_where_they_are(here, capsys):
    make_shards(here / "data")
    facts = facts_of(capsys, "data.path=data", "data.lanes=1", "train.steps=90")
    stored = facts["data"]["stored"]
    assert facts["model"]["vocab_size"] == stored["vocab_size"]
    assert not facts["model"]["vocab_assumed"]
    assert facts["data"]["epochs"] == pytest.approx(90 * 4096 / stored["tokens"])


def test_a_run_says_how_fast_it_was(here, capsys):
    rows = [{"step": step, "tokens_per_s": 1000.0 if step < 5 else 5000.0} for step in range(10)]
    (here / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    measured = facts_of(capsys, "--measured", ".", "--gpu", "cpu", "--gpus-per-node", "2")["rates"]["measured"]
    assert measured["tokens_per_s"] == 5000.0
    assert measured["step_s"] == pytest.approx(4096 / 5000)


def test_search_and_sweep_are_in_the_facts(here, capsys):
    facts = facts_of(capsys, "--search", "--sweep", "nodes=1..4", "--gpus-per-node", "2")
    assert facts["search"] and facts["search"][0]["memory_bytes"] > 0
    assert [point["nodes"] for point in facts["sweep"]] == [1, 2, 4]


def test_tables_of_search_and_sweep_fit_a_terminal_of_80_columns(tmp_path):
    arguments = ["--gpus-per-node", "2", "--search", "--sweep", "nodes=1..16", "--time", "90m"]
    result = run_light("plan", QUICKSTART, BATCH, *arguments, cwd=tmp_path, COLUMNS="80")
    assert result.code == 0
    tables = result.stdout[result.stdout.index("Layouts that fit") :]
    assert "fastest first" in tables and "The first: engine.kind=auto" in tables
    assert "16 nodes: 16 rows a step do not divide over 32 ranks" in tables
    assert tables.isascii(), "rich cuts what is too wide off with an ellipsis"


def test_a_refused_batch_ends_the_search_for_layouts_with_an_error(tmp_path):
    asked = ["--gpus-per-node", "8", "--nodes", "2", "--search", "--time", "2d"]
    result = run_light("plan", QUICKSTART, BATCH, "--gpu", "h100", *asked, cwd=tmp_path)
    assert result.code == 64
    assert "The first: engine.kind=auto" in result.stdout and "must be a multiple" not in result.stdout
    (error,) = result.errors
    assert error.endswith("ranks 16 = 32768; use 32768, or batch.micro=1; no answer to --time before that")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--gpus-per-node", "3"], "batch.global_tokens=4096 must be a multiple of seq_len 256 x micro 8 x ranks 3"),
        (["--gpu", "h1000"], "--gpu: unknown GPU 'h1000'; use h100"),
        (["--time", "soon"], "--time: 'soon' is no time; write 3d"),
        (["--sweep", "1..4"], "--sweep: '1..4' is no sweep; write --sweep nodes=1..512"),
        (["--measured", "nowhere"], "nowhere: no such file; check the path of --measured"),
        (["--calibration", "nowhere"], "nowhere: cannot be read: No such file or directory; check the path of --cal"),
    ],
)
def test_what_makes_no_sense_is_one_line(here, capsys, arguments, line):
    assert cli.run(["plan", QUICKSTART, BATCH, *arguments, "--json"]) == 64
    assert f"error: {line}" in capsys.readouterr().err


def test_adapters_and_frozen_weights_are_counted_and_shown(tmp_path):
    start = ["init.from=models/base", "model.preset=gpt2-124m", "model.vocab_size=50257"]
    start += ["optim.kind=adamw", "optim.muon=null"]
    full = json.loads(run_light("plan", QUICKSTART, *start, "--json", cwd=tmp_path).stdout)
    lora = json.loads(run_light("plan", QUICKSTART, *start, "finetune.kind=lora", "--json", cwd=tmp_path).stdout)
    assert lora["model"]["trained"] == lora["model"]["adapters"] == 12 * 8 * 16 * 768
    assert full["model"]["trained"] == full["model"]["parameters"]["total"]
    assert lora["course"]["checkpoint_bytes"] == 12 * lora["model"]["trained"]
    assert lora["memory"]["optimizer"] < full["memory"]["optimizer"] / 50
    ratio = lora["model"]["flops_per_token"]["useful"] / full["model"]["flops_per_token"]["useful"]
    assert 2 / 3 < ratio < 0.75  # two products of three, a little of attention's, and the adapters
    shown = run_light("plan", QUICKSTART, *start, "init.freeze=[embedding.*]", cwd=tmp_path, COLUMNS="80").stdout
    assert "trained" in shown and "of the weights" in shown and "adapters" not in shown


def test_the_plan_says_whether_fp8_pays(here, capsys):
    large = ["model.preset=llama3-8b", "engine={precision: bf16, zero_stage: 2}"]
    batch = "batch={seq_len: 8192, global_tokens: 65536, micro: 1}"
    for overrides, said in (
        ([*large, batch], "FP8 pays (engine.fp8=tensorwise, predicted): products of blocks 1.4"),
        (["engine.precision=bf16", "engine.fp8=rowwise"], "use engine.fp8=off, a larger micro-batch or a wider model"),
        (
            [*large, batch, "engine.fp8=rowwise", "--gpu", "a100"],
            "will be refused: A100 80GB has no FP8; use engine.fp8=off",
        ),
    ):
        assert cli.run(["plan", QUICKSTART, *overrides]) == 0
        assert said in capsys.readouterr().out


def test_ranks_that_share_rows_are_planned_with_what_they_exchange(here, capsys):
    arguments = (QUICKSTART, BATCH, "parallel.sequence=2", "engine.precision=bf16", "--gpus-per-node", "2")
    assert cli.run(["plan", *arguments, "--gpu", "h100"]) == 0
    output = capsys.readouterr().out
    assert "16 rows a step = 1 group of 2 ranks x 2 accumulated x 8 at once" in output
    assert re.search(r"and queries, keys, values and results to the 2 ranks of a row: [\d.]+ MiB in [\d.]+ ", output)
    # By default as many GPUs of a node as divide the batch, and the ranks of a row.
    assert cli.run(["plan", QUICKSTART, BATCH, "parallel.sequence=4", "--gpu", "h100"]) == 0
    assert "2 groups of 4 ranks x 1 accumulated" in capsys.readouterr().out
