"""Fragments: written with any cut, read with any other; a file that is not one is told as such."""

import json
import os
import struct
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from pretrain.checkpoint import fragments
from pretrain.checkpoint.fragments import FragmentReader, write_fragments
from pretrain.errors import CheckpointError
from pretrain.parts import Stripes
from pretrain.types import Fragment
from pretrain.utils.io import check_file
from tests.helpers.warm_python import run_python


@st.composite
def written_parameters(draw):
    """Lengths of parameters, and for each its pieces as (file, start, stop), which cover it."""
    num_files = draw(st.integers(1, 4))
    parameters = {}
    for number in range(draw(st.integers(1, 3))):
        length = draw(st.integers(1, 40))
        cuts = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=6))})
        parameters[f"layer.{number}"] = [(draw(st.integers(0, num_files - 1)), *pair) for pair in pairwise(cuts)]
    return num_files, parameters


def values_of(name: str, kind: str, length: int) -> torch.Tensor:
    """Values that differ between parameters and kinds."""
    return torch.arange(length, dtype=torch.float32) + 1000 * int(name.split(".")[1]) + (500 if kind == "m" else 0)


@settings(max_examples=40)
@given(written_parameters(), st.data())
def test_any_range_is_read_back_whatever_cut_wrote_it(tmp_path_factory, written, data):
    num_files, parameters = written
    folder = tmp_path_factory.mktemp("fragments")
    whole = {
        name: {kind: values_of(name, kind, pieces[-1][2]) for kind in ("weight", "m")}
        for name, pieces in parameters.items()
    }
    paths = [folder / f"{number}.safetensors" for number in range(num_files)]
    for number, path in enumerate(paths):
        fragments = [
            Fragment(name, start, (pieces[-1][2],), {kind: t[start:stop] for kind, t in whole[name].items()})
            for name, pieces in parameters.items()
            for file, start, stop in pieces
            if file == number
        ]
        record = write_fragments(path, fragments)
        assert check_file(path, record) is None
    reader = FragmentReader(paths, data.draw(st.sampled_from([None, 0.0, 0.5, 1.0])))
    for name, kinds in whole.items():
        for kind, values in kinds.items():
            start = data.draw(st.integers(0, len(values)))
            stop = data.draw(st.integers(start, len(values)))
            out = torch.full((stop - start,), -1.0)
            reader.read_into(name, kind, start, out)
            assert torch.equal(out, values[start:stop])


def test_no_more_is_read_than_what_is_asked_for(tmp_path, monkeypatch):
    values = torch.arange(3000, dtype=torch.float32)
    paths = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    for number, path in enumerate(paths):
        start, stop = 1500 * number, 1500 * (number + 1)
        write_fragments(path, [Fragment("layer.0", start, (3000,), {"weight": values[start:stop], "m": values[:1500]})])
    reader, read = FragmentReader(paths), []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, out, place: read.append(len(out[0])) or preadv(file, out, place))
    out = torch.empty(700)
    reader.read_into("layer.0", "weight", 1000, out)
    assert torch.equal(out, values[1000:1700])
    assert read == [500 * 4, 200 * 4]


@pytest.mark.parametrize(("world", "most"), [(32, 1), (24, 3), (16, 3), (64, 2), (1, 32)])
def test_a_rank_parses_the_headers_of_the_files_that_have_its_ranges(tmp_path, monkeypatch, world, most):
    values = {name: torch.arange(192, dtype=torch.float32) + number for number, name in enumerate("ab")}
    paths = [tmp_path / f"{number}.safetensors" for number in range(32)]
    for number, path in enumerate(paths):
        parts = {name: value[6 * number :][:6] for name, value in values.items()}
        write_fragments(path, [Fragment(name, 6 * number, (192,), {"weight": part}) for name, part in parts.items()])
    parsed = []
    read_header = fragments._read_header
    monkeypatch.setattr(fragments, "_read_header", lambda *file: parsed.append(file[0]) or read_header(*file))
    length = 192 // world
    for rank in range(world):
        parsed.clear()
        reader = FragmentReader(paths, rank / world)
        for name, value in values.items():
            out = torch.empty(length)
            reader.read_into(name, "weight", length * rank, out)
            assert torch.equal(out, value[length * rank :][:length])
        assert len(parsed) <= most
    assert not reader.has("c", "weight")
    assert len(parsed) == 32
    with pytest.raises(CheckpointError, match="c/weight lacks element 0; use another checkpoint"):
        FragmentReader(paths, 0.5).read_into("c", "weight", 0, torch.empty(1))


def test_columns_as_they_were_saved_need_one_header_and_a_bad_file_is_told_when_it_is_needed(tmp_path):
    """A rank that has its own part never looks at the file beside it."""
    (tmp_path / "0").write_bytes(b"no header")
    stripes = Stripes(2, 8)
    write_fragments(tmp_path / "1", [Fragment("w", 4, (4, 8), {"weight": torch.arange(8.0)}, stripes)])
    reader, out = FragmentReader([tmp_path / "0", tmp_path / "1"], 0.5), torch.empty(8)
    reader.read_into("w", "weight", 4, out, stripes)
    assert out.tolist() == list(range(8))
    with pytest.raises(CheckpointError, match=r"0: cannot be parsed: .*; use another checkpoint"):
        reader.read_into("w", "weight", 0, out, stripes)


