"""From the sources of a config to one stream: packing, mixtures, curricula, sources that end."""

from functools import partial

import numpy as np
import pydantic
import pytest

from pretrain.config.data import BatchConfig, DataConfig, plan_batch
from pretrain.data.loader import TrainLoader, ValidationLoader
from pretrain.data.mixture import source_of
from pretrain.data.stream import SourceStreams, open_stores, open_windows
from pretrain.errors import ConfigError, DataError
from pretrain.objective.seq2seq import pair_rows
from pretrain.shards.dataset import open_dataset
from pretrain.shards.store import LocalStore
from pretrain.types import IGNORE_INDEX
from tests.helpers.rows import CAUSAL, lengths_of
from tests.helpers.shards import make_shards
from tests.unit.data.test_bin_stream import make_pairs

BATCH = BatchConfig(global_tokens=16 * 8, seq_len=16, micro=2)


@pytest.fixture
def mixture(tmp_path):
    for number, size in enumerate((600, 900)):
        make_shards(tmp_path / f"s{number}", train=(size,), validation=(100 + number,))
    sources = [{"name": f"s{n}", "path": str(tmp_path / f"s{n}"), "weight": w} for n, w in enumerate((0.75, 0.25))]
    return {"mixture": sources, "lanes": 2, "block_samples": 4}


def streams(config, batch=BATCH, seed=1):
    data = DataConfig.model_validate(config)
    return SourceStreams(
        open_dataset(data), open_stores(data, lambda: False), data, lengths_of(batch), batch.rows, seed
    )


@pytest.mark.parametrize("packing", ["concat", "bins"])
def test_a_mixture_is_drawn_by_its_weights_and_its_curriculum(mixture, packing):
    curriculum = [{"tokens": 40 * 16, "weights": {"s1": 1.0}}]
    mixed = streams(mixture | {"packing": packing, "curriculum": curriculum})
    picked = source_of(mixed.read(range(80)).sample_ids_B)
    assert np.bincount(picked[:40], minlength=2).tolist() == [30, 10]
    assert set(picked[40:]) == {1}
    epochs = mixed.epochs(80)
    if packing == "concat":
        assert epochs == {"s0": 30 / (600 / 16), "s1": 50 / (900 / 16)}
    assert epochs.keys() == {"s0", "s1"}


def test_a_batch_does_not_depend_on_the_number_of_ranks(mixture):
    found = []
    for world_size in (1, 2, 4):
        plan = plan_batch(BATCH, world_size)
        loaders = [
            TrainLoader(streams(mixture | {"packing": "bins"}), CAUSAL, plan, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        steps = [[next(loader) for loader in loaders] for _ in range(6)]
        for loader in loaders:
            loader.close()
        rows = [
            [m.tokens_BT[r].tolist() for part in step for m in part.micro_batches for r in range(2)] for step in steps
        ]
        found.append((rows, [sum(part.counts.digest for part in step) % 2**64 for step in steps]))
    assert found[0] == found[1] == found[2]


def test_a_source_that_does_not_repeat_is_read_once_and_the_others_go_on(mixture):
    before = source_of(streams(mixture).read(range(49)).sample_ids_B)
    mixture["mixture"][0]["repeat"] = False
    mixed = streams(mixture)
    assert mixed.ends(100) == {"s0": 49} and mixed.ends(49) == {}
    mixed.check_supply(10_000)
    ids = mixed.read(range(100)).sample_ids_B
    assert np.array_equal(source_of(ids)[:45], before[:45])  # the last period looks beyond its end
    first = ids[source_of(ids) == 0].tolist()
    assert len(first) == len(set(first)) == 36 and 600 // 16 == 37, "all but one at most"
    assert mixed.epochs(100)["s0"] == 36 / (600 / 16)
    assert set(source_of(ids)[50:].tolist()) == {1}


def test_a_run_that_no_source_lasts_for_is_refused(mixture):
    for source in mixture["mixture"]:
        source["repeat"] = False
    mixed = streams(mixture)
    end = 600 // 16 + 900 // 16 - 1  # a source may keep one sample
    mixed.check_supply(end)
    with pytest.raises(ConfigError, match=rf"no source is left after {end} of the run's 100 samples .*s0, s1 do not"):
        mixed.check_supply(100)


@pytest.mark.parametrize("packing", ["bins", "padded"])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("pairs", "data: 2 of 4 pairs are longer than batch.source_len or batch.seq_len, and left out"),
        (
            "records",
            "data: 1 of 4 records are longer than batch.seq_len, and cut: the rest is trained on without its prompt, "
            "and a row that a prompt fills has no targets",
        ),
    ],
)
def test_what_no_row_holds_is_counted(tmp_path, kind, said, packing):
    make_pairs(tmp_path, [(3, 4), (40, 2), (2, 49), (5, 16)], kind)
    data = {"path": str(tmp_path), "packing": packing}
    assert streams(data).too_long() == [f"{said}; raise it, or drop them by filter.max_chars of prepare"]
    assert streams(data, BATCH.model_copy(update={"seq_len": 64, "global_tokens": 128})).too_long() == []


def test_plain_texts_go_on_in_the_next_row(tmp_path):
    make_shards(tmp_path, train=(300,), longest=60)
    assert streams({"path": str(tmp_path), "packing": "bins"}).too_long() == []


