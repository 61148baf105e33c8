"""The stack below a run, checked once on each of its versions, on a tiny model of the run's kinds.

    collectives         of each kind, against values made on the host
    attention backend   gradients in fp32 against those of `eager`
    compiled blocks     the same against those of plain blocks
    engine              gradients of a step, losses and norms of four, in the run's precision
    resumed steps       the last two steps once more, from the state after the second

Wrong versions of packages train without a word, and badly: each of these has happened. What is
compared with is plain torch in one process. Not here: whole runs, and kills
(`pretrain doctor --selftest`).
"""

import logging
import math
import platform
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as td
from torch import Tensor, nn

from pretrain import dist
from pretrain.config.data import BatchConfig, plan_batch
from pretrain.config.engine import PLAIN_ENGINE, EngineConfig
from pretrain.config.model import AnyModelConfig, RecurrentConfig
from pretrain.config.objective import ObjectiveConfig
from pretrain.config.optim import OptimConfig
from pretrain.config.run import RunConfig
from pretrain.data.loader import StepCounts, cut_columns
from pretrain.dist import World, ranks_of_node
from pretrain.doctor.machine import ask_driver, check_compiler
from pretrain.doctor.selftest import GRADIENT_TOLERANCE, farthest
from pretrain.engine.build import (
    build_engine,
    builds_sharded,
    fill_sharded,
    forget_accelerator,
    pick_device,
    start_accelerator,
)
from pretrain.engine.engine import Engine
from pretrain.errors import ConfigError, LaunchError
from pretrain.model import LanguageModel, build_model
from pretrain.model.build import compiles_on, fill_weights, initial_weight
from pretrain.model.sequence_parallel import share_rows
from pretrain.objective import build_loss
from pretrain.optim.build import build_optimizer
from pretrain.optim.groups import group_parameters
from pretrain.run.folder import RunDir, package_versions
from pretrain.training.health.tiny_model import COLUMNS, ROWS, VOCABULARY, reads_two, tiny_model
from pretrain.training.step import TrainModule, start_exchange
from pretrain.types import Batch, Columns, StackRows
from pretrain.utils.status_line import show_phase

log = logging.getLogger(__name__)

CHECKED = "self_check"
"""Key of an attempt: the stack that it has checked."""
STEPS = 4
RESUMED = 2
"""Steps that are taken again."""
MICRO_BATCHES = 2
GRADIENT_TOLERANCES = {"fp32": GRADIENT_TOLERANCE, "bf16": 0.1, "fp16": 0.1}
"""Relative, of a parameter's gradient: 16 bits through two layers make 0.02, and defects 0.3."""
_OPTIM = OptimConfig(lr=1e-2, kind="adamw", weight_decay=0.0, grad_clip=0.0)
_LOSS_TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
_SEED = 5
_MOST_SKIPPED = 20

Gradients = dict[str, Tensor]
Figures = tuple[float, float]
"""Loss of a step, and norm of its gradient."""


def is_wanted(config: RunConfig, world: World) -> bool:
    """Returns whether a run is checked: `auto` where it is expensive, on GPUs or several nodes."""
    asked = config.run.self_check
    if asked != "auto":
        return asked == "on"
    return pick_device(config.engine) == "cuda" or world.size > ranks_of_node(world)


def stack_of(engine: EngineConfig, device: str) -> dict[str, str]:
    """Returns what a check depends on: versions, driver, compiler, card and engine."""
    gpus, _ = ask_driver() if device == "cuda" else ([], "")
    names = ("python", "torch", "deepspeed", "accelerate")
    versions = {name: version for name, version in package_versions().items() if name in names}
    kind = f"{engine.kind} {engine.zero_stage} {engine.precision} {engine.attention}"
    return versions | {
        "cuda": torch.version.cuda or "none",
        "driver": gpus[0].driver if gpus else "none",
        "device": gpus[0].name if gpus else platform.machine(),
        "compiler": check_compiler(engine).detail,
        "engine": f"{kind}, compile {engine.compile}",
    }


