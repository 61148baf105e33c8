"""A translator on a test set, from raw text to scores."""

import json

import pytest
import sacrebleu
import sacremoses

from pretrain.artifact import open_artifact
from pretrain.artifact.average import average_checkpoints
from pretrain.cli import run
from pretrain.errors import ConfigError
from pretrain.evaluation.translation import (
    TranslationTask,
    encode_sources,
    evaluate_translation,
    parse_beams,
    read_texts,
    write_texts,
)
from pretrain.generation.beam import Beams, beam_search
from pretrain.generation.constraints import Constraints
from pretrain.generation.sampling import generate
from tests.unit.artifact.runs import TEXTS, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with two checkpoints of random weights, and a test set."""
    folder = tmp_path_factory.mktemp("translation")
    write_run(folder / "run", steps=[1, 2])
    write_texts(folder / "test.en", TEXTS)
    write_texts(folder / "test.de", [text.swapcase() for text in TEXTS])
    return folder


def task(folder, **changes):
    return TranslationTask(folder / "test.en", folder / "test.de", **{"max_tokens": 12, "resamples": 100} | changes)


def normalized(text, language):
    """As the configs of the run's data say, by sacremoses itself."""
    text = sacremoses.MosesPunctNormalizer(language).normalize(text.lower())
    return sacremoses.MosesTokenizer(language).tokenize(text, return_str=True, escape=False)


def joined(text):
    """As people write it, by sacremoses itself."""
    return sacremoses.MosesDetokenizer("de").detokenize(text.split())


@pytest.mark.parametrize("options", [["--temperature", "3"], ["--temperature", "3", "--json"]])
def test_a_translation_is_written_as_people_write_it(folder, capsys, options):
    command = ["generate", str(folder / "run"), "--prompt", TEXTS[0], "--max-tokens", "40", *options]
    assert run([*command, "--tokenized"]) == 0
    tokens = capsys.readouterr().out.rstrip("\n")
    assert run(command) == 0
    text = capsys.readouterr().out.rstrip("\n")
    if "--json" in options:
        tokens, text = (json.loads(line)["text"] for line in (tokens, text))
    assert tokens.split() and text == joined(tokens) != tokens


def test_raw_text_goes_through_what_the_training_text_went_through(folder):
    report = evaluate_translation(folder / "run", task(folder, beams=(4,), length_penalty=0.6))
    ((decoded, scores),) = report.systems
    artifact = open_artifact(folder / "run")
    sources = encode_sources(artifact.model, artifact.codec, [normalized(text, "en") for text in TEXTS], "")
    constraints = Constraints(12, eos_ids=artifact.codec.eos_ids)
    found = beam_search(artifact.model, sources, constraints, Beams(4, 0.6))
    assert decoded.found.texts == [artifact.codec.decode(one[0].tokens) for one in found]
    references = [normalized(text.swapcase(), "de") for text in TEXTS]
    tokenized = sacrebleu.corpus_bleu(decoded.found.texts, [references], tokenize="none", force=True)
    assert scores[0].metric == "bleu_tokenized"
    assert scores[0].score == tokenized.score


@pytest.mark.parametrize("beams", [1, 4])
def test_repetitions_are_limited_as_by_generate(folder, beams):
    limits = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 1}
    ((decoded, _),) = evaluate_translation(folder / "run", task(folder, beams=(beams,), **limits)).systems
    ((free, _),) = evaluate_translation(folder / "run", task(folder, beams=(beams,))).systems
    artifact = open_artifact(folder / "run")
    sources = encode_sources(artifact.model, artifact.codec, [normalized(text, "en") for text in TEXTS], "")
    constraints = Constraints(12, eos_ids=artifact.codec.eos_ids, **limits)
    if beams > 1:
        found = [one[0] for one in beam_search(artifact.model, sources, constraints, Beams(beams))]
    else:
        found = generate(artifact.model, sources, constraints)
    assert all(len(set(one.tokens)) == len(one.tokens) for one in found)
    assert decoded.found.texts == [artifact.codec.decode(one.tokens) for one in found] != free.found.texts


