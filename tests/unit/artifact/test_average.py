"""Averages of checkpoints: the numbers, what comes with them, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pretrain.artifact.average import average_checkpoints
from pretrain.artifact.model_path import open_source
from pretrain.artifact.open import find_normalize, normalize_of_data, open_artifact
from pretrain.artifact.transfer import export_model
from pretrain.checkpoint.load import MeanReader, WeightReader
from pretrain.errors import CheckpointError, ConfigError, DataError
from tests.helpers.runs import tensors_of
from tests.unit.artifact.runs import NORMALIZE, TEXTS, write_pairs, write_run, write_text_run, write_texts
from tests.unit.checkpoint.stand_in import StandIn, manager, state_of


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of two stacks with four checkpoints of random weights."""
    return write_run(tmp_path_factory.mktemp("runs") / "run", steps=[10, 20, 30, 40])


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").iterdir())


def test_it_is_the_mean_of_the_last_checkpoints(run, tmp_path):
    averaged = average_checkpoints([run], 3, tmp_path / "mean")
    assert averaged.steps == [20, 30, 40]
    stored = [tensors_of(path) for path in checkpoints(run)[1:]]
    mean = tensors_of(tmp_path / "mean")
    assert mean.keys() == {name for name in stored[0] if name.endswith("/weight")}
    for name, values in mean.items():
        expected = np.mean([one[name].astype(np.float64) for one in stored], axis=0).astype(np.float32)
        assert np.array_equal(values, expected)


def test_the_averages_of_a_run_are_those_of_its_last_checkpoints(run, tmp_path):
    with pytest.raises(CheckpointError, match=r"step-00000020: it has no average of the weights"):
        average_checkpoints([run / "ema"], 3, tmp_path / "mean")
    with pytest.raises(CheckpointError, match="has 4 checkpoints, --last 5 needs more"):
        average_checkpoints([run / "ema"], 5, tmp_path / "mean")


