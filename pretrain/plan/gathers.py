"""Weights that ZeRO stage 3 gathers in a micro-batch, by the rules of DeepSpeed's coordinator.

    order of use   forward pass, then back; a checkpointed block forward again before it goes back
    before a use   what is missing is gathered, and a bucket of what comes next; such a bucket also
                   before each module without large weights
    after a use    released, unless used again within `MAX_LIVE` values, or passed over by the
                   search for what comes next

Small tensors, which are always whole, are left out. A weight of more than `MAX_LIVE` values, or
with so many between its uses, is gathered at each: under checkpointing up to three times. The rules
are those of `partitioned_param_coordinator.py` once it has seen a whole micro-batch; a step that
the real engine takes gathers the same bytes (`tests/integration/test_collectives.py`).
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby, islice
from typing import Any, Literal, NamedTuple

from pretrain.config.engine import EngineConfig
from pretrain.config.model.parts import ModelCounts, counts_of
from pretrain.config.model.parts.transformer import TransformerCounts
from pretrain.plan.params import names_of_experts, names_of_matrices, parameter_shapes
from pretrain.plan.task import TrainingTask

MAX_LIVE = 1_000_000_000
"""DeepSpeed's default of `stage3_max_live_parameters` and of `stage3_max_reuse_distance`."""

Phase = Literal["loss", "turn", "blocks", "end"]
"""The head's forward pass; its backward pass; all blocks; what is behind all blocks."""


