"""Workers of `prepare` that are forked from a process which has imported their modules: a second a worker.

Real ones, which import for themselves and die with their parent, are in `tests/unit/preparation/test_pool.py`.
"""

import multiprocessing
from multiprocessing.context import BaseContext
from types import SimpleNamespace

PRELOADED = ["tests.helpers.warm_pool_worker", "pretrain.preparation.prepare", "pretrain.preparation.convert"]


def warm_context(_: str) -> BaseContext:
    """Stands for `multiprocessing.get_context`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


WARM = SimpleNamespace(get_context=warm_context)
"""Stands for `multiprocessing` in the process that has the pool."""
