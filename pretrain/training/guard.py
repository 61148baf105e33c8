"""The guard of a run: comparison of replicas, loss spikes, and rollback in the same process.

    bits of each weight as integers  ->  their sum, wrapping at 64 bits  ->  gathered, one a rank
    sums differ                      ->  sums of each weight gathered: the ranks, the first weight

Replicas exist at ZeRO 0 to 2 and under DDP; at ZeRO 3 there is one copy of each weight. A flipped
bit in memory, a missed update or a faulty kernel does not show in the loss, but ends up in a
checkpoint. All ranks get the same sums, so all judge alike, without communication: some 13 us a
step; the comparison reads every weight once.
"""

import logging
import math
import socket
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NoReturn

import torch
from torch import Tensor

from pretrain import dist
from pretrain.checkpoint.agree import agree
from pretrain.checkpoint.format import list_checkpoints
from pretrain.checkpoint.state import TrainState
from pretrain.config.train import GuardConfig
from pretrain.data.order import SkipRanges
from pretrain.dist import World
from pretrain.engine.engine import Engine, Update
from pretrain.errors import CheckpointError, DivergedError
from pretrain.parts import Part, part_of
from pretrain.training.build import Run
from pretrain.training.rollback import plan_rollback, record_rollback
from pretrain.training.step import StepTotals
from pretrain.utils.units import plural

log = logging.getLogger(__name__)

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(engine: Engine, step: int) -> None:
    """Compares the weights of all ranks: reads each once, gathers 8 bytes a rank. Collective.

    Experts over ranks are compared among the ranks that have the same ones.

    Raises:
        DivergedError: They differ; names the minority of ranks, or all without a majority, and the
            first weight.
    """
    parts = [part_of(weight) for _, weight in engine.working_weights()]
    names, sums = zip(*bit_sums(engine.working_weights()), strict=True)
    each = torch.stack(sums)
    # One total of what all ranks have, and one of this rank's experts.
    widest = max(part.ranks for part in parts)
    shared = sorted({1, widest})
    totals = dist.gather_objects([int(each[_places(parts, n)].sum()) for n in shared])
    ranks = range(len(totals))
    alike = [(0, ranks), *((1, ranks[first::widest]) for first in range(widest) if widest > 1)]
    different = ((kind, group) for kind, group in alike if _differ(totals, kind, group))
    kind, group = next(different, (0, range(0)))
    if not group:
        return
    rows = dist.gather_objects({"sums": each.tolist(), "host": socket.gethostname()})
    odd = [group[place] for place in odd_ones([totals[rank][kind] for rank in group])]
    sums_of = [row["sums"] for row in rows]
    places = _places(parts, shared[kind])
    differing = next(names[place] for place in places if _differ(sums_of, place, group))
    hosts = {rank: rows[rank]["host"] for rank in odd}
    _refuse_replicas(hosts, len(group) - len(odd), differing, step)


def _refuse_replicas(odd: Mapping[int, str], num_alike: int, weight: str, step: int) -> NoReturn:
    listed = " and ".join(f"rank {rank} on {host}" for rank, host in odd.items())
    rest = f"the other {num_alike} agree" if num_alike else "no majority tells which is right"
    raise DivergedError(
        f"the weights of {listed} differ at step {step}, first {weight}; {rest}",
        fix="the last checkpoint is good; look for memory errors there, and resume without these machines",
    )


def _differ(values: Sequence[Sequence[int]], place: int, ranks: Iterable[int]) -> bool:
    return len({values[rank][place] for rank in ranks}) > 1


def _places(parts: list[Part], ranks: int) -> list[int]:
    return [place for place, part in enumerate(parts) if part.ranks == ranks]