def test_preprocessed_text_is_taken_as_it_is(folder, tmp_path):
    write_texts(tmp_path / "test.en", [normalized(text, "en") for text in TEXTS])
    write_texts(tmp_path / "test.de", [normalized(text.swapcase(), "de") for text in TEXTS])
    ((raw, scores),) = evaluate_translation(folder / "run", task(folder, beams=(1,))).systems
    ((done, others),) = evaluate_translation(folder / "run", task(tmp_path, beams=(1,), preprocessed=True)).systems
    assert done.found.texts == raw.found.texts
    assert others[0] == scores[0]
    assert [score.metric for score in others] == ["bleu_tokenized", "chrf"]


def test_beams_are_compared_with_the_first_and_written_apart(folder, tmp_path):
    report = evaluate_translation(folder / "run", task(folder, beams=(1, 3)), output=tmp_path / "out.de")
    greedy, beam = (decoded for decoded, _ in report.systems)
    assert (greedy.beams, beam.beams) == (1, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.de.beam1", "out.de.beam3"]
    assert len(read_texts(tmp_path / "out.de.beam3")) == len(TEXTS)
    assert {(paired.baseline, paired.system) for paired in report.compared} == {
        (f"{folder / 'run'}, greedy", f"{folder / 'run'}, beam 3")
    }
    differences = {paired.metric: paired.difference for paired in report.compared}
    first, second = ({score.metric: score.score for score in scores} for _, scores in report.systems)
    assert differences == pytest.approx({name: second[name] - first[name] for name in first})
    facts = report.facts()
    assert facts["systems"][1]["scores"]["bleu"][
        "signature"
    ] == "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:" + (sacrebleu.__version__)
    assert facts["systems"][1]["sentences"] == 4
    (row,) = {line for line in report.lines()[:5] if line.startswith("  bleu ")}
    assert row.endswith("(with case: too low for this model, see the next row)")
    assert [line.split()[0] for line in report.lines()[1:4]] == ["bleu_tokenized", "bleu", "bleu_lowercase"]


def test_another_model_is_the_baseline_and_translates_alike(folder, tmp_path):
    average_checkpoints([folder / "run"], 2, tmp_path / "mean")
    report = evaluate_translation(
        tmp_path / "mean", task(folder, beams=(2,)), other=folder / "run", output=tmp_path / "out.de"
    )
    mean, run = (decoded for decoded, _ in report.systems)
    assert mean.normalize == run.normalize is not None
    assert {(paired.baseline, paired.system) for paired in report.compared} == {
        (f"{folder / 'run'}, beam 2", f"{tmp_path / 'mean'}, beam 2")
    }
    assert read_texts(tmp_path / "out.de") == [joined(text) for text in mean.found.texts]
    alone = evaluate_translation(folder / "run", task(folder, beams=(2,)))
    assert alone.systems[0][0].found.texts == run.found.texts


@pytest.mark.parametrize(("text", "expected"), [(None, ()), ("1", (1,)), ("1,5", (1, 5)), ("5, 1", (5, 1))])
def test_beam_sizes_are_a_list(text, expected):
    assert parse_beams(text) == expected


@pytest.mark.parametrize("text", ["", "0", "1,x", "5,5", "1;5"])
def test_what_is_no_list_of_beam_sizes_is_refused(text):
    with pytest.raises(ConfigError, match="is no list of beam sizes; use 1,5 or so; 1 is greedy"):
        parse_beams(text)


def test_what_belongs_to_a_search_is_refused_for_greedy_alone(folder):
    with pytest.raises(ConfigError, match="--length-penalty is not for --beams 1"):
        evaluate_translation(folder / "run", task(folder, beams=(1,), length_penalty=0.5))


def test_a_run_without_its_data_translates_alike(folder, tmp_path):
    run = write_run(tmp_path / "run", steps=[1])
    expected = evaluate_translation(run, task(folder, beams=(1,)))
    (tmp_path / "run-data").rename(tmp_path / "elsewhere")
    again = evaluate_translation(run, task(folder, beams=(1,)))
    assert again.systems[0][0].found.texts == expected.systems[0][0].found.texts