class Step(NamedTuple):
    """A use of a module; one whose input is computed again is fetched before, released after."""

    phase: Phase
    kind: Literal["forward", "again", "backward", "fetch", "release"]
    names: tuple[str, ...]
    looks: int = 0  # modules without large weights since the step before


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Values that a rank gathers in a micro-batch, and the most that it has at once."""

    gathered: int  # values gathered, each time that they are
    small: int  # values of the tensors that are always whole, gathered once a step
    whole: dict[Phase, int]  # most whole weights, whole gradients, and copies of these in a message


def _block(name: str) -> str | None:
    words = name.split(".")
    return ".".join(words[: words.index("blocks") + 2]) if "blocks" in words else None


def _looks(modules: Sequence[str], large: Collection[str]) -> dict[str, int]:
    """Returns for each module with large weights how many others are entered since the last one.

    Those without parameters of their own or below them, such as a dropout, are not known here.
    """
    looks: dict[str, int] = {}
    entered, before = 0, ""
    for module in modules:
        words = module.split(".")
        parents = (".".join(words[:n]) for n in range(1, len(words)) if words[n - 1] != "blocks")
        entered += sum(not before.startswith(f"{parent}.") for parent in parents)
        if module in large:
            looks[module], entered = entered, 0
        else:
            entered += 1
        before = module
    return looks


def _steps(
    counts: ModelCounts, every_name: Sequence[str], names: list[str], engine: EngineConfig, device: str
) -> list[Step]:
    """Returns the uses of modules with large weights, `names`, in a micro-batch, in order."""
    by_block = engine.compiles(device)  # gathered as a whole (`set_z3_leaf_modules`)
    every = 0
    if engine.activation_checkpointing != "none" and not by_block:
        every = engine.activation_checkpointing_every

    def module(name: str) -> str:
        return (by_block and _block(name)) or name.rpartition(".")[0]

    modules = list(dict.fromkeys(map(module, every_name)))
    large = set(map(module, names))
    looks, looks_back = _looks(modules, large), _looks(modules[::-1], large)

    def forth(kind: Any, used: tuple[str, ...]) -> Step:
        return Step("blocks", kind, used, looks[module(used[0])])

    def back(kind: Any, used: tuple[str, ...]) -> Step:
        return Step("blocks", kind, used, looks_back[module(used[0])])

    forward = [tuple(used) for _, used in groupby(names, module)]
    if counts.reads_table_twice and "embedding.weight" in names:
        forward.append(("embedding.weight",))
    steps = [forth("forward", used) for used in forward]
    if counts.has_head:
        steps[-1] = steps[-1]._replace(phase="loss")
    return steps + _backward(counts, forward, every, forth, back)


_Used = tuple[str, ...]
_MakeStep = Callable[[Any, _Used], Step]


def _backward(
    counts: ModelCounts, forward: Sequence[_Used], every: int, forth: _MakeStep, back: _MakeStep
) -> list[Step]:
    """Returns the uses of the backward pass; each `every`th block computes its input again."""
    steps: list[Step] = []
    done = 0  # steps up to the end of the last block
    for block, group in groupby(reversed(forward), lambda used: _block(used[0])):
        uses = list(group)
        if block is None or not every or int(block.split(".")[-1]) % every:
            phase: Phase = "blocks" if done or block else "turn"
            steps += [back("backward", used)._replace(phase=phase) for used in uses]
        else:
            later = []
            if isinstance(counts, TransformerCounts) and counts.norms_first(block):
                # The gradient reaches the last product first, whose input is then computed again.
                last = uses.pop(0)
                steps.append(back("fetch", last))
                later = [forth("fetch", last), Step("blocks", "release", last)]
            steps += [forth("again", used) for used in reversed(uses)]
            steps += later
            steps += [back("backward", used) for used in uses]
        if block:
            done = len(steps)
    done = done or len(steps)
    return steps[:done] + [step._replace(phase="end") for step in steps[done:]]


@dataclass
class _Coordinator:
    """The state of DeepSpeed's coordinator, and of its bucket of gradients."""

    sizes: dict[str, int]  # values of each weight
    trained: Collection[str]  # those with a gradient
    alone: Collection[str]  # those that no other rank has, gathered without a byte
    ahead: int  # values gathered ahead of use
    bucket: int  # values of gradients reduced at once
    ranks: int
    copies: int  # size of a message's copies in that of its gradients
    by_block: bool  # blocks are gathered as a whole
    turn: int = -1  # first step back, where the search of a block meets the model, with all weights
    live: set[str] = field(default_factory=set)
    held: int = 0  # values of these
    gathered: int = 0
    flying: list[list[str]] = field(default_factory=list)  # gathered as one, and not yet used
    again: set[str] = field(default_factory=set)  # released, but still saved for the backward pass
    marked: dict[str, int] = field(default_factory=dict)  # last use that the search has seen
    pending: list[int] = field(default_factory=list)  # gradients in the bucket
    whole: dict[Phase, int] = field(default_factory=lambda: {"loss": 0, "turn": 0, "blocks": 0, "end": 0})

    def run(self, steps: tuple[Step, ...]) -> None:
        trace = [step.names for step in steps if step.kind != "release"]
        coming = deque((name, place) for place, names in enumerate(trace) for name in names)
        if self.by_block:
            self.turn = [step.kind for step in steps].index("backward")
        place = 0
        before: Phase = "blocks"
        for step in steps:
            if step.kind != "release":
                for _ in range(step.looks):
                    self._look_ahead(coming)
                if step.looks and self.trained and step.kind in ("fetch", "backward"):
                    self._reduce(before, 1)  # gradients of a norm, which send a full bucket
                self._fetch(step, coming, place)
                place += 1
            self._note(step.phase, 0)
            if step.kind in ("backward", "release"):
                self._pass_back(step)
            if step.kind != "fetch":
                self._release(step, trace, place)
            before = step.phase
        self._note(steps[-1].phase, self._message())

    def _fetch(self, step: Step, coming: deque[tuple[str, int]], place: int) -> None:
        self._gather([name for name in step.names if name not in self.live])
        fresh = {name for name in step.names if self.marked.get(name, -1) < place}
        while fresh:
            name, self.marked[name] = coming.popleft()
            fresh.discard(name)
        self._land(step)
        self._look_ahead(coming)

    def _pass_back(self, step: Step) -> None:
        for name in step.names:
            self._note(step.phase, self.sizes[name] if name in self.trained else 0)
        # What is saved goes before gradients arrive.
        self.again.difference_update(step.names)
        for name in step.names:
            if name in self.trained:
                self._reduce(step.phase, self.sizes[name])

    def _gather(self, names: list[str]) -> None:
        self.live.update(names)
        self.held += sum(self.sizes[name] for name in names)
        self.gathered += sum(self.sizes[name] for name in names if name not in self.alone)
        if len(names) > 1:
            self.flying.append(names)

    def _land(self, step: Step) -> None:
        """Copies the weights that this step waits for out of their message, which is as large."""
        for names in [names for names in self.flying if not set(names).isdisjoint(step.names)]:
            self._note(step.phase, sum(self.sizes[name] for name in names))
            self.flying.remove(names)

    def _look_ahead(self, coming: deque[tuple[str, int]]) -> None:
        most = min(MAX_LIVE - self.held, self.ahead)
        names: list[str] = []
        values = 0
        while coming and values < most:
            name, place = coming.popleft()
            self.marked[name] = max(place, self.marked.get(name, -1))
            if name not in self.live and name not in names:
                names.append(name)
                values += self.sizes[name]
        self._gather(names)

    def _release(self, step: Step, trace: list[tuple[str, ...]], place: int) -> None:
        gone = {name for name in step.names if self.marked.get(name, -1) <= place}
        passed = 0
        for number, later in enumerate(islice(trace, place, None), place):
            if passed >= MAX_LIVE:
                break
            if number == self.turn:
                gone.clear()
                break
            gone.difference_update(later)
            passed += sum(self.sizes[name] for name in later)
        for name in gone & self.live:
            self.live.remove(name)
            self.held -= self.sizes[name]
            if step.kind == "again":  # torch's checkpoint saves an alias of its memory
                self.again.add(name)

    def _note(self, phase: Phase, more: int) -> None:
        # Gradients that fit the bucket lie in it, and count as a bucket.
        extra = sum(size for size in self.pending if size > self.bucket)
        extra += sum(self.sizes[name] for name in self.again)
        self.whole[phase] = max(self.whole[phase], self.held + extra + more)

    def _message(self) -> int:
        """Returns the values of the copies that a message of the bucket is made of."""
        values = sum(self.pending)
        is_view = len(self.pending) == 1 and values % self.ranks == 0 and self.copies == 1
        return 0 if is_view else self.copies * values

    def _reduce(self, phase: Phase, size: int) -> None:
        if self.pending and sum(self.pending) + size > self.bucket:
            self._note(phase, size + self._message())
            self.pending.clear()
        self.pending.append(size)
        self._note(phase, 0)


