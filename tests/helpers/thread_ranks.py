"""Ranks of a world that are threads of one process: for what needs no process group."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pretrain.dist import World
from tests.helpers.waiting import LIMIT_S

Result = TypeVar("Result")


class Ranks:
    """The ranks of a world as threads, and the one collective that they need."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier, self._values, self._here = threading.Barrier(size), [None] * size, threading.local()

    @property
    def rank(self) -> int:
        """The calling thread's."""
        return self._here.rank if self.size > 1 else 0

    def run(self, function: Callable[[World], Result]) -> list[Result]:
        """Calls `function(world)` on every rank at once; returns what each returned."""
        if self.size == 1:
            return [function(World(0, 1, 0))]

        def called(rank: int) -> Result:
            self._here.rank = rank
            try:
                return function(World(rank, self.size, rank))
            except BaseException:
                self._barrier.abort()  # the others would wait for this rank
                raise

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(called, rank) for rank in range(self.size)]
        errors = [error for future in futures if (error := future.exception())]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def gather(self, value: Any) -> list[Any]:
        """Returns every rank's value. Collective."""
        if self.size == 1:
            return [value]
        self._values[self.rank] = value
        self._barrier.wait(LIMIT_S)
        values = list(self._values)
        self._barrier.wait(LIMIT_S)
        return values