def check_stack(
    config: RunConfig, folder: RunDir, world: World, device: torch.device
) -> dict[str, Any]:  # fmt: skip
    """Checks the stack of a run unless it has passed here; returns it for run.json. Collective.

    About 10 s. The accelerator of the run is to be started again where the result is not empty.

    Raises:
        LaunchError: Something is wrong; with the known issue.
    """
    if not is_wanted(config, world):
        return {}
    engine = config.engine.on(world.size).model_copy(update={"fp8": "off", "zero_hpz": 1})
    stack = stack_of(engine, device.type)
    attempts = folder.read_record()["attempts"] if world.is_main and folder.exists() else []
    if dist.broadcast_object(any(attempt.get(CHECKED) == stack for attempt in attempts)):
        return {}
    show_phase("self-check: the first start on these versions")
    checker = _Checker(config, engine, world, device)
    checker.run()
    log.info("self-check: %s are right", ", ".join(checker.passed))
    return {CHECKED: stack}


class _Checker:
    """Checks of one run, which stop at the first failure."""

    def __init__(
        self, config: RunConfig, engine: EngineConfig, world: World, device: torch.device
    ) -> None:  # fmt: skip
        self._config = config
        self._engine = engine
        self._world = world
        self._device = device
        self._columns = COLUMNS * world.row_ranks
        self._rows = ROWS * MICRO_BATCHES * world.data_size
        self.passed: list[str] = []

    def run(self) -> None:
        """Runs all checks."""
        self._check_collectives()
        try:
            model = tiny_model(self._config.model, self._config.parallel)
            plain = build_model(model, _in_fp32(attention="eager"), self._device)
        except ConfigError as error:
            log.warning("self-check: only collectives are checked: %s", error.what)
            return
        batches = list(_micro_batches(model, self._rows, self._columns))
        gradients, figures = _train_plain(plain, model, batches, self._device)
        self._check_blocks(model, batches, gradients)
        engine = self._build(model)
        first, ours = self._train(engine, batches)
        self._compare("the engine", first, gradients, self._engine.precision)
        self._compare_figures(ours, figures)
        self._check_resumed(engine, batches, ours[-RESUMED:])

    def _check_collectives(self) -> None:
        world, device = self._world, self._device
        mine = torch.arange(6.0, device=device) + 10 * world.rank
        all_ranks = [torch.arange(6.0) + 10 * rank for rank in range(world.size)]
        if not dist.is_distributed():
            return
        whole = torch.cat(all_ranks).view(-1)
        gathered = mine.new_empty(6 * world.size)
        td.all_gather_into_tensor(gathered, mine)
        parts = [mine.new_empty(6 * world.size) for _ in range(2)]
        with td._coalescing_manager(async_ops=True) as work:
            for factor, part in enumerate(parts, start=1):
                td.all_gather_into_tensor(part, mine * factor)
        work.wait()
        scattered, exchanged = mine.new_empty(6), mine.new_empty(world.size)
        td.reduce_scatter_tensor(scattered, whole.to(device))
        numbers = torch.arange(float(world.size))
        td.all_to_all_single(exchanged, mine[0] * 100 + numbers.to(device))
        sent = mine.clone()
        td.broadcast(sent, world.size - 1)
        expected = {
            "all-reduce": (dist.all_reduce_sum(mine.clone()), sum(all_ranks)),
            "all-gather": (gathered, whole),
            "coalesced all-gather": (torch.cat(parts), torch.cat((whole, 2 * whole))),
            "reduce-scatter": (scattered, all_ranks[world.rank] * world.size),
            "all-to-all": (exchanged, 1000 * numbers + world.rank),
            "broadcast": (sent, all_ranks[-1]),
        }
        for name, (got, right) in expected.items():
            text = "it has other values than ranks have sent"
            self._judge(f"the {name} of {td.get_backend()}", torch.equal(got.cpu(), right), text)
        self.passed.append("collectives")

    def _check_blocks(
        self, model: AnyModelConfig, batches: Sequence[Batch], plain: Gradients
    ) -> None:  # fmt: skip
        """Compares gradients in fp32 of the backend, then of compiled blocks, with plain ones."""
        if isinstance(model, RecurrentConfig):
            return
        backend = self._engine.attention
        kinds = {"the attention backend": _in_fp32(attention=backend)}
        if compiles_on(self._engine, self._device):
            mode = self._engine.compile_mode
            kinds["compiled blocks"] = _in_fp32(attention=backend, compile=True, compile_mode=mode)
        for name, engine in kinds.items():
            built = build_model(model, engine, self._device)
            gradients, _ = _train_plain(built, model, batches, self._device, steps=1)
            self._compare(name, gradients, plain, "fp32")

    def _build(self, model: AnyModelConfig) -> Engine:
        engine, world, device = self._engine, self._world, self._device
        tokens = self._rows * self._columns
        batch = BatchConfig(global_tokens=tokens, seq_len=self._columns, micro=ROWS)
        plan = plan_batch(batch, world.size, world.row_ranks)
        forget_accelerator()
        accelerator = start_accelerator(engine, 0.0, plan, 10**6, world)
        built = build_model(model, engine, device, storage=not builds_sharded(engine), world=world)
        share_rows(built, world, engine.group_timeout_s)
        draw = partial(_draw, model)
        groups = group_parameters(built)
        if builds_sharded(engine):
            fill_sharded(built, draw, engine, accelerator, world)
        else:
            fill_weights(built, draw)
        names = {id(parameter): name for name, parameter in built.named_parameters()}
        module = TrainModule(built, build_loss(ObjectiveConfig()))
        fuses = engine.has_masters and compiles_on(engine, device)
        optimizer = build_optimizer(groups, _OPTIM, device, fuses=fuses)
        return build_engine(
            module, names, optimizer, accelerator, engine, 0.0, world, balance=module.kept
        )  # fmt: skip

    def _train(self, engine: Engine, batches: Sequence[Batch]) -> tuple[Gradients, list[Figures]]:
        """Returns the gradients of the first step, and the figures of each."""
        figures = [self._step(engine, batches)]
        first = self._first_moments(engine)
        figures += [self._step(engine, batches) for _ in range(STEPS - RESUMED - 1)]
        held = [piece.tensors for piece in engine.state.held_fragments()]
        self._saved = [{name: value.clone() for name, value in one.items()} for one in held]
        self._scalars = engine.state.scalars()
        figures += [self._step(engine, batches) for _ in range(RESUMED)]
        return first, figures

    def _step(self, engine: Engine, batches: Sequence[Batch]) -> Figures:
        world, module = self._world, engine.module
        num_targets = sum(batch.num_targets() for batch in batches)
        mine = batches[world.data_rank * MICRO_BATCHES : (world.data_rank + 1) * MICRO_BATCHES]
        if world.row_ranks > 1:
            mine = [cut_columns(batch, Columns(world.row_rank, world.row_ranks)) for batch in mine]
        for _ in range(_MOST_SKIPPED):
            total = torch.zeros(len(module.layout), dtype=torch.float64, device=self._device)
            for batch in mine:
                scale = world.size / num_targets
                total += engine.forward_backward(batch.to(self._device), scale, batch is mine[-1])
            pending = start_exchange(total, StepCounts(), None, module.layout)
            update = engine.update(_OPTIM.lr)
            loss = pending().loss_sum / num_targets
            if not update.skipped:  # as a loss scale of fp16 has the first ones
                break
        return loss, update.grad_norm

    def _first_moments(self, engine: Engine) -> Gradients:
        """Returns the first moment of each parameter, whole, over 1 - beta1. Collective."""
        whole: Gradients = {}
        for piece in engine.state.owned_fragments():
            if "exp_avg" in piece.tensors:
                zeros = torch.zeros(math.prod(piece.shape), device=self._device)
                flat = whole.setdefault(piece.name, zeros)
                run, stride = piece.stripes or (
                    piece.length,
                    piece.length,
                )  # as `Fragment` has them
                numbers = torch.arange(piece.length, device=self._device)
                places = piece.offset + numbers // run * stride + numbers % run
                flat[places] += piece.tensors["exp_avg"].to(self._device) / (1 - _OPTIM.beta1)
        shapes = {name: flat.numel() for name, flat in whole.items()}
        sizes = {name: size for each in dist.gather_objects(shapes) for name, size in each.items()}
        for name, size in sorted(sizes.items()):
            zeros = torch.zeros(size, device=self._device)
            whole[name] = dist.all_reduce_sum(whole.get(name, zeros))
        return whole

    def _check_resumed(
        self, engine: Engine, batches: Sequence[Batch], figures: Sequence[Figures]
    ) -> None:  # fmt: skip
        for piece, saved in zip(engine.state.held_fragments(), self._saved, strict=True):
            for name, value in saved.items():
                piece.tensors[name].copy_(value)
        engine.state.finish_load(STEPS - RESUMED, self._scalars)
        for step, (loss, _) in enumerate(figures, start=STEPS - RESUMED + 1):
            again, _ = self._step(engine, batches)
            text = f"the loss of step {step} is {again:.6f}, and was {loss:.6f}"
            is_same = math.isclose(again, loss, rel_tol=_LOSS_TOLERANCES[self._engine.precision])
            self._judge("resumed steps", is_same, text)
        self.passed.append("resumed steps")

    def _compare(self, name: str, ours: Gradients, plain: Gradients, precision: str) -> None:
        missing = sorted(plain.keys() - ours.keys())
        apart, worst = math.inf, "".join(missing[:1])
        if not missing:
            names = plain.keys()
            apart, worst = farthest((one, _flat(plain[one]), _flat(ours[one])) for one in names)
        tolerance = GRADIENT_TOLERANCES[precision]
        text = f"the gradient of {worst} is {apart:.1e} from that of plain torch"
        self._judge(name, apart <= tolerance, f"{text}, and {tolerance:.0e} is allowed")
        self.passed.append(name)

    def _compare_figures(self, ours: Sequence[Figures], plain: Sequence[Figures]) -> None:
        precision = self._engine.precision
        kinds = {
            "loss": _LOSS_TOLERANCES[precision],
            "gradient's norm": GRADIENT_TOLERANCES[precision],
        }
        for step, pair in enumerate(zip(ours, plain, strict=True), start=1):
            for (kind, tolerance), one, right in zip(kinds.items(), *pair, strict=True):
                text = f"the {kind} of step {step} is {one:.5f}, and {right:.5f} in plain torch"
                self._judge("the engine", math.isclose(one, right, rel_tol=tolerance), text)

    def _judge(self, name: str, is_right: bool, text: str) -> None:
        """Raises: LaunchError on every rank where one has found something wrong."""
        wrong = [one for one in dist.gather_objects("" if is_right else text) if one]
        if wrong:
            fix = f"{_ADVICE.get(name, _COLLECTIVES)}; run.self_check=off trains all the same"
            raise LaunchError(f"self-check: {name}: {wrong[0]}", fix=fix)


