"""Folders of sentence-transformers: read as they are written, in both of their forms, and what is refused."""

import json

import pytest

from pretrain.config.model import ModelConfig
from pretrain.config.presets import expand_preset
from pretrain.errors import CheckpointError, ConfigError
from pretrain.interop.sentence_folder import (
    MODULES,
    POOLING,
    read_sentence_folder,
    sentence_files,
    without_vectors,
)


def model(preset="bert-tiny", **head):
    head = {"transform": False, "bias": False, "activation": None, **head}
    values = {"preset": preset, "vocab_size": 100, "tied_embeddings": False, "head": head}
    return ModelConfig.model_validate(expand_preset(values | {"pooler": False} if preset == "bert-tiny" else values))


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("preset", "mean", "mode"),
    [("bert-tiny", True, "mean"), ("bert-tiny", False, "cls"), ("llama-tiny", False, "lasttoken")],
)
def test_a_folder_is_read_as_it_is_written_in_both_forms(tmp_path, preset, mean, mode):
    config = model(preset, kind="vectors", mean=mean)
    files = sentence_files(config)
    write(tmp_path, files)
    bare = without_vectors(config)
    assert bare.head.kind == "none"
    assert read_sentence_folder(tmp_path, bare) == config
    # As version 6 writes it.
    modules = [one | {"type": one["type"].replace(".models.", ".base.modules.x.")} for one in files[MODULES]]
    pooling = {"embedding_dimension": 64, "pooling_mode": mode, "include_prompt": True}
    write(tmp_path, {MODULES: modules, POOLING: pooling})
    assert read_sentence_folder(tmp_path, bare) == config


def test_a_folder_of_hidden_states_alone_says_of_no_vectors(tmp_path):
    assert read_sentence_folder(tmp_path, model(kind="none")) is None


def changed(files, **pooling):
    return files | {POOLING: files[POOLING] | pooling}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda files: files | {MODULES: [*files[MODULES][:2], {"type": "my_lab.Dense", "path": "x"}]},
            "module my_lab.Dense",
        ),
        (
            lambda files: (
                files | {MODULES: [*files[MODULES], {"type": "sentence_transformers.models.Dense", "path": ""}]}
            ),
            "module sentence_transformers.models.Dense is none of Transformer, Pooling, Normalize; remove modules.json",
        ),
        (lambda files: files | {MODULES: files[MODULES][:1]}, "modules Transformer are in no order that is known"),
        (lambda files: files | {MODULES: {"a": 1}}, "not a list of modules"),
        (lambda files: changed(files, pooling_mode_max_tokens=True), "pools by mean, max: one way is needed"),
        (
            lambda files: changed(files, pooling_mode_mean_tokens=False, pooling_mode_lasttoken=True),
            "pooling by lasttoken of a encoder cannot be represented",
        ),
    ],
)
def test_what_a_model_cannot_represent_is_refused_by_name(tmp_path, change, message):
    write(tmp_path, change(sentence_files(model(kind="vectors", mean=True))))
    with pytest.raises(ConfigError) as error:
        read_sentence_folder(tmp_path, model(kind="none"))
    assert message in str(error.value)


def test_a_model_of_scores_and_damaged_files_are_refused(tmp_path):
    write(tmp_path, sentence_files(model(kind="vectors", mean=True)))
    with pytest.raises(ConfigError, match="its model scores tokens, and vectors are of hidden states"):
        read_sentence_folder(tmp_path, model(kind="lm"))
    (tmp_path / POOLING).write_text("{")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        read_sentence_folder(tmp_path, model(kind="none"))
