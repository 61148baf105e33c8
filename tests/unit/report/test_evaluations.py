"""What `pretrain evaluate` has kept is on the page: of every kind, with intervals, newest first, and never as code."""

import json
import re
from itertools import product

import numpy as np
import pytest

from pretrain.evaluation.bootstrap import Difference, wilson_interval
from pretrain.evaluation.evaluation_log import Data, Subject, keep_evaluation
from pretrain.evaluation.exact_answers import ExactReport, KindScore
from pretrain.evaluation.held_out import HeldOutReport, SourceLoss
from pretrain.evaluation.label_scores import Answers, score_labels
from pretrain.evaluation.row_loss import LossReport
from pretrain.evaluation.tasks import TaskReport, TaskScore
from pretrain.evaluation.translation import TranslationReport, Translations, TranslationSet
from pretrain.evaluation.translation_metrics import MetricScore, PairedComparison
from pretrain.kinds.objective import Shown
from pretrain.report import page as page_module
from pretrain.report.evaluations import read_evaluations
from pretrain.report.page import build_page, write_report
from pretrain.run.folder import RunDir
from tests.unit.checkpoint.stand_in import save
from tests.unit.report.run_folders import metric_row, write_run
from tests.unit.report.test_page import SCRIPTS, Page, read

WEB, CODE = Data("web", "data/web", "1" * 64), Data("code", "data/code", "2" * 64)
BETTER = Difference(-0.25, -0.5, -0.125, 0.01, 17, "rows", 1000)
SETTINGS = {
    "loss": {"max_tokens": None}, "labels": {"max_tokens": 4096}, "translation": {},
    "tasks": {"num_fewshot": 2, "limit": 10}, "exact": {},
}  # fmt: skip


def losses(subject=None):
    mine, its = LossReport(2.5, 200, 50), LossReport(2.75, 200, 40)
    found = [
        SourceLoss("web", mine, 1.25, 0, baseline=its, differences={"loss": BETTER}),
        SourceLoss("code", LossReport(800.0, 100, 10), None, 3),
        SourceLoss("all", mine, None, 3),
    ]
    return HeldOutReport("runs/a", "runs/b", "causal", "validation", found, [WEB, CODE], subject)


def labels(subject=None):
    gold = np.array([0, 1, 0, 1, 1, 0] * 4)
    answers = Answers(gold, np.array([0, 1, 1, 1, 1, 0] * 4), np.arange(24), np.full(24, 0.5))
    scores = score_labels(answers, ["no", "yes"], 100)
    found = SourceLoss("data", LossReport(0.5, 24, 20), None, 0, labels=scores, scores_words=False)
    return HeldOutReport("runs/a", None, "classify", "validation", [found], [WEB], subject)


def translations(subject=None):
    found = Translations(["ein Satz"] * 4, 8, 1, 2.0)
    systems = [
        (TranslationSet("runs/mt", beams, found, None), [MetricScore("bleu", 27.314, "", "tok:13a")])
        for beams in (1, 5)
    ]
    pair = PairedComparison("bleu", "runs/mt, greedy", "runs/mt, beam 5", 0.5, 0.03, 1.25, 1.5, "bs:1000")
    return TranslationReport(systems, [pair], [Data("source", "test.en", "3" * 64)], subject)


def tasks(subject=None):
    scores = [
        TaskScore("choices", "acc,none", 0.45, 0.03, 0.5, Difference(-0.05, -0.2, 0.1, 0.4, 10, "documents", 1000)),
        TaskScore("choices", "f1,none", 0.25, None, 0.5, None),
    ]
    return TaskReport("runs/a", "runs/b", "0.4", scores, {"choices": 10}, [Data("choices", None, "4" * 64)], subject)


def exact(subject=None):
    scores = [KindScore("number", wilson_interval(3, 4), 3, 4), KindScore("all", wilson_interval(5, 8), 5, 8)]
    return ExactReport("runs/a", "runs/b", scores, BETTER, [], [Data("questions", "held.jsonl", "5" * 64)], subject)


REPORTS = {"loss": losses, "labels": labels, "translation": translations, "tasks": tasks, "exact": exact}


@pytest.fixture(autouse=True)
def no_charts(monkeypatch):
    """Draws none, which takes longer than all else of a page; test_page.py has them beside such texts."""
    for name in ("draw_panel", "draw_timeline"):
        monkeypatch.setattr(page_module, name, lambda *_: "")


@pytest.fixture
def run(tmp_path):
    """A run that has kept one evaluation of each kind, of a checkpoint that is on disk."""
    folder = write_run(tmp_path / "run", [metric_row(step) for step in range(1, 9)])
    (checkpoint,) = save(folder / "checkpoints", 8)
    subject = Subject(RunDir(folder), checkpoint.name, 8, next(iter(read(folder).checkpoints)).manifest)
    for kind, make in REPORTS.items():
        report = make(subject)
        keep_evaluation(subject, report.data, SETTINGS[kind], report.facts())
    return folder


