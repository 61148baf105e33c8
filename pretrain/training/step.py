"""One step on a rank, and the exchange of its sums.

    seed_noise  ->  TrainModule: model, loss of a micro-batch  ->  start_exchange  ->  StepTotals

The exchange is the one collective that the loop adds to a step: an all-reduce of a few float64
values during the optimizer's work: losses and counters of the ending step, counters of the coming
one, and flags.

The coming step is here because its loss scale needs the global number of targets before its
backward pass. All ranks get the same sums, so all take the same decision at the same step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pretrain import dist
from pretrain.config.run import RunConfig
from pretrain.data.loader import StepCounts
from pretrain.data.mixture import source_of
from pretrain.dist import World
from pretrain.engine.replicated import KeptTensor
from pretrain.model import LanguageModel
from pretrain.objective import Comparison, Loss, LossOutput
from pretrain.objective.distillation import Distillation
from pretrain.objective.loss_sums import LOSS_SUMS, SumLayout, pack_evaluated
from pretrain.training.balance import find_balance
from pretrain.types import IGNORE_INDEX, Batch


def seed_noise(config: RunConfig, world: World, step: int, micro: int) -> None:
    """Seeds dropout, and any other noise, by counters: a repeated step draws the same, and no generator is saved."""
    # Odd multipliers spread the counters over 64 bits; the sum is unique for any run that fits a cluster.
    counters = (config.seed, step, micro, world.rank)
    factors = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
    seed = sum(c * f for c, f in zip(counters, factors, strict=True)) % 2**63
    # `torch.manual_seed` asks for every kind of device, at a hundred times the cost, in each micro-batch.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


class Figure(NamedTuple):
    """A sum over a step that training shows: its number of values, and a micro-batch's values, detached."""

    size: int
    measure: Callable[[Batch, LossOutput], Tensor]


