"""The last line of a terminal, in a process on a real one: phases, the bar of a run, and what stays of both."""

import os
import re
import subprocess
import sys
import textwrap

from pretrain.utils.status_line import show_phase
from tests.helpers.waiting import finish
from tests.unit.tracking.test_console import read_all

BEGIN = """
    import logging, sys
    from pretrain.utils.log import setup_logging
    from pretrain.utils.status_line import show_phase, status_line, stderr_console, transient_bar

    setup_logging(0, 1)
    line = status_line()
"""


def on_terminal(code: str, columns: int = 80, until: bytes = b"", **environment: str) -> list[str]:
    """Runs code after BEGIN on a terminal; returns all that it shows, a state of its last line each.

    A line of stdin comes when `until` has been shown.
    """
    master, slave = os.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(BEGIN) + textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": str(columns), **environment},
    )
    os.close(slave)
    seen = b""
    while until not in seen:
        seen += os.read(master, 100_000)
    assert child.stdin
    child.stdin.write("go\n")
    child.stdin.flush()
    shown = seen.decode() + read_all(master)
    os.close(master)
    finish(child)
    assert child.returncode == 0, shown
    assert environment or shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l"), "the cursor is visible"
    return [line.rstrip() for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown))]


def test_a_phase_is_shown_with_its_time_and_disappears():
    code = """
        show_phase("importing torch")
        sys.stdin.readline()
        line.close()
        line.close()
        print("done", file=sys.stderr)
    """
    shown = on_terminal(code, until=b"importing torch 0:01")
    assert "importing torch 0:00" in [text[2:] for text in shown]
    assert [text for text in shown if text][-1] == "done"


def test_a_cell_of_a_notebook_has_lines_and_no_frames_although_its_commands_have_a_terminal():
    code = """
        show_phase("importing torch")
        line.advance(1, 3, lambda width: "loss 5.1")
        line.close()
    """
    (shown, *rest) = on_terminal(code, JPY_PARENT_PID="1")
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO    importing torch", shown) and rest == [""]


def test_the_bar_moves_with_each_step_and_its_last_state_stays():
    shown = on_terminal("""
        line.advance(0, 3)
        line.enter("first step")
        logging.getLogger("pretrain").info("starting")
        for step in (1, 2, 3):
            line.advance(step, 3, "row {}".format)
        line.close()
    """)
    assert any(re.fullmatch(r"0/3 \S+ +0:00 first step 0:00", text) for text in shown)
    for step in (1, 2, 3):
        assert any(text.startswith(f"{step}/3 ") for text in shown)
    assert re.match(r"3/3 \S+ 0:00 row \d+", [text for text in shown if text][-1])


def test_the_line_leaves_room_for_the_echo_of_two_interrupts():
    for columns in (40, 80, 120):
        shown = on_terminal(f"""
            line.advance(52, 120, lambda width: "x" * width)
            line.enter("{"y" * 200}")
            line.close()
        """, columns)  # fmt: skip
        assert max(len(text) for text in shown if "52/120" in text) <= columns - 5
        assert not [text for text in shown if text and "52/120" not in text]


def test_another_bar_takes_the_place_of_the_line():
    shown = on_terminal("""
        show_phase("listing")
        with transient_bar() as bar:
            bar.add_task("files", total=3)
    """)
    assert any("files" in text for text in shown)


def test_without_a_terminal_a_phase_is_a_line_of_the_log(caplog):
    with caplog.at_level("INFO"):
        show_phase("importing torch")
    assert caplog.messages == ["importing torch"]
