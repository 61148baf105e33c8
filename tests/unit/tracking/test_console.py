"""What is shown, on a terminal and without one, and that losing it stops nothing."""

import logging
import math
import os
import re
import subprocess
import sys
import textwrap
from contextlib import suppress

from pretrain.tracking.run_output import Console, fit_metrics, format_metrics
from tests.helpers.waiting import finish

ROW = {"loss": 3.21454, "lr": 3e-4, "grad_norm": 1.0, "tokens_per_s": 12345.0, "data_wait": 0.004, "eta_s": 3725.0}

CODE = """
    import logging, signal, sys
    from pretrain.utils.log import setup_logging
    from pretrain.tracking.run_output import Console

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    setup_logging(0, 1)
    console = Console(1000, 1)
    for step in range(10, 30, 10):
        console.show(step, {"loss": 3.2145, "lr": 3e-4, "tokens_per_s": 950.0})
    logging.getLogger("pretrain").info("checkpoint committed")
    sys.stdin.readline()
    console.show(30, {"loss": 2.5, "lr": 3e-4})
    console.show(30, {"val_loss": 2.25})
    console.close()
    console.close()
    print("finished")
"""


def start(stderr) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CODE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )


def read_all(master: int) -> str:
    """What a terminal shows, until the last process that writes to it is gone."""
    shown = b""
    with suppress(OSError):  # Linux's end of file here
        while piece := os.read(master, 100_000):
            shown += piece
    return shown.decode()


def test_a_row_shows_known_metrics_in_order_and_in_columns():
    shown = "loss   3.2145  lr 3.00e-04  grad    1.00  tok/s  12.3k  wait   0.4%  eta 1:02:05"
    assert format_metrics(dict(reversed(ROW.items())), aligned=True) == shown
    assert format_metrics(ROW, aligned=False) == re.sub(" +", " ", shown)


def test_rows_of_different_sizes_line_up():
    small = format_metrics(ROW | {"grad_norm": 999.5, "tokens_per_s": 1.0, "data_wait": 1.0}, aligned=True)
    large = format_metrics(ROW | {"loss": 11.5, "tokens_per_s": 1.234e6, "eta_s": 35999.0}, aligned=True)
    assert len(small) == len(large) == len(format_metrics(ROW, aligned=True))


def test_counts_have_three_digits_and_a_unit():
    values = [0.4, 999.0, 1000.0, 12345.0, 999999.0, 1.2e6, 3.5e9]
    shown = [format_metrics({"tokens_per_s": value}, aligned=False).split()[1] for value in values]
    assert shown == ["0", "999", "1k", "12.3k", "1000k", "1.2M", "3.5G"]


def test_rows_of_a_classifier_have_its_accuracy_and_those_of_images_no_patches(caplog):
    row = {"loss": 0.5, "accuracy": 0.75, "tokens_per_s": 340.0}
    caplog.set_level(logging.INFO)
    for added in ({"tokens": 40.0}, {"labels": 40.0}, {"labels": 40.0, "images_per_s": 20.0}):
        Console(10, 1).show(5, row | added)
    shown = [" ".join(record.getMessage().split()[2:]) for record in caplog.records]
    # Targets of a classifier are labels: its tokens are said to be those that are read.
    assert shown == ["loss 0.5000 tok/s 340", "loss 0.5000 acc 75.0% tok/s read 340", "loss 0.5000 acc 75.0% img/s 20"]


def test_days_are_named():
    assert format_metrics({"eta_s": 2 * 86400 + 61.0}, aligned=False) == "eta 2d 0:01:01"


def test_values_that_are_not_finite_are_shown_as_such():
    assert format_metrics({"loss": math.nan, "grad_norm": math.inf}, aligned=False) == "loss nan grad inf"


def test_metrics_unknown_to_the_console_are_shown_in_rows_without_a_loss_only():
    assert format_metrics({"loss": 1.0, "odd": 2.0}, aligned=False) == "loss 1.0000"
    assert format_metrics({"val_loss": 1.0, "odd": 2.0}, aligned=False) == "val_loss 1.0000 odd 2"


def test_without_a_terminal_each_row_is_a_line():
    child = start(subprocess.PIPE)
    output, error = finish(child, "go\n")
    assert (output, child.returncode) == ("finished\n", 0)
    assert [line.split("INFO    ")[1] for line in error.splitlines()] == [
        "step   10/1000  loss   3.2145  lr 3.00e-04  tok/s    950",
        "step   20/1000  loss   3.2145  lr 3.00e-04  tok/s    950",
        "checkpoint committed",
        "step   30/1000  loss   2.5000  lr 3.00e-04",
        "step   30/1000  val_loss 2.2500",
    ]


def test_on_a_terminal_there_is_a_bar_with_log_lines_above_it():
    master, slave = os.openpty()
    child = start(slave)
    os.close(slave)
    child.stdin.write("go\n")
    child.stdin.flush()
    shown = read_all(master)
    os.close(master)
    output, _ = finish(child)
    assert (output, child.returncode) == ("finished\n", 0)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.search(r"20/1000 \S+ 0:00 loss 3.2145 lr 3.00e-04 tok/s 950", plain)
    assert re.search(r"30/1000 \S+ \d:\d\d loss 2.5000", "".join(plain.splitlines()[-2:]))
    lines = [line for line in plain.splitlines() if "INFO" in line]
    assert [line.split("INFO")[1].strip() for line in lines] == [
        "checkpoint committed",
        "step   30/1000  val_loss 2.2500",
    ]


def test_a_terminal_that_hangs_up_changes_nothing():
    master, slave = os.openpty()
    child = start(slave)
    os.close(slave)
    shown = b""
    while b"committed" not in shown:
        shown += os.read(master, 100_000)
    os.close(master)
    output, _ = finish(child, "go\n")
    assert (output, child.returncode) == ("finished\n", 0)


def test_a_pipe_whose_reader_is_gone_changes_nothing():
    child = start(subprocess.PIPE)
    assert child.stderr
    while "committed" not in child.stderr.readline():
        pass
    child.stderr.close()
    output, _ = finish(child, "go\n")
    assert (output, child.returncode) == ("finished\n", 0)


FULL = ROW | {"mfu": 0.412, "memory_bytes": 71.3e9}


def test_a_narrow_terminal_loses_what_is_wanted_least_and_never_the_loss():
    whole = format_metrics(FULL, aligned=False)
    assert fit_metrics(FULL, len(whole)) == whole
    assert "mfu" not in fit_metrics(FULL, len(whole) - 1)
    for width in range(20, len(whole)):
        shown = fit_metrics(FULL, width)
        assert shown.startswith("loss 3.2145") and len(shown) <= width
        assert ("eta 1:02:05" in shown) == (width >= len("loss 3.2145 eta 1:02:05"))


def test_memory_has_a_binary_unit():
    values = [0.0, 950 * 2**20, 71.3 * 2**30]
    shown = [format_metrics({"memory_bytes": value}, aligned=False).split()[1] for value in values]
    assert shown == ["0M", "950M", "71.3G"]
