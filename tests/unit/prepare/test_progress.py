import io
import logging

from rich.console import Console

from pretrain.prepare import progress


def test_bar_on_a_terminal_shows_phase_speed_and_documents(monkeypatch):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=200)
    monkeypatch.setattr(progress, "stderr_console", lambda: console)
    with progress.progress_bar() as show:
        show("tokenizing", 0, 2_000_000, 0)
        show("tokenizing", 1_500_000, 2_000_000, 12_345)
    assert "tokenizing" in screen.getvalue()
    assert "1.5/2.0 MB" in screen.getvalue()
    assert "12,345 documents" in screen.getvalue()


def test_elsewhere_a_line_is_logged_now_and_then(monkeypatch, caplog):
    monkeypatch.setattr(progress, "stderr_console", lambda: Console(file=io.StringIO()))
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.0)
    with caplog.at_level(logging.INFO), progress.progress_bar() as show:
        show("tokenizing", 1_500_000, 2_000_000, 12)
    assert caplog.messages == ["tokenizing: 2 of 2 MB, 12 documents"]
    monkeypatch.setattr(progress, "LOG_EVERY_S", 60.0)
    caplog.clear()
    with caplog.at_level(logging.INFO), progress.progress_bar() as show:
        show("tokenizing", 1_500_000, 2_000_000, 12)
    assert not caplog.messages


def test_a_line_tells_speed_and_what_is_left():
    assert progress.describe_speed(5_000_000, 2.0, 9_308_000_000) == ", 2.5 MB/s, 1:02:03 left"
    assert progress.describe_speed(0, 2.0, 10) == ""
