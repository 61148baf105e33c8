"""The fan-out: who gets a row, over an interruption, on which rank."""

import json
import logging
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pretrain.config.tracking import SamplesConfig, TrackingConfig
from pretrain.errors import DiskError
from pretrain.tracking import RunOutput
from pretrain.tracking.tracker import Identity
from pretrain.utils import io
from pretrain.utils.jsonl import read_rows
from tests.helpers.waiting import LIMIT_S
from tests.unit.tracking.wandb_file import read_history

ROOT = str(Path(__file__).parents[3])


def make(run_dir: Path, *, rank: int = 0, wandb: str = "off") -> RunOutput:
    return RunOutput(
        run_dir,
        TrackingConfig(wandb=wandb),
        Identity("abc123", "name", {"seed": 1}),
        rank=rank,
        total_steps=100,
    )


def test_rank_0_keeps_all_metrics_and_shows_them(tmp_path, caplog):
    tracker = make(tmp_path)
    with caplog.at_level(logging.INFO, logger="pretrain"):
        tracker.log(10, {"loss": 2.5, "anything": 1.0})
    tracker.close()
    tracker.close()
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 10, "loss": 2.5, "anything": 1.0}]
    assert caplog.messages == ["step  10/100  loss   2.5000"]


def test_other_ranks_do_nothing(tmp_path, caplog):
    tracker = make(tmp_path, rank=1, wandb="offline")
    with caplog.at_level(logging.INFO, logger="pretrain"):
        tracker.log(10, {"loss": 2.5})
        tracker.rewind(0)
        tracker.close()
    assert list(tmp_path.iterdir()) == []
    assert caplog.messages == []


def test_values_that_are_not_finite_are_null_in_strict_json(tmp_path):
    tracker = make(tmp_path)
    tracker.log(1, {"loss": math.nan, "grad_norm": math.inf})
    tracker.close()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert row == {"step": 1, "loss": None, "grad_norm": None}


@pytest.mark.long
def test_a_resumed_run_has_each_step_once_in_the_file_and_in_wandb(tmp_path):
    """Killed after step 8, the last commit at 5: 6 to 8 come twice, in the same process as in another."""
    for first, last, committed in ((1, 8, 0), (6, 12, 5)):
        code = f"""
            import sys
            from pathlib import Path
            sys.path.insert(0, {ROOT!r})
            from tests.unit.tracking.test_run_output import make
            tracker = make(Path({str(tmp_path)!r}), wandb="offline")
            tracker.rewind({committed})
            for step in range({first}, {last + 1}):
                tracker.log(step, {{"loss": 1 / step}})
            tracker.close()
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=os.environ,
        )
        assert done.returncode == 0, done.stderr
    expected = [{"step": step, "loss": 1 / step} for step in range(1, 13)]
    assert read_rows(tmp_path / "metrics.jsonl") == expected
    assert read_history(tmp_path) == [{"step": row["step"], "train/loss": row["loss"]} for row in expected]


@pytest.mark.long
def test_a_run_that_goes_back_shows_each_step_once_and_none_of_them_backwards(tmp_path):
    """Within one process, as after a loss spike: the file has the steps as they came last, wandb as they came first."""
    code = f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {ROOT!r})
        from tests.unit.tracking.test_run_output import make
        tracker = make(Path({str(tmp_path)!r}), wandb="offline")
        for start, last, loss in ((1, 6, 2.0), (5, 9, 1.0)):
            tracker.rewind(start - 1)
            for step in range(start, last + 1):
                tracker.log(step, {{"loss": loss}})
        tracker.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert rows == [{"step": step, "loss": 2.0 if step < 5 else 1.0} for step in range(1, 10)]
    sent = [{"step": step, "train/loss": 2.0 if step < 7 else 1.0} for step in range(1, 10)]
    assert read_history(tmp_path) == sent


def test_rows_wait_for_a_full_disk_which_is_one_warning_and_the_console_goes_on(tmp_path):
    """RLIMIT_FSIZE stands for the full disk."""
    code = f"""
        import resource, signal, sys
        from pathlib import Path
        sys.path.insert(0, {ROOT!r})
        from pretrain.utils.log import setup_logging
        from tests.unit.tracking.test_run_output import make
        setup_logging(0, 1)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        tracker = make(Path({str(tmp_path)!r}))
        for step, room in enumerate((100, 10, 10, 1000, 10, 1000), start=1):
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
            if step < 6:
                tracker.log(step, {{"loss": 2.0}})
        tracker.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], stderr=subprocess.PIPE, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    said = [line.split(maxsplit=2)[2] for line in done.stderr.splitlines()]
    warnings = [line for line in said if line.startswith(f"{tmp_path / 'metrics.jsonl'}: cannot append: ")]
    assert [line.rpartition("; ")[2] for line in warnings] == ["metrics wait in memory until it can be written"] * 2
    assert [line for line in said if line not in warnings] == [f"step   {n}/100  loss   2.0000" for n in range(1, 6)]
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_a_rewind_that_fails_is_a_warning(tmp_path, caplog):
    tracker = make(tmp_path)
    tracker.log(1, {"loss": 2.0})
    tracker.log(2, {"loss": 2.0})

    def fail(operation: str, _: Path) -> None:
        raise OSError(28, "No space left on device")

    io.set_fault_hook(fail)
    try:
        tracker.rewind(1)
    finally:
        io.set_fault_hook(None)
    assert "metrics after step 1 are kept beside their repetition" in caplog.text
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 2


def test_a_run_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    with pytest.raises(DiskError, match=r"metrics\.jsonl: cannot open"):
        make(tmp_path / "nowhere")


def test_texts_are_kept_by_step_and_those_after_a_commit_are_forgotten(tmp_path, caplog):
    config = TrackingConfig(wandb="off", samples=SamplesConfig(prompts=["Once"]))
    tracker = RunOutput(tmp_path, config, Identity("a", "name", {}), rank=0, total_steps=9)
    with caplog.at_level(logging.INFO, logger="pretrain"):
        for step in (2, 4):
            tracker.samples(step, [("Once", f" upon {step}\n")])
    tracker.rewind(3)
    tracker.close()
    assert read_rows(tmp_path / "samples.jsonl") == [{"step": 2, "samples": [{"prompt": "Once", "text": " upon 2\n"}]}]
    assert caplog.messages[0] == r"sample 'Once': ' upon 2\n'"


def test_without_prompts_there_is_no_file_for_texts(tmp_path):
    make(tmp_path).close()
    assert not (tmp_path / "samples.jsonl").exists()
