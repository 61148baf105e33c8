"""Results of `pretrain evaluate` on a run's checkpoints: rows of a table for each kind.

    evaluations.jsonl -> read_evaluations -> Evaluation: a row for each source, system, task

A line of any other content is counted and left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.utils.safe_read import MAX_RECORD_BYTES, parse_json, read_bounded

LOSSES = "Losses"
CLASSIFIERS = "Classifiers"
TRANSLATIONS = "Translations"
TASKS = "Tasks of lm-eval-harness"
EXACT = "Exact answers"
VECTORS = "Vectors of texts"
COMPARED = "Comparisons"
ORDER = (LOSSES, CLASSIFIERS, TRANSLATIONS, TASKS, EXACT, VECTORS, COMPARED)
_LABEL_SCORES = {"accuracy": "accuracy", "macro_f1": "macro F1", "matthews": "Matthews"}

_Facts = dict[str, Any]
_Texts = dict[str, str]


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """A row of the table with the heading `table`."""

    table: str
    data: str  # that were read
    cells: dict[str, Any]  # by the heading of the column


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One call of `pretrain evaluate`."""

    at: str  # UTC
    step: int
    manifest: str  # sha256 of the checkpoint's manifest
    rows: list[EvaluationRow]
    signatures: dict[str, str]  # by the name of the score


_Rows = Iterator[EvaluationRow]


def read_evaluations(path: Path, notes: list[str]) -> list[Evaluation]:
    """Returns the evaluations of a run, oldest first; adds what cannot be read to `notes`."""
    try:
        lines = read_bounded(path, MAX_RECORD_BYTES).split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}")
        return []
    evaluations = []
    damaged = 0
    for line in lines[:-1]:  # the last line is empty, or a row that is being written
        try:
            evaluations.append(_parse(parse_json(line)))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            damaged += 1
    if damaged:
        notes.append(f"{path.name}: {damaged:,} damaged lines are left out")
    return evaluations


def _parse(row: dict[str, Any]) -> Evaluation:
    data = {}
    for one in row["data"]:
        path = one["name"] if one["path"] is None else one["path"]
        data[str(one["name"])] = f"{path} ({str(one['sha256'])[:8]})"
    signatures: dict[str, str] = {}
    rows = list(_ROWS[row["result"]["kind"]](row["result"], data, row["settings"], signatures))
    return Evaluation(str(row["at"]), _count(row["step"]), str(row["manifest"]), rows, signatures)


def _loss_rows(result: _Facts, data: _Texts, settings: _Facts, _: _Texts) -> _Rows:
    limit = settings["max_tokens"]
    part = "" if limit is None else f", first {_count(limit):,} tokens"
    for source, facts in result["sources"].items():
        read = f"{data.get(source, ', '.join(data.values()))}, {result['split']}{part}"
        labels = facts.get("labels")
        cells = {"of": f"{result['objective']}, {source}", "loss": _number(facts["loss"])}
        if labels is None:
            bits = facts["bits_per_byte"]
            # Of words alone; of pixels no accuracy either.
            cells["perplexity"] = _number(facts["perplexity"]) if "perplexity" in facts else None
            cells["bits per byte"] = bits if bits is None else _float(bits)
            cells["accuracy"] = f"{_float(facts['accuracy']):.4f}" if "accuracy" in facts else None
        else:
            for name, head in _LABEL_SCORES.items():
                value, low, high = (_float(labels[name][part]) for part in ("value", "low", "high"))
                cells[head] = f"{value:.4f} ({low:.4f} to {high:.4f})"
            cells["documents"] = _count(labels["documents"])
        cells["targets"] = _count(facts["targets"])
        yield EvaluationRow(LOSSES if labels is None else CLASSIFIERS, read, cells)
        for score, difference in facts.get("differences", {}).items():
            yield _difference(read, result["baseline"], f"{source}: {score}", difference)


def _difference(data: str, baseline: str, score: str, found: _Facts) -> EvaluationRow:
    interval = f"{_signed(found['low'])} to {_signed(found['high'])}"
    drawn = f"{_count(found['num_units']):,} {found['unit']}, {_count(found['resamples']):,} draws"
    return _compared(data, baseline, score, found, interval=interval, drawn=drawn)


