import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pretrain.errors import DataError, DiskError
from pretrain.preparation.convert import token_file
from pretrain.shards.index import load_index
from pretrain.tokenizer.file import dump_tokenizer
from tests.helpers.corpus import WORDS, digests
from tests.helpers.killed import count_writes, run_killed
from tests.helpers.tokenizers import train_bpe
from tests.helpers.waiting import LIMIT_S
from tests.unit.data.prepared import draw_nothing
from tests.unit.preparation.convert.asked import convert, options
from tests.unit.preparation.convert.writers import EOS_ID


def convert_folder(folder: str, name: str) -> None:
    """What a process does that is killed."""
    draw_nothing()
    convert(options(Path(folder), name))


def test_killed_at_any_write_and_started_again_it_gives_the_same_bytes(source):
    num_writes = count_writes(convert_folder, source, "whole")
    assert num_writes > 60
    for kill_at in (2, *random.Random(0).sample(range(3, num_writes), 2), num_writes - 8):
        out = source / f"killed{kill_at}"
        run_killed(convert_folder, source, out.name, kill_at=kill_at)
        assert not (out / "index.json").exists()
        convert(options(source, out.name))
        assert digests(out) == digests(source / "whole")


def test_finished_parts_are_not_done_again(source, fault_hook):
    def fail(operation, path):
        if operation == "rename" and path.name == "part-00003.json":
            raise OSError(28, "No space left on device")

    fault_hook(fail)
    with pytest.raises(DiskError, match="No space left on device"):
        convert(options(source))
    fault_hook(None)
    kept = {path: path.stat().st_mtime_ns for path in (source / "out/parts").iterdir()}
    assert len(kept) == 3
    seen = []
    convert(options(source), lambda *args: seen.append(args))
    assert all(path.stat().st_mtime_ns == mtime for path, mtime in kept.items())
    assert seen[0][1] > 150 * 3
    convert(options(source, "whole"))
    assert digests(source / "out") == digests(source / "whole")


def test_a_worker_that_is_killed_loses_no_parts(source, monkeypatch):
    def kill(phase, done_bytes, total_bytes, num_documents):
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGKILL)

    message = "a worker process died, most likely killed for want of memory; run the same command again with fewer"
    with pytest.raises(DataError, match=message):
        convert(options(source), kill, processes=2, part_bytes=20)
    assert (source / "out/prepare.json").exists()
    convert(options(source), part_bytes=20)
    convert(options(source, "whole"), part_bytes=20)
    assert digests(source / "out") == digests(source / "whole")


def test_second_run_does_nothing(source, caplog):
    first = convert(options(source))
    before = {path: path.stat().st_mtime_ns for path in (source / "out").rglob("*") if path.name[0] != "."}
    with caplog.at_level(logging.INFO):
        assert convert(options(source)) == first
    assert "is complete: nothing to do" in caplog.text
    assert before == {path: path.stat().st_mtime_ns for path in (source / "out").rglob("*") if path.name[0] != "."}


@pytest.mark.parametrize("victim", ["train/part-00002-0000.tar", "train/part-00002-0000.idx.npy", "tokenizer.json"])
def test_a_file_that_went_missing_is_made_again(source, victim):
    convert(options(source))
    before = digests(source / "out")
    (source / "out" / victim).unlink()
    convert(options(source))
    assert digests(source / "out") == before


@pytest.mark.long
@pytest.mark.parametrize("operation", ["open", "write", "fsync", "rename"])
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "part-00001-0000", "part-00001.json", "conversion.json", "index.json"]
)
def test_full_disk_leaves_nothing_that_is_trusted(source, fault_hook, operation, name):
    def fail(what, path):
        if what == operation and path.name.startswith(name):
            raise OSError(28, "No space left on device")

    fault_hook(fail)
    with pytest.raises(DiskError, match="No space left on device; free space"):
        convert(options(source))
    assert not (source / "out/index.json").exists()
    assert not list((source / "out").rglob("*.tmp-*"))
    fault_hook(None)
    convert(options(source))
    convert(options(source, "whole"))
    assert digests(source / "out") == digests(source / "whole")


def test_a_file_that_cannot_be_read_for_now_loses_no_parts(source, monkeypatch):
    def fail(tokens, position, options, where):
        if where.endswith("b.bin"):
            raise OSError(5, "Input/output error", where)
        return check(tokens, position, options, where)

    check = token_file.check_tokens
    monkeypatch.setattr(token_file, "check_tokens", fail)
    message = r"b\.bin: cannot be read: Input/output error; fix the access problem and run the same command again"
    with pytest.raises(DataError, match=message):
        convert(options(source))
    assert list((source / "out/parts").iterdir())


@pytest.mark.long
def test_memory_does_not_grow_with_the_source(source):
    """One part of 40 MB passes through: a chunk as read and as checked, a member and what is written of it."""
    tokens = np.random.default_rng(0).integers(1, 280, 20 * 10**6, np.uint16)
    tokens[::2000] = EOS_ID
    (source / "large.bin").write_bytes(tokens.tobytes())
    (source / "bytes.json").write_bytes(dump_tokenizer(train_bpe([" ".join(WORDS)] * 3, 280)))
    child = (
        "import resource, sys; from pathlib import Path\n"
        "from tests.unit.preparation.convert.asked import convert, options\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "folder = Path(sys.argv[1]); convert(options(folder, 'small'))\n"
        "before = peak()\n"
        "large = {'source': (str(folder / 'large.bin'),), 'tokenizer': str(folder / 'bytes.json')}\n"
        "convert(options(folder, 'large', **large), part_bytes=10**8); print(peak() - before)\n"
    )
    command = [sys.executable, "-c", child, str(source)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert int(run.stdout) * 1024 < 20 * 10**6
    assert load_index(source / "large").split("train").num_documents > 7000