@lru_cache(maxsize=64)
def _pass(
    sizes: tuple[tuple[str, int], ...],
    steps: tuple[Step, ...],
    trained: frozenset[str] | None,
    alone: frozenset[str],
    limits: tuple[int, int, int, int],
    by_block: bool,
) -> _Coordinator:
    each = dict(sizes)
    coordinator = _Coordinator(each, each if trained is None else trained, alone, *limits, by_block)
    if steps:
        coordinator.run(steps)
    return coordinator


def plan_gathers(
    task: TrainingTask,
    engine: EngineConfig,
    device: str,
    ranks: int,
    *,
    ahead: int,
    bucket: int,
    small: int,
) -> GatherPlan:
    """Plans a micro-batch of stage 3; adapters are not gathered here.

    Args:
        task: Model and its trained parameters.
        engine: Checkpointing, compilation and precision are read.
        device: `cuda` or `cpu`.
        ranks: Number of ranks.
        ahead: Values gathered ahead of use (`stage3_prefetch_bucket_size`).
        bucket: Values of gradients that are reduced at once.
        small: Tensors of no more values are always whole (`stage3_param_persistence_threshold`).
    """
    shapes = parameter_shapes(task.model)
    shared = names_of_matrices(task.model) if task.tensor > 1 else names_of_experts(task.model)
    sizes = {name: math.prod(shape) // (task.parts if name in shared else 1) for name, shape in shapes.items()}
    # With as many ranks as share these, each is alone with its own.
    alone = frozenset(shared) if ranks == task.parts else frozenset()
    counts = counts_of(task.model)
    order = counts.names_in_order()
    large = [name for name in order if sizes[name] > small]
    steps = tuple(_steps(counts, order, large, engine, device))
    # A message in another dtype, of twice the size, is made of a copy of each gradient.
    copies = 1 if engine.gradient_bytes == engine.compute_bytes else 4
    trained = None if task.trained is None else task.trained.names
    each = tuple((name, sizes[name]) for name in dict.fromkeys(large))
    state = _pass(each, steps, trained, alone, (ahead, bucket, ranks, copies), engine.compiles(device))
    whole = sum(size for _, size in each)
    return GatherPlan(state.gathered, sum(sizes.values()) - whole, dict(state.whole))
