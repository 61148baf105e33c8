"""Classifiers in Hugging Face folders are evaluated as they are: the scores are those of transformers' pipelines."""

import numpy as np
import pytest
import torch
import transformers

from pretrain.artifact.average import average_checkpoints
from pretrain.artifact.model_path import open_source
from pretrain.artifact.open import open_artifact
from pretrain.artifact.transfer import export_model, import_model
from pretrain.config.prepare import PrepareConfig
from pretrain.errors import ConfigError, DataError
from pretrain.evaluation.corpus import Corpus, CorpusOptions, settle
from pretrain.evaluation.held_out import evaluate_held_out
from pretrain.evaluation.label_scores import read_answers
from pretrain.preparation.prepare import prepare
from tests.helpers.corpus import write_rows
from tests.helpers.lent import quiet_transformers
from tests.unit.evaluation.label_runs import CLASSES, TAGS, WORDS, write_label_run, write_labelled
from tests.unit.interop.releases import change_config

NAMES = {"classes": ["pos", "neg", "mixed"], "tags": ["O", "ANIMAL"]}
"""Not in the order of the alphabet."""
ROWS = {"classes": CLASSES, "tags": TAGS}
TINY = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "initializer_range": 0.4,
}  # fmt: skip
MODELS = {
    "bert": ("Bert", {}),
    "modernbert": ("ModernBert", {"classifier_pooling": "mean"}),
}