_COLLECTIVES = "see that all nodes have one torch and one NCCL (gloo's coalesced gather was wrong)"
_ADVICE = {
    "compiled blocks": "use another torch, or engine.compile=false (pytorch issues 180642, 193061: "
    "gradients that are left out, or stale)",
    "the attention backend": "use engine.attention=eager, or another version of its package",
    "the engine": "use another DeepSpeed, or another engine.zero_stage (DeepSpeed issues 8224: a "
    "module that is used twice; 7837: bf16 at stage 0)",
    "resumed steps": "use another DeepSpeed, or report it as a bug",
}


def _flat(value: Tensor) -> Tensor:
    return value.flatten().float().cpu()


def _in_fp32(**keys: Any) -> EngineConfig:
    """Returns one process in fp32, with some keys of the run's engine."""
    return PLAIN_ENGINE.model_copy(update=keys)


def _draw(model: AnyModelConfig, name: str, shape: torch.Size) -> Tensor:
    return initial_weight(name, shape, model, seed=_SEED)


def _micro_batches(model: AnyModelConfig, rows: int, columns: int) -> Iterator[Batch]:
    """Yields micro-batches of a global batch, the same on every rank: ids that count upwards."""
    generator = torch.Generator().manual_seed(_SEED)
    starts = torch.randint(0, VOCABULARY, (rows, 1), generator=generator)
    tokens = (starts + torch.arange(columns + 1)) % VOCABULARY
    for part in tokens.split(ROWS):
        source = StackRows(part[:, :-1].flip(1).contiguous()) if reads_two(model) else None
        yield Batch(part[:, :-1].contiguous(), part[:, 1:].contiguous(), source=source)


def _train_plain(
    built: LanguageModel,
    model: AnyModelConfig,
    batches: Sequence[Batch],
    device: torch.device,
    steps: int = STEPS,
) -> tuple[Gradients, list[Figures]]:
    """Trains by torch alone, in this process; returns the first gradients, and the figures."""
    fill_weights(built, partial(_draw, model))
    module = TrainModule(built, build_loss(ObjectiveConfig()))
    betas = (_OPTIM.beta1, _OPTIM.beta2)
    optimizer = torch.optim.AdamW(
        built.parameters(), _OPTIM.lr, betas=betas, eps=_OPTIM.eps, weight_decay=0.0
    )  # fmt: skip
    num_targets = sum(batch.num_targets() for batch in batches)
    first: Gradients = {}
    figures = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            loss_sum, sums = module(batch.to(device))
            (loss_sum / num_targets).backward()
            total += float(sums[0])
        named = built.named_parameters()
        gradients = {name: one.grad for name, one in named if one.grad is not None}
        first = first or {name: gradient.clone() for name, gradient in gradients.items()}
        figures.append((total / num_targets, float(nn.utils.get_total_norm(gradients.values()))))
        optimizer.step()
    return first, figures
