"""Log-probabilities of answers by the reference of `objective.kind: dpo`, before the first step.

    a new run      pairs of all splits -> engine.evaluate on all ranks -> RUN/reference.safetensors
    a resumed one  that file, which no step changes: the same losses, bit for bit

The reference is the model that the run begins with, in evaluation mode and the precision of the
run; there is no second model on a device. Every pair that fits a row is read once, at the cost of a
forward pass: a third of an epoch of training. A start that was killed before its first checkpoint
computes them again, from the same weights (`keep_start`).
"""

import logging
from collections.abc import Iterator
from dataclasses import replace

from pretrain import dist
from pretrain.checkpoint.state import TrainState
from pretrain.config.data import BatchPlan
from pretrain.data.loader import ValidationLoader
from pretrain.data.stream import open_windows
from pretrain.dist import World
from pretrain.engine.engine import Engine
from pretrain.objective.loss_sums import EVALUATED_SUMS
from pretrain.objective.pairs.preferences import ReferenceTable, add_reference, build_table, read_table
from pretrain.run.heartbeat import Progress
from pretrain.training.claim import Claim
from pretrain.utils.io import write_file
from pretrain.utils.status_line import show_phase
from pretrain.utils.units import plural

log = logging.getLogger(__name__)


def with_reference(
    claim: Claim,
    plan: BatchPlan,
    world: World,
    engine: Engine,
    state: TrainState,
    progress: Progress,
) -> Claim:
    """Returns a claim whose rows of `objective.kind: dpo` have their reference. Collective.

    Raises: DataError: The file of a resumed run, or a shard, is missing or damaged.
    """
    if not claim.config.objective.has_reference:
        return claim
    if state.step:
        table = read_table(claim.folder.reference)
    else:
        table = _compute(claim, plan, world, engine, progress)
    return replace(claim, make_rows=add_reference(claim.make_rows, table))


def _compute(claim: Claim, plan: BatchPlan, world: World, engine: Engine, progress: Progress) -> ReferenceTable:
    path = claim.folder.reference
    show_phase("log-probabilities of all answers by the model that training begins with")
    progress.enter("evaluate")
    mine = []
    for loader in _loaders(claim, plan, world):
        for batch in loader:
            assert batch.pairs is not None, "rows of preferences"
            sums = EVALUATED_SUMS.unpack(engine.evaluate(batch.to(engine.device)).tolist())
            answers = iter(sums["shown"])  # of both answers to each prompt, in turn
            keys = batch.pairs.keys_A.tolist()
            mine.append([list(pair) for pair in zip(keys, answers, answers, strict=True)])
            progress.go_on()
    # Every rank has as many batches: in turn, they are in the order of the rows.
    by_rank = dist.gather_objects(mine)
    pairs = [pair for batches in zip(*by_rank, strict=True) for batch in batches for pair in batch]
    table = build_table([key for key, *_ in pairs], [both for _, *both in pairs])
    if world.is_main:
        claim.check_lease()
        write_file(path, table.dump())
        log.info("reference: %s of answers, in %s", plural(len(table.keys), "pair"), path.name)
    return table


def _loaders(claim: Claim, plan: BatchPlan, world: World) -> Iterator[ValidationLoader]:
    config = claim.config
    for source, store in zip(claim.dataset.sources, claim.stores, strict=True):
        for split in source.index.splits:
            lengths = config.lengths
            yield ValidationLoader(
                open_windows(source.index, store, config.data, lengths, plan.rows, split=split),
                claim.make_rows,
                micro=plan.micro,
                rank=world.data_rank,
                world_size=world.data_size,
                crop=config.data.packing == "padded",
            )
