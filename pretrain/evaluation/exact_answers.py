"""Exact match: greedy answers of a model to questions of which each has one right answer.

a record a line -> turns before the last -> the answer, greedily -> equal to the last turn, or not
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.artifact.open import Artifact, load_artifact
from pretrain.evaluation.bootstrap import (
    RESAMPLES,
    Difference,
    Interval,
    compare_means,
    wilson_interval,
)
from pretrain.evaluation.distributed import collect, current, deal, open_together, with_bar
from pretrain.evaluation.evaluation_log import Data, Subject, find_subject, hash_lines
from pretrain.evaluation.translation import plan_batches, read_texts
from pretrain.generation.generation_options import Options
from pretrain.generation.incremental_decoder import check_prompt, check_prompts
from pretrain.generation.sampling import GREEDY, generate
from pretrain.preparation.readers.messages import read_messages
from pretrain.preparation.readers.record_fields import RecordError, parse_object
from pretrain.utils.io import write_file

ALL = "all"
MESSAGES = "messages"
SHOWN_WRONG = 3


@dataclass(frozen=True, slots=True)
class ExactChoice:
    """Options of the command line for questions."""

    questions: Path  # .jsonl: messages, the last of which is the right answer, and its kind, if any
    plain: bool = False  # a turn is a line, and the answer the next line: no template is needed
    max_tokens: int | None = None
    batch_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """Turns before an answer, as (role, text), the answer, and the kind under which it counts."""

    turns: list[tuple[str, str]]
    answer: str
    kind: str


@dataclass(frozen=True, slots=True)
class KindScore:
    """Share of exact answers to the questions of a kind."""

    kind: str
    share: Interval
    num_right: int
    num_asked: int


@dataclass(frozen=True, slots=True)
class ExactReport:
    """Exact match by kind of question, all of them last, compared with a baseline if there is one."""

    model: str
    baseline: str | None
    scores: list[KindScore]
    difference: Difference | None
    wrong: list[tuple[AskedQuestion, str]]
    data: list[Data]
    subject: Subject | None

    def facts(self) -> dict[str, Any]:
        """Returns plain values."""
        facts: dict[str, Any] = {
            "kind": "exact",
            "model": self.model,
            "scores": [asdict(score) for score in self.scores],
        }
        if self.difference is not None:
            facts |= {"baseline": self.baseline, "difference": asdict(self.difference)}
        return facts

    def lines(self) -> list[str]:
        """Returns the lines of the report."""
        lines = [f"{self.model}: greedy answers, exact match"]
        for score in self.scores:
            share = score.share
            interval = f"95% {share.low:.4f} to {share.high:.4f} ({share.method})"
            lines.append(
                f"  {score.kind:<12} {share.value:.4f}  {score.num_right:,} of {score.num_asked:,}  {interval}"
            )
        if self.difference is not None:
            lines.append(f"  against {self.baseline}: {self.difference.line()}")
        for one, said in self.wrong[:SHOWN_WRONG]:
            lines.append(f"  wrong: {one.turns[-1][1]!r} -> {said!r}, not {one.answer!r}")
        return lines


def read_questions(file: Path) -> list[AskedQuestion]:
    """Returns the questions of a file. Raises: ConfigError, DataError: Cannot be read; names the line."""
    questions = []
    for number, line in enumerate(read_texts(file), start=1):
        try:
            record = parse_object(line)
            turns = [(one["role"], str(one["content"])) for one in read_messages(record, MESSAGES, None).messages]
            if [role for role, _ in turns[-2:]] != ["user", "assistant"]:
                raise RecordError("the last two turns are no question with its answer", "end with user, assistant")
        except RecordError as error:
            raise error.at(f"{file}:{number}") from None
        questions.append(AskedQuestion(turns[:-1], turns[-1][1].strip(), str(record.get("kind", ALL))))
    return questions


def evaluate_exact(
    path: Path,
    choice: ExactChoice,
    *,
    other: Path | None = None,
    resamples: int = RESAMPLES,
    output: Path | None = None,
    device: str = "cpu",
) -> ExactReport:
    """Measures the share of questions that a decoder answers exactly. Collective.

    `path` and `other`, the baseline, are models as `evaluate_held_out` takes them. Questions with a
    wrong answer go to `output`, as preferences of the right one.

    Raises:
        ConfigError: The model has no template of conversations, or a question does not fit it.
        DataError: The questions cannot be read.
    """
    questions = read_questions(choice.questions)
    described = [open_together(one) for one in (path, *([] if other is None else [other]))]
    answers = [
        answer_questions(load_artifact(one, device), [asked.turns for asked in questions], choice) for one in described
    ]
    right = [
        np.array([said == one.answer for said, one in zip(said_by, questions, strict=True)]) for said_by in answers
    ]
    difference = None
    if other is not None:
        mine, theirs = (array.astype(np.float64) for array in right)
        difference = compare_means(theirs, mine, np.ones(len(questions)), resamples, "questions")
    wrong = [(one, said) for one, said in zip(questions, answers[0], strict=True) if said != one.answer]
    if output is not None and current()[0] == 0:
        write_file(output, b"".join(_preference(one, said) for one, said in wrong))
    lines = read_texts(choice.questions)
    return ExactReport(
        str(path),
        None if other is None else str(other),
        list(_score(questions, right[0])),
        difference,
        wrong,
        [Data("questions", str(choice.questions), hash_lines(lines))],
        find_subject(described[0]),
    )


def answer_questions(artifact: Artifact, asked: Sequence[list[tuple[str, str]]], choice: ExactChoice) -> list[str]:
    """Returns the greedy answer to each conversation, stripped of white space. Collective. Raises: ConfigError."""
    model, codec = artifact.model, artifact.codec
    check_prompts(model, [])
    prompts = []
    for number, turns in enumerate(asked, start=1):
        text = "".join(f"{text}\n" for _, text in turns)
        prompts.append(codec.encode(text) if choice.plain else codec.encode_chat(turns))
        check_prompt(model, prompts[-1], where=f"{choice.questions}:{number}")
    constraints = Options(choice.max_tokens, temperature=0).constraints(model, codec, artifact.generation)
    said: dict[int, str] = {}
    batches = list(plan_batches(prompts, choice.batch_tokens))
    mine = [batches[number] for number in deal(len(batches))]
    for rows in with_bar(mine, "answers", len(mine)):
        drawn = generate(model, [prompts[row] for row in rows], constraints, GREEDY)
        for row, one in zip(rows, drawn, strict=True):
            text = codec.decode(one.tokens)
            said[row] = (text.split("\n")[0] if choice.plain else text).strip()
    return collect(said, len(prompts))


def _preference(question: AskedQuestion, said: str) -> bytes:
    """Returns a line of `kind: preferences`."""
    prompt = [{"role": role, "content": text} for role, text in question.turns]
    record = {"prompt": prompt, "chosen": question.answer, "rejected": said}
    return json.dumps(record).encode() + b"\n"


def _score(questions: Sequence[AskedQuestion], right: np.ndarray) -> Iterator[KindScore]:
    asked = Counter(one.kind for one in questions)
    exact = Counter(one.kind for one, is_right in zip(questions, right, strict=True) if is_right)
    kinds = [(kind, exact[kind], asked[kind]) for kind in sorted(asked) if kind != ALL]
    for kind, num_right, num_asked in (*kinds, (ALL, exact.total(), asked.total())):
        yield KindScore(kind, wilson_interval(num_right, num_asked), num_right, num_asked)
