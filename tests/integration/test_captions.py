"""Captions of images through everything: prepare, train, resume, ranks and engines, evaluate, generate, export."""

import json
from pathlib import Path

import pytest

from benchmarks.shapes import write_shapes
from pretrain.tracking.audit import read_audit
from tests.helpers.cli import run_warm
from tests.helpers.runs import RunMaker, assert_same_run

CONFIG = """
seed: 7
run: {{dir: {runs}, name: run}}
data: {{path: {data}, lanes: 3, block_samples: 8, images: {{crop: random, padding: 2, erase: 0.25}}}}
model: {{preset: vit_gpt2-tiny, input: {{image: 16, size: 4}},
  encoder: {{width: 32, ff_width: 64}}, decoder: {{width: 48, ff_width: 96}}}}
objective: {{kind: captions}}
batch: {{global_tokens: 768, seq_len: 64, micro: 2}}
optim: {{lr: 3e-3, schedule: {{kind: constant, warmup_steps: 5}}}}
train: {{steps: 30}}
eval: {{every_steps: 15}}
engine: {{kind: deepspeed, zero_stage: 2, precision: fp32, device: cpu}}
checkpoint: {{every_steps: 10}}
tracking: {{log_every_steps: 10, wandb: off}}
"""
SINGLE = ("engine.kind=single", "engine.zero_stage=0")


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> Path:
    """A shard folder of shapes with captions of characters, prepared by the command line."""
    folder = tmp_path_factory.mktemp("shapes")
    write_shapes(folder / "shapes", 120)
    options = ("--kind", "images", "--output", "data", "--split", "hash:0.2", "--tokenizer", "char", "--processes", "1")
    result = run_warm("prepare", "--input", "shapes", *options, cwd=folder)
    assert result.code == 0, result.stderr
    assert "training images" in result.stdout and "captions of" in result.stdout
    return folder / "data"


@pytest.fixture(scope="module")
def golden(tmp_path_factory, shapes) -> RunMaker:
    """An uninterrupted run on one rank, and a maker of others beside it."""
    maker = RunMaker(tmp_path_factory.mktemp("captions"), shapes, CONFIG)
    maker.train("golden", *SINGLE, ranks=1)
    return maker


@pytest.mark.long
def test_a_stopped_run_continues_bit_for_bit_with_the_same_pixels(golden):
    golden.train("stopped", *SINGLE, "train.stop_after=17", ranks=1)
    golden.train("stopped", *SINGLE, "data.workers=3", ranks=1)
    assert_same_run(golden, "stopped", "golden", 30)
    rows = read_audit(golden.folder("golden").audit)
    assert len({row.pixels for row in rows}) == 30 and all(row.pixels for row in rows)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, ("engine.zero_stage=0", "data.workers=0")),
        (3, ("engine.zero_stage=1",)),
        (2, ("engine.zero_stage=2",)),
        (3, ("engine.zero_stage=3", "batch.micro=1")),
        (2, ("engine.kind=ddp", *SINGLE[1:])),
    ],
    ids=["zero0", "zero1", "zero2", "zero3", "ddp"],
)
def test_any_ranks_and_engine_read_the_same_pixels_and_resume(golden, ranks, overrides):
    name = f"{ranks}-{len(overrides)}-{overrides[0].split('=')[1]}"
    golden.train(name, *overrides, "train.steps=12", "train.stop_after=7", ranks=ranks)
    golden.train(name, *overrides, "train.steps=12", ranks=ranks)
    expected = read_audit(golden.folder("golden").audit)[:12]
    found = read_audit(golden.folder(name).audit)
    assert [(row.digest, row.pixels, row.tokens) for row in found] == [
        (row.digest, row.pixels, row.tokens) for row in expected
    ]
    losses, golden_losses = ([float.fromhex(row.loss) for row in rows] for rows in (found, expected))
    assert losses == pytest.approx(golden_losses, rel=1e-4)  # other orders of summation


@pytest.mark.long
def test_a_run_is_evaluated_exported_and_captions_images(golden, shapes, tmp_path):
    run = golden.folder("golden").path
    result = run_warm("evaluate", str(run), "--device", "cpu", "--json", cwd=tmp_path)
    assert result.code == 0, result.stderr
    found = json.loads(result.stdout)["sources"]["data"]
    assert 0 <= found["exact_match"] <= found["accuracy"] < 1
    images = [str(shapes.parent / f"shapes/{number:05d}.png") for number in range(3)]
    given = [part for image in images for part in ("--image", image)]
    result = run_warm("generate", str(run), *given, "--json", "--device", "cpu", cwd=tmp_path)
    assert result.code == 0, result.stderr
    mine = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["prompt"] for line in mine] == images
    result = run_warm("export", str(run), "released", cwd=tmp_path)  # compares the scores with those of transformers
    assert result.code == 0, result.stderr
    result = run_warm("generate", "released", *given, "--json", "--device", "cpu", cwd=tmp_path)
    assert result.code == 0, result.stderr
    assert [json.loads(line)["text"] for line in result.stdout.splitlines()] == [line["text"] for line in mine]


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompt", "a cat"), "the prompt is a text, and the model reads images of 16 x 16 pixels"),
        (("--image", "missing.png"), "--image missing.png: cannot be read: No such file or directory"),
        (("--image", "a.png", "--prompt", "a cat"), "--image goes without --prompt, --file and --chat"),
    ],
)
def test_what_a_captioner_cannot_read_is_refused_in_a_line(golden, tmp_path, options, message):
    run = golden.folder("golden").path
    result = run_warm("generate", str(run), *options, "--device", "cpu", cwd=tmp_path)
    assert result.code != 0 and result.stdout == ""
    assert message in result.stderr and len(result.stderr.splitlines()) == 1
