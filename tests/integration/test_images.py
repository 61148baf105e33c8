"""Images and captions through everything: prepare, train, resume, ranks, evaluate, export, and what refuses them."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks.digits import write_digits
from benchmarks.shapes import write_shapes
from pretrain.tracking.audit import compare, read_audit
from tests.helpers.cli import run_warm
from tests.helpers.fork_server import ROOT
from tests.helpers.images import encode, noise, write_colors
from tests.helpers.runs import RunMaker, assert_same_run
from tests.unit.preparation.readers.test_webdataset import write

PNG = encode(noise(9, 12))
CONFIG = """
seed: 7
run: {{dir: {runs}, name: run}}
data:
  {{path: {data}, lanes: 3, block_samples: 8, images: {{crop: random_resized, flip: 0.5, erase: 0.25, mixup: 0.2,
    cutmix: 0.5, randaugment: {{operations: 1}}}}}}
model:
  preset: vit-tiny
  encoder: {{width: 32, ff_width: 64, dropout: 0.1, position: rotary_2d, layer_scale: 0.5, drop_path: 0.2}}
objective: {{kind: images}}
batch: {{global_tokens: 408, seq_len: 17, micro: 4}}
optim: {{lr: 3e-3, schedule: {{kind: cosine, warmup_steps: 5}}}}
train: {{steps: 30}}
eval: {{every_steps: 15}}
engine: {{kind: deepspeed, zero_stage: 2, precision: fp32, device: cpu}}
checkpoint: {{every_steps: 10}}
tracking: {{log_every_steps: 10, wandb: off}}
"""
CAPTIONS = """
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
def colors(tmp_path_factory) -> Path:
    """A shard folder of three colors, prepared by the command line."""
    folder = tmp_path_factory.mktemp("colors")
    write_colors(folder / "photos", each=30)
    options = ("--kind", "images", "--output", "data", "--split", "hash:0.2", "--processes", "1")
    result = run_warm("prepare", "--input", "photos", *options, cwd=folder)
    assert result.code == 0, result.stderr
    assert "training images" in result.stdout and "3 classes" in result.stdout
    return folder / "data"


@pytest.fixture(scope="module")
def golden(tmp_path_factory, colors) -> RunMaker:
    """An uninterrupted run on one rank, and a maker of others beside it."""
    maker = RunMaker(tmp_path_factory.mktemp("images"), colors, CONFIG)
    maker.train("golden", *SINGLE, ranks=1)
    return maker


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
def captioner(tmp_path_factory, shapes) -> RunMaker:
    """An uninterrupted run on one rank, and a maker of others beside it."""
    maker = RunMaker(tmp_path_factory.mktemp("captions"), shapes, CAPTIONS)
    maker.train("golden", *SINGLE, ranks=1)
    return maker


@pytest.mark.long
@pytest.mark.parametrize("kind", ["golden", "captioner"])
def test_a_stopped_run_continues_bit_for_bit_with_the_same_pixels(request, kind):
    runs = request.getfixturevalue(kind)
    runs.train("stopped", *SINGLE, "train.stop_after=17", ranks=1)
    runs.train("stopped", *SINGLE, "data.workers=3", ranks=1)
    assert_same_run(runs, "stopped", "golden", 30)
    rows = read_audit(runs.folder("golden").audit)
    assert len({row.pixels for row in rows}) == 30 and all(row.pixels for row in rows)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "ranks", "overrides"),
    [
        ("golden", 2, ("data.workers=0",)),
        ("golden", 3, ("engine.zero_stage=3", "batch.micro=2")),
        ("golden", 2, ("engine.kind=ddp", *SINGLE[1:])),
        ("captioner", 2, ("engine.zero_stage=0", "data.workers=0")),
        ("captioner", 3, ("engine.zero_stage=1",)),
        ("captioner", 2, ("engine.zero_stage=2",)),
        ("captioner", 3, ("engine.zero_stage=3", "batch.micro=1")),
        ("captioner", 2, ("engine.kind=ddp", *SINGLE[1:])),
    ],
    ids=["zero2", "zero3", "ddp", *(f"captions-{name}" for name in ("zero0", "zero1", "zero2", "zero3", "ddp"))],
)
def test_any_ranks_workers_and_engine_read_the_same_pixels_and_resume(request, kind, ranks, overrides):
    runs = request.getfixturevalue(kind)
    name = f"{ranks}-{len(overrides)}-{overrides[0].split('=')[1]}"
    runs.train(name, *overrides, "train.steps=12", "train.stop_after=7", ranks=ranks)
    runs.train(name, *overrides, "train.steps=12", ranks=ranks)
    expected = read_audit(runs.folder("golden").audit)[:12]
    found = read_audit(runs.folder(name).audit)
    for row, same in zip(found, expected, strict=True):
        assert (row.digest, row.pixels, row.tokens) == (same.digest, same.pixels, same.tokens)
        if kind == "captioner":  # without dropout: other orders of summation alone
            assert float.fromhex(row.loss) == pytest.approx(float.fromhex(same.loss), rel=1e-4)


