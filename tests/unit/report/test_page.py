"""The page of `pretrain report`: what it tells, that it needs nothing else, and that no text of a run becomes code."""

import base64
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pretrain.report import page as page_module
from pretrain.report.page import build_page, differing_keys, write_report
from pretrain.report.panels import choose_panels
from pretrain.report.run_data import MAX_PICTURE_BYTES, RunData, read_run_data
from pretrain.report.tables import summarize, summary_table
from pretrain.run.folder import RunDir
from pretrain.run.lease import Lease
from pretrain_launch.runs import read_run
from tests.helpers.hostile_names import hostile_names
from tests.unit.checkpoint.stand_in import save
from tests.unit.report.run_folders import attempt, metric_row, write_long_run, write_run

PNG = b"\x89PNG\r\n\x1a\n"
SCRIPTS = [
    "<script>document.title='pwned'</script>",
    "</script><script>document.title='pwned'</script>",
    "</title><img src=x onerror=\"document.title='pwned'\">",
    "\"><svg onload=document.title='pwned'>",
    "' onmouseover='x",
    "<!-- <script>",
    "javascript:alert(1)",
    "&lt;b&gt; &amp;",
]


def read(folder: Path, label: str | None = None) -> RunData:
    """A run as the command reads it."""
    facts = read_run(folder)
    return read_run_data(folder, label or facts.name, facts.starts, facts.state)


