"""Files that want to run code or to be written elsewhere: nothing of them happens, and each is one clear error.

Fifty pickles, each in the place of five kinds of file; sixty tars; a hundred names, each in four places.
"""

import io
import itertools
import json
import os
import pickle
import struct
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from pretrain.checkpoint.format import MANIFEST, load_manifest
from pretrain.checkpoint.fragments import FragmentReader
from pretrain.config.load import load_config
from pretrain.config.train import RunSection
from pretrain.errors import CheckpointError, ConfigError, DataError, PretrainError
from pretrain.interop.tensors import TensorFolder
from pretrain.shards.index import DataIndex, build_split, check_shards, load_index, write_index
from pretrain.tokenizer.file import load_tokenizer
from pretrain.utils.io import make_dir, write_json
from tests.helpers.reading import documents
from tests.helpers.shards import describe_shard
from tests.unit.checkpoint.stand_in import manager, save

CANARY = "canary"


class Attack:
    """Unpickled, calls a function with arguments."""

    def __init__(self, function: Callable, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple:
        return self.call


def attacks(canary: Path) -> list[object]:
    """Ten objects that make a file when they are unpickled."""
    code = f"open({str(canary)!r}, 'w')"
    found: list[object] = [
        Attack(os.system, f"touch {canary}"),
        Attack(eval, code),
        Attack(exec, code),
        Attack(open, str(canary), "w"),
        Attack(os.mkdir, str(canary)),
        Attack(subprocess.check_call, ["touch", str(canary)]),
        Attack(subprocess.getoutput, f"touch {canary}"),
    ]
    return [*found, {"weight": found[0]}, [found[1], found[2]], (1, {"a": found[3]})]


def payloads(canary: Path) -> Iterator[bytes]:
    """Yields fifty pickles: of every protocol but the newest, and within a zip as `torch.save` makes it."""
    for attack in attacks(canary):
        yield from (pickle.dumps(attack, protocol) for protocol in range(1, 5))
        sink = io.BytesIO()
        with zipfile.ZipFile(sink, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(attack, 2))
            archive.writestr("archive/version", "3\n")
        yield sink.getvalue()


def test_the_payloads_are_real(tmp_path):
    for number, payload in enumerate(payloads(tmp_path / CANARY)):
        if number % 5 != 4:
            pickle.loads(payload)
            assert (tmp_path / CANARY).exists()
            (tmp_path / CANARY).rmdir() if (tmp_path / CANARY).is_dir() else (tmp_path / CANARY).unlink()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pickle_in_the_place_of_any_file_is_not_executed(tmp_path):
    (checkpoint,) = save(tmp_path / "checkpoints", 1)
    rank = checkpoint / "rank-00000.safetensors"
    whole, manifest = rank.read_bytes(), (checkpoint / MANIFEST).read_bytes()
    release = tmp_path / "release"
    release.mkdir()
    num_seen = 0
    for payload in payloads(tmp_path / CANARY):
        rank.write_bytes(payload)
        assert manager(tmp_path / "checkpoints").verify(checkpoint) is not None
        with pytest.raises(CheckpointError, match="cannot be parsed"):
            FragmentReader([rank])
        rank.write_bytes(whole)
        (checkpoint / MANIFEST).write_bytes(payload)
        with pytest.raises(CheckpointError, match="the manifest is damaged"):
            load_manifest(checkpoint)
        (checkpoint / MANIFEST).write_bytes(manifest)
        (tmp_path / "tokenizer.json").write_bytes(payload)
        with pytest.raises(DataError, match="not a tokenizer"):
            load_tokenizer(tmp_path / "tokenizer.json")
        (release / "pytorch_model.bin").write_bytes(payload)
        with pytest.raises(CheckpointError):
            TensorFolder(release)
        (tmp_path / "a.tar").write_bytes(payload)
        with pytest.raises(DataError):
            list(documents(tmp_path / "a.tar"))
        assert not (tmp_path / CANARY).exists()
        num_seen += 1
    assert num_seen == 50


def hostile_members(root: Path) -> Iterator[tarfile.TarInfo]:
    """Yields sixty members of tars that name, link to, or claim to be what they must not."""
    names = [
        "/etc/cron.d/x.txt", str(root / "outside.txt"), "../outside.txt", "a/../../outside.txt", "./../outside.txt",
        "a/b/../../../outside.txt", "..", "../", "..\\outside.txt", "C:\\outside.txt", "~/outside.txt",
        "$(touch x).txt", "a" * 300 + ".txt", "\x01\x02.txt", "a\nb.txt", "-rf.txt", "|touch x.txt", "CON.txt",
        ".../x.txt", "a//..//..//x.txt",
    ]  # fmt: skip
    for name in names:
        yield tarfile.TarInfo(name)
    links = ["/etc/passwd", "../../etc/passwd", str(root), "..", "a.txt", "/proc/self/environ", "/dev/zero", "."]
    for kind, target in itertools.product((tarfile.SYMTYPE, tarfile.LNKTYPE), links):
        info = tarfile.TarInfo("a.txt")
        info.type, info.linkname = kind, target
        yield info
    kinds = (
        tarfile.CHRTYPE,
        tarfile.BLKTYPE,
        tarfile.FIFOTYPE,
        tarfile.CONTTYPE,
        tarfile.GNUTYPE_SPARSE,
        b"Z",
        b"V",
        b"M",
    )
    for kind, name in itertools.product(kinds, ("a.txt", "a.json")):
        info = tarfile.TarInfo(name)
        info.type = kind
        yield info
    for size in (2**31, 2**33 - 1, 2**40, 2**62, 10**6, 2**33, 513, 2**20):
        info = tarfile.TarInfo("a.txt")
        info.size = size
        yield info


def test_hostile_members_of_a_tar_are_never_extracted_followed_or_believed(tmp_path):
    folder = tmp_path / "in" / "deep"
    folder.mkdir(parents=True)
    secret = next(line for line in Path("/etc/passwd").read_text().splitlines() if line)
    num_seen = 0
    for info in hostile_members(tmp_path):
        (folder / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
        try:
            found = documents(folder / "a.tar")
        except PretrainError as error:
            assert "\n" not in str(error)
        else:
            assert all(secret not in repr(document) and len(repr(document)) < 2000 for document in found)
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == [folder / "a.tar"]
        num_seen += 1
    assert num_seen == 60


LONG = "a" * 300
ODD = ["", ".", "..", "/", "a/b", "../x", "/abs", "..\\x", "a\\b", "a\0b", "a\nb", "a\rb", "a b", " a", "a\t", "~",
       "~x", "-x", "--x", "$x", "$(touch x)", "`touch x`", "${IFS}", "a;b", "a&b", "a|b", "a>b", "a<b", "a*b", "a?b",
       "a[b]", "a{b}", "a'b", 'a"b', "a!b", "a#b", "%s", "%n", "a%b", "a:b", "a=b", "a,b", "a@b", "a+b", "a^b",
       "\x1b[31m", "\x7f", "\u202e", "\u00e9", LONG]  # fmt: skip
NAMES = [*ODD, *(f"a/{name}" if number % 2 else f"../{name}" for number, name in enumerate(ODD))]


def test_hostile_names_are_refused_wherever_a_name_becomes_a_path(tmp_path):
    assert len(NAMES) == 100
    (checkpoint,) = save(tmp_path / "checkpoints", 1)
    content = load_manifest(checkpoint).to_json()["content"]
    make_dir(tmp_path / "shards")
    for number, name in enumerate(NAMES):
        with pytest.raises(ValidationError, match="name"):
            RunSection.model_validate({"name": name})
        if number % 20 == 0:
            with pytest.raises(ConfigError, match="name"):
                load_config("configs/run/quickstart.yaml", [f"run.name={json.dumps(name)}"])
        check_manifest(checkpoint, content, name)
        check_header(tmp_path / "x.safetensors", name)
        check_index(tmp_path / "shards", name)
        assert {path.name for path in tmp_path.iterdir()} <= {"checkpoints", "x.safetensors", "shards"}


def check_manifest(checkpoint: Path, content: dict, name: str) -> None:
    """A manifest, whole by its CRC, that lists a file of this name."""
    changed = content | {"files": [content["files"][0] | {"name": name}]}
    crc32 = zlib.crc32(json.dumps(changed, sort_keys=True).encode())
    write_json(checkpoint / MANIFEST, {"content": changed, "crc32": crc32})
    if name == LONG:  # strange, and within the folder
        assert manager(checkpoint.parent).verify(checkpoint) is not None
        return
    with pytest.raises(CheckpointError, match="a file name leaves the folder; do not trust this checkpoint"):
        load_manifest(checkpoint)


def check_header(path: Path, name: str) -> None:
    """A safetensors file whose tensor has this name: it is a name, and no path."""
    header = json.dumps({f"{name}/weight@0": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", 2.0))
    out = torch.zeros(1)
    FragmentReader([path]).read_into(name, "weight", 0, out)
    assert out.item() == 2.0


def check_index(folder: Path, name: str) -> None:
    """An index that lists a shard of this name, which is refused, or is looked for in the folder and missing."""
    shard = describe_shard("train/a.tar", 10, sha256="ab")
    write_index(folder, DataIndex("cd", 300, "uint16", 0, {"train": build_split([shard], 99)}))
    raw = json.loads((folder / "index.json").read_text())
    raw["splits"]["train"]["shards"][0]["name"] = name
    (folder / "index.json").write_text(json.dumps(raw))
    with pytest.raises(DataError):
        check_shards(folder, load_index(folder))