@pytest.mark.long
def test_a_damaged_image_is_skipped_by_any_number_of_ranks_alike(tmp_path, colors):
    shutil.copytree(colors, tmp_path / "data")
    tar = next((tmp_path / "data/train").glob("*.tar"))
    content = bytearray(tar.read_bytes())
    content[1600] ^= 255  # of the first image
    tar.write_bytes(content)
    runs = RunMaker(tmp_path, tmp_path / "data", CONFIG)
    skipping = (*SINGLE[1:], "data.on_error=skip", "data.max_skipped_rows=9", "train.steps=8")
    runs.train("one", "engine.kind=single", *skipping, ranks=1)
    runs.train("two", "engine.kind=ddp", *skipping, ranks=2)
    one, two = (read_audit(runs.folder(name).audit) for name in ("one", "two"))
    assert [(row.digest, row.pixels, row.tokens) for row in one] == [
        (row.digest, row.pixels, row.tokens) for row in two
    ]
    assert len(one) == 8 and len({row.tokens for row in one}) == 2  # a step has a row less
    result = run_warm("train", str(runs.config("stopped")), *SINGLE, "train.steps=8", cwd=tmp_path)
    assert result.code == 65 and re.search(r"train/part-.*\.tar: 00000000\.png is damaged: CRC32", result.stderr)


@pytest.mark.long
def test_attention_over_an_image_is_drawn(golden, colors, tmp_path):
    (tmp_path / "cat.png").write_bytes(PNG)
    run = str(golden.folder("golden").path)
    for options, count in ((("--layer", "1", "--head", "0,3"), "2 maps"), (("--rollout",), "1 map")):
        result = run_warm("attention", run, "--image", "cat.png", "--output", "map.png", *options, cwd=tmp_path)
        assert (result.code, result.stdout) == (0, f"map.png: {count}\n"), result.stderr
        assert (tmp_path / "map.png").stat().st_size > 5000


@pytest.mark.long
def test_another_augmentation_is_another_ledger(golden):
    golden.train("other", *SINGLE, "data.images.flip=0", "train.stop_after=2", ranks=1)
    difference = compare(golden.folder("golden").audit, golden.folder("other").audit, ("digest", "pixels"))
    assert difference is not None and difference.field == "pixels" and difference.step == 1


@pytest.mark.long
def test_the_colors_are_learned_and_measured(golden, colors):
    run = golden.folder("golden").path
    result = run_warm("evaluate", str(run), "--device", "cpu", "--json", cwd=run.parent)
    assert result.code == 0, result.stderr
    found = json.loads(result.stdout)["sources"]["data"]
    assert found["accuracy"] > 0.9
    assert (
        found["targets"] == json.loads((colors / "statistics.json").read_text())["splits"]["validation"]["num_images"]
    )


@pytest.mark.long
def test_a_run_is_evaluated_exported_and_captions_images(captioner, shapes, tmp_path):
    run = captioner.folder("golden").path
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
def test_what_a_captioner_cannot_read_is_refused_in_a_line(captioner, tmp_path, options, message):
    run = captioner.folder("golden").path
    result = run_warm("generate", str(run), *options, "--device", "cpu", cwd=tmp_path)
    assert result.code != 0 and result.stdout == ""
    assert message in result.stderr and len(result.stderr.splitlines()) == 1


def test_tars_of_others_are_indexed_by_the_command_line(tmp_path):
    samples = [(f"{n}.{kind}", body) for n in range(6) for kind, body in (("png", PNG), ("cls", str(n % 2).encode()))]
    write(tmp_path / "a.tar", samples)
    words = ["prepare", "--from", "webdataset", "--input", "a.tar", "--output", "data"]
    assert run_warm(*words[:-2], cwd=tmp_path).code == 64
    result = run_warm(*words, "--processes", "1", cwd=tmp_path)
    assert (result.code, result.stdout) == (0, "data: 6 training images, 2 classes\n"), result.stderr
    assert [path.is_symlink() for path in (tmp_path / "data").rglob("*.tar")] == [True]


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (
            ("generate", "{run}", "--prompt", "a"),
            64,
            "the model reads images, not text; measure it by pretrain evaluate",
        ),
        (("attention", "{run}", "--text", "a", "--json"), 64, "--text: the model reads images, not text; give --image"),
        (("attention", "{run}", "--json"), 64, "the model needs one input; give --text, or to a model of images"),
        (("attention", "{run}", "--image", "no.jpg", "--json"), 65, "--image no.jpg: cannot be read: No such file"),
        (("data", "show", "{data}"), 64, "images are shown as a picture: give --output SHEET.png"),
        (("data", "stats", "{data}", "--output", "a.png"), 64, "--output is of texts; images are drawn by pretrain"),
        (("export", "{run}", "out"), 64, "no Hugging Face family represents this model exactly; the nearest, vit, has"),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, tuple) else None,
)
def test_commands_for_text_say_so_in_one_line(golden, colors, tmp_path, command, code, message):
    words = [word.format(run=golden.folder("golden").path, data=colors) for word in command]
    result = run_warm(*words, cwd=tmp_path)
    assert (result.code, len(result.errors)) == (code, 1), result.stderr
    assert message in result.errors[0]


