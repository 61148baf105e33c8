"""The arm `ranks`: layouts, comparison, the environment of ranks on one GPU, disturbed runs."""

import contextlib
import json
from unittest import mock

import pytest
import torch
import torch.distributed as td

from benchmarks.gpu_bench import Bench
from benchmarks.gpu_job import ONE_GPU, environment_of
from benchmarks.gpu_layouts import ALONE, CONFIG, FULL, GROUPS, LAYOUTS, RANKS, ROWS, TINY, references
from benchmarks.gpu_rank import Sleeper, Task, disturbed, unordered
from benchmarks.gpu_rank_drills import start_again
from benchmarks.gpu_rank_runs import RankRuns, are_close, differences, first_difference
from benchmarks.gpu_ranks import Layouts
from pretrain.checkpoint.format import SCHEMA, Manifest
from pretrain.config.load import load_config
from pretrain.engine import deepspeed_engine
from pretrain.errors import ConfigError
from pretrain.run.folder import RunDir
from pretrain.utils.io import FileRecord, json_bytes


def bench_in(folder, **options):
    """A rehearsal of the arm."""
    return Bench("ranks", "?", folder, folder, rehearse=True, command="", commit="", nanogpt=None, **options)


def test_ranks_of_one_gpu_are_nodes_of_one_gpu_each():
    first, second = (environment_of(rank, 2, 29_500, on_gpu=True) for rank in range(2))
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]  # else NCCL refuses the second rank of a GPU
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert [one[name] for one in (first, second) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["0", "1", "0", "1"]
    assert first["NCCL_NET"] == "Socket" and first["MASTER_PORT"] == second["MASTER_PORT"]


def test_ranks_of_a_cpu_have_no_setting_of_nccl():
    environment = environment_of(1, 2, 29_500, on_gpu=False)
    assert (environment["LOCAL_RANK"], environment["LOCAL_WORLD_SIZE"]) == ("1", "2")
    assert not (ONE_GPU.keys() - {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}) & environment.keys()
    assert "NCCL_HOSTID" not in environment


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The config of all runs, over data that are not there."""
    folder = tmp_path_factory.mktemp("config")
    path = folder / "ranks.yaml"
    path.write_text(CONFIG.format(runs=folder / "runs", data=folder / "data", device="cpu", steps=4))
    return path


@pytest.mark.parametrize("sizes", [FULL, TINY], ids=["full", "tiny"])
def test_every_layout_is_a_config_whose_rows_are_those_of_its_reference(config, sizes):
    words = references(sizes, "")
    del words["LoRA"]  # whose start is not there
    for name in words:
        load_config(config, ["run.name=one", *words[name], *ALONE])
    for group, layouts in LAYOUTS.items():
        assert len({layout.name for layout in layouts}) == len(layouts)
        for layout in layouts:
            if layout.reference in words:
                more = layout.overrides(RANKS[group])
                found = load_config(config, ["run.name=layout", *words[layout.reference], *more])
                shared = found.parallel.sequence * found.parallel.tensor
                assert found.batch.rows == ROWS == 2 * found.batch.micro * RANKS[group] // shared
    for model in (sizes.race, sizes.saved):
        load_config(config, ["run.name=drill", *model])


def test_layouts_have_what_is_asked_of_ranks():
    layouts = [layout for group in LAYOUTS.values() for layout in group]
    assert {layout.stage for layout in layouts} == {None, 1, 2, 3}
    assert {layout.tensor for layout in layouts} == {1, 2, 4}
    assert {layout.sequence for layout in layouts} == {1, 2}
    assert {layout.experts for layout in layouts} == {1, 2, 4}
    assert {layout.reference for layout in layouts} == references(TINY, "").keys()
    assert {layout.more[0] for layout in layouts} == {
        *("", "compiled", "optimizer offloaded", "optimizer and params offloaded")
    }
    assert GROUPS.keys() == RANKS.keys()


def ledger(losses, norms=(1.0, 1.0), digests=("a", "b"), **figures):
    """A ledger of two steps."""
    rows = [
        {"loss": loss.hex(), "grad_norm": norm.hex(), "digest": digest, "tokens": 64}
        for loss, norm, digest in zip(losses, norms, digests, strict=True)
    ]
    return {"rows": rows, "figures": figures}


REFERENCE = ledger((4.0, 2.0), val_loss=3.0)


@pytest.mark.parametrize(
    ("ours", "close"),
    [
        (ledger((4.0, 2.0001), (1.0, 1.0009), val_loss=3.0), True),
        (ledger((4.0, 2.0003), val_loss=3.0), False),
        (ledger((4.0, 2.0), (1.002, 1.0), val_loss=3.0), False),
        (ledger((4.0, 2.0), digests=("a", "c"), val_loss=3.0), False),
        (ledger((4.0, float("nan")), val_loss=3.0), False),
        (ledger((4.0, 2.0), val_loss=3.001), False),
        (ledger((4.0, 2.0)), False),
        ({"rows": REFERENCE["rows"][:1], "figures": {"val_loss": 3.0}}, False),
        ({"rows": [], "figures": {"val_loss": 3.0}}, False),
    ],
)
def test_a_layout_is_close_in_losses_norms_and_evaluation_over_the_same_samples(ours, close):
    assert are_close(differences(REFERENCE, ours)) is close


@pytest.mark.parametrize(
    ("ours", "seen"),
    [
        ({"step-20": 1, "step-26": 5, "step-40": 2}, None),  # stopped at 26
        ({"step-40": 2}, None),
        ({"step-20": 3, "step-40": 2}, "the files of step-20 differ"),
        ({"step-20": 1, "step-26": 5}, "the last checkpoints are step-40 and step-26"),
    ],
)
def test_two_runs_differ_by_a_file_of_a_checkpoint_that_both_have(tmp_path, ours, seen):
    saved = {"expected": {"step-20": 1, "step-40": 2}, "ours": ours}
    for run, steps in saved.items():
        for step, crc in steps.items():
            folder = tmp_path / run / "checkpoints" / step.replace("-", "-000000")
            folder.mkdir(parents=True)
            file = {"name": "rank-00000.safetensors", "num_bytes": 8, "crc32s": [crc]}
            manifest = Manifest(SCHEMA, {"step": 1, "tokens": 1}, {}, [], [FileRecord(**file)], {})
            (folder / "manifest.json").write_bytes(json_bytes(manifest.to_json()))
        (tmp_path / run / "audit.jsonl").touch()
    found = first_difference(RunDir(tmp_path / "expected"), RunDir(tmp_path / "ours"))
    assert found == (seen and seen.replace("step-", "step-000000"))


def test_references_are_read_from_earlier_rows_of_the_same_length(tmp_path):
    steps = TINY.steps
    long = {"rows": [{"loss": "0x1p+1"}] * steps, "figures": {}}
    short = {"rows": [{"loss": "0x1p+1"}], "figures": {}}
    rows = [
        {"arm": "ranks", "case": "one: dense", "ledger": long},
        {"arm": "ranks", "case": "one: bf16", "ledger": short},
        {"arm": "probe", "case": "copy"},
        {"arm": "ranks", "error": "exit code 1"},
    ]
    earlier = tmp_path / "earlier.jsonl"
    earlier.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    bench = bench_in(tmp_path, earlier=(earlier,))
    assert Layouts(RankRuns(bench, mock.Mock()))._references == {"dense": long}


@pytest.fixture
def alone():
    """A group of this process alone."""
    td.init_process_group("gloo", store=td.HashStore(), rank=0, world_size=1)
    yield
    td.destroy_process_group()


def test_a_disturbed_run_sleeps_around_its_collectives_and_behind_its_updates(alone):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    optimizer.step()
    with mock.patch.object(Sleeper, "nap") as nap, mock.patch.object(Sleeper, "after_update") as after, disturbed(0):
        td.all_reduce(torch.ones(1))
        td.all_gather_into_tensor(torch.ones(1), torch.ones(1))
        td.reduce_scatter_tensor(torch.ones(1), torch.ones(1))
        assert nap.call_count >= 6
        optimizer.step()
        assert after.call_count == 1
    td.all_reduce(torch.ones(1))
    optimizer.step()
    assert (nap.call_count, after.call_count) == (6, 1)


def test_the_wait_that_is_left_out_on_a_gpu_is_that_of_gathers_for_the_update():
    with mock.patch.object(torch.cuda, "is_available", return_value=True), unordered():
        deepspeed_engine.order_gathers("an optimizer without the attributes of DeepSpeed's")
    with pytest.raises(AttributeError):
        deepspeed_engine.order_gathers("as above")


class FakeJob(contextlib.nullcontext):
    """A job whose tasks end as listed, and whose first rank ends with a code."""

    def __init__(self, rows, code):
        super().__init__(self)
        self.rows, self.code, self.tasks = rows, code, []

    def begin(self, tasks):
        self.tasks = [task["name"] for task in tasks]

    def wait_for_row(self, count, limit_s):
        return self.rows[: count + 1]

    def codes(self):
        return [self.code, None]

    def last_lines(self, rank):
        return f"the end of rank {rank}"


def test_tasks_after_one_that_fails_or_is_killed_run_in_another_job(tmp_path):
    jobs = [FakeJob([{"code": 0, "seconds": 3.0}, {"code": 65, "seconds": 1.0}], 65), FakeJob([], -9)]
    jobs.append(FakeJob([{"code": 0, "seconds": 2.0}], 0))
    runs = RankRuns(bench_in(tmp_path), mock.Mock(take=mock.Mock(side_effect=jobs)))
    ended = []
    tasks = [Task(name, ["train"]) for name in "abcd"]
    runs.run("two", 2, tasks, lambda task, code, figures: ended.append((task.name, code, figures)))
    log = {"log": "the end of rank 0"}
    assert ended == [("a", 0, {"seconds": 3.0}), ("b", 65, log), ("c", -9, log), ("d", 0, {"seconds": 2.0})]
    assert [job.tasks for job in jobs] == [["a", "b", "c", "d"], ["c", "d"], ["d"]]


def test_a_run_is_continued_only_where_one_was_killed(tmp_path):
    pool = mock.Mock()
    with pytest.raises(ConfigError, match="no run was killed; use --groups kill again"):
        start_again(RankRuns(bench_in(tmp_path), pool))
    assert pool.mock_calls == []