def tables(page):
    """The rows of each table under a heading of `pretrain evaluate`: {column: text}."""
    found = {}
    for title, content in re.findall(r"<h3>([^<]*), by pretrain evaluate</h3>.*?(<table>.*?</table>)", page, re.DOTALL):
        heads = re.findall(r"<th(?: [^>]*)?>(.*?)</th>", content)
        rows = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in content.split("<tr>")[2:]]
        found[title] = [dict(zip(heads, row, strict=True)) for row in rows]
    return found


def test_every_kind_has_its_table(run):
    found = tables(build_page([read(run)]))
    assert list(found) == [
        "Losses",
        "Classifiers",
        "Translations",
        "Tasks of lm-eval-harness",
        "Exact answers",
        "Comparisons",
    ]
    assert all(row["step"] == "8" and "first" in row["run"] for rows in found.values() for row in rows)
    web, code, whole = found["Losses"]
    assert (web["of"], web["loss"], web["perplexity"]) == ("causal, web", "2.5", "12.182")
    assert (web["bits per byte"], web["accuracy"], web["targets"]) == ("1.25", "0.2500", "200")
    assert web["data"] == "data/web (11111111), validation" and code["data"] == "data/code (22222222), validation"
    assert whole["data"] == "data/web (11111111), data/code (22222222), validation"
    assert code["perplexity"] == "not finite" and code["bits per byte"] == ""


def test_exact_answers_stand_by_kind_with_their_interval(run):
    number, every = tables(build_page([read(run)]))["Exact answers"]
    assert (number["of"], number["questions"], number["data"]) == ("number", "4", "held.jsonl (55555555)")
    assert every["exact match"] == "0.6250 (0.3057 to 0.8632)"


def test_a_loss_that_is_of_no_words_has_a_row_without_a_perplexity(tmp_path):
    folder = write_run(tmp_path / "run", [metric_row(step) for step in range(1, 9)])
    (checkpoint,) = save(folder / "checkpoints", 8)
    subject = Subject(RunDir(folder), checkpoint.name, 8, next(iter(read(folder).checkpoints)).manifest)
    pairs = SourceLoss(
        "pairs", LossReport(0.5, 24, 20, (0.25,)), None, 0, scores_words=False, shown=Shown(("rewards/margins",))
    )
    pixels = SourceLoss("digits", LossReport(0.25, 64, 0), None, 0, chooses=False, scores_words=False)
    report = HeldOutReport("runs/a", None, "dpo", "validation", [pairs, pixels], [WEB], subject)
    keep_evaluation(subject, report.data, SETTINGS["loss"], report.facts())
    page = build_page([read(folder)])
    first, second = tables(page)["Losses"]
    assert (first["loss"], first["accuracy"], first["targets"]) == ("0.5", "0.8333", "24")
    assert (second["loss"], second["accuracy"], second["targets"]) == ("0.25", "", "64")
    assert not first.get("perplexity") and not second.get("perplexity") and "damaged" not in page


def test_scores_stand_with_their_intervals_signatures_and_samples(run):
    page = build_page([read(run)])
    found = tables(page)
    (classes,) = found["Classifiers"]
    scores = labels().losses[0].labels.scores
    for head, name in (("accuracy", "accuracy"), ("macro F1", "macro_f1"), ("Matthews", "matthews")):
        score = scores[name]
        assert classes[head] == f"{score.value:.4f} ({score.low:.4f} to {score.high:.4f})"
    assert classes["data"] == "data/web (11111111), validation, first 4,096 tokens" and classes["documents"] == "24"
    assert [(row["of"], row["bleu"], row["cut short"]) for row in found["Translations"]] == [
        ("runs/mt, greedy", "27.31", "1"), ("runs/mt, beam 5", "27.31", "1")
    ]  # fmt: skip
    assert "<p class=note>bleu: tok:13a</p><p class=note>bleu, compared: bs:1000</p>" in page
    first, second = found["Tasks of lm-eval-harness"]
    assert (first["metric"], first["score"], second["score"]) == ("acc,none", "0.4500 +- 0.0300", "0.2500")
    assert first["data"] == "choices (44444444), 2 examples, first 10 documents"


def test_comparisons_say_against_what_and_by_how_much(run):
    rows = [(row["against"], row["of"], row["difference"], row["95%"], row["p"], row["drawn"])
            for row in tables(build_page([read(run)]))["Comparisons"]]  # fmt: skip
    assert rows == [
        ("runs/b", "exact match", "-0.2500", "-0.5000 to -0.1250", "0.0100", "17 rows, 1,000 draws"),
        ("runs/b", "choices: acc,none", "-0.0500", "-0.2000 to +0.1000", "0.4000", "10 documents, 1,000 draws"),
        ("runs/mt, greedy", "runs/mt, beam 5: bleu", "+0.5000", "+-1.50 against +-1.25", "0.0300", "sentences"),
        ("runs/b", "web: loss", "-0.2500", "-0.5000 to -0.1250", "0.0100", "17 rows, 1,000 draws"),
    ]


