"""What labels need of a model and a run, checked when the config loads."""

import pytest

from pretrain.config.load import load_config
from pretrain.config.model import HeadConfig, ModelConfig
from pretrain.config.objective import ObjectiveConfig
from pretrain.config.presets import expand_preset
from pretrain.errors import ConfigError

CONFIG = """
run: {{dir: runs, name: labels}}
data: {{path: data, packing: bins{data}}}
model: {{preset: {preset}{model}}}
objective: {{kind: {kind}}}
batch: {{global_tokens: 512, seq_len: 64, micro: 2}}
optim: {{lr: 1e-3, schedule: {{warmup_steps: 2}}}}
train: {{steps: 10}}
"""
SPANS = ", tied_embeddings: false, head: {kind: spans}"
LABELS = ", tied_embeddings: false, head: {kind: labels}"


def load(tmp_path, kind="classify", model=LABELS, data="", preset="bert-tiny"):
    (tmp_path / "a.yaml").write_text(CONFIG.format(kind=kind, model=model, data=data, preset=preset))
    return load_config(tmp_path / "a.yaml")


def test_what_fits_is_taken(tmp_path):
    assert load(tmp_path).model.head.kind == "labels"
    assert load(tmp_path, "tag").objective.kind == "tag"
    assert load(tmp_path, model=LABELS + ", pooler: true").model.pooler
    assert load(tmp_path, "tag", data=", document_mask: false").objective.kind == "tag"
    for preset in ("bert-tiny", "gpt2-tiny", "llama-tiny"):
        assert load(tmp_path, "answers", SPANS, preset=preset).model.head.kind == "spans"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"model": ""},
            r"objective\.kind=classify needs model\.head\.kind=labels, this model has lm; set it, and model\.tied_embe",
        ),
        ({"kind": "masked"}, r"objective\.kind=masked needs model\.head\.kind=lm, this model has labels; set it$"),
        (
            {"kind": "tag", "model": LABELS + ", pooler: true"},
            r"objective\.kind=tag labels words, but model\.head\.mean and model\.pooler summarize documents; set",
        ),
        ({"kind": "tag", "model": LABELS.replace("labels}", "labels, mean: true}")}, r"summarize documents; set both"),
        (
            {"kind": "answers", "model": SPANS, "data": ", document_mask: false"},
            r"objective\.kind=answers searches documents, which must not attend to each other; use data",
        ),
        (
            {"kind": "choices", "model": "", "preset": "llama-tiny"},
            r"objective\.kind=choices needs a model with encoder, model\.preset=llama-tiny has decoder; use",
        ),
        (
            {"kind": "answers", "model": "", "preset": "llama-tiny"},
            r"objective\.kind=answers needs model\.head\.kind=spans, this model has lm; set it, and model\.tied_embe",
        ),
        (
            {"kind": "answers", "model": SPANS, "preset": "bart-tiny"},
            r"head\.kind=spans needs a model of an encoder or a decoder alone",
        ),
        (
            {"kind": "choices", "model": SPANS.replace("spans", "choices"), "preset": "llama-tiny"},
            r"head\.kind=choices needs a model of an encoder alone",
        ),
        (
            {"kind": "choices", "model": SPANS},
            r"objective\.kind=choices needs model\.head\.kind=choices, this model has spans; set it, and model\.tied",
        ),
        (
            {"kind": "choices", "model": SPANS.replace("spans", "choices"), "data": ", document_mask: false"},
            r"objective\.kind=choices compares documents, which must not attend to each other",
        ),
        ({"kind": "answers", "model": SPANS + ", pooler: true"}, r"head\.kind=spans scores tokens, and model\.pooler"),
        (
            {"data": ", document_mask: false"},
            r"objective\.kind=classify labels documents, which must not attend to each other; use data",
        ),
        ({"model": ", head: {kind: labels}"}, r"tied_embeddings=true needs head\.kind=lm, not labels; set it to false"),
        ({"model": ", head: {mean: true}"}, r"labels, mean and dropout go with kind=labels, not lm; leave them out"),
        (
            {"model": ", head: {kind: labels, scaled: true}"},
            "scaled, scale and soft_cap go with kind=lm, not labels",
        ),
        (
            {
                "kind": "causal",
                "model": ", tied_embeddings: false, head: {kind: labels}, decoder: {layers: 1, width: 128, "
                "heads: 2, ff_width: 8}",
            },
            r"head\.kind=labels needs a model of an encoder or a decoder alone",
        ),
    ],
)
def test_what_contradicts_labels_is_refused_with_its_reason(tmp_path, values, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, **values)


def test_the_head_of_classes_is_computed_at_no_share_of_positions_that_counts():
    assert ObjectiveConfig(kind="classify").head_share == 0
    assert ObjectiveConfig(kind="tag").head_share == 1


def test_a_head_has_a_row_for_each_label_and_no_padding():
    values = {"preset": "bert-tiny", "vocab_size": 100, "tied_embeddings": False, "head": {"kind": "labels"}}
    config = ModelConfig.model_validate(expand_preset(values))
    named = config.model_copy(update={"head": HeadConfig(kind="labels", labels=["a", "b", "c"])})
    assert (named.num_scores, named.num_head_rows) == (3, 3)
    lm = ModelConfig.model_validate(expand_preset({"preset": "bert-tiny", "vocab_size": 100}))
    assert (lm.num_scores, lm.num_head_rows) == (100, 128)
