"""Prefetching on background threads, with results in order.

    make(0), make(1), ...  up to `depth` ahead of the consumer  -->  take() returns them by index

The order of results is the order of indices, whichever thread is faster. A wait ends at a stop
request: a hanging disk or server must not keep a run from saving.
"""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

from pretrain.shards.store import WaitStoppedError

Item = TypeVar("Item")

POLL_S = 0.1


class Prefetcher(Generic[Item]):
    """Calls `make` with 0, 1, 2, ... ahead of the consumer, from several threads at once.

    `depth` items are in flight or ready. Without `workers`, `take` calls `make` itself; without a
    `total`, there is no end. `stop` ends a wait for a thread when it returns True.
    """

    def __init__(
        self,
        make: Callable[[int], Item],
        *,
        depth: int,
        workers: int,
        total: int | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        # Seconds that `take` has waited: above zero if the consumer is faster than the threads.
        self.wait_s = 0.0
        self._make = make
        self._total = total
        self._stop = stop
        self._next = 0
        self._is_stuck = False
        # Threads, not processes: numpy copies, CRC32 and page faults release the interpreter lock.
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="data") if workers else None
        self._queue: deque[Callable[[], Item]] = deque()
        for _ in range(depth):
            self._submit()

    def take(self) -> Item:
        """Returns the next item; an exception of `make` is raised here, and ends the work.

        Raises: StopIteration, after the last or once closed; WaitStoppedError.
        """
        if not self._queue:
            raise StopIteration
        started = time.perf_counter()
        try:
            item = self._queue.popleft()()
        except BaseException:
            self.close()
            raise
        self.wait_s += time.perf_counter() - started
        self._submit()
        return item

    def close(self) -> None:
        """Drops the remaining items and joins the threads, unless one is stuck. Idempotent."""
        self._queue.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=not self._is_stuck, cancel_futures=True)

    def _submit(self) -> None:
        if self._total is None or self._next < self._total:
            make = partial(self._make, self._next)
            # Without threads, an item is made when it is taken.
            self._queue.append(make if self._pool is None else partial(self._wait_for, self._pool.submit(make)))
            self._next += 1

    def _wait_for(self, future: "Future[Item]") -> Item:
        while not future.done():
            with suppress(TimeoutError):
                future.exception(POLL_S)
            if not future.done() and self._stop():
                self._is_stuck = True
                raise WaitStoppedError
        return future.result()
