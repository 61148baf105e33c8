"""Classifiers of transformers, of texts and of words: read, they give the same scores; written, they are the same."""

import json
import re
from functools import partial

import pytest
import torch
import transformers

from pretrain.artifact.model_path import open_source
from pretrain.artifact.transfer import export_model
from pretrain.config.model import HeadConfig
from pretrain.errors import CheckpointError, ConfigError
from pretrain.families import FAMILIES
from pretrain.interop.choose import choose_family
from pretrain.interop.release import open_release
from pretrain.types import Batch
from tests.helpers.lent import Lent, build_imported, check_gradients, lend, quiet_transformers
from tests.helpers.tables import thinned
from tests.parity.exchange import check_round_trip
from tests.unit.interop.releases import change_config, load_tensors, save_tensors, tiny
from tests.unit.model.tiny import packed_batch

NAMES = ["down", "flat", "up"]
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
"""fp32 through two layers, summed in other orders."""

TINY = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 32, "id2label": dict(enumerate(NAMES)), "attn_implementation": "eager",
    "initializer_range": 0.3,
}  # fmt: skip
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}


def bert(kind, **values):
    return getattr(transformers, f"BertFor{kind}Classification")(transformers.BertConfig(**TINY | values))


def modernbert(kind, **values):
    config = transformers.ModernBertConfig(**TINY | SPECIAL | values)
    return getattr(transformers, f"ModernBertFor{kind}Classification")(config)


LABELS_OF_DECODER = {"pad_token_id": 0, "id2label": dict(enumerate(NAMES)), "attn_implementation": "eager"}
DECODERS = [
    *("Llama", "Olmo", "Olmo3", "SmolLM3", "Phi", "Phi3", "Gemma", "Gemma2", "Gemma3Text", "GPTNeoX", "StableLm"),
    *("Falcon", "Mistral", "Mixtral", "Qwen3", "Olmo2", "Starcoder2"),
]


def of(name, kind, **values):
    values = TINY | {"hidden_dropout_prob": 0.0, "pad_token_id": 0} | values
    if name == "DistilBert":
        theirs = ("dim", "n_layers", "n_heads", "hidden_dim")
        ours = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        values |= {key: values.pop(name) for key, name in zip(theirs, ours, strict=True)}
    return getattr(transformers, f"{name}For{kind}")(getattr(transformers, f"{name}Config")(**values))


def decoder(name, kind="SequenceClassification", **values):
    if name not in ("GPT2", "GPTNeoX", "Falcon"):
        values = {"num_key_value_heads": 4, "head_dim": 8} | values
    return of(name, kind, **LABELS_OF_DECODER | values)


MAKERS = {
    "bert-texts": lambda: bert("Sequence", classifier_dropout=0.25),
    "bert-words": lambda: bert("Token"),
    "roberta-texts": lambda: of("Roberta", "SequenceClassification"),
    "xlm-roberta-words": lambda: of("XLMRoberta", "TokenClassification"),
    "distilbert-texts": lambda: of("DistilBert", "SequenceClassification", seq_classif_dropout=0.3),
    "distilbert-words": lambda: of("DistilBert", "TokenClassification"),
    "electra-texts": lambda: of("Electra", "SequenceClassification", embedding_size=16),
    "electra-words": lambda: of("Electra", "TokenClassification"),
    "gpt2-texts": lambda: decoder("GPT2"),
    "qwen2-texts": lambda: of(
        "Qwen2", "SequenceClassification", num_key_value_heads=2, tie_word_embeddings=True, **LABELS_OF_DECODER
    ),
    "modernbert-first": lambda: modernbert("Sequence", classifier_dropout=0.25),
    "modernbert-mean": lambda: modernbert("Sequence", classifier_pooling="mean"),
    "modernbert-words": lambda: modernbert("Token"),
    "modernbert-biased": lambda: modernbert(
        "Sequence", norm_bias=True, attention_bias=True, mlp_bias=True, classifier_bias=True
    ),
    **{f"{name.lower()}-texts": partial(decoder, name) for name in DECODERS},
}


def make(name, folder) -> Lent:
    torch.manual_seed(0)
    with quiet_transformers():
        return lend(MAKERS[name](), folder)


@pytest.fixture(scope="module", params=MAKERS)
def made(request, tmp_path_factory):
    return make(request.param, tmp_path_factory.mktemp("theirs"))