def test_a_checkpoint_that_is_gone_or_was_made_again_is_marked(run):
    subject = Subject(RunDir(run), "step-00000008", 8, "f" * 64)
    gone = Subject(RunDir(run), "step-00000004", 4, "f" * 64)
    for one in (subject, gone):
        keep_evaluation(one, [WEB], SETTINGS["labels"], labels(one).facts())
    steps = [row["step"] for row in tables(build_page([read(run)]))["Classifiers"]]
    assert sorted(steps) == ["4, not on disk", "8", "8, other weights"]


def test_many_are_folded_and_the_newest_stand_first(tmp_path):
    folder = write_run(tmp_path / "run", [metric_row(1)])
    row = {"at": "", "step": 0, "checkpoint": "", "manifest": "", "data": [], "settings": SETTINGS["loss"],
           "versions": {}, "result": {**losses().facts(), "baseline": "runs/b"}}  # fmt: skip
    days = [row | {"at": f"2026-01-{day:02d}", "step": day} for day in range(1, 32)]
    RunDir(folder).evaluations.write_text("".join(json.dumps(one, allow_nan=True) + "\n" for one in days))
    page = build_page([read(folder)])
    assert [row["at, UTC"] for row in tables(page)["Losses"]] == [f"2026-01-{day}" for day in (31, 30, 29, 28)
                                                                    for _ in range(3)]  # fmt: skip
    assert "all 93 rows" in page


def test_of_one_second_the_last_that_was_kept_stands_first(tmp_path):
    folder = write_run(tmp_path / "run", [metric_row(1)])
    row = {"at": "2026-01-01T00:00:00+00:00", "checkpoint": "", "manifest": "", "data": [], "versions": {},
           "settings": SETTINGS["loss"], "result": {**losses().facts(), "baseline": "runs/b"}}  # fmt: skip
    kept = [json.dumps(row | {"step": step}) for step in (3, 1, 2)]
    RunDir(folder).evaluations.write_text("".join(f"{line}\n" for line in kept))
    steps = [row["step"][0] for row in tables(build_page([read(folder)]))["Comparisons"]]
    assert steps == ["2", "1", "3"]


def test_the_facts_of_a_report_count_them(run, tmp_path):
    facts = write_report([read(run)], tmp_path / "page.html")
    assert facts["runs"][0]["evaluations"] == 5


def test_a_run_that_has_kept_none_has_no_such_table(tmp_path):
    folder = write_run(tmp_path / "run", [metric_row(1)])
    assert read(folder).evaluations == [] and "by pretrain evaluate" not in build_page([read(folder)])


def damaged(row):
    """Rows that are none: each in one place of a good one."""
    for path, value in [
        (("step",), "eight"), (("step",), 10**400), (("data",), 3), (("data", 0), "web"), (("settings",), None),
        (("result",), []), (("result", "kind"), "songs"), (("result", "sources"), "web"),
        (("result", "sources", "web", "loss"), "low"), (("result", "sources", "web", "targets"), [1]),
    ]:  # fmt: skip
        copy = json.loads(json.dumps(row))
        place = copy
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        yield json.dumps(copy)


def test_lines_that_are_no_rows_are_counted_and_the_others_shown(run):
    path = RunDir(run).evaluations
    first = json.loads(path.read_text().splitlines()[0])
    bad = [*damaged(first), "no json", "[]", "{}", "[" * 100_000, ""]
    with path.open("a") as file:
        file.write("".join(f"{line}\n" for line in bad) + '{"at": "being written')
    notes = []
    assert len(read_evaluations(path, notes)) == 5
    assert notes == [f"evaluations.jsonl: {len(bad)} damaged lines are left out"]


def test_a_file_that_cannot_be_read_is_a_note(tmp_path):
    notes = []
    assert read_evaluations(tmp_path, notes) == [] and notes == [f"{tmp_path.name} cannot be read: not a regular file"]


def test_text_that_looks_like_code_is_shown_and_nothing_else(tmp_path):
    folder = write_run(tmp_path / "run", [metric_row(1)])
    for text, (kind, make) in product(SCRIPTS, REPORTS.items()):
        subject = Subject(RunDir(folder), text, 1, text)
        facts = json.loads(json.dumps(make().facts()).replace("runs/", json.dumps(text)[1:-1] + "/"))
        keep_evaluation(subject, [Data(text, text, text)], SETTINGS[kind], facts)
    page = Page(build_page([read(folder)]))
    assert page.count("script") == 0
    images = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert all(source.startswith("data:image/svg+xml;") for source in images)
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert not [text for text in SCRIPTS if f"{text}/b" not in page.texts]
