"""Loss on prepared data: equal to a plain softmax in float64 over texts that the test tokenises itself."""

import json
import math

import pytest
import torch
from tokenizers import Tokenizer

from pretrain.artifact.average import average_checkpoints
from pretrain.artifact.model_path import open_source
from pretrain.artifact.open import open_artifact
from pretrain.artifact.transfer import export_model
from pretrain.config.prepare import PrepareConfig
from pretrain.data.stream import TokenStream
from pretrain.errors import CheckpointError, ConfigError, DataError
from pretrain.evaluation.corpus import CorpusOptions
from pretrain.evaluation.held_out import evaluate_held_out
from pretrain.kinds.objectives.masked import MaskedConfig
from pretrain.objective.masked import masked_rows
from pretrain.preparation.normalize import build_normalizers
from pretrain.preparation.prepare import prepare
from pretrain.shards.index import load_index
from pretrain.tokenizer.file import load_tokenizer
from pretrain.tokenizer.roles import describe_vocabulary
from pretrain.types import IGNORE_INDEX, Batch, StackRows
from tests.helpers.corpus import write_rows
from tests.unit.artifact.runs import NORMALIZE, TEXTS, write_pairs, write_run, write_text_run, write_texts

LONG = [" ".join(text.split()[shift:] + text.split()[:shift]) for text in TEXTS for shift in range(4)]
OTHERS = [text.upper() for text in TEXTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prepared texts and pairs, and a run of each shape with random weights."""
    folder = tmp_path_factory.mktemp("held-out")
    write_texts(folder / "texts", LONG)
    write_run(folder / "t5", steps=[1, 2])
    write_text_run(folder / "gpt", folder / "texts", "llama-tiny", "causal")
    write_text_run(folder / "gpt2", folder / "texts", "llama-tiny", "causal", steps=[2])
    write_text_run(folder / "bert", folder / "texts", "bert-tiny", "masked")
    return folder


def sums_by_hand(model, pieces):
    """Loss and number of right answers over (tokens, targets, source), one at a time, in float64."""
    model = model.double()
    nll, correct, count = 0.0, 0, 0
    for tokens, targets, source in pieces:
        batch = Batch(torch.tensor([tokens]), torch.tensor([targets]), source=source)
        with torch.no_grad():
            logits = model(batch).logits_BTV[0, :, : model.vocab_size]
        for scores, target in zip(logits.double(), targets, strict=True):
            if target != IGNORE_INDEX:
                nll -= float(scores.log_softmax(dim=-1)[target])
                correct += int(int(scores.argmax()) == target)
                count += 1
    return nll / count, correct, count


def windows_by_hand(data, texts, seq_len):
    """Every document of every row: its tokens in the row, and what follows each in the same document."""
    tokenizer, end = Tokenizer.from_file(str(data / "tokenizer.json")), load_index(data).eos_id
    ids = [[*tokenizer.encode(text, add_special_tokens=False).ids, end] for text in texts]
    stream = [(token, number) for number, tokens in enumerate(ids) for token in tokens]
    pieces = []
    for first in range(0, len(stream) - 1, seq_len):
        row = stream[first : first + seq_len + 1]
        for number in sorted({number for _, number in row}):
            tokens = [token for token, of in row if of == number]
            if len(tokens) > 1:
                pieces.append((tokens[:-1], tokens[1:], None))
    return pieces, len(stream), sum(len(text.encode()) for text in texts)


def test_next_token_loss_is_that_of_a_plain_softmax(folder):
    (found,) = evaluate_held_out(folder / "gpt", CorpusOptions(batch_tokens=70)).losses
    pieces, num_tokens, num_bytes = windows_by_hand(folder / "texts", in_order(folder / "texts"), 32)
    loss, correct, count = sums_by_hand(open_artifact(folder / "gpt").model, pieces)
    assert (found.report.num_targets, found.report.num_correct) == (count, correct)
    assert found.report.loss == pytest.approx(loss, rel=1e-6)
    assert found.report.perplexity == pytest.approx(math.exp(loss), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(loss / math.log(2) * num_tokens / num_bytes, rel=1e-6)


def in_order(data):
    """The texts in the order in which they were read."""
    files = data.with_name(f"{data.name}-texts")
    return [path.read_text() for path in sorted(files.iterdir(), key=lambda path: path.name)]


def test_loss_of_pairs_is_that_of_a_plain_softmax(folder):
    (found,) = evaluate_held_out(folder / "t5", CorpusOptions()).losses
    artifact = open_artifact(folder / "t5")
    tokenizer = Tokenizer.from_file(str(folder / "t5" / "tokenizer.json"))
    (end,), start = artifact.codec.eos_ids, artifact.model_config.special_tokens.start
    to_source, to_target = build_normalizers(NORMALIZE)
    pieces = []
    for text in TEXTS:
        source, target = to_source(text), to_target(text.swapcase())
        ids = [[*tokenizer.encode(side, add_special_tokens=False).ids, end] for side in (source, target)]
        pieces.append(([start, *ids[1][:-1]], ids[1], StackRows(torch.tensor([ids[0]]))))
    loss, correct, count = sums_by_hand(artifact.model, pieces)
    assert (found.report.num_targets, found.report.num_correct) == (count, correct)
    assert found.report.loss == pytest.approx(loss, rel=1e-5)
    assert (found.left_out, found.bits_per_byte) == (0, None)


def test_masked_loss_is_over_the_masks_of_the_seed_and_comes_again(folder):
    (found,) = evaluate_held_out(folder / "bert", CorpusOptions(batch_tokens=64)).losses
    (again,) = evaluate_held_out(folder / "bert", CorpusOptions(batch_tokens=640)).losses
    data, artifact = folder / "texts", open_artifact(folder / "bert")
    index = load_index(data)
    special = artifact.model_config.special_tokens
    stream = TokenStream(data, index, "validation", seq_len=32)
    vocabulary = describe_vocabulary(load_tokenizer(data / "tokenizer.json"), special)
    rows = masked_rows(stream.read_windows(range(stream.num_windows())), MaskedConfig(), vocabulary, 7, True)
    pieces = []
    for row in range(len(rows.tokens_BT)):
        documents = rows.documents_BT[row] if rows.documents_BT is not None else torch.zeros(32).int().numpy()
        for number in sorted(set(documents.tolist())):
            places = documents == number
            pieces.append((rows.tokens_BT[row][places].tolist(), rows.targets_BT[row][places].tolist(), None))
    loss, correct, count = sums_by_hand(artifact.model, pieces)
    assert (found.report.num_targets, found.report.num_correct) == (count, correct)
    assert found.report.loss == pytest.approx(loss, rel=1e-5)
    assert found.bits_per_byte is None
    assert again.report.num_targets == count
    assert again.report.loss == pytest.approx(found.report.loss, rel=1e-6)


@pytest.mark.long
def test_a_model_folder_is_evaluated_by_its_shape(folder, tmp_path):
    average_checkpoints([folder / "t5"], 2, tmp_path / "mean")
    report = evaluate_held_out(tmp_path / "mean", CorpusOptions(data=(str(folder / "t5-data"),), seq_len=64))
    assert report.objective == "seq2seq"
    whole = evaluate_held_out(folder / "t5", CorpusOptions()).losses[0].report
    assert report.losses[0].report.num_targets == whole.num_targets
    assert report.losses[0].report.loss != whole.loss


def test_a_hugging_face_folder_has_the_loss_of_what_it_was_exported_from(folder, tmp_path):
    export_model(folder / "gpt", tmp_path / "hf")
    choice = CorpusOptions(data=(str(folder / "texts"),), seq_len=32)
    theirs = evaluate_held_out(tmp_path / "hf", choice, other=folder / "gpt", resamples=100)
    (found,) = theirs.losses
    assert theirs.objective == "causal"
    assert found.report.num_targets == found.baseline.num_targets
    assert found.report.loss == pytest.approx(found.baseline.loss, rel=1e-6)


def test_sources_are_told_apart_and_add_up(folder):
    write_given(folder / "more", folder / "texts", OTHERS)
    choice = CorpusOptions(data=(str(folder / "texts"), str(folder / "more")), split="train")
    report = evaluate_held_out(folder / "gpt", choice)
    first, second, both = report.losses
    assert [found.source for found in report.losses] == ["texts", "more", "all"]
    (alone,) = evaluate_held_out(folder / "gpt", CorpusOptions(data=(str(folder / "more"),), split="train")).losses
    assert alone.report == second.report
    assert both.report.num_targets == first.report.num_targets + second.report.num_targets
    total = sum(one.report.loss * one.report.num_targets for one in (first, second))
    assert both.report.loss == pytest.approx(total / both.report.num_targets, rel=1e-12)
    # The bits of all over the bytes of all: not the mean of two ratios.
    num_bytes = [one.report.bits_per_byte(1.0) * one.report.num_targets / one.bits_per_byte for one in (first, second)]
    assert both.bits_per_byte == pytest.approx(total / math.log(2) / sum(num_bytes), rel=1e-12)


def write_given(output, data, texts):
    """Prepares texts with the tokenizer of other data, as training data alone."""
    files = output.with_name(f"{output.name}-texts")
    files.mkdir()
    for number, text in enumerate(texts):
        (files / f"{number}.txt").write_text(text)
    tokenizer = {"kind": "given", "path": str(data / "tokenizer.json")}
    values = {"output": str(output), "inputs": [{"path": str(files)}], "tokenizer": tokenizer, "split": "hash:0"}
    prepare(PrepareConfig.model_validate(values), processes=1)


def test_records_given_to_a_decoder_are_scored_on_their_answers_with_or_without_a_run(folder, tmp_path):
    rows = [{"prompt": text[:20], "response": text[20:]} for text in TEXTS]
    path = write_rows(tmp_path / "a.jsonl", rows)
    tokenizer = {"kind": "given", "path": str(folder / "texts/tokenizer.json")}
    inputs = [{"path": str(path), "template": "instruction"}]
    values = {"output": str(tmp_path / "records"), "kind": "records", "inputs": inputs, "tokenizer": tokenizer}
    index = prepare(PrepareConfig.model_validate(values | {"split": "hash:0"}), processes=1)
    learned = json.loads((tmp_path / "records/statistics.json").read_text())["splits"]["train"]["num_learned_tokens"]
    assert learned < index.split("train").num_tokens // 2
    export_model(folder / "gpt", tmp_path / "released")
    choice = CorpusOptions(data=(str(tmp_path / "records"),), split="train", seq_len=64)
    reports = [evaluate_held_out(path, choice) for path in (tmp_path / "released", folder / "gpt")]
    assert [report.objective for report in reports] == ["supervised"] * 2
    released, run = (report.losses[0] for report in reports)
    assert released.report.num_targets == run.report.num_targets == learned
    assert released.report.loss == pytest.approx(run.report.loss, rel=1e-6)
    assert released.bits_per_byte is None


def test_a_comparison_has_the_losses_of_both_and_their_difference(folder):
    report = evaluate_held_out(folder / "gpt", CorpusOptions(), other=folder / "gpt2", resamples=200)
    (found,) = report.losses
    alone = [evaluate_held_out(folder / name, CorpusOptions()).losses[0].report for name in ("gpt", "gpt2")]
    for mine, theirs in zip((found.report, found.baseline), alone, strict=True):
        assert (mine.num_targets, mine.num_correct) == (theirs.num_targets, theirs.num_correct)
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-6)
    loss, accuracy = found.differences["loss"], found.differences["accuracy"]
    assert loss.value == pytest.approx(alone[0].loss - alone[1].loss, abs=1e-6)
    assert loss.low < loss.value < loss.high
    assert accuracy.value == pytest.approx(alone[0].accuracy - alone[1].accuracy, abs=1e-12)
    facts = json.loads(json.dumps(report.facts()))
    assert facts["sources"]["data"]["differences"]["loss"]["num_units"] > 5
    assert any("against" in line for line in report.lines())


@pytest.mark.parametrize(
    ("name", "choice", "other", "error", "message"),
    [
        ("gpt", {"split": "test"}, None, DataError, "texts: there is no split 'test'; use one of: train, validation"),
        ("gpt", {"data": ("nowhere",)}, None, DataError, "nowhere"),
        (
            "gpt",
            {"data": ("t5-data",)},
            None,
            ConfigError,
            "objective.kind=causal on text or records, and the data are",
        ),
        ("gpt", {"seq_len": 65}, None, ConfigError, "rows of 65 tokens, model.max_seq_len is 64; use --seq-len 64"),
        ("gpt", {"data": ("foreign",)}, None, DataError, "another tokenizer than that of"),
        (
            "gpt",
            {},
            "bert",
            ConfigError,
            "needs a model with decoder, this one has encoder; compare models of one shape",
        ),
        ("nowhere", {}, None, CheckpointError, "neither a checkpoint nor a run with one"),
    ],
)
def test_what_makes_no_sense_is_one_line(folder, monkeypatch, name, choice, other, error, message):
    if not (folder / "foreign").exists():
        write_texts(folder / "foreign", [text[::-1] for text in LONG])
    monkeypatch.chdir(folder)
    with pytest.raises(error, match=message) as caught:
        evaluate_held_out(folder / name, CorpusOptions(**choice), other=other and folder / other)
    assert "\n" not in str(caught.value)


def test_a_model_folder_needs_data(folder, tmp_path):
    average_checkpoints([folder / "t5"], 2, tmp_path / "mean")
    with pytest.raises(ConfigError, match="this model has no data of its own; give --data DIR"):
        evaluate_held_out(tmp_path / "mean", CorpusOptions())
    assert open_source(tmp_path / "mean").run is None


@pytest.mark.long
def test_pairs_that_do_not_fit_are_counted(folder, tmp_path):
    data = write_pairs(tmp_path / "pairs", TEXTS)
    (found,) = evaluate_held_out(folder / "t5", CorpusOptions(data=(str(data),), seq_len=32, source_len=32)).losses
    (whole,) = evaluate_held_out(folder / "t5", CorpusOptions()).losses
    assert 0 < found.left_out < len(TEXTS)
    assert found.report.num_targets < whole.report.num_targets
