"""Uploads of committed checkpoints, and the return of the newest one to a machine that has none.

    the start                ->  all ranks wait until the folder in the bucket is this attempt's
    committed and read back  ->  offered  ->  one process at a time uploads (bucket.py)
                              a newer one meanwhile is next; those between are left out
    failed                   ->  a warning with the reason; the next save tries again
    taken by another attempt ->  the run ends
    the end of a run         ->  waited for by all ranks, with progress

In between, training waits for the start of a process, some milliseconds of a thread, and for
nothing else: the upload has the lowest priority of the scheduler, reads files that are on the disk
already, and cannot fail a step. At the end of a run it has the priority of the run.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pretrain import dist
from pretrain.checkpoint.agree import KINDS, agree, nothing
from pretrain.checkpoint.bucket import SILENT_S
from pretrain.checkpoint.format import step_name
from pretrain.checkpoint.retention import Retention
from pretrain.dist import World
from pretrain.errors import CheckpointError, ConfigError, DiskError, LaunchError, LockedError
from pretrain.run.folder import RunDir, check_new
from pretrain.run.owner import this_process
from pretrain.utils.remote import without_secrets
from pretrain.utils.safe_read import parse_json
from pretrain.utils.units import size

log = logging.getLogger(__name__)

PATIENCE_S = 300.0
"""Time without an answer of the store after which an upload, or a fetch, has failed."""
LOOK_S = 0.5
REPORT_S = 30.0
LOWEST = 19
"""Nice value of an upload beside training. No user can raise the priority of a process again."""


class UnansweredError(LaunchError):
    """A store that does not answer, or refuses: nothing is known of what it has (exit code 69)."""


class _StoreWork:
    """A job of bucket.py in its process, and how far it is."""

    def __init__(self, url: str, **job: Any) -> None:
        self._job = {"url": url, "patience_s": PATIENCE_S, **job}
        self._process: subprocess.Popen[str] | None = None
        self.done = self.total = 0
        self.is_dropped = False

    def drop(self) -> None:
        """Ends the process: at any request, it leaves the older checkpoints or the new one."""
        self.is_dropped = True
        if self._process is not None:
            self._process.kill()

    def run(self) -> dict[str, Any]:
        """Returns the result of the job. Raises: errors of `KINDS`."""
        command = [sys.executable, "-m", "pretrain.checkpoint.bucket", str(os.getpid())]
        last: dict[str, Any] = {}
        # A session of its own: a Ctrl-C of the terminal is for the run, which waits for an upload.
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        ) as process:  # fmt: skip
            assert process.stdin and process.stdout and process.stderr
            self._process = process
            if self.is_dropped:
                process.kill()
            process.stdin.write(json.dumps(self._job))
            process.stdin.close()
            for line in process.stdout:
                last = parse_json(line)
                if "note" in last:
                    log.warning("%s", last["note"])
                self.done, self.total = last.get("done", self.done), last.get("total", self.total)
            trace = process.stderr.read().strip().rpartition("\n")[2]
        if "result" in last:
            return dict(last["result"])
        if "failed" in last:
            kind = KINDS.get(last["kind"], UnansweredError)
            raise kind(last["failed"], where=without_secrets(last["where"]), fix=last["fix"])
        text = f"its process has ended with {process.returncode} ({trace})"
        if process.returncode == -signal.SIGALRM:
            text = f"nothing has come for {SILENT_S // 60} minutes"
        raise UnansweredError(text, where=without_secrets(self._job["url"]), fix="see to the store")

    def __str__(self) -> str:
        return f"{size(self.done)} of {size(self.total)}"


def url_of(upload: str, run: RunDir) -> str:
    """Returns the address of a run under `checkpoint.upload`."""
    return f"{upload.rstrip('/')}/{run.path.name}"


def fetch_newest(upload: str, run: RunDir, world: World, go_on: Callable[[], None]) -> int | None:
    """Fetches the newest checkpoint and the records of a run, if its folder is older. Collective.

    Returns its step; None where the folder has all that there is. `go_on` marks progress.

    Raises:
        LockedError: Another attempt has the folder there.
        CheckpointError: Another run is there, or none of its checkpoints is whole.
        LaunchError: The store contradicts itself; or it cannot be asked, and the folder has no
            checkpoint to begin with.
        DiskError: The disk refused.
    """
    facts = {"folder": str(run.path), "process": asdict(this_process()), **_history(run)}
    work = _StoreWork(url_of(upload, run), kind="fetch", **facts)

    def fetch() -> int | None:
        try:
            step = work.run()["step"]
        except UnansweredError as error:
            if not run.has_saved():
                raise
            log.warning("not asked for a newer checkpoint: %s", error)
            return None
        if step is not None:
            log.info("fetched step %d from %s (%s)", step, url_of(upload, run), size(work.total))
        return None if step is None else int(step)

    report = partial(log.info, "fetching a checkpoint: %s", work)
    newest: int | None = _by_main(world, fetch, go_on, report)
    return newest


def _history(run: RunDir) -> dict[str, Any]:
    try:
        record = run.read_record()
    except ConfigError:
        record = {}
    begun = record.get("id")
    try:
        if not run.has_saved():
            check_new(run)
            record = {}
    except (CheckpointError, ConfigError):  # there are signs of a checkpoint
        pass
    facts = {"step": run.newest_step(), "rollbacks": record.get("rollbacks") or []}
    return {"run": record.get("id"), "begun": begun, **facts}


def _by_main(world: World, work: Callable[[], Any], go_on: Callable[[], None], report: Callable[[], None], /) -> Any:
    """Returns the result of `work`, on rank 0, while all ranks mark progress. Collective."""
    future: Future[Any] = Future()
    if world.is_main:
        threading.Thread(target=_settle, args=(future, work), name="store", daemon=True).start()
    reported = time.monotonic()
    is_done = False
    while not is_done:
        go_on()
        if world.is_main:
            wait([future], LOOK_S)
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                report()
        is_done = dist.broadcast_object(future.done())
    return agree(future.result if world.is_main else nothing)[0]


def _settle(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # raised again by `Future.result`
        future.set_exception(error)


@dataclass(kw_only=True)
class Uploads:
    """The uploads of a run, by rank 0. The other ranks have one too, for `finish`."""

    upload: str
    run: RunDir
    world: World
    keep: int
    keep_every_steps: int
    # Protects the checkpoint under way from removal, and ranks those that were evaluated.
    retention: Retention

    def __post_init__(self) -> None:
        self._url = url_of(self.upload, self.run)
        self._process = this_process()
        self._lock = threading.Condition()
        self._next: list[Path] = []
        self._work: _StoreWork | None = None
        self._is_first = True
        self._is_ending = False
        self._failure = ""
        self._lost: LockedError | None = None
        self._finished: list[tuple[int, float]] = []

    def begin(self, go_on: Callable[[], None]) -> None:
        """Takes the folder in the bucket, and uploads a checkpoint that it lacks. Collective.

        Raises:
            LockedError: Another attempt has it.
            CheckpointError: It has another run's checkpoints.
            LaunchError: The store contradicts itself; or it cannot be asked, and there is nothing
                saved here.
            DiskError: The disk refused.
        """
        work = _StoreWork(self._url, **self._job(None))

        def take() -> None:
            try:
                work.run()
                self._is_first = False
            except UnansweredError as error:
                if not self.run.has_saved():
                    raise
                self._failure = str(error)
                log.warning("no checkpoint can be uploaded: %s; the next save tries again", error)

        _by_main(self.world, take, go_on, lambda: log.info("asking for %s", self._url))
        self._offer_newest()

    def _offer_newest(self) -> None:
        if newest := self.run.newest_step():
            self.offer(self.run.checkpoints / step_name(newest))

    def offer(self, checkpoint: Path) -> None:
        """Uploads a committed checkpoint after the one under way, in place of any that waits."""
        if not self.world.is_main:
            return
        with self._lock:
            is_idle = not self._next and self._work is None
            self._next = [checkpoint]
            if is_idle:
                threading.Thread(target=self._run, name="upload", daemon=True).start()

    def take_finished(self) -> list[tuple[int, float]]:
        """Returns (step, seconds) of uploads that have ended since the last call.

        Raises: LockedError: Another attempt has taken the folder in the bucket.
        """
        if self._lost is not None:
            raise self._lost
        finished, self._finished = self._finished, []
        return finished

    def hurry(self) -> None:
        """From now on uploads are waited for, and have the priority of the run."""
        self._is_ending = True

    def finish(self, go_on: Callable[[str], None], *, must: bool) -> None:
        """Waits until everything that was offered is uploaded, or has failed. Collective.

        `go_on` gets the progress as a text.

        Raises:
            LockedError: Another attempt has taken the folder in the bucket.
            DiskError: It failed, with `must`.
        """
        progress = {"text": "uploading"}
        if self._failure:
            self._offer_newest()

        def settle() -> None:
            with self._lock:
                if self._next and self._work is not None:
                    self._work.drop()  # of lowest priority, and no longer the newest
                while self._next or self._work is not None:
                    progress["text"] = f"uploading {self._work}" if self._work else "uploading"
                    self._lock.wait(LOOK_S)
            if self._lost is not None:
                raise self._lost
            if self._failure and must:
                raise DiskError(
                    f"the last checkpoint is not uploaded: {self._failure}",
                    fix="the same command tries again",
                )

        report = lambda: log.info("%s to %s", progress["text"], self._url)  # noqa: E731
        _by_main(self.world, settle, lambda: go_on(progress["text"]), report)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._next:
                    self._work = self.retention.uploading = None
                    self._lock.notify_all()
                    return
                checkpoint = self._next.pop()
                self._work = work = _StoreWork(self._url, **self._job(checkpoint))
                self.retention.uploading = checkpoint
            self._try(work, checkpoint)

    def _try(self, work: _StoreWork, checkpoint: Path) -> None:
        name = checkpoint.name
        begun = time.monotonic()
        try:
            num_bytes = work.run()["bytes"]
        except LockedError as error:
            self._lost = error
            return
        except (LaunchError, CheckpointError, DiskError, OSError, ValueError) as error:
            if not work.is_dropped:
                self._failure = str(error)
                log.warning("%s is not uploaded: %s; the next save tries again", name, error)
            return
        self._is_first = False
        self._failure = ""
        if num_bytes:
            seconds = time.monotonic() - begun
            log.info("uploaded %s to %s: %s in %.1f s", name, self._url, size(num_bytes), seconds)
            self._finished.append((int(name.removeprefix("step-")), seconds))

    def _job(self, checkpoint: Path | None) -> dict[str, Any]:
        us, run = self._process, _history(self.run)["begun"]
        owner = {"run": run, "attempt": us.token, "host": us.host, "process": asdict(us)}
        return {
            "kind": "upload",
            "nice": 0 if checkpoint is None or self._is_ending else LOWEST,
            "checkpoint": None if checkpoint is None else str(checkpoint),
            "owner": owner,
            "is_first": self._is_first,
            "keep": self.keep,
            "keep_every_steps": self.keep_every_steps,
            "best": self.retention.rank_evaluated(),
        }
