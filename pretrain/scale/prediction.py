"""The prediction of a large run: made from a ladder before it begins, and scored after it.

read_point         final validation loss of a run, or the reason why it does not count
predict            laws, loss of the large run and of the best size, 95% intervals
write_prediction   LADDER/prediction.json, with a SHA-256 over its content
score              a measured loss against it; an edited file is refused
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.config.load import load_config
from pretrain.errors import EXIT_DIVERGED, ConfigError, DataError
from pretrain.evaluation.bootstrap import SEED, bootstrap_interval
from pretrain.run.folder import RunDir
from pretrain.scale.law import (
    HUBER_DELTA,
    LineLaw,
    LossPoint,
    ScalingLaw,
    draw_laws,
    draw_line_laws,
    find_residuals,
    find_scales,
)
from pretrain.scale.scaling_rule import FLOPS_OF_A_WEIGHT, RunSize, size_of
from pretrain.utils.io import json_bytes, write_file
from pretrain.utils.jsonl import rows_with
from pretrain.utils.safe_read import read_json

PREDICTION = "prediction.json"
RESAMPLES = 1000
HASH = "sha256"
_SAME_SIZE = 0.01


def read_point(folder: Path) -> LossPoint | str:
    """Returns a trained run with its final validation loss, or the reason why it does not count.

    Raises:
        ConfigError: The record or the config is damaged.
        DataError: The metrics are damaged.
    """
    run = RunDir(folder)
    if not run.exists():
        return "not started"
    attempts = run.read_record()["attempts"]
    if attempts and attempts[-1].get("exit_code") == EXIT_DIVERGED:
        return f"diverged: {attempts[-1].get('reason')}"
    config = load_config(run.config, extensions="ignore")
    last = config.train.last_step
    if not run.is_complete(last):
        return f"not finished: step {run.newest_step()} of {last}"
    rows = [row for row in rows_with(run.metrics, "val_loss") if row["step"] == last]
    if not rows:
        return f"no validation loss at its last step, {last}"
    loss = rows[-1]["val_loss"]
    vocab_size = config.model.vocab_size
    if not isinstance(loss, float) or not math.isfinite(loss) or (vocab_size and loss >= math.log(vocab_size)):
        return f"diverged: validation loss {loss}"
    size = size_of(config)
    bits_per_byte = rows[-1].get("val_bits_per_byte")
    return LossPoint(config.run.name, size.parameters, size.tokens, loss, bits_per_byte)


@dataclass(frozen=True, slots=True)
class PredictedRun:
    """A run of a size with its predicted loss, nats a target."""

    name: str
    parameters: float
    tokens: int
    flops: float
    loss: float
    low: float  # 95% interval of a run of this size: of the law, and of one run around it
    high: float


@dataclass(frozen=True, slots=True)
class LadderFit:
    """The laws of a ladder, and their draws."""

    points: Sequence[LossPoint]
    line: float  # tokens a parameter
    laws: Sequence[ScalingLaw]  # of the runs, then of each draw
    line_laws: Sequence[LineLaw]  # of the runs on the line, then of each draw
    residuals: np.ndarray  # of log losses, with the spread of new runs on the line; float64 [runs]

    @property
    def law(self) -> ScalingLaw:
        """The law of the runs."""
        return self.laws[0]

    def predict(self, name: str, size: RunSize) -> PredictedRun:
        """Returns a run of a size: the median of all draws, and its interval.

        A draw is the law of the line at the budget of the size, times what the law of N and D says
        of this size against that of the line.
        """
        on_line = math.sqrt(size.flops / FLOPS_OF_A_WEIGHT / self.line)
        draws = zip(self.laws[1:], self.line_laws[1:], strict=True)
        drawn = np.array([
            along.loss(size.flops)
            * law.loss(size.parameters, size.tokens)
            / law.loss(on_line, self.line * on_line)
            for law, along in draws
        ])  # fmt: skip
        loss = float(np.median(drawn))
        noise = np.random.default_rng(SEED).choice(self.residuals, len(drawn))
        bounds = bootstrap_interval(loss, drawn * np.exp(noise))
        return PredictedRun(name, size.parameters, size.tokens, size.flops, loss, bounds.low, bounds.high)

    def optimal_parameters(self, flops: float) -> tuple[float, float, float]:
        """Returns N of the lowest loss for a budget, with its 95% interval."""
        values = [law.optimal_parameters(flops) for law in self.laws]
        interval = bootstrap_interval(values[0], np.array(values[1:]))
        return interval.value, interval.low, interval.high


def fit_ladder(points: Sequence[LossPoint], line: float, resamples: int = RESAMPLES) -> LadderFit:
    """Fits the law to the finished runs, near a line of so many tokens a parameter.

    Raises:
        DataError: Too few runs, all of them on one line, or too few of them on this one.
    """
    scales = find_scales(points, line)
    laws = draw_laws(points, scales, resamples)
    residuals = find_residuals(points, laws[0], scales)
    return LadderFit(points, line, laws, draw_line_laws(points, line, laws, residuals), residuals)


def prediction_facts(
    fit: LadderFit,
    name: str,
    budget: float,
    predicted: Sequence[PredictedRun],
    left_out: dict[str, str],
) -> dict[str, Any]:
    """Returns the content of a prediction: laws, runs, what is left out, and the predicted runs."""
    runs = [
        {
            **asdict(point),
            "flops": point.flops,
            "fitted": fit.law.loss(point.parameters, point.tokens),
        }
        for point in fit.points
    ]
    best, low, high = fit.optimal_parameters(budget)
    return {
        "version": 2,
        "ladder": name,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "law": asdict(fit.law),
        "line_law": asdict(fit.line_laws[0]),
        "huber_delta": HUBER_DELTA,
        "resamples": len(fit.laws) - 1,
        "runs": runs,
        "left_out": left_out,
        "budget": budget,
        "optimal": {"parameters": best, "low": low, "high": high},
        "predicted": [asdict(run) for run in predicted],
    }


def _digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json_bytes({key: value for key, value in facts.items() if key != HASH})).hexdigest()


def write_prediction(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Writes a prediction with the hash of its content; returns it with the hash. Raises: DiskError."""
    hashed = {**facts, HASH: _digest(facts)}
    write_file(path, json_bytes(hashed))
    return hashed


