"""For all tests."""

import gc
import logging
import os
import signal

import hypothesis
import pytest

# What a developer's shell may have set, and a test must not pass or fail by: an unbuffered child has nothing left to
# flush when it ends, tables and colours follow the terminal, and a rank or a job is what a launcher starts.
_OF_A_SHELL = ("PYTHONUNBUFFERED", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TORCH_LOGS", "PRETRAIN_DEBUG",
               "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # fmt: skip
_GROUPS_OF_A_SHELL = ("SLURM", "TORCHELASTIC_", "WANDB_")
for _name in [name for name in os.environ if name in _OF_A_SHELL or name.startswith(_GROUPS_OF_A_SHELL)]:
    del os.environ[_name]

# One thread a process, set before torch is imported: several test processes and their ranks share few cores, and
# threads that wait for each other there make small models a hundred times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Else the first graph that is compiled starts a pool of processes that import torch, whatever its backend.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# torch's store looks up the name of whoever connects, and all others wait: five seconds a lost answer is too long.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A shell starts background jobs with SIGINT ignored, and what is ignored is inherited: Ctrl-C tests would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time, and no time limit on one: the machine may be busy.
hypothesis.settings.register_profile("pretrain", derandomize=True, deadline=None)
hypothesis.settings.load_profile("pretrain")


# Until all is imported, which leaves no garbage: each collection would look through a million objects.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option of `make smoke`."""
    parser.addoption("--smoke", action="store_true", help="run the first fast test of each file alone")


@pytest.hookimpl(trylast=True)  # after the marks have left out theirs
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the first test of each file, with `--smoke`."""
    if config.getoption("--smoke"):
        first = {item.path: item for item in reversed(items)}
        config.hook.pytest_deselected(items=[item for item in items if first[item.path] is not item])
        items[:] = [item for item in items if first[item.path] is item]


def pytest_collection_finish() -> None:
    """Leaves what was imported so far to itself."""
    gc.freeze()
    gc.enable()
    # Thousands of models are built here: collections at every 700 objects cost some 5% of the time of their tests.
    gc.set_threshold(20_000, 20, 20)


def pytest_runtest_teardown() -> None:
    """Undoes `setup_logging`, which commands that run in the process of a test call: caplog would miss records."""
    from pretrain.utils.log import OWN_LOGGERS

    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if hasattr(handler, "installed_by_pretrain")]:
        root.removeHandler(handler)
        handler.close()
    for logger in map(logging.getLogger, OWN_LOGGERS):
        if logger.level != logging.NOTSET:  # setting it empties the caches of all loggers
            logger.setLevel(logging.NOTSET)
    logging.captureWarnings(False)
