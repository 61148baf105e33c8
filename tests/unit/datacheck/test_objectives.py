"""What is shown of a row is what the loader of the same config gives a model, whatever the objective."""

import numpy as np
import pytest
import yaml

from pretrain.config.data import plan_batch
from pretrain.config.load import load_config
from pretrain.data.loader import TrainLoader
from pretrain.data.stream import SourceStreams, open_stores
from pretrain.datacheck.show import ReadingOptions, show
from pretrain.datacheck.shown_rows import HIDDEN
from pretrain.objective import build_rows
from pretrain.resolve import context_of_run, fit_config
from pretrain.rows import IGNORE_INDEX
from pretrain.shards.dataset import open_dataset
from tests.unit.report.data_folders import make_texts
from tests.unit.report.marked_folders import make_marked_folder

MODEL = {"decoder": "llama-tiny", "encoder": "bert-tiny", "both": "t5-v1.1-tiny"}
FIM = {"kind": "fim", "fim": {"rate": 0.8, "max_documents": 2}}
CASES = {
    "causal": ("text", "decoder", {"kind": "causal"}, {}),
    "causal, no document mask": ("text", "decoder", {"kind": "causal"}, {"document_mask": False}),
    "causal, bins": ("text", "decoder", {"kind": "causal"}, {"packing": "bins"}),
    "masked": ("text", "encoder", {"kind": "masked", "masked": {"random": 0.3, "keep": 0.3}}, {}),
    "masked, padded": ("text", "encoder", {"kind": "masked", "masked": {"whole_words": True}}, {"packing": "padded"}),
    "span": ("text", "both", {"kind": "span"}, {}),
    "span, no document mask": ("text", "both", {"kind": "span"}, {"document_mask": False}),
    "prefix": ("text", "decoder", {"kind": "prefix"}, {}),
    "prefix, padded": ("text", "decoder", {"kind": "prefix"}, {"packing": "padded"}),
    "ul2, two stacks": ("text", "both", {"kind": "ul2"}, {"document_mask": False}),
    "ul2, one stack": ("text", "decoder", {"kind": "ul2"}, {"document_mask": False}),
    "fim": ("text", "decoder", FIM, {}),
    "seq2seq": ("pairs", "both", {"kind": "seq2seq"}, {"packing": "bins"}),
    "supervised": ("records", "decoder", {"kind": "supervised"}, {"packing": "bins"}),
    "mixture": (
        "text",
        "decoder",
        {"mixture": [{"kind": "causal", "weight": 1.0}, {"kind": "prefix", "weight": 1.0}, FIM | {"weight": 2.0}]},
        {},
    ),
    "mixture of corruptions": (
        "text",
        "both",
        {"mixture": [{"kind": "span", "weight": 1.0}, {"kind": "ul2", "weight": 1.0}]},
        {"document_mask": False},
    ),
}
NUM_ROWS = 24


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    texts = make_texts(80)
    make_marked_folder(path / "text", texts)
    make_marked_folder(path / "pairs", list(zip(texts, make_texts(80, 1), strict=True)), kind="pairs")
    make_marked_folder(path / "records", [[(t, False), (t[::-1], True)] for t in texts], kind="records")
    return path


@pytest.fixture
def config(root, tmp_path):
    """Writes the config of a case."""

    def write(kind, model, objective, data, seed, seq_len) -> str:
        values = {
            "seed": seed,
            "run": {"name": "a"},
            "data": {"path": str(root / kind), "lanes": 3, "block_samples": 8, **data},
            "model": {"preset": MODEL[model], "max_seq_len": 128},
            "batch": {"global_tokens": 8 * seq_len, "seq_len": seq_len, "micro": 4},
            "objective": objective,
            "optim": {"lr": 1e-3},
            "train": {"steps": 500},
        }
        path = tmp_path / "a.yaml"
        path.write_text(yaml.safe_dump(values))
        return str(path)

    return write


