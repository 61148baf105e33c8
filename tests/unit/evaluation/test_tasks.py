"""Tasks of lm-eval-harness: ours scores as the harness's own Hugging Face model does on the exported folder."""

import json
import sys

import pytest

from pretrain.artifact.transfer import export_model
from pretrain.errors import ConfigError, DataError, LaunchError
from pretrain.evaluation.tasks import TaskChoice, evaluate_tasks
from tests.helpers.chat_templates import CHATML
from tests.unit.artifact.runs import TEXTS, write_run, write_text_run, write_texts
from tests.unit.artifact.test_chat_templates import write_base
from tests.unit.evaluation.task_files import NAMES, write_tasks
from tests.unit.preparation.test_templates import prepared


def test_without_the_harness_it_is_said_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(LaunchError, match=r"run by lm-eval-harness, which is not installed; run .* -e '\.\[eval\]'"):
        evaluate_tasks(tmp_path, TaskChoice(("arc",)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two decoders with random weights, a translator, and tasks; nothing is fetched."""
    folder = tmp_path_factory.mktemp("tasks")
    write_texts(folder / "texts", TEXTS * 3)
    for number, name in enumerate(("gpt", "gpt2"), start=1):
        write_text_run(folder / name, folder / "texts", "llama-tiny", "causal", steps=[number])
    write_tasks(folder / "tasks")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
            patch.setenv(name, "1")
        patch.setenv("HF_HOME", str(folder / "cache"))
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache" / "datasets"))
        yield folder


def harness_scores(path, tasks, **options):
    """What the harness says of a Hugging Face folder by its own model."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(pretrained=str(path), device="cpu", dtype="float32", batch_size=2)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return lm_eval.simple_evaluate(model=model, tasks=list(NAMES), task_manager=manager, bootstrap_iters=0, **options)


@pytest.mark.long
@pytest.mark.parametrize("num_fewshot", [None, 1])
def test_scores_are_those_of_the_harness_on_the_exported_folder(folder, tmp_path, num_fewshot):
    export_model(folder / "gpt", tmp_path / "hf")
    choice = TaskChoice(NAMES, folder / "tasks", num_fewshot=num_fewshot, batch_tokens=100)
    ours = evaluate_tasks(folder / "gpt", choice, resamples=100)
    theirs = harness_scores(tmp_path / "hf", folder / "tasks", num_fewshot=num_fewshot)
    expected = {
        (task, metric): value
        for task, values in theirs["results"].items()
        for metric, value in values.items()
        if "," in metric and "_stderr" not in metric
    }
    found = {(score.task, score.metric): score.value for score in ours.scores}
    assert found.keys() == expected.keys() and len(found) == 5
    for key, value in expected.items():
        # Shares are of the same answers; perplexities are of sums in fp32, in another order.
        assert found[key] == (pytest.approx(value, rel=1e-5) if key[0] == "our_text" else value), key
    assert ours.num_documents == dict.fromkeys(NAMES, 12)
    check_answers(_model_of(folder / "gpt"), theirs["samples"])


@pytest.mark.long
def test_in_chat_the_contexts_are_those_of_the_exported_chat_template(folder, tmp_path):
    record = {"prompt": TEXTS[0], "response": TEXTS[1]}
    base = write_base(tmp_path / "base", CHATML, ["<|im_start|>", "<|im_end|>"], "<|im_end|>")
    prepared(tmp_path, record, base, template="tokenizer")
    write_text_run(tmp_path / "run", tmp_path / "out", "llama-tiny", "supervised")
    export_model(tmp_path / "run", tmp_path / "hf")
    choice = TaskChoice(NAMES[::2], folder / "tasks", num_fewshot=1, chat=True, batch_tokens=100)
    ours = evaluate_tasks(tmp_path / "run", choice, resamples=100)
    options = {"num_fewshot": 1, "apply_chat_template": True, "fewshot_as_multiturn": True}
    theirs = harness_scores(tmp_path / "hf", folder / "tasks", **options)
    for score in ours.scores:
        assert score.value == theirs["results"][score.task][score.metric]
    context, _ = theirs["samples"]["our_choices"][0]["arguments"][0]
    assert context.startswith("<|im_start|>user\n") and context.endswith("<|im_start|>assistant\n")
    check_answers(_model_of(tmp_path / "run", chat=True), theirs["samples"], least=1)


def check_answers(model, samples, least=3):
    """Asserts that what is scored is the same too: each log-probability, and each text that was generated."""
    for sample in samples["our_choices"]:
        found = model.loglikelihood([_request(*arguments) for arguments in sample["arguments"]])
        for (log_prob, is_greedy), (expected,) in zip(found, sample["resps"], strict=True):
            assert log_prob == pytest.approx(expected[0], rel=1e-5)
            assert is_greedy == expected[1]
    texts = [(model.generate_until([_request(*sample["arguments"][0])]), sample) for sample in samples["our_answers"]]
    assert all(text == sample["resps"][0] for text, sample in texts)
    assert len({text for (text,), _ in texts}) >= least, "and they are not all empty"


@pytest.mark.long
def test_two_models_are_compared_document_by_document(folder):
    choice = TaskChoice(NAMES[:2], folder / "tasks", limit=8)
    report = evaluate_tasks(folder / "gpt", choice, other=folder / "gpt2", resamples=100)
    for score in report.scores:
        if score.task == "our_choices":
            assert score.difference.value == pytest.approx(score.value - score.baseline, abs=1e-12)
            assert (score.difference.unit, score.difference.num_units) == ("documents", 8)
        else:
            assert score.difference is None and score.baseline is not None
    facts = json.loads(json.dumps(report.facts()))
    assert facts["documents"] == {"our_choices": 8, "our_text": 8}
    assert sum("no mean over documents: not compared" in line for line in report.lines()) == 2


@pytest.mark.long
def test_what_cannot_be_asked_is_one_line(folder, tmp_path):
    with pytest.raises(ConfigError, match="no such folder; give the folder of task files"):
        evaluate_tasks(folder / "gpt", TaskChoice(("our_choices",), tmp_path / "nothing"))
    (folder / "tasks" / "documents.jsonl").rename(tmp_path / "documents.jsonl")
    try:
        with pytest.raises(
            DataError, match=r"--tasks our_text: cannot be loaded: .*; correct the task's file"
        ) as caught:
            evaluate_tasks(folder / "gpt", TaskChoice(("our_text",), folder / "tasks"))
    finally:
        (tmp_path / "documents.jsonl").rename(folder / "tasks" / "documents.jsonl")
    assert "\n" not in str(caught.value)
    write_run(tmp_path / "mt", steps=[1])
    with pytest.raises(
        ConfigError, match=r"--tasks is for models with a decoder alone .*, this one has encoder\+decoder"
    ):
        evaluate_tasks(tmp_path / "mt", TaskChoice(("our_text",), folder / "tasks"))
    with pytest.raises(ConfigError, match=r"answers of a task have 8 tokens, model.max_seq_len is 4; set generation_"):
        _model_of(folder / "gpt", max_seq_len=4).generate_until(
            [_request("A man", {"until": ["e"], "max_gen_toks": 8})]
        )
    with pytest.raises(ConfigError, match="a task draws its answers, or searches with beams; set do_sample: false"):
        _model_of(folder / "gpt").generate_until([_request("A man", {"do_sample": True, "temperature": 1.0})])


def _model_of(path, max_seq_len=None, *, chat=False):
    from pretrain.artifact.open import open_artifact
    from pretrain.evaluation.harness_model import HarnessModel

    artifact = open_artifact(path)
    if max_seq_len is not None:
        artifact.model.max_seq_len = max_seq_len
    return HarnessModel(artifact, 100, chat=chat)


def _request(*arguments):
    from types import SimpleNamespace

    return SimpleNamespace(args=arguments)
