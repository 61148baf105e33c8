"""README.md of a released run: model, course, environments, commands that continue and check it."""

from collections.abc import Sequence

from pretrain.config.load import dump_config
from pretrain.config.run import RunConfig
from pretrain.plan.params import count_parameters
from pretrain.release.released_course import Course
from pretrain.scale.prediction import PredictionScore
from pretrain.utils.log import redact
from pretrain.utils.units import count

_CARD = """# {name}

A run of pretrain, with what it takes to continue and to check it: config, ledger, metrics, data
recipe, checkpoints and hashes. {parameters} parameters, {steps:,} steps, {targets:,} {counted};
training loss {loss:.4f} at the end.

    pretrain verify-release .                    # hashes, and a few steps trained again
    pretrain continue . --from-step {step}{more}
    pretrain generate .                          # and evaluate, report, inspect, export: it is a run folder

Checkpoints: steps {checkpoints}.
`ledger.json` has a hash of each step's row, and the environments below. In the same one every loss
is the same to the last bit; in another one the samples are the same, and losses within a tolerance.

| steps | environment |
|---|---|
{environments}
{prediction}
## Config

What differs from the defaults:

```yaml
{config}```
"""


def write_card(
    config: RunConfig,
    course: Course,
    steps: Sequence[int],
    score: PredictionScore | None,
) -> str:
    """Returns the card. `steps`: of the checkpoints."""
    table = []
    rows = course.rows
    first = 1
    for last, environment in course.environments():
        facts = ", ".join(f"{name} {value}" for name, value in environment.items())
        table.append(f"| {first} to {last} | {facts} |")
        first = last + 1
    is_over = steps[-1] >= config.train.steps
    text = _CARD.format(
        name=config.run.name,
        parameters=count(count_parameters(config.model)),
        steps=len(rows),
        targets=sum(row.tokens for row in rows),
        counted=config.counted,
        loss=float.fromhex(rows[-1].loss),
        step=steps[-1],
        more=" train.steps=MORE" if is_over else "",
        checkpoints=", ".join(map(str, steps)),
        environments="\n".join(table),
        prediction="" if score is None else _prediction(score),
        config=dump_config(config, is_published=True),
    )
    return redact(text)


def _prediction(score: PredictionScore) -> str:
    moment = "before" if score.is_before else "AFTER"
    place = "inside" if score.is_inside else "OUTSIDE"
    predicted = score.predicted
    return f"""
## Prediction

Written {score.written}, {moment} the run began ({score.began}).
Predicted validation loss {predicted.loss:.4f} (95%: {predicted.low:.4f} to {predicted.high:.4f});
measured {score.measured:.4f}, {place} the interval.
`prediction.json` has the laws behind it.
"""
