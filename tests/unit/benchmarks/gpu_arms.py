"""Arms that go wrong, for the tests of the GPU campaign's runner."""

import threading

from benchmarks.gpu_bench import Bench
from pretrain.errors import ConfigError


def half_fails(bench: Bench) -> None:
    """Measures one case, fails in a second, is refused in a third, and measures a fourth."""
    for number in range(4):
        with bench.case(f"case {number}", {}):
            if number == 1:
                raise ValueError("no such number")
            if number == 2:
                raise ConfigError("this machine has no such kernel", fix="use another")
            bench.write(f"case {number}", {}, **bench.measure(bench.synchronize, 2))


def dies(bench: Bench) -> None:
    """Ends without a word after a row."""
    bench.write("before", {}, value=1)
    raise SystemExit(3)


def hangs(bench: Bench) -> None:
    """Never ends."""
    threading.Event().wait()
