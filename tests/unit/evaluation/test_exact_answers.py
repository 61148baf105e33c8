"""Exact match of answers: each as greedy decoding alone gives it, scored by kind, wrong ones kept as preferences."""

import json

import pytest

from pretrain.artifact.open import open_artifact
from pretrain.errors import ConfigError, DataError
from pretrain.evaluation.exact_answers import ExactChoice, evaluate_exact, read_questions
from pretrain.generation.chat import ChatCodec
from pretrain.generation.generation_options import Options
from pretrain.generation.sampling import GREEDY
from pretrain.generation.text import generate_text
from tests.unit.artifact.runs import write_text_run
from tests.unit.preparation.test_templates import prepared

TEXTS = ["Say cafe.", "It is said.", "Again!", "Say it again, say it.", "Is it?"]


def asked(*turns, answer, **fields):
    roles = ("user", "assistant") * 3
    messages = [{"role": role, "content": text} for role, text in zip(roles, (*turns, answer), strict=False)]
    return fields | {"messages": messages}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exact")
    prepared(folder, asked(*TEXTS, answer="Yes."), messages_field="messages", template="chatml")
    return write_text_run(folder / "run", folder / "out", "llama-tiny", "supervised")


def write(folder, *records):
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.mark.parametrize("plain", [False, True])
def test_an_answer_is_that_of_greedy_decoding_alone(run, tmp_path, plain):
    artifact = open_artifact(run)
    options = Options(8, temperature=0)
    records = []
    for number, text in enumerate(TEXTS):
        codec = artifact.codec if plain else ChatCodec(artifact.codec)
        constraints = options.constraints(artifact.model, codec, artifact.generation)
        ((one,),) = generate_text(artifact.model, codec, [f"{text}\n" if plain else text], constraints, GREEDY)
        said = one.text.split("\n")[0] if plain else one.text
        records.append(asked(text, answer=said if number % 2 else said + "x", kind="odd" if number % 2 else "even"))
    choice = ExactChoice(write(tmp_path, *records), plain=plain, max_tokens=8, batch_tokens=40)
    report = evaluate_exact(run, choice, other=run, resamples=100, output=tmp_path / "wrong.jsonl")
    assert [(one.kind, one.num_right, one.num_asked) for one in report.scores] == [
        ("even", 0, 3), ("odd", 2, 2), ("all", 2, 5),
    ]  # fmt: skip
    assert report.difference.value == 0 and report.facts()["scores"][-1]["share"]["value"] == 0.4
    wrong = [json.loads(line) for line in (tmp_path / "wrong.jsonl").read_text().splitlines()]
    assert [one["prompt"][-1]["content"] for one in wrong] == TEXTS[::2]
    assert all(one["chosen"] == one["rejected"] + "x" for one in wrong)
    assert report.lines()[3].startswith("  all          0.4000  2 of 5  95% ")


def test_earlier_turns_are_read_before_the_question(tmp_path):
    (one,) = read_questions(write(tmp_path, asked("Hello.", "Hi.", "Who?", answer=" Ben ")))
    assert one.turns == [("user", "Hello."), ("assistant", "Hi."), ("user", "Who?")]
    assert (one.answer, one.kind) == ("Ben", "all")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [{"role": "user", "content": "Who?"}]}, ":1: the last two turns are no question with its answer"),
        ({"text": "Who?"}, r":1: .*messages"),
        ([], ":1: "),
    ],
)
def test_a_record_without_a_question_is_refused_with_its_line(tmp_path, record, message):
    with pytest.raises((ConfigError, DataError), match=message):
        read_questions(write(tmp_path, record))