def _compared(data: str, baseline: str, score: str, found: _Facts, *, interval: str, drawn: str) -> EvaluationRow:
    cells = {"against": str(baseline), "of": score, "difference": _signed(found["value"])}
    cells |= {"95%": interval, "p": f"{_float(found['p_value']):.4f}", "drawn": drawn}
    return EvaluationRow(COMPARED, data, cells)


def _translation_rows(result: _Facts, data: _Texts, _: _Facts, signatures: _Texts) -> _Rows:
    read = ", ".join(data.values())
    for system in result["systems"]:
        beams = _count(system["beams"])
        search = "greedy" if beams == 1 else f"beam {beams}"
        cells: dict[str, Any] = {"of": f"{system['model']}, {search}"}
        for metric, value in system["scores"].items():
            cells[metric] = f"{_float(value['score']):.2f}"
            signatures[metric] = str(value["signature"])
        cells |= {"sentences": _count(system["sentences"]), "cut short": _count(system["cut"])}
        yield EvaluationRow(TRANSLATIONS, read, cells)
    for pair in result["compared"]:
        interval = f"+-{_float(pair['system_ci']):.2f} against +-{_float(pair['baseline_ci']):.2f}"
        score = f"{pair['system']}: {pair['metric']}"
        signatures[f"{pair['metric']}, compared"] = str(pair["signature"])
        value = {"value": pair["difference"], "p_value": pair["p_value"]}
        yield _compared(read, pair["baseline"], score, value, interval=interval, drawn="sentences")


def _task_rows(result: _Facts, data: _Texts, settings: _Facts, _: _Texts) -> _Rows:
    shots = settings["num_fewshot"]
    limit = settings["limit"]
    how = "" if shots is None else f", {_count(shots)} examples"
    how += "" if limit is None else f", first {_count(limit):,} documents"
    for score in result["scores"]:
        task = str(score["task"])
        stderr = score["stderr"]
        read = data.get(task, "all of it") + how
        value = f"{_float(score['value']):.4f}"
        value += "" if stderr is None else f" +- {_float(stderr):.4f}"
        documents = result["documents"].get(task)
        cells: dict[str, Any] = {"of": task, "metric": str(score["metric"]), "score": value}
        cells["documents"] = None if documents is None else _count(documents)
        yield EvaluationRow(TASKS, read, cells)
        if score["difference"] is not None:
            name = f"{task}: {score['metric']}"
            yield _difference(read, result["baseline"], name, score["difference"])


def _exact_rows(result: _Facts, data: _Texts, _: _Facts, __: _Texts) -> _Rows:
    read = ", ".join(data.values())
    for score in result["scores"]:
        value, low, high = (_float(score["share"][part]) for part in ("value", "low", "high"))
        cells = {"of": str(score["kind"]), "exact match": f"{value:.4f} ({low:.4f} to {high:.4f})"}
        yield EvaluationRow(EXACT, read, cells | {"questions": _count(score["num_asked"])})
    if "difference" in result:
        yield _difference(read, result["baseline"], "exact match", result["difference"])


def _retrieval_rows(result: _Facts, data: _Texts, settings: _Facts, _: _Texts) -> _Rows:
    width = settings["width"]
    part = "" if width is None else f", first {_count(width)} dimensions"
    read = ", ".join(data.values()) + part
    cells: dict[str, Any] = {"of": f"{_count(result['num_units']):,} {result['units']}"}
    for name, score in result["scores"].items():
        value, low, high = (_float(score[part]) for part in ("value", "low", "high"))
        cells[str(name)] = f"{value:.4f} ({low:.4f} to {high:.4f})"
    yield EvaluationRow(VECTORS, read, cells)
    for name, difference in result.get("differences", {}).items():
        yield _difference(read, result["baseline"], str(name), difference)


_ROWS = {
    "loss": _loss_rows,
    "translation": _translation_rows,
    "tasks": _task_rows,
    "exact": _exact_rows,
    "retrieval": _retrieval_rows,
}


def _signed(value: Any) -> str:
    return f"{_float(value):+.4f}"


def _number(value: Any) -> Any:
    return "not finite" if value is None else _float(value)


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 2**63:
        raise TypeError(f"{value!r} is no count")
    return value
