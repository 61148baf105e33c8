"""Texts from a config are read as the data of the run were, and wait for evaluations that there
are."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from pretrain.config.data import DataConfig
from pretrain.config.prepare import PrepareConfig
from pretrain.dist import World
from pretrain.preparation.prepare import prepare
from pretrain.shards.dataset import Dataset, open_dataset
from pretrain.training.samples import build_reader, takes_part
from tests.unit.model.tiny import build, encoder_config, tiny_config, two_stacks_config


def dataset(folder: Path, split: str, **of_input) -> Dataset:
    """Prepares a few letters, large and small."""
    (folder / "a.txt").write_text("ABCDE abcde\n" * 20)
    inputs = [{"path": str(folder / "a.txt"), **of_input}]
    config = {"output": str(folder / "shards"), "inputs": inputs, "tokenizer": {"kind": "char"}, "split": split}
    prepare(PrepareConfig.model_validate(config), processes=1)
    return open_dataset(DataConfig(path=str(folder / "shards")))


@pytest.mark.parametrize(("split", "expected"), [("hash:0", False), ("tail:0.2", True)])
def test_without_a_held_out_split_nothing_is_evaluated(tmp_path, split, expected, caplog):
    engine = SimpleNamespace(needs_all_ranks=False)
    assert takes_part(dataset(tmp_path, split), engine, World(0, 2, 0), "no texts are generated") is expected
    assert ("no texts are generated, as the data have no validation split" in caplog.text) is not expected
    assert not takes_part(open_dataset(DataConfig(path=str(tmp_path / "shards"))), engine, World(1, 2, 1), "")


def test_texts_are_normalised_as_the_data_were_and_a_source_ends_like_a_document(tmp_path):
    read = dataset(tmp_path, "hash:0", normalize={"steps": ["lowercase"]})
    for config, ends in ((tiny_config(), False), (encoder_config(), False), (two_stacks_config(), True)):
        reader = build_reader(read, build(config))
        assert reader.normalize("ABc") == reader.normalize_target("ABc") == "abc"
        ids = reader.codec.encode("abc")
        assert (ids[-1:] == list(reader.codec.eos_ids)) is ends
        assert reader.codec.decode(ids[:3]) == "abc"


def test_data_that_nothing_was_done_to_are_read_as_they_are(tmp_path):
    assert build_reader(dataset(tmp_path, "hash:0"), build(tiny_config())).normalize("ABc") == "ABc"