def test_files_that_are_removed_meanwhile_are_read_to_their_end_and_closed(tmp_path):
    paths = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    for number, path in enumerate(paths):
        write_fragments(path, [Fragment("w", 5 * number, (10,), {"weight": torch.full((5,), float(number))})])
    before = set(Path("/proc/self/fd").iterdir())
    reader = FragmentReader(paths)
    for path in paths:
        path.unlink()
    out = torch.empty(10)
    reader.read_into("w", "weight", 0, out)
    assert out.tolist() == [0.0] * 5 + [1.0] * 5
    del reader
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_more_files_than_may_be_open_are_an_error_that_names_the_limit(tmp_path):
    write_fragments(tmp_path / "f", [Fragment("w", 0, (1,), {"weight": torch.ones(1)})])
    child = """
import resource, sys
from pathlib import Path
import pretrain.checkpoint.fragments as fragments
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 64))
fragments.FragmentReader([Path(sys.argv[1])] * 40)  # above the soft limit
try:
    fragments.FragmentReader([Path(sys.argv[1])] * 64)
except Exception as error:
    print(error)
"""
    done = run_python(child, str(tmp_path / "f"))
    assert "Too many open files" in done.stdout and "raise ulimit -n" in done.stdout, done.stderr


def test_a_file_is_what_safetensors_reads(tmp_path):
    weight = torch.randn(7)
    write_fragments(tmp_path / "f", [Fragment("a/b.c", 3, (20,), {"weight": weight})])
    loaded = load_file(tmp_path / "f")
    assert list(loaded) == ["a/b.c/weight@3"]
    assert torch.equal(loaded["a/b.c/weight@3"], weight)


def test_a_missing_range_is_named_by_its_first_element(tmp_path):
    pieces = [Fragment("w", start, (30,), {"weight": torch.ones(5)}) for start in (0, 10)]
    write_fragments(tmp_path / "f", pieces)
    reader = FragmentReader([tmp_path / "f"])
    reader.read_into("w", "weight", 10, torch.empty(5))
    for start, length, missing in ((3, 5, 5), (12, 4, 15), (7, 1, 7), (29, 1, 29)):
        with pytest.raises(CheckpointError, match=f"w/weight lacks element {missing}; use another checkpoint"):
            reader.read_into("w", "weight", start, torch.empty(length))
    with pytest.raises(CheckpointError, match="w/exp_avg lacks element 0"):
        reader.read_into("w", "exp_avg", 0, torch.empty(1))


def test_a_file_cut_short_after_its_header_is_an_error_not_old_memory(tmp_path):
    write_fragments(tmp_path / "f", [Fragment("w", 0, (8,), {"weight": torch.ones(8)})])
    (tmp_path / "f").write_bytes((tmp_path / "f").read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="f is cut short"):
        FragmentReader([tmp_path / "f"]).read_into("w", "weight", 0, torch.empty(8))


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BAD_HEADERS = {
    "not JSON": b"{",
    "a list": b"[]",
    "an entry that is a number": json.dumps({"w/weight@0": 3}).encode(),
    "no offset in the name": json.dumps({"w": ENTRY}).encode(),
    "another dtype": json.dumps({"w/weight@0": ENTRY | {"dtype": "F16"}}).encode(),
    "two dimensions": json.dumps({"w/weight@0": ENTRY | {"shape": [1, 2]}}).encode(),
    "a scalar": json.dumps({"w/weight@0": ENTRY | {"shape": []}}).encode(),
    "a length that contradicts the shape": json.dumps({"w/weight@0": ENTRY | {"data_offsets": [0, 4]}}).encode(),
    "a place before the file": json.dumps({"w/weight@0": ENTRY | {"data_offsets": [-8, 0]}}).encode(),
    "one offset": json.dumps({"w/weight@0": ENTRY | {"data_offsets": [0]}}).encode(),
    "text for numbers": json.dumps({"w/weight@0": ENTRY | {"data_offsets": ["0", "8"]}}).encode(),
    "nested without end": b"[" * 100_000,
}


@pytest.mark.parametrize("header", BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_a_header_that_makes_no_sense_is_an_error_that_names_the_file(tmp_path, header):
    (tmp_path / "f").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    with pytest.raises(CheckpointError, match=r"f: cannot be parsed: .*; use another checkpoint"):
        FragmentReader([tmp_path / "f"])


@pytest.mark.parametrize("content", [b"", b"abc", struct.pack("<Q", 2**60)], ids=["empty", "short", "huge header"])
def test_a_file_without_a_header_is_an_error(tmp_path, content):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be parsed"):
        FragmentReader([tmp_path / "f"])
