"""Weights of a new run from a checkpoint: of a head of labels, those of the same labels only."""

import errno
import logging
from functools import partial
from pathlib import Path

import pytest
import torch

from pretrain.artifact.model_path import open_source
from pretrain.artifact.source import AdaptedModel
from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.load import load_config
from pretrain.config.model import HeadConfig
from pretrain.config.prepare import TokenizerConfig
from pretrain.config.run import RunConfig
from pretrain.dist import World
from pretrain.errors import CheckpointError, ConfigError
from pretrain.interop.tensors import parameter_shapes
from pretrain.model import build_model
from pretrain.model.build import fill_weights
from pretrain.run.folder import RunDir
from pretrain.run.heartbeat import Progress
from pretrain.tokenizer.file import dump_tokenizer
from pretrain.tokenizer.train import train_tokenizer
from pretrain.training.build import _draw
from pretrain.training.initial_weights import InitialWeights, open_start, take_weights
from pretrain.training.resolution import pin_start
from pretrain.utils.io import set_fault_hook
from tests.unit.checkpoint.stand_in import StandIn, manager, state_of
from tests.unit.interop.releases import VOCAB, tiny, write_tiny

SHAPES = {"encoder.weight": (3, 4), "pooler.weight": (4, 4), "head.weight": (2, 4), "head.bias": (2,)}
CONFIG = """
run: {{dir: {runs}, name: run}}
data: {{path: data, packing: bins}}
model: {{preset: bert-tiny, vocab_size: 99, tied_embeddings: false, head: {head}}}
objective: {{kind: {kind}}}
batch: {{global_tokens: 128, seq_len: 64, micro: 2}}
optim: {{lr: 1e-3, schedule: {{warmup_steps: 1}}}}
train: {{steps: 100}}
"""
"""Of the model only the head matters here: the weights are a stand-in's."""


def finished_run(folder: Path, kind: str, head: str, shapes: dict[str, tuple[int, ...]]) -> RunDir:
    """A run with a checkpoint of step 6, whose every value is 6."""
    run = RunDir(folder / "run")
    run.path.mkdir(parents=True)
    run.config.write_text(CONFIG.format(runs=folder, kind=kind, head=head))
    run.tokenizer.write_bytes(dump_tokenizer(train_tokenizer(["a text"], TokenizerConfig(kind="char"))))
    manager(run.checkpoints).save(StandIn(6, shapes), state_of(6))
    return run


def start_from(run: RunDir, labels: list[str], caplog) -> dict[str, float]:
    """The one value that each weight has after the start of a run over these labels."""
    model = load_config(run.config).model.model_copy(update={"head": HeadConfig(kind="labels", labels=labels)})
    store, source = StandIn(0, SHAPES), AdaptedModel(open_source(run.path), model, SHAPES)
    take_weights(source, store)
    caplog.set_level(logging.INFO)
    logging.getLogger("pretrain").info("%s", source.describe())
    found = {name: set(kinds["weight"].tolist()) for name, kinds in store.tensors.items()}
    assert all(len(values) == 1 for values in found.values())
    return {name: value for name, (value,) in found.items()}


def test_the_scores_of_the_same_labels_are_kept(tmp_path, caplog):
    run = finished_run(tmp_path, "classify", "{kind: labels, labels: [a, b]}", SHAPES)
    assert set(start_from(run, ["a", "b"], caplog).values()) == {6.0}
    assert "begin anew" not in caplog.text


@pytest.mark.parametrize("labels", [["b", "a"], ["x", "y"]])
def test_the_scores_of_other_labels_begin_anew_although_they_are_as_many(tmp_path, caplog, labels):
    run = finished_run(tmp_path, "classify", "{kind: labels, labels: [a, b]}", SHAPES)
    found = start_from(run, labels, caplog)
    assert found == {"encoder.weight": 6.0, "pooler.weight": 6.0, "head.weight": 0.0, "head.bias": 0.0}
    assert "but for these, which begin anew: head.bias [2], head.weight [2, 4]" in caplog.text


def test_of_a_language_model_the_encoder_is_taken_and_what_it_lacks_is_named(tmp_path, caplog):
    shapes = {"encoder.weight": (3, 4), "head.weight": (99, 4)}
    run = finished_run(tmp_path, "masked", "{kind: lm}", shapes)
    found = start_from(run, ["a", "b"], caplog)
    assert found == {"encoder.weight": 6.0, "pooler.weight": 0.0, "head.weight": 0.0, "head.bias": 0.0}
    assert "begin anew: head.bias [2], head.weight [2, 4], pooler.weight [4, 4]" in caplog.text


