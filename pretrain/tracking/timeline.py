"""Where the time of a step goes: data, forward, backward, optimizer, communication, evaluation, checkpoint, other.

    timeline.enter("forward")    the part before it ends here
    timeline.end_step()          the step ends here
    metrics |= timeline.take()   seconds a step of each part since the last call; they add up to the time that passed

On a CPU parts are cut by the clock. On CUDA, where the host runs ahead, they are cut by events on the stream, read a
step late, so that nothing waits for them: a part lasts until the device has done what it was given in it.

Not here: communication inside the engine. Gradients are reduced under the backward pass, and weights gathered under
the optimizer: what of that is exposed counts there. `communication` is the wait for the exchange of the loop, which
ends when the slowest rank has come; a profile (`profile.steps`) shows every collective by itself.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PARTS = ("data", "forward", "backward", "optimizer", "communication", "evaluation", "checkpoint", "other")


class Timeline:
    """Cuts time into parts. Costs about 0.3 us a cut on the host, 3 us with events.

    Args:
        on_cuda: Cut by CUDA events.
        clock: Monotonic seconds, for the host.
    """

    def __init__(self, on_cuda: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = _record_event if on_cuda else clock
        self._on_cuda = on_cuda
        self._part, self._since = "other", self._clock()
        self._cuts: deque[tuple[str, Any, Any]] = deque()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._num_steps = 0

    @property
    def part(self) -> str:
        """The part that runs."""
        return self._part

    def enter(self, part: str) -> None:
        """Ends the part that runs, and begins another, one of PARTS."""
        now = self._clock()
        if self._on_cuda:
            self._cuts.append((self._part, self._since, now))
        else:
            self._seconds[self._part] += now - self._since
        self._part, self._since = part, now

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Counts the body as `part`; then the part that ran before goes on."""
        before = self._part
        self.enter(part)
        yield
        self.enter(before)

    def after_forward(self, *_: object) -> None:
        """A forward hook of the module that is trained: what follows is the backward pass. Evaluation has none."""
        if self._part == "forward":
            self.enter("backward")

    def end_step(self) -> None:
        """Ends a step; what follows until the next part is `other`."""
        self.enter("other")
        self._num_steps += 1

    def take(self) -> dict[str, float]:
        """Returns `data_s`, `forward_s` and so on, a step, of the steps that have ended since the last call.

        Parts that took no time are left out; without a step there is nothing.
        """
        while self._cuts and self._cuts[0][2].query():
            part, start, end = self._cuts.popleft()
            self._seconds[part] += start.elapsed_time(end) / 1e3
        steps, self._num_steps = self._num_steps, 0
        if not steps:
            return {}
        seconds, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return {f"{part}_s": value / steps for part, value in seconds.items() if value}


def _record_event() -> Any:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