def load_prediction(path: Path) -> dict[str, Any]:
    """Reads a prediction.

    Raises:
        ConfigError: There is none.
        DataError: It was edited after it was written, or is damaged.
    """
    fix = "restore it; a prediction that is made anew is one after the fact if the large run has begun"
    try:
        facts = read_json(path)
        is_whole = facts[HASH] == _digest(facts)
    except FileNotFoundError:
        text, fix = (
            "there is no prediction yet",
            "make it before the large run: pretrain scale fit LADDER",
        )
        raise ConfigError(text, where=str(path), fix=fix) from None
    except KeyError as error:
        raise DataError(f"not a prediction: it has no {error}", where=str(path), fix=fix) from None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"not a prediction: {error}", where=str(path), fix=fix) from None
    if not is_whole:
        raise DataError(
            "was edited: its content has another SHA-256 than it was written with",
            where=str(path),
            fix=fix,
        )
    return dict(facts)


@dataclass(frozen=True, slots=True)
class PredictionScore:
    """A measured loss against its prediction."""

    run: str
    predicted: PredictedRun
    measured: float
    error: float  # predicted over measured loss, less 1
    is_inside: bool  # of the 95% interval
    written: str  # time of the prediction, UTC
    began: str  # time of the run's first start, UTC
    is_before: bool  # the prediction was written before the run began


def score(prediction: dict[str, Any], folder: Path) -> PredictionScore:
    """Compares a finished run with the prediction of its size.

    Raises:
        DataError: The run has not ended well, or no run of its size was predicted.
    """
    point = read_point(folder)
    if isinstance(point, str):
        raise DataError(point, where=str(folder), fix="finish the run first")
    runs = [PredictedRun(**run) for run in prediction["predicted"]]
    near = [run for run in runs if _is_same(run, point)]
    if not near:
        sizes = "; ".join(f"{run.name} N={run.parameters:.4g} D={run.tokens:,}" for run in runs)
        raise DataError(
            f"no run of its size was predicted: N={point.parameters:.4g} D={point.tokens:,}, not {sizes}",
            where=str(folder),
            fix="give the large run of this ladder",
        )
    began = str(RunDir(folder).read_record()["created"])
    return PredictionScore(
        run=point.name,
        predicted=near[0],
        measured=point.loss,
        error=near[0].loss / point.loss - 1,
        is_inside=near[0].low <= point.loss <= near[0].high,
        written=prediction["written"],
        began=began,
        is_before=datetime.fromisoformat(prediction["written"]) <= datetime.fromisoformat(began),
    )


def _is_same(run: PredictedRun, point: LossPoint) -> bool:
    sizes = ((run.parameters, point.parameters), (run.tokens, point.tokens))
    return all(abs(math.log(predicted / measured)) < _SAME_SIZE for predicted, measured in sizes)