def test_an_encoder_of_another_size_is_no_start(tmp_path, caplog):
    shapes = SHAPES | {"encoder.weight": (3, 5)}
    run = finished_run(tmp_path, "classify", "{kind: labels, labels: [a, b]}", shapes)
    with pytest.raises(CheckpointError, match=r"encoder\.weight has shape \[3, 4\] in this model, in the checkpoint"):
        start_from(run, ["a", "b"], caplog)


def test_a_base_that_cannot_be_marked_is_pinned_with_a_warning(tmp_path, caplog):
    run = finished_run(tmp_path, "masked", "{kind: lm}", SHAPES)
    adapted = load_config(run.config, [f"init.from={run.path}", "finetune.kind=lora", "run.name=adapted"])

    def refuse(operation: str, path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    set_fault_hook(refuse)
    try:
        pinned = pin_start(adapted, World(0, 1, 0))
    finally:
        set_fault_hook(None)
    assert pinned.init.from_ == str(run.checkpoints / "step-00000006")
    assert f"{pinned.init.from_} cannot be marked as in use (cannot write: Permission denied)" in caplog.text


RELEASED = """
run: {{dir: runs, name: run}}
init: {{from: {start}, check_tokenizer: false}}
data: {{path: data, packing: {packing}}}
batch: {{global_tokens: 128, seq_len: 64, micro: 2}}
optim: {{lr: 1e-3, schedule: {{warmup_steps: 1}}}}
train: {{steps: 100}}
"""


def released(folder: Path, preset: str, packing: str, *overrides: str) -> RunConfig:
    """The config of a run that starts from a release of random weights."""
    write_tiny(folder / "released", tiny(preset))
    (folder / "run.yaml").write_text(RELEASED.format(start=folder / "released", packing=packing))
    return load_config(folder / "run.yaml", list(overrides))


@pytest.mark.parametrize("is_usual", [True, False])
def test_a_start_that_gives_a_model_that_cannot_be_exported_says_so_before_it_is_trained(tmp_path, caplog, is_usual):
    """The recipe `classify` as it is, which is BERT's, over a ModernBERT; and with the keys for that one."""
    usual = ["model.pooler=false", "model.head.transform=true"] if is_usual else ["model.pooler=true"]
    labels = ["model.head.kind=labels", "model.head.labels=[a, b]", "model.tied_embeddings=false"]
    config = released(tmp_path, "modernbert-tiny", "padded", "objective.kind=classify", *labels, *usual)
    start, store = InitialWeights(config, None), StandIn(0, parameter_shapes(config.model))
    start.fill(store, state_of(0))
    what = "this model can be trained, but `pretrain export` refuses it: no Hugging Face family represents this model"
    assert (what in caplog.text) != is_usual
    assert ("pooler=false, not true" in caplog.text) != is_usual


def test_new_tokens_whose_rows_adapters_do_not_train_are_named_with_the_key_that_trains_them(tmp_path, caplog):
    added = [f"model.vocab_size={VOCAB + 2}", "finetune.kind=lora"]
    for also, is_warned in (("[]", True), ("[embedding.weight, head.weight]", False)):
        config = released(tmp_path / str(is_warned), "llama-tiny", "bins", *added, f"finetune.also={also}")
        model = build_model(config.model, PLAIN_ENGINE, torch.device("cpu"))
        caplog.clear()
        base = AdaptedModel(open_source(Path(config.init.from_)), config.model, parameter_shapes(config.model))
        InitialWeights(config, base).arrange(model, torch.device("cpu"))
        what = "rows of 2 new tokens in embedding.weight, head.weight are not trained; to train these tables: "
        assert (f"{what}finetune.new_tokens=trained" in caplog.text) == is_warned


def test_an_encoder_under_an_objective_of_decoders_is_refused_by_the_name_of_the_start(tmp_path):
    message = (
        rf"needs a model with decoder.*, that of init\.from={tmp_path}/released has encoder; use another init\.from"
    )
    with pytest.raises(ConfigError, match=message):
        released(tmp_path, "bert-tiny", "bins", "objective.kind=supervised")


def test_weights_that_a_checkpoint_is_loaded_over_are_not_drawn(tmp_path):
    (tmp_path / "run.yaml").write_text(CONFIG.format(runs=tmp_path, kind="masked", head="{kind: lm}"))
    config = load_config(tmp_path / "run.yaml")
    drawn = []
    for _ in range(2):
        start = open_start(config, tmp_path / "absent", World(0, 1, 0))
        model = build_model(config.model, PLAIN_ENGINE, torch.device("cpu"))
        fill_weights(model, partial(_draw, start, Progress()))
        drawn.append(sum(parameter.abs().sum().item() for parameter in model.parameters()))
        manager(RunDir(config.folder).checkpoints).save(StandIn(6, SHAPES), state_of(6))
    assert drawn[0] > 0
    assert drawn[1] == 0.0
