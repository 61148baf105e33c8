"""Where ranks tell each other how they are: a few keys in the store that the process group was set up through.

A connection of its own, so that nothing waits behind the main thread's. Every call may block without limit when the
store's process is frozen: only a thread that may be left behind makes them.
"""

import contextlib
import json
import os
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as td

from pretrain.run.progress import Beat
from pretrain.run.verdict import Verdict

CONNECT_S = 5.0
ANSWER_S = 1e6
"""As good as never: who keeps the store may stand still for a while, and is not gone; how long it is silent, others
measure and judge. The longest that torch waits is 2^31 milliseconds."""


class Board:
    """The keys of one job.

    Args:
        host: Where the store is.
        port: Its port.

    Raises:
        DistError: It cannot be reached; every method may raise it.
    """

    def __init__(self, host: str, port: int) -> None:
        timeout = timedelta(seconds=CONNECT_S)
        store = td.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        store.set_timeout(timedelta(seconds=ANSWER_S))
        # torchrun's store outlives an attempt, and its verdict must not.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = td.PrefixStore(f"pretrain-watchdog-{attempt}", store)

    def publish(self, beat: Beat) -> None:
        """Replaces this rank's heartbeat."""
        self._store.set(f"beat-{beat.rank}", json.dumps(beat.to_json()))

    def read(self, ranks: Iterable[int]) -> list[Beat]:
        """Returns the heartbeats of those of `ranks` that have one."""
        keys = [f"beat-{rank}" for rank in ranks]
        found = [key for key in keys if self._store.check([key])]
        return [Beat(**json.loads(text)) for text in self._store.multi_get(found)] if found else []

    def verdict(self) -> Verdict | None:
        """Returns why the job ends, if somebody has said so."""
        return Verdict.from_json(json.loads(self._store.get("verdict"))) if self._store.check(["verdict"]) else None

    def conclude(self, verdict: Verdict) -> Verdict:
        """Says why the job ends, unless somebody has; returns what stands."""
        return Verdict.from_json(json.loads(self._store.compare_set("verdict", "", json.dumps(verdict.to_json()))))


def num_collectives() -> int:
    """Returns how many collectives this process has begun, over all process groups; 0 where torch does not say."""
    from torch.distributed import distributed_c10d

    with contextlib.suppress(AttributeError, RuntimeError):
        groups = list(distributed_c10d._world.pg_map)
        return sum(group._get_sequence_number_for_group() for group in groups)
    return 0