def loaded(path: str):
    """Yields the first rows of a run, each as arrays of its own."""
    config = load_config(path)
    dataset, stores = open_dataset(config.data), open_stores(config.data, lambda: False)
    config = fit_config(config, dataset)
    plan = plan_batch(config.batch, 1)
    streams = SourceStreams(dataset, stores, config.data, config.lengths, plan.rows, config.seed)
    make_rows = build_rows(config.objective, context_of_run(config, dataset))
    crop = config.data.packing == "padded"
    loader = TrainLoader(streams, make_rows, plan, rank=0, world_size=1, workers=0, crop=crop)
    rows, num_targets = [], 0
    for _ in range(NUM_ROWS // plan.rows):
        step = next(loader)
        num_targets += step.counts.num_targets
        for batch in step.micro_batches:
            rows += [(batch, number) for number in range(len(batch.tokens_BT))]
    loader.close()
    return rows, num_targets


def at(tensor, number: int, missing: np.ndarray) -> np.ndarray:
    """A row of what may be left out where it says nothing."""
    return missing if tensor is None else tensor[number].numpy()


def check_side(parts, inputs, positions, documents, num_padding) -> None:
    """The parts of all documents, one after another, are a row."""
    parts = [part for part in parts if part is not None]
    filled = sum(part.num_tokens for part in parts)
    read = [number for part in parts for stretch in part.stretches for number in stretch.inputs]
    assert read == inputs[:filled].tolist()
    assert filled <= len(inputs) <= filled + num_padding, "columns that are padding in all rows of a batch are cropped"
    first = 0
    for part in parts:
        assert (part.first, part.position) == (first, positions[first])
        assert len(set(documents[first : first + part.num_tokens])) == 1, "of one document"
        assert sum(len(stretch.inputs) for stretch in part.stretches) == part.num_tokens
        first += part.num_tokens


@pytest.mark.parametrize(("seed", "seq_len"), [(3, 96), (4, 41)])
@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_that_the_loader_gives_a_model(config, case, seed, seq_len):
    if seq_len < 64 and "ul2" in str(CASES[case]):
        seq_len = 80  # its longest span would not fit
    path = config(*CASES[case], seed, seq_len)
    rows, num_targets = loaded(path)
    shown = show(path, [], ReadingOptions(rows=NUM_ROWS)).rows
    assert sum(row.num_targets for row in shown) == num_targets > 0
    for row, (batch, number) in zip(shown, rows, strict=True):
        inputs, targets = batch.tokens_BT[number].numpy(), batch.targets_BT[number].numpy()
        columns, zeros = np.arange(len(inputs)), np.zeros(len(inputs))
        parts = [document.target for document in row.documents]
        documents = at(batch.documents_BT, number, zeros)
        check_side(parts, inputs, at(batch.positions_BT, number, columns), documents, row.num_padding)
        predicted = [n for part in parts if part for stretch in part.stretches for n in stretch.targets]
        assert predicted == targets[: len(predicted)].tolist()
        assert (targets[len(predicted) :] == IGNORE_INDEX).all(), "padding is not predicted"
        last = IGNORE_INDEX if not predicted else predicted[-1]
        next_token = last != IGNORE_INDEX and batch.source is None and row.objective != "masked"
        assert (row.beyond is None) != next_token
        assert (row.num_source_tokens is None) == (batch.source is None)
        if batch.source is not None:
            read = batch.source.tokens_BT[number].numpy()
            columns, zeros = np.arange(len(read)), np.zeros(len(read))
            check_side(
                [document.source for document in row.documents],
                read,
                at(batch.source.positions_BT, number, columns),
                at(batch.source.documents_BT, number, zeros),
                row.num_source_padding,
            )


@pytest.mark.parametrize("case", CASES)
def test_kinds_say_what_is_predicted(config, case):
    """Told by inputs and targets alone; each kind of the objective comes."""
    shown = show(config(*CASES[case], 5, 96), [], ReadingOptions(rows=NUM_ROWS)).rows
    for row in shown:
        for document in row.documents:
            assert document.target is not None or document.source is not None
            for part in (document.source, document.target):
                for stretch in part.stretches if part else ():
                    check_stretch(row, stretch)
    found = {
        s.kind for row in shown for d in row.documents for part in (d.source, d.target) if part for s in part.stretches
    }
    expected = {
        "causal": {"text"},
        "masked": {"text", "masked", "replaced", "kept"},
        "span": {"source", "target"},
        "prefix": {"prefix", "learned"},
        "ul2": {"source", "target"},
        "fim": {"text", "prefix", "middle", "suffix", "prefix+middle"},
        "seq2seq": {"source", "target"},
        "supervised": {"context", "learned"},
    }
    objectives = {row.objective for row in shown}
    for objective in objectives:
        assert expected[objective] <= found | ({"replaced", "kept"} if "padded" in case else set())
    assert objectives == {task["kind"] for task in CASES[case][2].get("mixture", [CASES[case][2]])}


def check_stretch(row, stretch) -> None:
    if stretch.kind in (*HIDDEN, "kept"):
        assert IGNORE_INDEX not in stretch.targets
        assert (stretch.inputs == stretch.targets) == (stretch.kind == "kept")
        assert (stretch.stands is None) == (stretch.kind == "kept")
    elif row.objective == "masked":
        assert set(stretch.targets) <= {IGNORE_INDEX}
    elif row.num_source_tokens is not None:
        assert "<pad>" not in stretch.text, "what begins the next target is no part of this one"
        assert (
            set(stretch.targets) <= {IGNORE_INDEX} if stretch.kind != "target" else IGNORE_INDEX not in stretch.targets
        )
    elif stretch.kind == "prefix" and row.objective == "prefix":
        assert set(stretch.targets[:-1]) <= {IGNORE_INDEX}, "the last one predicts what follows"


def test_denoisers_are_told_and_lengths_follow_from_them(config):
    path = config(*CASES["ul2, two stacks"], 5, 96)
    tasks = load_config(path).objective.ul2.denoisers
    shown = show(path, [], ReadingOptions(rows=60)).rows
    names = {row.denoiser for row in shown}
    assert len(names) == len(tasks) and "[S2S]: prefix, the last 25%" in names
    assert "[NLG]: spans, 50% in spans of 8" in names
    for row in shown:
        mode = row.documents[0].source.stretches[0].text.split("]")[0] + "]"
        assert row.denoiser.startswith(f"{mode}: ")
        has_sentinel = "<extra_id_0>" in row.documents[0].target.stretches[0].text
        assert has_sentinel == ("prefix" not in row.denoiser)
    sizes = {(row.denoiser, row.num_padding, row.num_source_padding) for row in shown}
    assert len(sizes) == len(names), "the rows of a denoiser have one length"
