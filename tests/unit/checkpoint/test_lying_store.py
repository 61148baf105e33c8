"""A store that answers wrongly loses no checkpoint: a real S3 server, behind one that lies."""

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import s3fs

from pretrain.checkpoint.bucket import upload
from pretrain.errors import PretrainError
from pretrain.run.folder import RunDir, begin_attempt
from pretrain.utils.io import json_bytes
from tests.helpers.lying import KINDS, LyingStore, serve_lies
from tests.helpers.servers import serve_s3
from tests.unit.checkpoint.stand_in import save
from tests.unit.checkpoint.test_upload import URL, assert_whole, bucket, job, quiet, take

Objects = dict[str, bytes]


class Lab:
    """Two runs, one in a bucket behind a store that may lie, and the truth about it."""

    def __init__(self, folder: Path, store: LyingStore, behind: str) -> None:
        self.folder, self.store, self.number = folder, store, 0
        self.files = s3fs.S3FileSystem(endpoint_url=behind, use_listings_cache=False)
        self.run = self.make("run")
        for name, owner in (("other", self.make("other")), ("run", self.run)):
            for step in (10, 20, 30):
                self.send(owner, step, url=f"s3://lab/runs/{name}", keep=9)
        self.kept = {name: self.read(f"runs/{name}") for name in ("run", "other")}

    def make(self, name: str) -> RunDir:
        """Makes a run with a record of its own at each step."""
        run = RunDir(self.folder / name / "run")
        run.checkpoints.mkdir(parents=True)
        begin_attempt(run, "run", {})
        run.config.write_text(f"run: {{name: {name}}}\n")
        save(run.checkpoints, 10, 20, 30, keep=9)
        return run

    def send(self, run: RunDir, step: int, url: str = URL, **changes: object) -> None:
        """Uploads a step of a run, whose ledger is that of the step."""
        run.audit.write_text(f'{{"step": {step}}}\n')
        upload(bucket(url), job(run, run.checkpoints / f"step-{step:08d}", **changes), quiet)

    def read(self, place: str) -> Objects:
        """Returns what is there, without lies."""
        found = self.files.find(f"lab/{place}")
        return {name.removeprefix(f"lab/{place}/"): self.files.cat_file(name) for name in found}

    def begin(self, *steps: int) -> None:
        """Has the bucket hold these steps of the run; requests count from 0."""
        self.store.lie = lambda request: None
        if self.files.exists("lab/runs/run"):
            self.files.rm("lab/runs/run", recursive=True)
        owner = json.loads(self.kept["run"]["owner.json"]) | {"step": max(steps)}
        there = {**self.of_steps(steps), "owner.json": json_bytes(owner)}
        self.files.pipe({f"lab/runs/run/{name}": content for name, content in there.items()})
        self.store.forget()

    def of_steps(self, steps: Sequence[int]) -> Objects:
        """Returns the files of checkpoints of the run."""
        folders = tuple(f"step-{step:08d}/" for step in steps)
        return {name: content for name, content in self.kept["run"].items() if name.startswith(folders)}

    def check(self) -> list[int]:
        """Returns the checkpoints there, which are whole, to the byte; the other run has all of its own."""
        assert self.sums("other") == sums_of(self.kept["other"])
        there = self.sums("run")
        steps = [step for step in (10, 20, 30) if f"step-{step:08d}/manifest.json" in there]
        assert there.items() >= sums_of(self.of_steps(steps)).items()
        assert json.loads(self.files.cat_file("lab/runs/run/owner.json"))["step"] in steps
        return steps

    def sums(self, name: str) -> dict[str, str]:
        """Returns the MD5 of each file of a run there, as S3 lists it."""
        found = self.files.find(f"lab/runs/{name}", detail=True)
        return {path.removeprefix(f"lab/runs/{name}/"): facts["ETag"].strip('"') for path, facts in found.items()}

    def restore(self) -> int | None:
        """Fetches into an empty folder; returns the step, all of which is what was uploaded."""
        self.number += 1
        folder = self.folder / f"machine-{self.number}"
        step = take(folder)
        if step is not None:
            assert_whole(folder, step)
            for name in ("config.yaml", "audit.jsonl", "run.json"):
                assert (folder / name).read_bytes() == self.kept["run"][f"step-{step:08d}/records/{name}"]
        assert [path.name for path in (folder / "checkpoints").glob(".tmp*")] == []
        shutil.rmtree(folder)
        return step


def sums_of(objects: Objects) -> dict[str, str]:
    """Returns the MD5 of each file."""
    return {name: hashlib.md5(content).hexdigest() for name, content in objects.items()}


@pytest.fixture
def lab(tmp_path):
    (tmp_path / "empty").mkdir()
    with serve_s3({"lab": tmp_path / "empty"}):
        behind = os.environ["AWS_ENDPOINT_URL"]
        with serve_lies() as store:
            made = Lab(tmp_path, store, behind)
            made.begin(10, 20)
            store.old_list = old_list(made)
            yield made


def old_list(lab: Lab) -> bytes:
    """Returns the body of the listing as it is now, in the words of S3."""
    found = lab.files.find("lab/runs/run", detail=True)
    entry = "<Contents><Key>{}</Key><Size>{}</Size></Contents>"
    entries = "".join(entry.format(name.removeprefix("lab/"), facts["size"]) for name, facts in found.items())
    return f"<ListBucketResult><Name>lab</Name><KeyCount>{len(found)}</KeyCount>{entries}</ListBucketResult>".encode()


def outcome_of(call) -> str:
    """Returns the name of the error that a call ends with, or its result."""
    try:
        return str(call())
    except (PretrainError, OSError) as error:
        return type(error).__name__


def upload_under(lab: Lab, kind: str, *numbers: int) -> tuple[str, int]:
    """Uploads step 30 beside 10 and 20, with lies; returns how it ended, and the number of its requests."""
    lab.begin(10, 20)
    lab.store.lie = lambda request: kind if not numbers or request.number in numbers else None
    ended = outcome_of(lambda: lab.send(lab.run, 30))
    num_requests = len(lab.store.requests)
    lab.store.lie = lambda request: None
    steps = lab.check()
    assert steps in ([10, 20], [10, 20, 30], [20, 30]), (kind, numbers, ended)
    lab.send(lab.run, 30, is_first=False)
    assert lab.check() in ([20, 30], [10, 20, 30])
    return ended, num_requests


def restore_under(lab: Lab, kind: str, *numbers: int) -> tuple[str, int]:
    """Restores from 20 and 30, with lies; returns how it ended, and the number of its requests."""
    lab.begin(20, 30)
    lab.store.lie = lambda request: kind if not numbers or request.number in numbers else None
    ended = outcome_of(lab.restore)
    num_requests = len(lab.store.requests)
    lab.store.lie = lambda request: None
    assert lab.check() == [20, 30]
    assert ended in ("30", "20", "LaunchError", "CheckpointError", "FileNotFoundError", "OSError"), (kind, numbers)
    return ended, num_requests


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("work", [upload_under, restore_under])
def test_each_request_answered_wrongly_loses_no_checkpoint(lab, work, kind):
    ended: Counter[str] = Counter()
    number = 0
    while (answer := work(lab, kind, number))[1] > number:  # until there is no request of that number
        ended[answer[0]] += 1
        number += 1
    print(f"{work.__name__}, {kind}: {number} requests, {dict(ended)}")
    # The whole folder of another run is one of this run to a machine that has nothing.
    if kind != "another run":
        print(f"{work.__name__}, always {kind}: {work(lab, kind)[0]}")
    assert number > 8