class Page(HTMLParser):
    """The tags of a page, and the texts of its cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)

    def count(self, tag):
        """How often there is a tag."""
        return sum(name == tag for name, _ in self.tags)


@pytest.fixture(scope="module")
def long_page(tmp_path_factory):
    return build_page([read(write_long_run(tmp_path_factory.mktemp("runs") / "long", num_rows=4000))])


def test_the_page_needs_nothing_from_anywhere(long_page):
    page = Page(long_page)
    assert not [attributes for _, attributes in page.tags if {"href", "action"} & attributes.keys()]
    sources = [attributes["src"] for _, attributes in page.tags if "src" in attributes]
    assert sources and all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert not re.search(r"url\(|@import|https?://", long_page)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "embed", "form", "base"}


def test_the_policy_allows_no_script_and_no_network(long_page):
    (policy,) = (attributes["content"] for tag, attributes in Page(long_page).tags if "http-equiv" in attributes)
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def test_a_long_run_shows_curves_starts_evaluations_texts_and_facts(long_page):
    texts = [text.strip() for text in Page(long_page).texts]
    for heading in ("Summary", "Learning", "Speed and memory", "By the clock", "By source and layer", "Evaluation",
                    "Generated texts", "Checkpoints", "Config", "Facts"):  # fmt: skip
        assert heading in texts
    for told in ("SIGUSR1", "rank 3 hangs in backward", "4711, restart 1", "2.13.0", "node1, node2", "decoder.11",
                 "recovery 1, a step done after 2.5 s, of the loss: rank 3 hangs",
                 "from step 120 to 310: rank 3 on node2, GPU 1: computes 1.31 times as long; "
                 "from step 990 on: rank 3 on node2, GPU 1: computes 1.31 times as long"):  # fmt: skip
        assert told in texts
    assert "Training loss by source" in texts and "Where a step's time goes" in texts
    assert texts.count("no end recorded: killed, node lost, or disk full") == 2  # the last one has no lease either
    assert "a time, at step 10000,\nthere was a loss." in texts
    assert any(text.endswith("not finite, red on the axis: 1") and "beyond the axis" in text for text in texts)


def test_facts_are_texts_in_one_column(long_page):
    facts = long_page[long_page.index("<h2>Facts</h2>") :]
    assert "<td>ranks</td><td>8</td>" in facts and "class=number" not in facts


def test_colours_follow_the_reader_and_hold_in_the_charts_too(long_page):
    style = long_page[long_page.index("<style>") : long_page.index("</style>")]
    dark = style[style.index("prefers-color-scheme: dark") :]
    names = set(re.findall(r"(--\w+):", style[: style.index("@media")])) - {"--"}
    assert names == set(re.findall(r"(--\w+):", dark[: dark.index("figure img")]))
    assert set(re.findall(r"var\((--\w+)\)", style)) == names
    assert "figure img, .wide img, .swatch { filter: invert" in dark


@pytest.fixture
def no_charts(monkeypatch):
    """Draws none, which takes longer than all else of a page."""
    for name in ("draw_panel", "draw_timeline"):
        monkeypatch.setattr(page_module, name, lambda *_: "")


@pytest.mark.usefixtures("no_charts")
def test_the_newest_picture_of_attention_is_in_the_page_itself(tmp_path):
    folder = write_run(tmp_path / "run", [metric_row(20)])
    (folder / "attention").mkdir()
    for step, png in ((10, PNG + b"old"), (20, PNG + b"new")):
        (folder / "attention" / f"step-{step:08d}.png").write_bytes(png)
    page = Page(build_page([read(folder)]))
    (picture,) = (attributes for _, attributes in page.tags if attributes.get("alt") == "maps of attention")
    assert picture["src"] == f"data:image/png;base64,{base64.b64encode(PNG + b'new').decode()}"
    assert "first, step 20" in page.texts


@pytest.mark.parametrize("content", [b"<script>", PNG + bytes(MAX_PICTURE_BYTES)], ids=["no PNG", "too large"])
def test_what_is_no_picture_of_a_bounded_size_is_told_and_left_out(content, tmp_path):
    folder = write_run(tmp_path / "run", [metric_row(20)])
    (folder / "attention").mkdir()
    (folder / "attention" / "step-00000020.png").write_bytes(content)
    run = read(folder)
    assert run.attention is None and run.notes == ["step-00000020.png: no PNG of at most 4 MiB"]


def test_a_month_of_many_curves_stays_below_two_megabytes(tmp_path):
    # As many curves and groups as a month has: the size depends on the groups, not on the rows behind them.
    rows = [metric_row(step) | {f"grad_norm/layer{n}": n + step % 7 for n in range(80)} for step in range(1, 300)]
    runs = [read(write_run(tmp_path / name, rows, name=name)) for name in "ab"]
    assert len(build_page(runs).encode()) < 2_000_000


def test_curves_are_over_steps_and_losses_also_over_tokens(tmp_path):
    run = read(write_long_run(tmp_path / "long", num_rows=4000))
    loss, by_tokens = choose_panels([run])["Learning"][:2]
    (curve,) = (line.curve for line in loss.lines)
    assert len(curve.xs) == 400 and curve.highs.max() == 40.0 and curve.lost.tolist() == [13320]
    assert loss.restarts == [10000.0, 20000.0, 30000.0] and not loss.is_log
    assert by_tokens.title == "Training loss by tokens" and by_tokens.is_by_tokens and by_tokens.is_log
    assert by_tokens.restarts == [1e7, 2e7, 3e7] and by_tokens.lines[0].curve.xs[-1] == 1000 * curve.xs[-1]


@pytest.mark.parametrize("scripts", [SCRIPTS[:3], pytest.param(SCRIPTS, marks=pytest.mark.long)], ids=["some", "all"])
def test_text_that_looks_like_code_is_shown_and_nothing_else(tmp_path, scripts):
    folders = []
    for number, text in enumerate(scripts):
        row = metric_row(1) | {f"loss_{text}": 1.0, text: 2.0, f"val_{text}": 3.0, "val_loss": 2.0}
        ended = {"reason": text, "exit_code": 70, "host": text, "engine": text, "versions": {text: text}}
        samples = [{"step": 1, "samples": [{"prompt": text, "text": text}]}]
        config = {text: text, "b": {text: [text]}}
        folders.append(write_run(tmp_path / str(number), [row], name=text, samples=samples, config=config,
                                 attempts=[attempt(1, 0, 1, 0, **ended)]))  # fmt: skip
    plain = write_run(tmp_path / "plain", rows=[metric_row(1)])
    page = Page(build_page([*map(read, folders), read(plain)]))
    assert page.count("script") == 0 and page.count("svg") == 0 and page.count("title") == 1
    images = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert len(images) == page.count("img") and all(source.startswith("data:image/svg+xml;") for source in images)
    # Charts hold numbers only.
    charts = [base64.b64decode(source.split(",")[1]).decode() for source in images]
    assert not [text for text in scripts if any(text in chart for chart in charts)]
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert not [text for text in scripts if text not in page.texts or f" {text}" not in page.texts]


@pytest.mark.usefixtures("no_charts")
def test_any_name_gives_a_page_that_can_be_written(tmp_path):
    folder = write_run(tmp_path / "run", [], attempts=[{"number": 1, "started": "soon"}])
    for name in [*hostile_names(tmp_path / "canary"), "\ud800", "\0"]:
        write_report([read(folder, name)], tmp_path / "out" / "report.html")
        assert (tmp_path / "out" / "report.html").read_text(encoding="utf-8").endswith("</html>\n")
    assert not (tmp_path / "canary").exists()


@pytest.mark.usefixtures("no_charts")
def test_runs_are_compared_by_what_their_configs_differ_in(tmp_path):
    configs = ({"seed": 1, "optim": {"lr": 1}, "x": True}, {"seed": 1, "optim": {"lr": 2.0}, "x": 1, "new": "y"})
    runs = [
        read(write_run(tmp_path / str(number), [metric_row(5)], name=f"run{number}", config=config))
        for number, config in enumerate(configs)
    ]
    assert differing_keys(runs) == {"optim.lr": [1, 2.0], "x": [True, 1], "new": [None, "y"]}
    texts = Page(build_page(runs)).texts
    assert "optim.lr" in texts and "not there" in texts
    (panel, *_) = choose_panels(runs)["Learning"]
    assert [(line.run, line.color) for line in panel.lines] == [(0, "#0072b2"), (1, "#d55e00")]


def test_a_metric_that_nobody_knows_has_a_panel_of_its_own(tmp_path):
    run = read(write_run(tmp_path / "run", [{"step": 1, "my_metric": 1.0, "loss_scale": 2.0, "skipped_steps": 0.0}]))
    sections = {title: [panel.title for panel in panels] for title, panels in choose_panels([run]).items()}
    assert sections == {"Learning": ["Loss scale"], "Other metrics": ["my_metric"]}


@pytest.mark.usefixtures("no_charts")
def test_a_run_that_has_just_begun_has_a_page(tmp_path):
    folder = write_run(tmp_path / "run", [], attempts=[attempt(1, 0, None, 0)])
    (folder / "metrics.jsonl").unlink()
    facts = write_report([read(folder)], tmp_path / "report.html")
    (run,) = facts["runs"]
    assert (run["state"], run["steps"], run["loss"], run["notes"]) == ("lost", 0, None, [])
    lease = Lease(RunDir(folder).lease)
    page = Page(build_page([read(folder)])).texts
    lease.release()
    assert "running" in page and not any("killed, node lost" in text for text in page)
    assert "lost" in Page(build_page([read(folder)])).texts
    assert facts["bytes"] == (tmp_path / "report.html").stat().st_size


@pytest.mark.usefixtures("no_charts")
def test_the_best_evaluation_and_every_checkpoint_are_told(tmp_path):
    rows = [metric_row(10), {"step": 10, "val_loss": 3.0}, metric_row(20), {"step": 20, "val_loss": 2.0}]
    rows += [{"step": 21, "checkpoint_step": 20, "checkpoint_stall_s": 0.25, "checkpoint_write_s": 7.5}]
    rows += [metric_row(30), {"step": 30, "val_loss": 2.5, "val_accuracy": 0.5}]
    folder = write_run(tmp_path / "run", rows)
    save(folder / "checkpoints", 20, 30)
    run = read(folder)
    page = Page(build_page([run]))
    facts = write_report([run], tmp_path / "report.html")["runs"][0]
    assert (facts["best_val_loss"], facts["best_val_step"], facts["loss"]) == (2.0, 20, metric_row(30)["loss"])
    assert "best 20" in page.texts and "50.00%" in page.texts
    assert {"0.25", "7.5"} <= set(page.texts)


@pytest.mark.usefixtures("no_charts")
def test_a_rollback_is_told(tmp_path):
    folder = write_run(tmp_path / "run", [metric_row(10)])
    record = json.loads((folder / "run.json").read_text())
    record["rollbacks"] = [{"to": 5, "first": 100, "end": 164, "automatic": True, "at": "2026-03-02"}]
    (folder / "run.json").write_text(json.dumps(record))
    texts = Page(build_page([read(folder)])).texts
    assert "automatic, after a spike" in texts and "64" in texts


def test_the_summary_has_the_loss_of_the_last_row_and_no_earlier_one(tmp_path):
    rows = [metric_row(step) | ({"loss": math.nan} if step > 4 else {}) for step in range(1, 10)]
    run = read(write_run(tmp_path / "run", rows))
    assert summarize(run)["loss"] is None
    assert "<td>not finite</td>" in summary_table([run])
    assert "empty steps" not in summary_table([run])


def test_the_summary_has_the_number_of_steps_without_targets(tmp_path):
    run = read(write_run(tmp_path / "run", [metric_row(step) | {"empty_steps": step - 1.0} for step in (1, 2, 4)]))
    assert summarize(run)["empty_steps"] == 3
    assert "empty steps" in summary_table([run])
