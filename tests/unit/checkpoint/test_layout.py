"""Names in a checkpoint folder, and the manifest: it vouches for itself, and nothing in it is believed blindly."""

import json

import pytest

from pretrain.checkpoint.format import (
    MANIFEST,
    SCHEMA,
    Manifest,
    NewerFormatError,
    list_checkpoints,
    load_manifest,
    seal,
    step_name,
    step_of,
)
from pretrain.errors import CheckpointError
from pretrain.utils.io import FileRecord, write_json
from tests.unit.utils.test_safe_read import make_strange

GOOD = Manifest(SCHEMA, {"step": 3}, {"w": [2, 3]}, ["exp_avg"], [FileRecord("rank-00000.safetensors", 9, [1])], {})


def write_manifest(folder, **changes):
    """Writes a manifest whose CRC is right, with changed fields."""
    content = GOOD.to_json()["content"] | changes
    write_json(folder / MANIFEST, seal(content))


def test_a_manifest_is_read_back_as_it_was_written(tmp_path):
    write_json(tmp_path / MANIFEST, GOOD.to_json())
    assert load_manifest(tmp_path) == GOOD


@pytest.mark.parametrize(("step", "name"), [(0, "step-00000000"), (1000, "step-00001000"), (10**9, "step-1000000000")])
def test_a_step_and_its_folder_name_are_each_others_inverse(tmp_path, step, name):
    assert step_name(step) == name
    assert step_of(tmp_path / name) == step


@pytest.mark.parametrize(
    "name",
    [
        "step-1",
        "step-00000001.bad-damaged",
        ".tmp-step-00000001",
        "xstep-00000001",
        "step-00000001\n",
        "step-\u0660" * 8,
    ],
)
def test_other_names_are_not_checkpoints(tmp_path, name):
    assert step_of(tmp_path / name) is None
    (tmp_path / name).mkdir()
    write_json(tmp_path / name / MANIFEST, GOOD.to_json())
    assert list_checkpoints(tmp_path) == []


def test_checkpoints_are_listed_by_number_and_only_with_a_manifest(tmp_path):
    for step in (1000, 99999999, 100000000, 7):
        (tmp_path / step_name(step)).mkdir()
        (tmp_path / step_name(step) / MANIFEST).touch()
    (tmp_path / step_name(8)).mkdir()
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [7, 1000, 99999999, 100000000]
    assert list_checkpoints(tmp_path / "absent") == []


def test_a_newer_format_is_not_called_damaged(tmp_path):
    write_manifest(tmp_path, schema=SCHEMA + 1)
    with pytest.raises(NewerFormatError, match=r"manifest.json: written in format 2, this version reads 1; update pre"):
        load_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../rank", "/etc/passwd", "a/b", "..", ".", "", "a\0b", ".hidden", 3, None])
def test_a_file_name_that_leaves_the_folder_is_refused(tmp_path, name):
    write_manifest(tmp_path, files=[{"name": name, "num_bytes": 1, "crc32s": [1]}])
    with pytest.raises(CheckpointError, match="a file name leaves the folder; do not trust this checkpoint"):
        load_manifest(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b'{"content": 1, "crc32": 2}',
        b"\xff",
        b"{" * 1000,
        b"[" * 1_000_000,
        json.dumps(GOOD.to_json() | {"crc32": 1}).encode(),
    ],
)
def test_what_is_not_a_manifest_is_called_damaged(tmp_path, content):
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest.json: the manifest is damaged \(.*\); use another one"):
        load_manifest(tmp_path)


@pytest.mark.parametrize(
    ("here", "there"),
    [(b"}\n", b"}"), (b"\n", b"\r\n"), (b"1e-05", b"1E-05"), (b"{\n", b"\xef\xbb\xbf{\n"), (b": ", b":")],
)
def test_a_manifest_that_says_the_same_and_is_not_as_it_was_written_is_damaged(tmp_path, here, there):
    write_manifest(tmp_path, topology={"seconds": 1e-05})
    path = tmp_path / MANIFEST
    load_manifest(tmp_path)
    path.write_bytes(there.join(path.read_bytes().rsplit(here, 1)))
    with pytest.raises(CheckpointError, match=r"manifest.json: the manifest is damaged \(.*\); use another one"):
        load_manifest(tmp_path)


def test_fields_that_are_missing_or_unknown_are_damage(tmp_path):
    write_manifest(tmp_path, extra=1)
    with pytest.raises(CheckpointError, match="the manifest is damaged"):
        load_manifest(tmp_path)
    content = {key: value for key, value in GOOD.to_json()["content"].items() if key != "shapes"}
    write_json(tmp_path / MANIFEST, seal(content))
    with pytest.raises(CheckpointError, match="the manifest is damaged"):
        load_manifest(tmp_path)


@pytest.mark.parametrize("kind", ["FIFO", "device", "huge"])
def test_a_manifest_that_blocks_or_never_ends_is_damaged(tmp_path, kind):
    make_strange(tmp_path / MANIFEST, kind)
    with pytest.raises(CheckpointError, match=r"the manifest is damaged \(OSError: .*(not a regular|larger than)"):
        load_manifest(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"shapes": {"w": 3}}, {"shapes": {"w": [-1]}}, {"state": []}, {"topology": "x"}, {"files": [{"name": "a"}]}],
)
def test_a_manifest_of_other_types_is_damaged(tmp_path, changes):
    write_manifest(tmp_path, **changes)
    with pytest.raises(CheckpointError, match="the manifest is damaged"):
        load_manifest(tmp_path)


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"not a checkpoint \(no manifest.json\); check the path"):
        load_manifest(tmp_path)