def write_classifier(folder, name, kind, tokenizer):
    """A folder as people publish them: a classifier of random weights, with its tokenizer."""
    family, values = MODELS[name]
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("pad", "cls", "sep")}
    ids |= {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
    labels = {"id2label": dict(enumerate(NAMES[kind])), "vocab_size": len(tokenizer)}
    config = getattr(transformers, f"{family}Config")(**TINY, **values, **ids, **labels)
    torch.manual_seed(3)
    what = {"classes": "Sequence", "tags": "Token"}[kind]
    with quiet_transformers():
        model = getattr(transformers, f"{family}For{what}Classification")(config).eval()
        torch.nn.init.normal_(model.classifier.bias)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data of each kind, prepared with the tokenizer of the folders and the labels in their order, and the folders."""
    folder = tmp_path_factory.mktemp("hub")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(word for word in WORDS if word != "brown"), "bro", "##wn"]
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    tokenizer = transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=64)
    for kind, rows in ROWS.items():
        for name in MODELS:
            write_classifier(folder / f"{name}-{kind}", name, kind, tokenizer)
        one = {"path": str(write_rows(folder / f"{kind}.jsonl", rows))}
        values = {
            "output": str(folder / kind), "kind": kind, "labels": NAMES[kind], "split": "hash:0",
            "inputs": [one, one | {"split": "validation"}],
            "tokenizer": {"kind": "given", "path": str(folder / f"bert-{kind}")},
        }  # fmt: skip
        prepare(PrepareConfig.model_validate(values), processes=1)
    return folder


@pytest.mark.parametrize("kind", ROWS)
def test_an_export_reads_texts_in_the_tokens_of_the_training_where_the_tokenizer_ends_none(tmp_path, kind):
    data = write_labelled(tmp_path / "data", kind, ROWS[kind], {"kind": "bpe", "vocab_size": 300})
    run = write_label_run(tmp_path / "run", data, kind)
    export_model(run, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    codec = open_source(run).load_codec()
    for text in ("the lazy dog", "a river"):
        assert theirs(text)["input_ids"] == codec.encode_placed(text)[0]
        assert theirs(text)["input_ids"][-1] == codec.eos_ids[0]


def logits_of_pipeline(folder, texts):
    """What `pipeline("text-classification")` gives each text, before its softmax: float64 [texts, labels]."""
    with quiet_transformers():
        classify = transformers.pipeline("text-classification", str(folder), top_k=None, function_to_apply="none")
        found = [{one["label"]: one["score"] for one in scores} for scores in classify(texts)]
    return np.array([[scores[name] for name in NAMES["classes"]] for scores in found])


def answers_of(folder, kind, name):
    """What ours says of each document, in the order of the rows that were prepared."""
    what = open_source(folder / f"{name}-{kind}")
    choice = CorpusOptions(data=(str(folder / kind),))
    corpus = Corpus(settle(what, choice), choice, what.config)
    return read_answers(open_artifact(what.path).model, corpus.sources[0].loader)


def nll(scores, gold):
    """-log p(gold) of rows of logits."""
    scores = torch.tensor(scores, dtype=torch.float64).log_softmax(dim=-1)
    return -scores[torch.arange(len(gold)), torch.tensor(gold)].numpy()


@pytest.mark.parametrize("name", MODELS)
def test_texts_have_the_logits_of_the_pipeline(folder, name):
    answers = answers_of(folder, "classes", name)
    scores = logits_of_pipeline(folder / f"{name}-classes", [row["text"] for row in CLASSES])
    gold = np.array([NAMES["classes"].index(row["label"]) for row in CLASSES])
    expected = np.array([gold, scores.argmax(axis=1), nll(scores, gold)])
    # Documents come by length: compared as sets of (gold, answer, loss).
    ours = np.array([answers.gold, answers.predicted, answers.nll])
    np.testing.assert_allclose(ours[:, np.lexsort(ours)], expected[:, np.lexsort(expected)], rtol=1e-4, atol=1e-5)
    assert len(set(scores.argmax(axis=1))) > 1, "a model that says one thing of all texts proves little"


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ("ElectraModel", "a model without a head has no loss; fine-tune it, and evaluate the run"),
        ("ElectraForPreTraining", "a detector of replaced tokens has no loss without the generator"),
    ],
)
def test_a_model_without_a_loss_is_refused(folder, tmp_path, loader, message):
    with quiet_transformers():
        getattr(transformers, loader)(transformers.ElectraConfig(**TINY, vocab_size=9)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        evaluate_held_out(tmp_path, CorpusOptions(data=(str(folder / "classes"),)))


@pytest.mark.parametrize("name", MODELS)
def test_words_have_the_logits_of_their_first_tokens(folder, name):
    answers = answers_of(folder, "tags", name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / f"{name}-tags")
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(folder / f"{name}-tags").eval()
    found = []
    for row in TAGS:
        encoded = tokenizer(row["tokens"], is_split_into_words=True, return_tensors="pt")
        words = encoded.word_ids()
        with torch.no_grad():
            scores = theirs(**encoded).logits[0].double().numpy()
        places = [words.index(number) for number in range(len(row["tokens"]))]
        gold = np.array([NAMES["tags"].index(tag) for tag in row["tags"]])
        found += zip(gold, scores[places].argmax(axis=1), nll(scores[places], gold), strict=True)
    expected = np.array(found).T
    ours = np.array([answers.gold, answers.predicted, answers.nll])
    np.testing.assert_allclose(ours[:, np.lexsort(ours)], expected[:, np.lexsort(expected)], rtol=1e-4, atol=1e-5)


def test_an_import_of_a_classifier_is_scored_as_its_folder(folder, tmp_path):
    import_model(str(folder / "bert-classes"), tmp_path / "model")
    choice = CorpusOptions(data=(str(folder / "classes"),))
    found, own = (
        evaluate_held_out(path, choice, resamples=100).facts()["sources"]["data"]
        for path in (tmp_path / "model", folder / "bert-classes")
    )
    assert found == own and found["labels"]["confusion"] and own["labels"]["accuracy"]["method"] == "wilson"


@pytest.mark.parametrize("kind", ["classes", "tags"])
def test_a_classifier_of_ours_is_scored_the_same_after_an_export(tmp_path, kind):
    data = write_labelled(tmp_path / kind, kind, ROWS[kind])
    run = write_label_run(tmp_path / "run", data, kind)
    written = export_model(run, tmp_path / "hf")
    assert written.architecture == f"BertFor{'Sequence' if kind == 'classes' else 'Token'}Classification"
    choice = CorpusOptions(data=(str(data),), seq_len=48)
    ours, theirs = (
        evaluate_held_out(path, choice, resamples=100).facts()["sources"] for path in (run, tmp_path / "hf")
    )
    assert ours == theirs
    twin = write_label_run(tmp_path / "twin", data, kind)
    average_checkpoints([run, twin], None, tmp_path / "mean")
    assert (
        open_source(tmp_path / "mean").like
        == open_source(run).like
        == ("ForTokenClassification" if kind == "tags" else "")
    )
    export_model(tmp_path / "hf", tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


class TestRefusals:
    """Data that are not those of a classifier."""

    def test_other_labels_and_another_order(self, folder, tmp_path):
        data = write_labelled(tmp_path / "sorted", "classes", CLASSES)
        with pytest.raises(DataError, match=r"labels are mixed, neg, pos, those of .* pos, neg, mixed; prepare .* order"
                                            r": labels=\[pos, neg, mixed\]"):  # fmt: skip
            evaluate_held_out(folder / "bert-classes", CorpusOptions(data=(str(data),)))

    def test_labels_that_nobody_named(self, folder, tmp_path):
        copy = tmp_path / "copy"
        copy.mkdir()
        for file in (folder / "bert-classes").iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        change_config(copy, id2label=..., label2id=..., num_labels=3)
        with pytest.raises(DataError, match=r"LABEL_0, LABEL_1, LABEL_2; prepare .*; or name them in id2label"):
            evaluate_held_out(copy, CorpusOptions(data=(str(folder / "classes"),)))

    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize(("kind", "other"), [("classes", "tags"), ("tags", "classes")])
    def test_words_for_a_classifier_of_texts_and_texts_for_one_of_words(self, folder, name, kind, other):
        with pytest.raises(ConfigError, match=f"the model labels (texts|words), and .* give data of kind {kind}"):
            evaluate_held_out(folder / f"{name}-{kind}", CorpusOptions(data=(str(folder / other),)))

    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize(("kind", "other"), [("classes", "tags"), ("tags", "classes")])
    def test_the_same_for_an_import(self, folder, tmp_path, name, kind, other):
        import_model(str(folder / f"{name}-{kind}"), tmp_path / "model")
        with pytest.raises(ConfigError, match=f"the model labels (texts|words), and .* give data of kind {kind}"):
            evaluate_held_out(tmp_path / "model", CorpusOptions(data=(str(folder / other),)))
