"""Contact sheets, statistics and the check of images."""

import json

import numpy as np
import pytest
from PIL import Image

from benchmarks.shapes import write_shapes
from pretrain.datacheck.image_data import print_image_stats, wrap_words
from pretrain.datacheck.reading import Order
from pretrain.datacheck.show import ReadingOptions, show
from pretrain.datacheck.stats import count_data
from pretrain.datacheck.verify import print_proof, verify
from pretrain.errors import ConfigError, DataError
from pretrain.utils.image_file import ImageFile
from tests.helpers.images import prepare_colors
from tests.unit.preparation.readers.test_webdataset import write
from tests.unit.preparation.test_captions import captioned, texts_of
from tests.unit.preparation.test_image_tars import index, members

CONFIG = """
run: {{name: sheet}}
data: {{path: {data}, images: {{crop: random_resized, flip: 0.5, mixup: 1.0}}}}
model: {{preset: vit-tiny, input: {{image: 8, size: 4}}}}
objective: {{kind: images}}
batch: {{global_tokens: 40, seq_len: 5, micro: 2}}
optim: {{lr: 1e-3, schedule: {{warmup_steps: 2}}}}
train: {{steps: 10}}
"""


@pytest.fixture(scope="module")
def colors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("colors")
    return prepare_colors(folder)[0]


def test_a_contact_sheet_has_the_pixels_that_training_reads_and_their_labels(colors, tmp_path):
    (tmp_path / "a.yaml").write_text(CONFIG.format(data=colors))
    shown = show(str(tmp_path / "a.yaml"), [], ReadingOptions(position=2, rows=6))
    line = shown.write(tmp_path / "out/sheet.png")
    assert line.endswith("sheet.png: 6 images of train from position 2, 8 x 8 pixels, as the model reads them")
    sheet = np.asarray(Image.open(tmp_path / "out/sheet.png"))
    for place, image in enumerate(shown.rows.pixels_BCYX):
        top, left = 6 + place // 3 * (96 + 26 + 6), 6 + place % 3 * (96 + 6)
        assert np.array_equal(sheet[top : top + 96 : 12, left : left + 96 : 12], image.transpose(1, 2, 0))
        assert (sheet[top + 96 : top + 122, left : left + 96] < 100).any()  # its caption
    facts = shown.facts()["rows"]
    assert [row["position"] for row in facts] == list(range(2, 8))
    assert all(sum(row["labels"].values()) == pytest.approx(1) for row in facts)
    assert any(len(row["labels"]) == 2 for row in facts)
    json.dumps(facts)
    again = show(str(tmp_path / "a.yaml"), [], ReadingOptions(position=2, rows=6))
    again.write(tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "out/sheet.png").read_bytes()


def test_a_folder_shows_the_centres_of_both_splits(colors, tmp_path):
    shown = show(str(colors), [], ReadingOptions())
    assert shown.rows.pixels_BCYX.shape == (32, 3, 96, 96) and shown.rows.mixed_B2 is None
    held_out = show(str(colors), [], ReadingOptions(split="validation", rows=1))
    (row,) = held_out.facts()["rows"]
    assert [*row["labels"].values()] == [1.0]
    with pytest.raises(ConfigError, match=r"--output a\.jpg: a contact sheet is a \.png; name it so"):
        held_out.write(tmp_path / "a.jpg")


def test_statistics_count_classes_sizes_formats_and_modes(tmp_path, capsys):
    write(tmp_path / "a.tar", members(0, 6))
    index(tmp_path, tmp_path / "a.tar")
    facts = count_data(str(tmp_path / "data"))
    split = facts["splits"]["train"]
    assert split["classes"] == {"cat": 3, "dog": 3} and split["kinds"] == {"jpg RGB": 6}
    assert split["sizes"]["height"] == {"min": 8, "median": 10, "max": 13}
    print_image_stats(facts)
    text = capsys.readouterr().out
    assert "train: 6 images, 1 shard" in text and "jpg RGB" in text and "cat" in text


def test_verify_reads_every_byte_and_decodes_on_request(tmp_path, colors, capsys):
    proof = verify(str(colors), Order(), decode=True)
    assert (proof["images"], proof["decoded"], proof["webdataset_samples"]) == (24, True, 24)
    print_proof(proof)
    assert "and every image decodes" in capsys.readouterr().out
    write(tmp_path / "a.tar", members(0, 6))
    index(tmp_path, tmp_path / "a.tar")
    assert verify(str(tmp_path / "data"), Order())["webdataset_samples"] == 6
    whole = (tmp_path / "a.tar").read_bytes()
    for place, message in ((700, r"a/0\.jpg is damaged: CRC32"), (len(whole) - 1, r"sha256 is .*, although every")):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        (tmp_path / "a.tar").write_bytes(damaged)
        with pytest.raises(DataError, match=message):
            verify(str(tmp_path / "data"), Order())


def test_verify_finds_pixels_that_were_damaged_before_the_index_was_made(tmp_path, colors, monkeypatch):
    # Of tars that were indexed by an earlier release; checksums alone do not find it.
    with monkeypatch.context() as patched:
        patched.setattr(ImageFile, "decode", lambda self, channels, shrink=1.0: Image.new("RGB", (1, 1)))
        found = members(0, 4)
        found[0] = ("a/0.jpg", found[0][1][:-60])
        write(tmp_path / "a.tar", found)
        index(tmp_path, tmp_path / "a.tar")
    assert verify(str(tmp_path / "data"), Order())["images"] == 4
    with pytest.raises(DataError, match=r"a/0\.jpg: its pixels are damaged"):
        verify(str(tmp_path / "data"), Order(), decode=True)


def test_captions_are_shown_counted_and_checked(tmp_path, capsys):
    write_shapes(tmp_path / "shapes", 24)
    folder = captioned(tmp_path / "data", tmp_path / "shapes")
    texts = {path.read_text().strip() for path in (tmp_path / "shapes").glob("*.txt")}
    shown = show(str(folder), [], ReadingOptions(rows=5))
    captions = [row["caption"] for row in shown.facts()["rows"]]
    assert len(captions) == 5 and set(captions) <= texts
    shown.write(tmp_path / "sheet.png")
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    assert (sheet[6 + 96 : 6 + 96 + 50, 6:102] < 100).any()  # the first caption
    facts = count_data(str(folder))
    split = facts["splits"]["train"]["captions"]
    assert split["max"] == 1 + max(map(len, texts_of(folder).values())) and facts["vocab_size"] > 20
    print_image_stats(facts)
    assert "captioned images" in capsys.readouterr().out
    proof = verify(str(folder), Order(), decode=True)
    assert proof["images"] == 24
    tokens = next((folder / "train").glob("*.captions.npy"))
    tokens.write_bytes(tokens.read_bytes()[:-1] + b"\x07")
    with pytest.raises(DataError, match=r"captions\.npy: its CRC32 or its shape differs"):
        verify(str(folder), Order())


def test_words_are_wrapped_and_a_long_one_stands_alone():
    assert wrap_words("a cat on a mat", 6, len) == ["a cat", "on a", "mat"]
    assert wrap_words("an extraordinary cat", 6, len) == ["an", "extraordinary", "cat"]
