"""`model: {kind: recurrent}`: which section is read, and what is refused."""

import pytest

from pretrain.config.load import dump_config, load_config
from pretrain.config.model import ModelConfig, RecurrentConfig, parse_model
from pretrain.errors import ConfigError

RUN = """
run: {{name: a}}
data: {{path: shards}}
batch: {{global_tokens: 256, seq_len: 32, micro: 2}}
optim: {{lr: 1e-3}}
train: {{steps: 3}}
objective: {{kind: {objective}}}
model: {model}
"""
CELLS = "{cell: lstm, layers: 2, width: 64}"


@pytest.fixture
def load(tmp_path):
    def load(model: str, objective: str = "causal"):
        path = tmp_path / "config.yaml"
        path.write_text(RUN.format(model=model, objective=objective))
        return load_config(path)

    return load


def test_the_kind_chooses_the_section_and_no_kind_is_a_transformer(load):
    assert isinstance(load("{preset: llama-tiny}").model, ModelConfig)
    config = load(f"{{kind: recurrent, encoder: {CELLS}, decoder: {CELLS}, attention: luong}}", "seq2seq")
    assert isinstance(config.model, RecurrentConfig)
    assert (config.stacks, config.model.shape) == (["encoder", "decoder"], "encoder+decoder")


def test_a_resolved_recurrent_config_loads_as_the_same(load, tmp_path):
    config = load(f"{{kind: recurrent, decoder: {CELLS}, tied_embeddings: true}}")
    (tmp_path / "resolved.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "resolved.yaml") == config
    assert parse_model(config.model.model_dump()) == config.model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (f"{{kind: recurent, decoder: {CELLS}}}", "kind=recurent is unknown; use transformer or recurrent"),
        ("{kind: recurrent}", "model.decoder is required"),
        (
            "{kind: recurrent, decoder: {cel: gru, layers: 1, width: 8}}",
            r"unknown key 'model.decoder.cel'; did you mean 'model.decoder.cell'\?",
        ),
        ("{kind: recurrent, decoder: {cell: elman, layers: 1, width: 8}}", "input should be 'rnn', 'lstm' or 'gru'"),
        (f"{{kind: recurrent, decoder: {CELLS}, attention: luong}}", "attention=luong needs an encoder"),
        (
            f"{{kind: recurrent, encoder: {{layers: 2, width: 32}}, decoder: {CELLS}}}",
            r"encoder.width=32 must equal decoder.width=64: the decoder begins with the encoder's last state",
        ),
        (
            f"{{kind: recurrent, encoder: {CELLS}, decoder: {CELLS}, attention: bahdanau, score: dot}}",
            "score and input_feeding are for attention=luong, not attention=bahdanau",
        ),
        (
            "{kind: recurrent, decoder: {layers: 1, width: 8, bidirectional: true}}",
            "decoder.bidirectional=true would show a decoder the tokens to predict",
        ),
        (
            "{kind: recurrent, encoder: {layers: 1, width: 9, bidirectional: true}, decoder: {layers: 1, width: 9}}",
            "bidirectional=true needs an even width, not 9",
        ),
        (
            f"{{kind: recurrent, decoder: {CELLS}, head: {{transform: true}}}}",
            "head.kind=lm is the only head of a recurrent model",
        ),
        # A key of the other kind is not suggested.
        ("{preset: llama-tiny, input_feeding: true}", "unknown key 'model.input_feeding'; did you mean"),
        (f"{{kind: recurrent, preset: gpt2-124m, decoder: {CELLS}}}", "unknown key 'model.decoder.heads'"),
    ],
)
def test_what_makes_no_model_is_refused_by_name(load, model, message):
    with pytest.raises(ConfigError, match=message):
        load(model)


@pytest.mark.parametrize("objective", ["prefix", "ul2"])
def test_an_objective_that_reads_a_prefix_both_ways_is_refused(load, objective):
    with pytest.raises(ConfigError, match=f"objective.kind={objective} needs bidirectional attention to the prefix"):
        load(f"{{kind: recurrent, decoder: {CELLS}}}", objective)