@pytest.mark.long
@pytest.mark.parametrize(
    "command", [("inspect", "{run}"), ("inspect", "{data}"), ("plan", "{config}"), ("report", "{run}")]
)
def test_commands_that_describe_know_images(golden, colors, tmp_path, command):
    config = golden.config("golden")
    words = [word.format(run=golden.folder("golden").path, data=colors, config=config) for word in command]
    result = run_warm(*words, cwd=tmp_path)
    assert result.code == 0, result.stderr


def test_labels_that_do_not_fit_the_head_are_refused(tmp_path, colors):
    runs = RunMaker(tmp_path, colors, CONFIG)
    result = run_warm("train", str(runs.config()), *SINGLE, "model.head.labels=[cat, dog]", cwd=tmp_path)
    assert (result.code, len(result.errors)) == (64, 1)
    assert "model.head.labels are cat, dog, those of the data blue, green, red; leave them out" in result.errors[0]


def test_every_word_of_a_classifier_is_of_labels_and_images(tmp_path, colors):
    runs = RunMaker(tmp_path, colors, CONFIG)
    options = ("train.steps=6", "train.stop_after=2", "eval.every_steps=2", "tracking.log_every_steps=1")
    result = run_warm("train", str(runs.config()), *SINGLE, *options, cwd=tmp_path)
    assert result.code == 0, result.stderr
    assert re.search(r"step 2/6  loss +[0-9.]+  acc +[0-9.]+%  lr .* img/s", result.stderr), result.stderr
    step, validated = (json.loads(line) for line in runs.folder("runs").metrics.read_text().splitlines()[-3:-1])
    assert step["labels"] == 48 and step["images_per_s"] * 17 == pytest.approx(step["tokens_per_s"])
    assert validated.keys() == {"step", "val_loss", "val_accuracy", "val_labels"}
    path = str(runs.folder("runs").path)
    described = run_warm("inspect", path, cwd=tmp_path).stdout
    assert re.search(r"newest +step 2, labels 48,", described), described
    assert "images of 16 x 16 x 3 in" in described and "vocabulary" not in described, described
    page = run_warm("report", path, "--output", "page.html", cwd=tmp_path)
    assert page.code == 0, page.stderr
    text = (tmp_path / "page.html").read_text()
    assert "Training loss by labels" in text and "erplexity" not in text


def test_prepared_images_are_described_as_images(tmp_path, colors):
    described = run_warm("inspect", str(colors), cwd=tmp_path).stdout
    lines = [" ".join(line.split()) for line in described.splitlines()]
    assert {"of images", "classes 3", "labels blue, green, red"} <= set(lines), described
    assert "train images 71, shards 1, bytes 184,320, width 16, height 16" in lines, described
    assert "token" not in described


def test_the_digits_without_scikit_learn_end_with_the_remedy(tmp_path, monkeypatch):
    for module in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit, match=r"scikit-learn, which is not installed; python -m pip install scikit-learn$"):
        write_digits(tmp_path / "digits")


@pytest.mark.long
def test_the_recipe_of_the_digits_reads_97_of_100(tmp_path):
    write_digits(tmp_path / "digits")
    options = ("--kind", "images", "--output", "data/digits", "--split", "hash:0.2", "--processes", "1")
    assert run_warm("prepare", "--input", "digits", *options, cwd=tmp_path).code == 0
    result = run_warm("train", str(ROOT / "configs/run/vit_digits.yaml"), "tracking.wandb=off", cwd=tmp_path)
    assert result.code == 0, result.stderr
    result = run_warm("evaluate", "runs/vit-digits", "--device", "cpu", "--json", cwd=tmp_path)
    assert json.loads(result.stdout)["sources"]["data"]["accuracy"] >= 0.97
