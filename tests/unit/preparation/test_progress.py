import logging
import re

from pretrain.preparation import progress
from tests.unit.utils.test_status_line import on_terminal

BARS = """
    from pretrain.preparation.progress import progress_bar

    with progress_bar("document") as show:
        show("reading for the tokenizer", 0, 31_525_224, 0)
        show("reading for the tokenizer", 8_512_345, 31_525_224, 12_345)
        show("training the tokenizer, bpe", 0, 0, 0)
        show("tokenizing", 0, 31_525_224, 0)
        show("tokenizing", 31_525_224, 31_525_224, 1)
"""


def test_each_phase_has_a_bar_that_fits_the_terminal_and_the_last_state_stays():
    shown = [text for text in on_terminal(BARS) if text]
    assert max(map(len, shown)) <= 75
    assert any(
        text.startswith("reading for the tokenizer 8.5/31.5 MB ") and "12,345 documents" in text for text in shown
    )
    assert "training the tokenizer, bpe 0:00" in [text[2:] for text in shown]
    assert shown[-1].startswith("tokenizing 31.5/31.5 MB ") and "1 document" in shown[-1]
    wide = [text for text in on_terminal(BARS, columns=120) if text]
    assert re.search(r"0:00 1 document, \S+ MB/s, 0:00 left$", wide[-1])


def test_elsewhere_each_phase_is_a_line_and_its_progress_one_now_and_then(monkeypatch, caplog):
    monkeypatch.setattr(progress, "has_terminal", lambda: False)
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.0)
    with caplog.at_level(logging.INFO), progress.progress_bar("image") as show:
        show("tokenizing", 1_500_000, 2_000_000, 12)
    assert caplog.messages == ["tokenizing", "tokenizing: 2 of 2 MB, 12 images"]
    monkeypatch.setattr(progress, "LOG_EVERY_S", 60.0)
    caplog.clear()
    with caplog.at_level(logging.INFO), progress.progress_bar("document") as show:
        show("training the tokenizer, bpe", 0, 0, 0)
        show("tokenizing", 1_500_000, 2_000_000, 12)
        show("tokenizing", 1_600_000, 2_000_000, 12)
    assert caplog.messages == ["training the tokenizer, bpe", "tokenizing"]


def test_a_line_tells_speed_and_what_is_left():
    assert progress.describe_speed(5_000_000, 2.0, 9_308_000_000) == ", 2.5 MB/s, 1:02:03 left"
    assert progress.describe_speed(0, 2.0, 10) == ""