def padded_batch():
    tokens = torch.randint(3, 99, (3, 11), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([11, 4, 7], dtype=torch.int32)
    mask = (torch.arange(11) < lengths[:, None]).long()
    return Batch(tokens, tokens, lengths_B=lengths), {"input_ids": tokens, "attention_mask": mask}


@torch.no_grad()
def test_scores_are_equal(lent):
    """A text's scores are at its first token, a word's at the token; padding has none."""
    batch, inputs = padded_batch()
    # Theirs finds the last token of a text for a decoder by the id of padding.
    inputs["input_ids"] = inputs["input_ids"] * inputs["attention_mask"]
    scores, expected = lent.ours(batch).logits_BTV, lent.theirs(**inputs).logits
    if expected.dim() == 2:
        torch.testing.assert_close(scores[:, 0], expected, **TOLERANCE)
    else:
        real = inputs["attention_mask"].bool()
        torch.testing.assert_close(scores[real], expected[real], **TOLERANCE)


SMALL = {
    "Llama": TINY, "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "T5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
}  # fmt: skip
SIZES = {"initializer_range": 0.1, "num_labels": 2, "id2label": None}
UNITS = {
    f"{name}-{kind}": (name, kind)
    for name in ("Bert", "Roberta", "XLMRoberta", "DistilBert", "Electra")
    for kind in ("QuestionAnswering", "MultipleChoice")
} | {"Electra-PreTraining": ("Electra", "PreTraining")}
ANSWERING = [
    *("GPT2", "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "SmolLM3", "GPTNeoX", "Falcon"),
]
OF_DECODERS = {f"{name}-QuestionAnswering": (name, "QuestionAnswering") for name in ANSWERING}


@pytest.mark.parametrize("name", [*UNITS, *thinned(OF_DECODERS, 3)])
def test_spans_choices_and_replaced_tokens_are_scored_equally(name, tmp_path):
    family, kind = (UNITS | OF_DECODERS)[name]
    torch.manual_seed(0)
    with quiet_transformers():
        make_theirs = decoder if family in ANSWERING else of
        lent = lend(make_theirs(family, kind, **SIZES), tmp_path / "theirs")
    batch, inputs = padded_batch()
    scores, real = lent.ours(batch).logits_BTV, inputs["attention_mask"].bool()
    if kind == "MultipleChoice":  # of one question
        inputs = {key: value[None] for key, value in inputs.items()}
        found, expected = scores[:, 0, 0], lent.theirs(**inputs).logits[0]
    elif kind == "QuestionAnswering":
        output = lent.theirs(**inputs)
        found, expected = scores[real], torch.stack((output.start_logits, output.end_logits), dim=-1)[real]
    else:
        found, expected = scores[..., 0][real], lent.theirs(**inputs).logits[real]
    torch.testing.assert_close(found, expected, **TOLERANCE)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    check_gradients(lent)
    check_round_trip(lent, getattr(transformers, f"AutoModelFor{kind}"), tmp_path / "again", **inputs)
    export_model(lent.release.folder, tmp_path / "checked")  # compares the scores of both


@pytest.mark.parametrize(
    "name", ["LlamaForTokenClassification", "GPT2ForTokenClassification", "T5ForQuestionAnswering"]
)
def test_a_head_that_ours_lack_is_named(name, tmp_path):
    family, _, _ = name.partition("For")
    with quiet_transformers():
        getattr(transformers, name)(getattr(transformers, f"{family}Config")(**SMALL[family])).save_pretrained(tmp_path)
    model_type = family.lower()
    message = f"architectures=['{name}']: our models of {model_type} have no such head"
    with pytest.raises(ConfigError, match=re.escape(message)):
        open_release(tmp_path)


OF_CLASSES = {"labels": "SequenceClassification", "spans": "QuestionAnswering", "choices": "MultipleChoice"}


@pytest.mark.parametrize("kind", OF_CLASSES)
def test_decoders_are_exported_by_every_class_that_transformers_has_and_refused_without_one(kind):
    known = 0
    for family in FAMILIES.values():
        lm = tiny()
        if not family.architecture(lm).endswith(("ForCausalLM", "LMHeadModel")):
            continue
        known += 1
        head = {"kind": kind, "labels": ["a", "b"] if kind == "labels" else [], "bias": kind != "labels"}
        config = lm.model_copy(update={"head": HeadConfig(**head), "tied_embeddings": False})
        name = family.architecture(config)
        base = re.sub(r"(Model|For\w+)$", "", name)
        assert name.endswith(OF_CLASSES[kind]) == hasattr(transformers, f"{base}For{OF_CLASSES[kind]}"), name
    assert known == 57


def test_a_decoder_whose_family_has_no_such_class_is_refused_at_export_by_its_name():
    config = tiny("olmo-tiny", head={"kind": "spans", "bias": True}, tied_embeddings=False)
    message = "the nearest, olmo, has head.kind=none, not spans (transformers has no OlmoForQuestionAnswering);"
    with pytest.raises(ConfigError, match=re.escape(message)):
        choose_family(config)


def test_names_of_labels_dropout_and_pooling_are_read(tmp_path):
    first, mean = make("bert-texts", tmp_path / "a").release.config, make("modernbert-mean", tmp_path / "b")
    assert (first.head.labels, first.head.dropout, first.pooler) == (NAMES, 0.25, True)
    assert (mean.release.config.head.mean, mean.release.config.head.dropout) == (True, 0.0)


def test_a_decoder_without_a_token_of_padding_is_exported_as_a_classifier(tmp_path):
    folder = make("gpt2-texts", tmp_path / "theirs").release.folder
    change_config(folder, pad_token_id=None)
    export_model(folder, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [
        "GPT2ForSequenceClassification"
    ]


def test_the_last_token_of_each_packed_document_labels_it(tmp_path):
    lent, lengths = make("llama-texts", tmp_path), [4, 1, 6]
    batch = packed_batch([lengths], vocab_size=99)
    with torch.no_grad():
        found = lent.ours(batch).logits_BTV[0]
        parts = batch.tokens_BT.split(lengths, dim=1)
        alone = torch.cat([lent.ours(Batch(tokens, tokens)).logits_BTV[0, -1:] for tokens in parts])
    torch.testing.assert_close(found[[0, 4, 5]], alone, **TOLERANCE)


def test_an_export_is_the_classifier_that_was_imported(lent, tmp_path):
    auto = "Token" if "ForToken" in type(lent.theirs).__name__ else "Sequence"
    auto_class = getattr(transformers, f"AutoModelFor{auto}Classification")
    check_round_trip(lent, auto_class, tmp_path / "again", input_ids=padded_batch()[0].tokens_BT)
    card = (tmp_path / "again" / "README.md").read_text()
    assert f"AutoModelFor{auto}Classification.from_pretrained" in card and "- labels: down, flat, up\n" in card


def test_transformers_reads_the_names_of_an_export(tmp_path):
    export_model(make("modernbert-words", tmp_path / "theirs").release.folder, tmp_path / "out")
    found = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "out")
    assert type(found).__name__ == "ModernBertForTokenClassification"
    assert found.config.id2label == dict(enumerate(NAMES)) and found.config.label2id["up"] == 2


def test_a_pooler_beside_labels_of_words_is_dropped(tmp_path):
    lent = make("bert-words", tmp_path / "theirs")
    pooler = {"bert.pooler.dense.weight": torch.ones(32, 32), "bert.pooler.dense.bias": torch.ones(32)}
    save_tensors(tmp_path / "theirs", load_tensors(tmp_path / "theirs") | pooler)
    release = open_release(tmp_path / "theirs")
    assert release.ignored == sorted(pooler) and not release.config.pooler
    batch = padded_batch()[0]
    with torch.no_grad():
        assert torch.equal(build_imported(release)(batch).logits_BTV, lent.ours(batch).logits_BTV)


def test_without_architectures_the_tensors_tell_what_is_labelled(tmp_path):
    for name, has_pooler in (("bert-texts", True), ("bert-words", False)):
        make(name, tmp_path / name)
        change_config(tmp_path / name, architectures=...)
        config = open_release(tmp_path / name).config
        assert (config.head.kind, config.pooler) == ("labels", has_pooler)


def test_labels_without_names_are_numbered_as_transformers_does(tmp_path):
    torch.manual_seed(0)
    theirs = transformers.BertForSequenceClassification(transformers.BertConfig(**TINY | {"id2label": None}))
    theirs.save_pretrained(tmp_path)
    change_config(tmp_path, id2label=..., label2id=...)
    assert open_release(tmp_path).config.head.labels == ["LABEL_0", "LABEL_1"]
    assert list(theirs.config.id2label.values()) == ["LABEL_0", "LABEL_1"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"problem_type": "multi_label_classification"}, "of all labels one is right"),
        ({"problem_type": "regression"}, "problem_type='regression': only 'single_label_classification'"),
        ({"id2label": {"0": "score"}}, "one score is a regression, not a choice of labels"),
        ({"id2label": {"0": "a", "1": "a", "2": "b"}}, "must be a name for each number from 0 on"),
        ({"id2label": {"0": "a", "2": "b"}}, "must be a name for each number from 0 on"),
        ({"id2label": {"0": "a", "1": 1}}, "must be a name for each number from 0 on"),
        (
            {"architectures": ["BertForImages"]},
            "BertForSequenceClassification, ForMultipleChoice, ForQuestionAnswering",
        ),
        ({"classifier_dropout": "much"}, "classifier_dropout='much': must be a number"),
    ],
)
def test_scores_that_are_no_choice_of_labels_are_refused(tmp_path, values, message):
    make("bert-texts", tmp_path)
    change_config(tmp_path, **values)
    with pytest.raises(ConfigError) as error:
        open_release(tmp_path)
    assert message in str(error.value) and str(tmp_path / "config.json") in str(error.value)


def test_more_names_than_scores_are_refused(tmp_path):
    make("bert-texts", tmp_path)
    change_config(tmp_path, id2label={str(number): f"l{number}" for number in range(4)})
    with pytest.raises(CheckpointError, match=r"classifier.bias is \[3\], should be \[4\]"):
        open_release(tmp_path)


def test_another_way_of_pooling_is_refused(tmp_path):
    make("modernbert-first", tmp_path)
    change_config(tmp_path, classifier_pooling="max")
    with pytest.raises(ConfigError, match="classifier_pooling='max': must be 'cls' or 'mean'"):
        open_source(tmp_path)


def test_config_json_has_no_labels_where_there_is_no_such_head(tmp_path):
    lent = lend(transformers.BertModel(transformers.BertConfig(**TINY)), tmp_path / "theirs")
    assert lent.release.config.head.labels == []
    export_model(lent.release.folder, tmp_path / "out")
    assert "id2label" not in json.loads((tmp_path / "out" / "config.json").read_text())
