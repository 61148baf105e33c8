"""Which steps are traced, and what is left of them."""

import gzip
import json
import logging

import torch

from pretrain.config.tracking import ProfileConfig
from pretrain.tracking.meter import Profiler


def take_steps(profiler: Profiler, steps: range) -> None:
    for step in steps:
        profiler.before_step(step)
        with torch.profiler.record_function(f"of step {step}"):
            torch.ones(8) @ torch.ones(8)
        profiler.after_step(step)
    profiler.close(steps[-1])


def names_in(path) -> set[str]:
    trace = json.loads(gzip.decompress(path.read_bytes()))
    return {event.get("name", "") for event in trace["traceEvents"]}


def test_the_steps_that_were_asked_for_are_traced_and_no_others(tmp_path, caplog):
    profiler = Profiler(ProfileConfig(steps=[2, 3]), tmp_path, 0, on_cuda=False)
    with caplog.at_level(logging.INFO, logger="pretrain"):
        take_steps(profiler, range(1, 6))
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        "steps-2-3-rank-0.json.gz",
        "steps-2-3-rank-0.txt",
    ]
    found = names_in(tmp_path / "profile" / "steps-2-3-rank-0.json.gz")
    assert {f"of step {step}" for step in range(1, 6)} & found == {"of step 2", "of step 3"}
    assert "aten::dot" in (tmp_path / "profile" / "steps-2-3-rank-0.txt").read_text()
    assert len(caplog.messages) == 1 and "steps-2-3-rank-0.json.gz" in caplog.messages[0]


def test_a_run_that_ends_among_them_writes_what_there_is(tmp_path):
    take_steps(Profiler(ProfileConfig(steps=[2, 9]), tmp_path, 1, on_cuda=False), range(1, 4))
    assert not (tmp_path / "profile").exists(), "rank 1 is not to trace"
    take_steps(Profiler(ProfileConfig(steps=[2, 9], ranks=[1]), tmp_path, 1, on_cuda=False), range(3, 5))
    assert "of step 3" in names_in(tmp_path / "profile" / "steps-3-4-rank-1.json.gz")


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "profile").write_text("in the way")
    take_steps(Profiler(ProfileConfig(steps=[1, 1]), tmp_path, 0, on_cuda=False), range(1, 3))
    assert any(message.startswith("profile: ") for message in caplog.messages)
