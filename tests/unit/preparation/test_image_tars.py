"""Tars of images that others made: indexed where they are, from a disk and from servers, or refused whole."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from pretrain.config.data import ImagesConfig
from pretrain.config.load import parse_section, short_prepare
from pretrain.config.model import ImageSize
from pretrain.config.prepare import PrepareConfig
from pretrain.config.yaml_nodes import LocatedTree
from pretrain.data.image_stream import ImageStream
from pretrain.datacheck.reading import Order
from pretrain.datacheck.verify import verify
from pretrain.errors import ConfigError, DataError
from pretrain.preparation.filters import TooManyBadError
from pretrain.preparation.input_parts import Share
from pretrain.preparation.prepare import prepare
from pretrain.shards.index import check_shards, load_index
from pretrain.shards.remote_store import open_store
from tests.helpers.corpus import digests
from tests.helpers.images import encode, noise
from tests.helpers.servers import serve_folder, serve_s3
from tests.unit.preparation.readers.test_webdataset import pack, write
from tests.unit.preparation.test_images import images_of

PNG = encode(noise(9, 12))


def members(first, count=4, kind="cls"):
    """Members of samples of two classes, cat and dog."""
    found = []
    for number in range(first, first + count):
        name = ("cat", "dog")[number % 2]
        label = {"cls": f"\ufeff{name}", "json": json.dumps({"label": name, "id": number}), "txt": f"{name}\n"}[kind]
        image = encode(noise(8 + number, 10, seed=number), "JPEG")
        found += [(f"a/{number}.jpg", image), (f"a/{number}.{kind}", label.encode()), (f"a/{number}.meta", b"x")]
    return found


@pytest.fixture
def tars(tmp_path):
    """Three tars, each with labels of another kind, and one that is held out by its name."""
    folder = tmp_path / "tars"
    folder.mkdir()
    for place, kind in enumerate(("cls", "json", "txt")):
        write(folder / f"photos-{place:03d}.tar", members(4 * place, kind=kind))
    write(folder / "val-000.tar", members(40))
    return folder


def index(tmp_path, *inputs, **options):
    config = short_prepare(tmp_path / "data", [str(one) for one in inputs], kind="images", **options)
    found = prepare(config, processes=1)
    assert found is not None
    return found


def test_samples_are_read_from_the_tars_where_they_are(tmp_path, tars):
    found = index(tmp_path, tars, format="webdataset")
    assert found.labels == ("cat", "dog") and found.tars == {}
    expected = [(image, ("cat", "dog")[number // 3 % 2]) for number, (_, image) in enumerate(members(0, 12))]
    assert images_of(tmp_path / "data", "train") == expected[::3]
    assert len(images_of(tmp_path / "data", "validation")) == 4
    links = sorted((tmp_path / "data/train").glob("*.tar"))
    assert [link.name for link in links] == [f"part-00000-{n:04d}-photos-{n:03d}.tar" for n in range(3)]
    assert all(link.is_symlink() and link.resolve().parent == tars for link in links)
    facts = json.loads((tmp_path / "data/statistics.json").read_text())["splits"]["train"]
    assert facts["labels"] == {"cat": 6, "dog": 6} and facts["height"] == {"least": 8, "median": 13, "most": 19}
    assert not list((tmp_path / "data/parts").glob("*.npy"))


def test_shares_and_a_second_command_give_the_same_index(tmp_path, tars):
    expected = index(tmp_path / "a", tars)
    config = short_prepare(tmp_path / "b/data", [str(tars)], kind="images")
    assert prepare(config, share=Share(1, 2), processes=1) == expected
    before = digests(tmp_path / "a/data")
    assert index(tmp_path / "a", tars) == expected and digests(tmp_path / "a/data") == before


def read_all(store):
    found = load_index(store.folder)
    stream = ImageStream(store, found, "train", image=ImageSize(3, 8), seq_len=5, config=ImagesConfig(flip=0.5))
    rows = stream.read(range(2 * found.splits["train"].num_tokens))
    return rows.pixels_BCYX, rows.labels_BT


def test_a_folder_of_tars_behind_addresses_reads_the_same_pixels(tmp_path, tars):
    index(tmp_path / "disk", tars)
    expected = read_all(open_store(str(tmp_path / "disk/data"), tmp_path / "cache", 2**30))
    with serve_folder(tars) as server, serve_s3({"photos": tars}):
        inputs = {
            "http": (f"{server.url}/photos-{{000..002}}.tar", f"{server.url}/val-000.tar"),
            "s3": ("s3://photos",),
        }
        for name, addresses in inputs.items():
            found = index(tmp_path / name, *addresses)
            folder = tmp_path / name / "data"
            assert list(folder.rglob("*.tar")) == [] and len(found.tars) == 4
            assert next(iter(found.tars.values())).endswith("/photos-000.tar")
            check_shards(folder, found)
            assert prepare(short_prepare(folder, list(addresses), kind="images"), processes=1) == found
            store = open_store(str(folder), tmp_path / f"cache-{name}", 2**30)
            store.check()
            for ours, theirs in zip(read_all(store), expected, strict=True):
                assert np.array_equal(ours, theirs)
            store.close()
        # The folder of the index may be served, too, apart from the tars.
        with serve_folder(tmp_path / "http/data") as other:
            store = open_store(other.url, tmp_path / "cache-both", 2**30)
            assert np.array_equal(read_all(store)[0], expected[0])
            store.close()


def test_whole_tars_are_held_out_where_no_name_says_so(tmp_path, tars):
    (tars / "val-000.tar").unlink()
    found = index(tmp_path, tars, split="hash:0.2")
    assert [found.splits[name].num_documents for name in ("train", "validation")] == [8, 4]
    assert index(tmp_path / "none", tars, split="hash:0").splits.keys() == {"train"}


def test_labels_are_numbered_in_a_given_order_by_name_or_by_number(tmp_path):
    samples = [(f"{n}.{kind}", body) for n in range(6) for kind, body in (("png", PNG), ("cls", str(n % 3).encode()))]
    write(tmp_path / "a.tar", samples)
    assert index(tmp_path / "numbers", tmp_path / "a.tar").labels == ("0", "1", "2")
    values = {"output": str(tmp_path / "names"), "kind": "images", "labels": ["x", "y", "z"]}
    values["inputs"] = [{"path": str(tmp_path / "a.tar"), "split": "train"}]
    prepare(parse_section(PrepareConfig, LocatedTree(values, {}), "a test"), processes=1)
    assert [label for _, label in images_of(tmp_path / "names", "train")] == ["x", "y", "z"] * 2
    values |= {"output": str(tmp_path / "few"), "labels": ["x", "y"]}
    with pytest.raises(DataError, match=r"a\.tar, sample '2': label '2' is not one of labels \(x, y\); add it"):
        prepare(parse_section(PrepareConfig, LocatedTree(values, {}), "a test"), processes=1)
    assert not (tmp_path / "few/index.json").exists() and not list((tmp_path / "few").rglob("*.tar"))


GOOD = [("1.png", PNG), ("1.cls", b"0"), ("2.png", PNG), ("2.cls", b"1")]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([*GOOD, ("3.png", PNG)], r"sample '3': a sample without a label \(it has \.png\); give it a \.cls, a \.json"),
        ([*GOOD, ("3.png", PNG), ("3.json", b'{"class": 1}')], r"sample '3': a sample without a label .* 'label'"),
        ([*GOOD, ("3.xyz", PNG), ("3.cls", b"0")], r"sample '3': no image in a sample \(it has \.xyz, \.cls\); give"),
        ([*GOOD, ("1.png", PNG), ("1.cls", b"0")], r"sample '1': the key comes twice, .*; give each sample a key"),
        ([("1.png", PNG), ("1.png", PNG)], r"sample '1': two members \.png; give each sample a key of its own"),
        ([("1.png", PNG), ("1.jpg", PNG), ("1.cls", b"0")], r"sample '1': 2 images in a sample \(it has \.png, \.jpg"),
        ([("1.png", PNG), ("1.cls", b"\xff")], r"sample '1': \.cls: 'utf-8' codec .*; write it as UTF-8"),
        ([("1.png", PNG), ("1.json", b"{")], r"sample '1': \.json: .*; write it as JSON, in UTF-8"),
        ([("1.png", PNG), ("1.json", b'{"label": [1]}')], r"sample '1': \.json: '\[1\]' is no label; give a number"),
        ([*GOOD, ("3.png", PNG[:-40]), ("3.cls", b"0")], r"sample '3', \.png: its pixels are damaged: .*; remove it"),
        (GOOD, r"sample '1': class '0' has one image: it cannot be both learned and measured; add images"),
        (2 * [*GOOD[:2]], r"sample '1': two members"),
        ([("1.png", PNG), ("1.cls", b"0"), ("2.png", PNG), ("2.cls", b"0")], r"sample '1': there is one class, '0'"),
        ([], r"a\.tar: a tar without a sample; remove it"),
    ],
)
def test_a_tar_that_is_no_labelled_data_is_refused_whole(tmp_path, samples, message):
    write(tmp_path / "a.tar", samples)
    with pytest.raises(DataError, match=message) as caught:
        index(tmp_path, tmp_path / "a.tar")
    assert "\n" not in str(caught.value) and "a.tar" in str(caught.value)
    left = {path.name for path in (tmp_path / "data").rglob("*") if not path.name.endswith(".lock")}
    assert left == set(), left


def test_a_tar_that_is_cut_off_is_refused_whole(tmp_path):
    (tmp_path / "a.tar").write_bytes(pack(members(0))[:-11000])
    with pytest.raises(DataError, match=r"a\.tar, byte \d+: the tar is cut off"):
        index(tmp_path, tmp_path / "a.tar")
    assert not list((tmp_path / "data").rglob("*.npy"))


def test_inputs_of_two_kinds_and_compressed_tars(tmp_path, tars):
    (tars / "cat").mkdir()
    (tars / "cat/1.png").write_bytes(PNG)
    message = r"cat/1\.png: 1 image beside 4 tars, which are read in other ways; give folders of classes or tars"
    with pytest.raises(DataError, match=message):
        index(tmp_path, tars)
    assert index(tmp_path, tars, format="webdataset").kind == "images"  # --from webdataset: tars alone
    write(tars / "a.tar.gz", GOOD)
    with pytest.raises(DataError, match=r"a\.tar\.gz: a compressed tar: .*; decompress it"):
        index(tmp_path / "b", tars)
    with pytest.raises(ConfigError, match=r"inputs\.0: format=jsonl holds no images; leave it out"):
        index(tmp_path / "c", tars, format="jsonl")
    with pytest.raises(DataError, match=re.escape("no webdataset tars (.tar); give a folder with one folder")):
        index(tmp_path / "d", tars / "cat", format="webdataset")


def test_a_secret_in_an_address_is_not_written(tmp_path, tars):
    with serve_folder(tars) as server, pytest.raises(DataError, match="an address of data has no user, password"):
        index(tmp_path, f"{server.url}/photos-000.tar?token=secret")
    assert "secret" not in "".join(path.read_text() for path in Path(tmp_path / "data").rglob("*.json"))


def test_an_image_that_is_damaged_later_is_named_as_its_tar_names_it(tmp_path, tars):
    found = index(tmp_path, tars)
    path = tars / "photos-001.tar"
    content = bytearray(path.read_bytes())
    content[1000] ^= 255  # of the first image
    path.write_bytes(content)
    stream = ImageStream(tmp_path / "data", found, "train", image=ImageSize(3, 8), seq_len=5, config=ImagesConfig())
    with pytest.raises(DataError, match=r"train/part-00000-0001-photos-001\.tar: a/4\.jpg is damaged: CRC32 of"):
        stream.read(range(found.splits["train"].num_tokens))


def test_bad_samples_and_the_rest_of_a_damaged_tar_are_left_out_on_request(tmp_path, tars):
    bad = [("b/0.jpg", b"no image"), ("b/0.cls", b"cat"), ("b/1.jpg", PNG), ("c/2.jpg", PNG), ("c/2.cls", b"dog")]
    write(tars / "photos-003.tar", [*members(20), *bad])
    damaged = pack([*members(30, 6), *members(36)])
    at = damaged.index(b"a/36.jpg")
    (tars / "photos-004.tar").write_bytes(damaged[:at] + b"x" * 300 + damaged[at + 300 :])
    write(tars / "photos-005.tar", bad[:2])
    with pytest.raises(DataError, match="not an image"):
        index(tmp_path, tars)
    found = index(tmp_path, tars, on_error="skip", max_skipped_share=0.5)
    # With the sample before the damage, of which more might have followed.
    assert found.splits["train"].num_documents == 12 + 5 + 5
    facts = json.loads((tmp_path / "data/statistics.json").read_text())
    assert facts["left_out"] == {"bad_image": 3, "damaged": 1} and facts["skipped"]["num_bad"] == 4
    check_shards(tmp_path / "data", found)
    assert len(list((tmp_path / "data/train").glob("*.tar"))) == 5
    for name in ("photos-003.tar", "photos-004.tar"):  # as the first shard, which webdataset reads too
        options = {"kind": "images", "on_error": "skip", "max_skipped_share": 0.7}
        prepare(short_prepare(tmp_path / name, [str(tars / name)], **options), processes=1)
        assert verify(str(tmp_path / name), Order())["webdataset_samples"] == 5
    with pytest.raises(
        TooManyBadError, match=r"of \d+ records are bad.*more than max_skipped_share=0\.01.*sample 'b/0'"
    ):
        prepare(short_prepare(tmp_path / "other", [str(tars)], kind="images", on_error="skip"), processes=1)
