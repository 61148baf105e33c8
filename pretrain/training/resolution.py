"""Resolution of a run's config: every change after its validation, in order. Nothing changes it afterwards.

    load_config          a preset, or the model of `init.from`, under `model`; validation    (config/load.py)
    fit_config           vocabulary, special tokens and labels of the data                   (pretrain/resolve.py)
    follow_stored        start of the run so far; refuses what a resumption must not change
    resolve_with_ranks   the same of a run that is fetched from `checkpoint.upload`; newest checkpoint of another run

The first three need no other rank: `claim_run` calls them before there is a process group.
"""

import logging
from pathlib import Path

from pretrain.artifact.model_path import newest_checkpoint
from pretrain.artifact.source import find_base, split_average
from pretrain.checkpoint.agree import agree, wait_until_visible
from pretrain.checkpoint.retention import mark_in_use
from pretrain.checkpoint.upload import fetch_newest
from pretrain.config.load import load_config
from pretrain.config.resumption import check_config, check_start, has_start, keep_start
from pretrain.config.run import RunConfig
from pretrain.dist import World
from pretrain.errors import DiskError
from pretrain.run.folder import RunDir
from pretrain.run.heartbeat import Progress

log = logging.getLogger(__name__)


def follow_stored(config: RunConfig, folder: RunDir) -> RunConfig:
    """Compares a config with its run folder's, if any, and keeps the start of the run. Raises: ConfigError."""
    has_saved = folder.has_saved()
    if folder.config.is_file():
        stored = load_config(folder.config, extensions="ignore")
        merged = keep_start(stored, config)
        # An attempt that saved nothing takes its weights again: the same ones, though that run trained on.
        config = merged if has_saved or has_start(merged) else config
        effects = course_changes(stored, config, folder.newest_step()) if has_saved else []
        check_config(stored, config, has_saved=has_saved, effects=effects)
    check_start(config, has_saved=has_saved)
    return config


def resolve_with_ranks(config: RunConfig, folder: RunDir, world: World, progress: Progress) -> RunConfig:
    """Fetches what the run folder lacks of `checkpoint.upload`, and pins the start. Collective.

    Raises:
        ConfigError: The config contradicts the run that was fetched.
        CheckpointError: The store has another run, or no whole checkpoint of this one; or the run
            in `init.from` has no intact one.
        LaunchError: The store cannot be asked, and there is no checkpoint here.
    """
    upload = config.checkpoint.upload
    if upload is not None and fetch_newest(upload, folder, world, progress.go_on) is not None:
        wait_until_visible(folder.path, [folder.config.name])
        stored = load_config(folder.config, extensions="ignore")
        config = keep_start(stored, config)
        check_config(stored, config, effects=course_changes(stored, config, folder.newest_step()))
    return pin_start(config, world)


def pin_start(config: RunConfig, world: World) -> RunConfig:
    """Replaces runs of `init.from` and of a teacher by their newest checkpoints. Collective.

    That run may train on: the checkpoint under adapters is marked, so that its retention spares it.
    Raises: CheckpointError: It has no intact checkpoint.
    """
    config = _pin_teacher(config, world)
    init, has_adapters = config.init, config.finetune.kind == "lora"
    if init.from_ is None:
        return config

    def pin() -> str | None:
        has_saved = RunDir(config.folder).has_saved()
        if not world.is_main or (has_saved and not has_adapters):
            return init.from_  # of a run that has its weights: the start may be gone
        named = Path(str(init.from_))
        start, is_of_run = newest_checkpoint(find_base(named, RunDir(config.folder)) if has_saved else named)
        # A resumption has marked it, or may be refused.
        if has_adapters and is_of_run and not has_saved:
            try:
                mark_in_use(split_average(start)[0], config.folder)
            except DiskError as error:
                text = "%s cannot be marked as in use (%s); copy its run, which may remove it as it trains on"
                log.warning(text, start, error.what)
        return str(start)

    return config.model_copy(update={"init": init.model_copy(update={"from_": agree(pin)[0]})})


def _pin_teacher(config: RunConfig, world: World) -> RunConfig:
    distill = config.objective.distill
    if distill is None:
        return config

    def pin() -> str:
        named = Path(distill.teacher)
        return str(newest_checkpoint(named)[0]) if world.is_main else distill.teacher

    pinned = distill.model_copy(update={"teacher": agree(pin)[0]})
    objective = config.objective.model_copy(update={"distill": pinned})
    return config.model_copy(update={"objective": objective})


def course_changes(stored: RunConfig, config: RunConfig, step: int) -> list[str]:
    """Returns the rates, decays and sizes of the next step that differ; `step` are done."""
    # The old run would not have gone beyond its end: its last step is what the next one follows.
    before = _course(stored, min(step, stored.train.steps - 1))
    after = _course(config, step)
    changed = [name for name in before if name in after and before[name] != after[name]]
    return [f"{name} at step {step + 1}: {before[name]} -> {after[name]}" for name in changed]


def _course(config: RunConfig, step: int) -> dict[str, str]:
    """Returns the values of a step, 0 the first, that follow from several keys or are scheduled."""
    optim, batch = config.optim, config.batch
    factor = optim.schedule.rate(step, batch, config.train.steps)
    tokens = batch.steps.at(step) * batch.seq_len
    values = {"learning rate": f"{optim.lr * factor:.2e}"}
    values["weight decay"] = f"{optim.weight_decay:g}"
    if rate := optim.of_matrices("lr"):
        decay = optim.of_matrices("weight_decay")
        decay = optim.weight_decay if decay is None else decay
        values["learning rate of hidden matrices"] = f"{rate * factor:.2e}"
        values["weight decay of hidden matrices"] = f"{decay:g}"
    if optim.ema.is_on:
        values["decay of the average of the weights"] = f"{optim.ema.decay(step, tokens):.6g}"
    values["tokens of the batch"] = f"{tokens:,}"
    values["row length"] = f"{batch.length_at(step):,}"
    values["attention window"] = f"{batch.window_at(step) or 'none'}"
    return values
