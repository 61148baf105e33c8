"""One step on a rank, and the exchange of its sums.

    seed_noise  ->  TrainModule: model, loss of a micro-batch  ->  start_exchange  ->  StepTotals

The exchange is the one collective that the loop adds to a step: an all-reduce of a few float64
values during the optimizer's work: losses and counters of the ending step, counters of the coming
one, and flags.

The coming step is here because its loss scale needs the global number of targets before its
backward pass. All ranks get the same sums, so all take the same decision at the same step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pretrain import dist
from pretrain.config.run import RunConfig
from pretrain.data.loader import StepCounts
from pretrain.dist import World
from pretrain.engine.replicated import KeptTensor
from pretrain.model import LanguageModel
from pretrain.objective import Loss
from pretrain.train.balance import find_balance
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


class TrainModule(nn.Module):
    """Model and objective as one module: an engine's hooks surround all that reads a parameter.

    From 2 sources of a mixture on, training shows the sums of each; with experts, their loads.

    Attributes:
        targets_per_token: Targets of the global batch over its tokens without padding, set before
            each step. The loss is divided by targets, and losses of experts are means over tokens.
        balance: Balance of the experts of the model; None: it has none.
        shown: Names of further sums of the loss (`Objective.shown`).
    """

    def __init__(self, model: LanguageModel, loss: Loss, num_sources: int = 1, shown: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.shown = shown
        self.model = model
        self.balance = find_balance(model)
        self.targets_per_token = 1.0
        self._loss = loss
        self._num_sources = num_sources

    @property
    def num_shown(self) -> int:
        """Number of values shown in training mode."""
        of_sources = 2 * self._num_sources if self._num_sources > 1 else 0
        return 2 + len(self.shown) + of_sources + self.num_ahead + self.num_routed

    @property
    def num_ahead(self) -> int:
        """Number of these that are of modules of `multi_token`, before those of experts."""
        predictors = getattr(self.model, "multi_token", None)
        return 0 if predictors is None else 3 * len(predictors.blocks)

    @property
    def num_routed(self) -> int:
        """Number of these that are of experts, the last ones."""
        return 0 if self.balance is None else self.balance.num_shown

    @property
    def kept(self) -> Sequence[KeptTensor]:
        """Tensors that a checkpoint keeps beside the parameters."""
        return () if self.balance is None else self.balance.state

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Runs the model and its loss on a micro-batch.

        Returns:
            The sum of the losses that is minimised, a scalar, and shown values, detached: float64
            [2], the sum of -log p(target) and the number of correct targets, then what the loss
            shows besides. For a mixture in training mode also that sum for each source, then the
            targets of each; then those of `LossOutput.ahead`, and then `ExpertBalance.shown`.
        """
        found = self._loss(self.model, batch)
        shown = torch.stack((found.nll_sum.double(), found.num_correct.double()))
        if found.shown_M is not None:
            shown = torch.cat((shown, found.shown_M))
        if self.training and self._num_sources > 1:
            shown = torch.cat((shown, sum_by_source(batch, found.nll_P, self._num_sources).flatten()))
        if found.ahead is not None:
            shown = torch.cat((shown, found.ahead.flatten()))
        loss_sum = found.loss_sum
        if self.training and self.balance is not None:
            assert found.routing_LW is not None, "the loss of a model with experts has its routing"
            shown = torch.cat((shown, self.balance.shown(found.routing_LW)))
            of_experts = self.balance.loss(found.routing_LW)
            if of_experts is not None:
                loss_sum = loss_sum + self.targets_per_token * of_experts
        return loss_sum, shown