def bit_sums(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the sum of the bit patterns of each weight, int64 [], on its device."""
    for name, weight in weights:
        integers = weight.detach().reshape(-1).view(_INTEGERS[weight.element_size()])
        yield name, integers.sum(dtype=torch.int64)


def odd_ones(values: list[int]) -> list[int]:
    """Returns the ranks whose value is not the most frequent one; all ranks at a tie."""
    counts = Counter(values).most_common()
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        return list(range(len(values)))
    return [rank for rank, value in enumerate(values) if value != counts[0][0]]


MAD_TO_SIGMA = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""
LEAST_SIGMA = 1e-3
"""Least sigma as a share of the median, for losses that hardly move."""
TINY = 1e-30


class SpikeDetector:
    """Judges the losses of a run, one a step: 10 us above the median, 1 us below.

        z = (loss - median) / (1.4826 x median absolute deviation)      over the last finite losses

    A spike is a loss whose z exceeds the threshold. OLMo-core's SkipStepOptimizer drops steps that
    are six standard deviations above the mean of the last 128; PaLM went back to a checkpoint and
    skipped the batches (Chowdhery et al. 2022, section 5.1). Median and MAD are used here because
    spikes in the window hardly move them: a second spike after a first is detected too. Every
    finite loss enters the window, spikes too, so that a loss that stays high becomes the new level.

    The window is in `TrainState`, so that a resumed run judges its first loss as it would have.
    """

    def __init__(self, window: int, threshold: float, losses: Iterable[float] = ()) -> None:
        self._losses = deque(losses, maxlen=window)
        self._threshold = threshold
        self._ordered = sorted(self._losses)

    @property
    def losses(self) -> tuple[float, ...]:
        """The window, oldest first."""
        return tuple(self._losses)

    def deviation(self, loss: float) -> float:
        """Returns z of a loss before it enters; 0 below the median, or before half a window.

        A loss that is not finite is a bad step (bad_step.py), and no spike.
        """
        if 2 * len(self._losses) < (self._losses.maxlen or 0) or not math.isfinite(loss):
            return 0.0
        middle = median(self._ordered)
        if loss <= middle:
            return 0.0
        sigma = MAD_TO_SIGMA * median([abs(value - middle) for value in self._ordered])
        return (loss - middle) / max(sigma, LEAST_SIGMA * abs(middle), TINY)

    def is_spike(self, loss: float) -> bool:
        """Returns whether a loss that has not entered yet is a spike."""
        return self.deviation(loss) > self._threshold

    def add(self, loss: float) -> None:
        """Adds the loss of a step to the window, if it is finite."""
        if not math.isfinite(loss):
            return
        if len(self._losses) == self._losses.maxlen:
            del self._ordered[bisect_left(self._ordered, self._losses[0])]
        self._losses.append(loss)
        insort(self._ordered, loss)

    def forget(self) -> None:
        """Empties the window: the losses that come are of another level."""
        self._losses.clear()
        self._ordered.clear()


class SpikeError(DivergedError):
    """A loss spike at which the run goes back (`guard.on_spike: rollback`)."""

    def __init__(self, state: TrainState, what: str) -> None:
        super().__init__(what, fix="lower optim.lr, or raise guard.spike_threshold")
        self.state = state


class Guard:
    """The watch over a run in progress. All ranks call the same methods at the same steps.

    Replicas are compared before each save too, hence `every_save`, which is
    `checkpoint.every_steps`.
    """

    def __init__(
        self, config: GuardConfig, engine: Engine, world: World, losses: Sequence[float], every_save: int
    ) -> None:
        self._config = config
        self._engine = engine
        self._world = world
        self._every_save = every_save
        self._detector = SpikeDetector(config.spike_window, config.spike_threshold, losses)
        self._dropped = False
        self._loss = self._deviation = 0.0
        self._compares = config.check_replicas_every > 0 and world.size > 1 and not engine.is_sharded
        if engine.is_sharded and config.check_replicas_every and world.size > 1:
            text = "guard.check_replicas_every: ZeRO 3 keeps one copy of each weight, none to compare"
            self._say(logging.INFO, text)

    def update(
        self, learning_rate: float, num_targets: int, pending: Callable[[], StepTotals]
    ) -> tuple[Update, StepTotals]:
        """Applies a step, or drops a spike or an empty one; `pending` waits for the exchange."""
        # Without targets, moments and weight decay would move the weights all the same.
        self._dropped = not num_targets
        if self._dropped or self._config.on_spike != "skip":
            # The exchange overlaps with the optimizer.
            return self._engine.update(learning_rate, drop=self._dropped), pending()
        # The decision to drop a step needs the loss of all ranks: the optimizer waits for it.
        agreed = pending()
        self._dropped = self._detector.is_spike(agreed.loss_sum / max(num_targets, 1))
        return self._engine.update(learning_rate, drop=self._dropped), agreed

    def judge(self, state: TrainState, loss: float, num_targets: int, update: Update) -> TrainState:
        """Returns the state after a step with the guard's counters, for resumed runs."""
        is_bad = update.skipped and not self._dropped
        self._loss = loss
        self._deviation = 0.0 if is_bad or not num_targets else self._detector.deviation(loss)
        is_spike = self._deviation > self._config.spike_threshold
        in_a_row = state.spikes_in_a_row + 1 if is_spike else 0
        if num_targets:
            self._detector.add(loss)
        if self._dropped and in_a_row >= self._config.max_skips:
            self._detector.forget()
        return replace(
            state,
            losses=self._detector.losses,
            spikes=state.spikes + is_spike,
            spikes_in_a_row=in_a_row,
            bad_steps_in_a_row=state.bad_steps_in_a_row + 1 if is_bad else 0,
            empty_steps=state.empty_steps + (not num_targets),
        )

    def act(self, state: TrainState) -> None:
        """Responds to a spike, and compares replicas where that is due. Collective.

        Raises:
            DivergedError: Replicas differ.
            SpikeError: The run is to go back.
        """
        if state.spikes_in_a_row:
            self._answer_spike(state)
        every = self._config.check_replicas_every
        before_save = self._every_save and state.step % self._every_save == 0
        if every and (state.step % every == 0 or before_save):
            self.check_replicas(state)

    def check_replicas(self, state: TrainState) -> None:
        """Compares the weights of which every rank has a copy, if so set. Raises: DivergedError."""
        if self._compares:
            check_replicas(self._engine, state.step)

    def _answer_spike(self, state: TrainState) -> None:
        window = len(state.losses) or self._config.spike_window
        text = (
            f"step {state.step} is a loss spike: {self._loss:.4g} is {self._deviation:.1f} robust "
            f"standard deviations above the median of the last {window}"
        )
        if self._config.on_spike == "rollback":
            raise SpikeError(state, text)
        if self._dropped and not state.losses:  # `judge` has cleared the window
            words = "%s; %d in a row were skipped: it is taken for the new level"
            self._say(logging.WARNING, words, text, state.spikes_in_a_row)
        elif self._dropped:
            self._say(logging.WARNING, "%s; it was skipped", text)
        elif state.spikes_in_a_row == 1:
            self._say(logging.WARNING, "%s", text)

    def _say(self, level: int, text: str, *values: object) -> None:
        if self._world.is_main:
            log.log(level, text, *values)


def go_back(run: Run, spike: SpikeError) -> TrainState:
    """Returns to the newest checkpoint in the same process, without the samples up to the spike.

        weights and moments loaded  ->  run.json  ->  ledger and metrics rewound  ->  another loader

    It is the command `pretrain rollback` (rollback.py) without a restart. A run that crashes before
    it has written run.json meets the spike again, and goes back then. Without a checkpoint it
    continues from the present state. A damaged checkpoint is set aside, as at a start. Collective.

    Raises:
        DivergedError: The run went back by itself `guard.max_rollbacks` times already.
        CheckpointError: No checkpoint can be loaded.
        DiskError: The checkpoints cannot be listed, or run.json cannot be written.
    """
    run.progress.enter("load")
    limit = run.config.guard.max_rollbacks
    state = spike.state
    skips = SkipRanges(state.skips)

    def look() -> tuple[int, bool]:
        times = sum(entry["automatic"] for entry in run.folder.read_record().get("rollbacks", []))
        return times, bool(list_checkpoints(run.folder.checkpoints))

    def record(loaded: TrainState) -> tuple[list[list[int]], int]:
        num_samples = skips.place_of(spike.state.position) - skips.place_of(loaded.position)
        rollback = plan_rollback(loaded, skips, num_samples, automatic=True)
        ranges = [list(pair) for pair in record_rollback(run.folder, rollback, skips).ranges]
        return ranges, len(run.folder.read_record()["rollbacks"])

    times, has_saved = agree(lambda: look() if run.world.is_main else None)[0]
    if times >= limit:
        went = f"the run went back {plural(limit, 'time')} already"
        raise DivergedError(f"{spike.what}; {went}", fix=spike.fix)
    outcome = "there is no checkpoint to go back to, training continues"
    if has_saved:
        loaded = run.checkpoints.load_newest(run.engine.state)
        if loaded is None:
            raise CheckpointError("the checkpoint to go back to is gone", where=str(run.folder.checkpoints))
        ranges, rollbacks = agree(lambda: record(loaded) if run.world.is_main else None)[0]
        skips = SkipRanges.of(ranges)
        ours = replace(loaded, data_hash=state.data_hash, tokenizer_hash=state.tokenizer_hash)
        state = ours.leaving_out(skips.ranges)
        run.tracker.rewind(state.step, rollbacks)
        if run.audit is not None:
            run.audit.rewind(state.step)
        outcome = f"back to step {state.step}, without the samples since then"
    if run.world.is_main:
        log.warning("%s; %s", spike.what, outcome)
    run.loader = run.loader.restarted(state.step, state.position, skips)
    return state