def test_pairs_become_batches_of_two_stacks(tmp_path):
    rng = np.random.default_rng(2)
    _, documents = make_pairs(tmp_path, [(int(s), int(t)) for s, t in rng.integers(1, 12, (80, 2))])
    data = DataConfig(path=str(tmp_path), packing="bins")
    pairs = streams(data.model_dump())
    assert pairs.read(range(3)).source is not None
    loader = TrainLoader(pairs, partial(pair_rows, start_id=999), plan_batch(BATCH, 1), rank=0, world_size=1)
    batch = next(loader).micro_batches[0]
    loader.close()
    written = {tuple(target.tolist()): tuple(source.tolist()) for source, target in documents}
    for row in range(2):
        numbers, source_numbers = batch.documents_BT[row], batch.source.documents_BT[row]
        for number in range(int(numbers.max()) + 1):
            inside = numbers == number
            targets = batch.targets_BT[row][inside]
            if (targets == IGNORE_INDEX).all():
                continue  # padding
            inputs = batch.tokens_BT[row][inside].tolist()
            source = batch.source.tokens_BT[row][source_numbers == number].tolist()
            assert inputs == [999, *targets.tolist()[:-1]]
            assert batch.positions_BT[row][inside].tolist() == list(range(len(inputs)))
            assert written[tuple(targets.tolist())] == tuple(source)


def test_validation_of_pairs_covers_every_pair_once(tmp_path):
    sizes = [(3, n % 9 + 1) for n in range(50)]
    index, documents = make_pairs(tmp_path, sizes)
    index.splits["validation"] = index.splits["train"]
    loader = ValidationLoader(
        open_windows(index, LocalStore(tmp_path), DataConfig(path="x"), lengths_of(BATCH), BATCH.rows),
        partial(pair_rows, start_id=5),
        micro=2,
        rank=0,
        world_size=1,
    )
    targets = [b.targets_BT[b.targets_BT != IGNORE_INDEX] for b in loader]
    found = np.sort(np.concatenate([t.numpy() for t in targets]))
    assert np.array_equal(found, np.sort(np.concatenate([target for _, target in documents])))


def test_documents_that_must_stay_whole_are_not_cut(tmp_path):
    make_pairs(tmp_path, [(3, 3)])
    with pytest.raises(ConfigError, match=r"data\.packing=concat cuts documents, which pairs must not be"):
        streams({"path": str(tmp_path)})


def test_sources_of_different_tokenizers_are_refused(mixture, tmp_path):
    make_shards(tmp_path / "s2", tokenizer_sha256="1" * 64)
    mixture["mixture"].append({"name": "s2", "path": str(tmp_path / "s2"), "weight": 1})
    with pytest.raises(DataError, match="tokenizer_sha256 of 's2' is 111111111111, that of 's0' is 000000000000"):
        streams(mixture)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "x"}, "needs path or mixture, and not both"),
        ({"mixture": []}, "needs path or mixture, and not both"),
        ({"curriculum": [{"tokens": 5, "weights": {"other": 1.0}}]}, "no source 'other' in mixture"),
        ({"curriculum": [{"tokens": 5, "weights": {"s0": 0.0}}]}, "no weight above 0"),
        ({"curriculum": [{"tokens": 5, "weights": {"s0": 1.0}}] * 2}, "tokens must ascend"),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(mixture, change, message):
    with pytest.raises(pydantic.ValidationError, match=message):
        DataConfig.model_validate(mixture | change)


@pytest.mark.parametrize("kind", ["pairs", "text"])
def test_padded_rows_hold_one_document_and_batches_of_similar_length(tmp_path, kind):
    rng = np.random.default_rng(3)
    if kind == "pairs":
        make_pairs(tmp_path, [(int(s), int(s)) for s in rng.integers(1, 17, 500)])
    else:
        make_shards(tmp_path, train=(6000,), longest=16)
    stream = streams({"path": str(tmp_path), "packing": "padded", "block_samples": 512, "lanes": 1})
    per_epoch = round(200 / stream.epochs(200)["data"])
    rows = stream.read(range(per_epoch))
    sides = [rows, rows.source] if kind == "pairs" else [rows]
    assert len(set(sides[0].sample_ids_B.tolist())) == per_epoch
    for side in sides:
        starts = side.starts[side.starts % 17 < side.num_tokens_B[side.starts // 17]]
        assert np.array_equal(np.sort(starts // 17), np.arange(per_epoch)), "one document a row"
    batches = sides[0].num_tokens_B[: per_epoch // 8 * 8].reshape(-1, 8)
    spread, whole = np.median(batches.max(axis=1) - batches.min(axis=1)), np.ptp(sides[0].num_tokens_B)
    assert spread <= 1 < whole / 4
    part = stream.read(range(40, 57))
    assert np.array_equal(part.sample_ids_B, sides[0].sample_ids_B[40:57])


def test_a_padded_batch_is_as_wide_as_its_longest_row(tmp_path):
    make_shards(tmp_path, train=(6000,), longest=16)
    padded = streams({"path": str(tmp_path), "packing": "padded"})
    loader = TrainLoader(padded, CAUSAL, plan_batch(BATCH, 1), rank=0, world_size=1, crop=True)
    whole = TrainLoader(padded, CAUSAL, plan_batch(BATCH, 1), rank=0, world_size=1)
    widths = set()
    for _ in range(30):
        for cropped, full in zip(next(loader).micro_batches, next(whole).micro_batches, strict=True):
            width = cropped.tokens_BT.shape[1]
            widths.add(width)
            assert (full.targets_BT[:, width:] == IGNORE_INDEX).all()
            assert cropped.targets_BT.tolist() == full.targets_BT[:, :width].tolist()
            assert cropped.tokens_BT.tolist() == full.tokens_BT[:, :width].tolist()
    assert widths == {8, 16}
    loader.close()
    whole.close()