def sum_by_source(batch: Batch, nll_P: Tensor | None, num_sources: int) -> Tensor:
    """Returns loss and targets by source, float64 [2, sources]; 0 where `nll_P` is None."""
    targets_BT = batch.targets_BT
    sums = torch.zeros(2, num_sources, dtype=torch.float64, device=targets_BT.device)
    if nll_P is None:
        return sums
    assert batch.sources_B is not None, "a batch of the loader"
    rows, width = targets_BT.shape
    nll_B = torch.zeros(rows, dtype=torch.float64, device=targets_BT.device)
    if batch.target_positions_P is None:
        nll_B += nll_P.view(rows, width).sum(dim=1, dtype=torch.float64)
    else:
        nll_B.index_add_(0, batch.target_positions_P // width, nll_P.double())
    counts_B = (targets_BT != IGNORE_INDEX).sum(dim=1).double()
    return sums.index_add_(1, batch.sources_B, torch.stack((nll_B, counts_B)))


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums over all ranks."""

    loss_sum: float  # sum of -log p(target) over the ending step
    num_correct: int  # targets of the ending step that are the model's most likely token
    shown: tuple[float, ...]  # further sums of its loss (`TrainModule.shown`)
    # For a mixture the sum of -log p(target) over each source, then the targets of each; else
    # empty.
    by_source: tuple[float, ...]
    done: StepCounts  # counters of the ending step
    coming: StepCounts | None  # counters of the coming step; None where a rank has none
    num_written: int  # ranks whose part of the save in flight is written, or has failed
    stop: bool  # whether any rank was asked to stop
    routed: tuple[float, ...] = ()  # `ExpertBalance.shown`; empty without experts
    ahead: tuple[float, ...] = ()  # `LossOutput.ahead`, flattened; empty without such modules

    @property
    def multi_token_loss(self) -> float | None:
        """Mean loss of the modules of `multi_token` over the ending step; None: there are none."""
        return None if not self.ahead else sum(self.ahead[::3]) / max(sum(self.ahead[2::3]), 1.0)

    def of_modules(self) -> dict[str, float]:
        """Returns loss and accuracy of each of these modules, by metric."""
        found = {}
        each = zip(self.ahead[::3], self.ahead[1::3], self.ahead[2::3], strict=True)
        for number, (loss_sum, num_correct, num_targets) in enumerate(each, start=1):
            found[f"multi_token_loss_{number}"] = loss_sum / max(num_targets, 1.0)
            found[f"multi_token_accuracy_{number}"] = num_correct / max(num_targets, 1.0)
        return found


def start_exchange(
    sums: Tensor,
    done: StepCounts,
    coming: StepCounts | None,
    *,
    stop: bool = False,
    is_written: bool = False,
    num_shown: int = 0,
    num_ahead: int = 0,
    num_routed: int = 0,
) -> Callable[[], StepTotals]:
    """Begins the all-reduce of `StepTotals`; returns the function that waits for it. Collective.

    `sums` are those of the engine over this rank's micro-batches, float64 [2 + `num_shown` +
    2 per source + `num_ahead` + `num_routed`], on its device. They are not read here, so that the
    host does not wait for the backward pass; it waits for no work that is queued between this call
    and the other.
    """
    flags = (float(coming is None), float(is_written), float(stop))
    parts = [done.pack(), (coming or StepCounts()).pack(), flags]
    host = torch.tensor([value for part in parts for value in part], dtype=torch.float64)
    values = torch.cat([sums, host.to(sums.device, non_blocking=True)])
    wait = dist.start_all_reduce_sum(values)

    def finish() -> StepTotals:
        totals = wait().split([len(sums), *map(len, parts)])
        ours, ending, following, flags = (part.tolist() for part in totals)
        loss_sum, num_correct, *further = ours
        num_missing, num_written, num_stops = flags
        last = len(further) - num_routed
        first = last - num_ahead
        return StepTotals(
            loss_sum=loss_sum,
            num_correct=int(num_correct),
            shown=tuple(further[:num_shown]),
            by_source=tuple(further[num_shown:first]),
            done=StepCounts.unpack(ending),
            coming=None if num_missing else StepCounts.unpack(following),
            num_written=int(num_written),
            stop=num_stops > 0,
            routed=tuple(further[last:]),
            ahead=tuple(further[first:last]),
        )

    return finish