class TrainModule(nn.Module):
    """Model and objective as one module: an engine's hooks surround all that reads a parameter.

    Attributes:
        targets_per_token: Targets of the global batch over its tokens without padding, set before
            each step. The loss is divided by targets, and losses of experts are means over tokens.
        balance: Balance of the experts of the model; None: it has none.
        comparison: Loss over all micro-batches of a step, between two passes. None: there is none.
        shown: Names of further sums of the loss (`Objective.shown`).
        teacher: Function of a batch: what the model learns of a teacher. None: it has none.
        layout: Sums that are shown in training: of the loss, `nll`, `correct` and `shown.NAME`; of a
            mixture `by_source`, that of -log p(target) for each source, then the targets of each;
            `ahead` of modules of `multi_token` (`LossOutput.ahead`); `routed` of experts
            (`ExpertBalance.shown`).
    """

    def __init__(self, model: LanguageModel, loss: Loss, num_sources: int = 1, shown: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.shown = shown
        self.model = model
        self.balance = find_balance(model)
        self.targets_per_token = 1.0
        self.comparison: Comparison | None = None
        self.teacher: Callable[[Batch], Distillation] | None = None
        self._loss = loss
        # A new figure is a line here.
        self._figures = {
            "nll": Figure(1, lambda batch, loss: loss.nll_sum),
            "correct": Figure(1, lambda batch, loss: loss.num_correct),
        }
        for place, name in enumerate(shown):
            self._figures[f"shown.{name}"] = Figure(1, partial(_shown_sum, place))
        if num_sources > 1:
            by_source = partial(sum_by_source, num_sources=num_sources)
            self._figures["by_source"] = Figure(2 * num_sources, by_source)
        predictors = getattr(model, "multi_token", None)
        if predictors is not None:
            self._figures["ahead"] = Figure(3 * len(predictors.blocks), lambda batch, loss: _exists(loss.ahead))
        if self.balance is not None:
            loads = self.balance.shown
            self._figures["routed"] = Figure(
                self.balance.num_shown, lambda batch, loss: loads(_exists(loss.routing_LW))
            )
        self.layout = SumLayout({name: figure.size for name, figure in self._figures.items()})

    @property
    def kept(self) -> Sequence[KeptTensor]:
        """Tensors that a checkpoint keeps beside the parameters."""
        return () if self.balance is None else self.balance.state

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Runs the model and its loss on a micro-batch.

        Returns:
            The sum of the losses that is minimised, a scalar, and sums by `layout`, without
            gradients by `EVALUATED_SUMS`, detached.
        """
        options = {}
        if self.teacher is not None and self.training:
            options["distillation"] = self.teacher(batch)
        loss = self._loss(self.model, batch, **options)
        if self.training and torch.is_grad_enabled():
            sums = self.layout.pack({name: self._figures[name].measure(batch, loss) for name in self.layout.sizes})
        else:
            sums = pack_evaluated(loss)
        loss_sum = loss.loss_sum
        if self.training and self.balance is not None:
            of_experts = self.balance.loss(_exists(loss.routing_LW))
            if of_experts is not None:
                loss_sum = loss_sum + self.targets_per_token * of_experts
        return loss_sum, sums


def _exists(value: Tensor | None) -> Tensor:
    assert value is not None, "the loss of a model with experts or further tokens has their sums"
    return value


def _shown_sum(place: int, batch: Batch, loss: LossOutput) -> Tensor:
    return _exists(loss.shown_M)[place]


def sum_by_source(batch: Batch, loss: LossOutput, num_sources: int) -> Tensor:
    """Returns loss and targets by source, float64 [2, sources]; 0 where the loss has no `nll_P`."""
    targets_BT = batch.targets_BT
    nll_P = loss.nll_P
    sums = torch.zeros(2, num_sources, dtype=torch.float64, device=targets_BT.device)
    if nll_P is None:
        return sums
    assert batch.sample_ids_B is not None, "a batch of the loader"
    rows, width = targets_BT.shape
    nll_B = torch.zeros(rows, dtype=torch.float64, device=targets_BT.device)
    if batch.target_positions_P is None:
        nll_B += nll_P.view(rows, width).sum(dim=1, dtype=torch.float64)
    else:
        nll_B.index_add_(0, batch.target_positions_P // width, nll_P.double())
    counts_B = (targets_BT != IGNORE_INDEX).sum(dim=1).double()
    return sums.index_add_(1, source_of(batch.sample_ids_B), torch.stack((nll_B, counts_B)))


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums over all ranks."""

    sums: Mapping[str, tuple[float, ...]]  # of the ending step (`TrainModule.layout`)
    done: StepCounts  # counters of the ending step
    coming: StepCounts | None  # counters of the coming step; None where a rank has none
    num_written: int  # ranks whose part of the save in flight is written, or has failed
    stop: bool  # whether any rank was asked to stop
    of_ranks: tuple[float, ...] = ()  # measures of each rank (`RankHealth`)

    @property
    def loss_sum(self) -> float:
        """Sum of -log p(target) over the ending step."""
        return self.sums["nll"][0]

    @property
    def num_correct(self) -> int:
        """Targets of the ending step that are the model's most likely token."""
        return int(self.sums["correct"][0])

    @property
    def next_digest(self) -> str:
        """Digest of the sample ids of the coming step, in hexadecimal; "": there is none."""
        return "" if self.coming is None else f"{self.coming.digest:016x}"

    @property
    def shown(self) -> dict[str, float]:
        """Further sums of its loss by name."""
        prefix = "shown."
        names = [name for name in self.sums if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.sums[name][0] for name in names}

    @property
    def multi_token_loss(self) -> float | None:
        """Mean loss of the modules of `multi_token` over the ending step; None: there are none."""
        ahead = self.sums.get("ahead")
        return None if ahead is None else sum(ahead[::3]) / max(sum(ahead[2::3]), 1.0)

    def of_modules(self) -> dict[str, float]:
        """Returns loss and accuracy of each of these modules, by metric."""
        metrics = {}
        ahead = self.sums.get("ahead", ())
        each = zip(ahead[::3], ahead[1::3], ahead[2::3], strict=True)
        for number, (loss_sum, num_correct, num_targets) in enumerate(each, start=1):
            metrics[f"multi_token_loss_{number}"] = loss_sum / max(num_targets, 1.0)
            metrics[f"multi_token_accuracy_{number}"] = num_correct / max(num_targets, 1.0)
        return metrics


def start_exchange(
    sums: Tensor,
    done: StepCounts,
    coming: StepCounts | None,
    layout: SumLayout = LOSS_SUMS,
    *,
    stop: bool = False,
    is_written: bool = False,
    of_ranks: Sequence[float] = (),
) -> Callable[[], StepTotals]:
    """Begins the all-reduce of `StepTotals`; returns the function that waits for it. Collective.

    `sums` are those of the engine over this rank's micro-batches, float64 by `layout`, on its
    device. They are not read here, so that the host does not wait for the backward pass; it waits for
    no work that is queued between this call and the other. `of_ranks` has a place for each rank.
    """
    counts = {"done": done.pack(), "coming": (coming or StepCounts()).pack()}
    flags = {"missing": (coming is None,), "written": (is_written,), "stop": (stop,)}
    on_host = {**counts, **flags, "ranks": of_ranks}
    whole = SumLayout({**layout.sizes, **{name: len(values) for name, values in on_host.items()}})
    host = torch.tensor([float(value) for values in on_host.values() for value in values], dtype=torch.float64)
    wait = dist.start_all_reduce_sum(torch.cat([sums, host.to(sums.device, non_blocking=True)]))

    def finish() -> StepTotals:
        totals = whole.unpack(wait().tolist())
        return StepTotals(
            sums={name: totals[name] for name in layout.sizes},
            done=StepCounts.unpack(totals["done"]),
            coming=None if totals["missing"][0] else StepCounts.unpack(totals["coming"]),
            num_written=int(totals["written"][0]),
            stop=totals["stop"][0] > 0,
            of_ranks=totals["ranks"],
        )

    return finish
