"""A bar where there is a terminal, and nothing where there is none."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pretrain.datacheck import progress_bar
from pretrain.datacheck.progress_bar import share_of, show_progress


@given(st.integers(0, 10**12), st.integers(1, 50))
def test_shares_add_up(total, num_parts):
    shares = [share_of(total, num_parts, number) for number in range(num_parts)]
    assert sum(shares) == total and max(shares) - min(shares) <= 1


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_drawn_on_a_terminal_only(monkeypatch, is_terminal):
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80)
    monkeypatch.setattr(progress_bar, "stderr_console", lambda: console)
    with show_progress() as start_phase:
        tick = start_phase("files", 10)
        for _ in range(10):
            tick(1)
    drawn = console.file.getvalue()
    assert ("files" in drawn and "100%" in drawn) == is_terminal and (bool(drawn)) == is_terminal