def test_named_checkpoints_are_averaged_in_any_order_to_the_same_bits(run, tmp_path):
    first, second, *_ = checkpoints(run)
    one = average_checkpoints([second, first], None, tmp_path / "one")
    two = average_checkpoints([first, second], None, tmp_path / "two")
    assert one.steps == two.steps == [10, 20]
    weights = [(tmp_path / name / "weights-00001.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]


def test_pieces_of_any_size_and_fragments_of_any_cut_give_the_same_mean(tmp_path):
    shapes = {"embed": (7, 5), "norm": (5,)}
    folders = []
    for step, cut in ((1, 4), (2, 6), (4, 100)):
        store = StandIn(step, shapes, cut)
        for number, kinds in enumerate(store.tensors.values()):
            kinds["weight"] += torch.randn(
                kinds["weight"].shape, generator=torch.Generator().manual_seed(number + step)
            )
        folders.append(manager(tmp_path / str(step)).save(store, state_of(step)))
    readers = [WeightReader(folder) for folder in folders]
    whole = MeanReader(readers)
    for piece in (1, 3, 35):
        reader = MeanReader(readers, piece)
        assert reader.shapes == shapes
        assert all(torch.equal(reader.read(name), whole.read(name)) for name in shapes)


def test_the_sum_is_not_rounded_on_its_way(tmp_path):
    # In fp32 1e8 + 1 - 1e8 is 0.
    folders = []
    for number, value in enumerate((1e8, 1.0, -1e8), start=1):
        store = StandIn(0)
        for kinds in store.tensors.values():
            kinds["weight"].fill_(value)
        folders.append(manager(tmp_path / str(number)).save(store, state_of(number)))
    assert (
        MeanReader([WeightReader(folder) for folder in folders]).read("norm").tolist() == [float(np.float32(1 / 3))] * 5
    )


def test_what_comes_out_is_a_model_folder(run, tmp_path):
    average_checkpoints([run], 2, tmp_path / "mean")
    ours, theirs = open_artifact(tmp_path / "mean"), open_artifact(run)
    assert ours.model_config == theirs.model_config
    assert (tmp_path / "mean" / "tokenizer" / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    assert ours.codec.eos_ids == theirs.codec.eos_ids
    for text in TEXTS:
        assert ours.codec.decode(theirs.codec.encode(text)) == text
    weight = open_source(tmp_path / "mean").read("embedding.weight")
    assert torch.equal(ours.model.embedding.weight, weight)


def test_it_tells_what_it_is_made_of_and_how_its_text_was_normalised(run, tmp_path):
    average_checkpoints([run], 2, tmp_path / "mean")
    facts = json.loads((tmp_path / "mean" / "model.json").read_text())
    assert facts["origin"]["steps"] == [30, 40]
    assert facts["origin"]["averaged"] == [str(path) for path in checkpoints(run)[2:]]
    assert "float64" in facts["origin"]["arithmetic"]
    assert find_normalize(open_source(tmp_path / "mean")) == find_normalize(open_source(run)) == NORMALIZE


def test_it_is_averaged_again(run, tmp_path):
    average_checkpoints([run], 2, tmp_path / "mean")
    again = average_checkpoints([tmp_path / "mean", checkpoints(run)[0]], None, tmp_path / "again")
    assert again.steps == [None, 10]


def test_it_is_exported(run, tmp_path):
    average_checkpoints([run], 2, tmp_path / "mean")
    written = export_model(tmp_path / "mean", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()
    assert written.model_type == "t5"


def test_a_run_with_fewer_is_refused(run, tmp_path):
    with pytest.raises(CheckpointError, match=r"has 4 checkpoints, --last 10 needs more; .*checkpoint\.keep=10"):
        average_checkpoints([run], 10, tmp_path / "mean")
    with pytest.raises(CheckpointError, match="has 0 checkpoints, --last 2 needs more; check the path"):
        average_checkpoints([tmp_path], 2, tmp_path / "mean")


def test_one_checkpoint_is_refused(run, tmp_path):
    for what in (run, checkpoints(run)[0]):
        with pytest.raises(ConfigError, match="a single checkpoint cannot be averaged; give --last N with a run"):
            average_checkpoints([what], None, tmp_path / "mean")
    (tmp_path / "released").mkdir()
    (tmp_path / "released" / "config.json").write_text("{}")
    for last in (None, 2):
        with pytest.raises(
            ConfigError, match="holds one set of weights, of which there is no average; name several mod"
        ):
            average_checkpoints([tmp_path / "released"], last, tmp_path / "mean")
    with pytest.raises(ConfigError, match="--last 2 is about one run"):
        average_checkpoints(checkpoints(run), 2, tmp_path / "mean")
    with pytest.raises(ConfigError, match="the same checkpoint was named twice"):
        average_checkpoints([run, checkpoints(run)[-1]], None, tmp_path / "mean")


def test_another_model_is_named_by_its_keys(run, tmp_path):
    other = write_run(tmp_path / "other", steps=[10], ff_width=96)
    with pytest.raises(ConfigError, match=r"another model than .*model\.decoder\.ff_width, model\.encoder\.ff_width"):
        average_checkpoints([run, other], None, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_another_tokenizer_is_refused(run, tmp_path):
    other = write_run(tmp_path / "other", steps=[10], texts=[*TEXTS[:3], "Other words about other windows."])
    with pytest.raises(DataError, match="another tokenizer than that of"):
        average_checkpoints([run, other], None, tmp_path / "mean")


def test_other_parameters_are_named(tmp_path):
    first = manager(tmp_path / "a").save(StandIn(1), state_of(1))
    other = manager(tmp_path / "b").save(StandIn(1, {"embed": (4, 4)}), state_of(1))
    with pytest.raises(CheckpointError, match=r"embed has shape \[4, 4\], and has shape \[3, 4\] in "):
        MeanReader([WeightReader(first), WeightReader(other)])
    less = manager(tmp_path / "c").save(StandIn(1, {"embed": (3, 4)}), state_of(1))
    with pytest.raises(CheckpointError, match=r"norm is missing, and has shape \[5\] in "):
        MeanReader([WeightReader(first), WeightReader(less)])


def test_a_damaged_checkpoint_is_named_and_nothing_is_written(run, tmp_path):
    copy = write_run(tmp_path / "copy", steps=[10, 20, 30])
    file = checkpoints(copy)[1] / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"step-00000020: damaged: rank-00000\.safetensors: CRC32"):
        average_checkpoints([copy], 3, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_a_hugging_face_folder_is_refused(run, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no checkpoint of ours; make a model folder of it first"):
        average_checkpoints([run, tmp_path], None, tmp_path / "mean")


def test_how_text_was_normalised_is_known_without_the_data(tmp_path):
    alone = write_run(tmp_path / "alone", steps=[10, 20])
    write_texts(tmp_path / "texts", TEXTS)
    decoder = write_text_run(tmp_path / "gpt", tmp_path / "texts", "llama-tiny", "causal")
    for name in ("alone-data", "texts"):
        (tmp_path / name).rename(tmp_path / f"{name}-elsewhere")
    average_checkpoints([alone], 2, tmp_path / "mean")
    assert find_normalize(open_source(alone)) == find_normalize(open_source(tmp_path / "mean")) == NORMALIZE
    assert find_normalize(open_source(decoder)) is None


def test_inputs_that_were_normalised_in_different_ways_are_warned_about(tmp_path, caplog):
    write_texts(tmp_path / "texts", TEXTS)
    folders = [write_pairs(tmp_path / "pairs"), tmp_path / "texts"]
    assert normalize_of_data(folders[:1]) == NORMALIZE
    assert normalize_of_data(folders) is None
    assert "normalised in different ways" in caplog.text


def test_a_damaged_normalize_is_named(run, tmp_path):
    average_checkpoints([run], 2, tmp_path / "mean")
    facts = json.loads((tmp_path / "mean" / "model.json").read_text())
    (tmp_path / "mean" / "model.json").write_text(json.dumps(facts | {"normalize": {"steps": ["rhyme"]}}))
    with pytest.raises(CheckpointError, match=r"model\.json: normalize is damaged: .*; restore it"):
        find_normalize(open_source(tmp_path / "mean"))
