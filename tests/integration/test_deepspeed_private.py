"""A canary: what we touch of DeepSpeed beyond its promises is in the installed one as it is in our fakes.

The one table of it is the attributes of the classes in `tests/helpers/fake_deepspeed.py` and `fake_zero.py`. For each
stage and precision a fake is built beside a real engine, over copies of the same parameters, on one rank and on two.
They are compared attribute by attribute, by where the parameters lie, and by what they do in a step that is dropped and
in one that is not.
"""

import ast
import copy
import functools
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from pretrain.dist import World
from pretrain.drill.drill_folder import CACHES
from pretrain.engine import build
from pretrain.engine.build import build_engine
from pretrain.engine.deepspeed_engine import DeepSpeedZeroEngine
from tests.helpers.fake_deepspeed import FakeAccelerator, fake_deepspeed, offered
from tests.helpers.ranks import run_in_ranks
from tests.helpers.thread_ranks import Ranks
from tests.integration import workers
from tests.integration.checkpoint_workers import allow_half_on_cpu
from tests.repo.source import ROOT, parse
from tests.unit.engine.toy import COMBINATIONS, PLAN, engine_config

MICRO, CLIP = 2, 1.0
# (stage, precision, offload, changes of the config's section). The last: parameters of at most 40 elements stay whole,
# and stage 3 cuts its groups at 5,000 elements a rank, as it would at 10^9.
CASES: list[list[Any]] = [
    *([stage, precision, "none", {}] for stage in range(4) for precision in ("fp32", "bf16")),
    *([stage, "fp16", "none", {}] for stage in (2, 3)),
    [2, "bf16", "optimizer", {}],
    [3, "fp32", "both", {}],
    [3, "bf16", "none", {"sub_group_size": 5000, "stage3_param_persistence_threshold": 40}],
]
OFFLOAD = {"none": (), "optimizer": ("optimizer",), "both": ("optimizer", "params")}


def differences(world: World, cases: list[list[Any]]) -> list[str]:
    """What in the installed DeepSpeed is not as in its fake, case by case."""
    import deepspeed

    found = compare("deepspeed", fake_deepspeed(Ranks(1)), deepspeed)
    for case in cases:
        ranks = Ranks(world.size)
        real, fakes = build_both(world, ranks, *case)
        fake = fakes[world.rank]
        said = compare("engine", fake._wrapped, real._wrapped)
        for ours, theirs in zip(fake.module.parameters(), real.module.parameters(), strict=True):
            said += compare(fake._names[id(ours)], ours, theirs) + probed(ours, theirs)
        said += probed(fake._wrapped.optimizer, real._wrapped.optimizer)
        said += compare_places(fake, real)
        if not said:
            taken = ranks.run(lambda here, fakes=fakes: steps(fakes[here.rank], here))[world.rank]
            said += compare_steps(taken, steps(real, world))
        found += [f"{case}, rank {world.rank} of {world.size}: {text}" for text in said]
    return found


def build_both(
    world: World, ranks: Ranks, stage: int, precision: str, offload: str, changes: dict[str, int]
) -> tuple[Any, list[Any]]:
    """Builds our engine over DeepSpeed's, and over the fake one of every rank."""
    fakes: list[Any] = []
    options = {"stage": stage, "precision": precision, "clip": CLIP, "offload": OFFLOAD[offload]}
    options["persistent"] = changes.get("stage3_param_persistence_threshold", 3)
    options["sub_group_size"] = changes.get("sub_group_size", 10**9)

    def build_beside(
        module: nn.Module, names: dict[int, str], optimizer: Any, accelerator: Any, *others: Any, **kw: Any
    ):
        copies = [copy.deepcopy((module, optimizer)) for _ in range(world.size)]
        *middle, _ = others

        def over_fake(here: World) -> DeepSpeedZeroEngine:
            own, own_optimizer = copies[here.rank]
            own_names = {id(p): names[id(q)] for p, q in zip(own.parameters(), module.parameters(), strict=True)}
            return DeepSpeedZeroEngine(own, own_names, own_optimizer, FakeAccelerator(ranks, **options), *middle, here)

        with mock.patch.dict(sys.modules, deepspeed=fake_deepspeed(ranks)):
            fakes.extend(ranks.run(over_fake))
        return build_engine(module, names, optimizer, accelerator, *others, **kw)

    def with_changes(*arguments: Any) -> dict[str, Any]:
        config = configured(*arguments)
        return config | {"zero_optimization": config["zero_optimization"] | changes}

    configured = build.deepspeed_config
    if precision == "fp16":
        allow_half_on_cpu()
    with (
        mock.patch.object(workers, "build_engine", build_beside),
        mock.patch.object(build, "deepspeed_config", with_changes),
    ):
        real = workers.build(world, "deepspeed", stage, precision, "adamw", offload, micro=MICRO, grad_clip=CLIP)
    return real, fakes


def compare(path: str, ours: Any, theirs: Any) -> list[str]:
    """What is offered by `ours`, a fake or a part of one, and not, or not so, by `theirs`."""
    found, names = [], []
    if inspect.isclass(ours) or isinstance(ours, nn.Module):
        return [] if isinstance(theirs, type(ours) if inspect.isclass(ours) else nn.Module) else [f"{path}: {theirs!r}"]
    if inspect.isroutine(ours):
        return compare_call(path, ours, theirs)
    if isinstance(ours, dict):  # grad_position: the ids that are its keys are nobody's business
        return compare(path, sorted(ours.values()), sorted(theirs.values()))
    if isinstance(ours, list | tuple):
        if len(ours) != len(theirs):
            return [f"{path}: {len(theirs)} items, not {len(ours)}"]
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [text for number, pair in pairs for text in compare(f"{path}[{number}]", *pair)]
    if isinstance(ours, torch.optim.Optimizer):
        found += compare(f"{path}.param_groups", *([group_of(g) for g in o.param_groups] for o in (ours, theirs)))
    elif isinstance(ours, Tensor):
        seen = [(tensor.dtype, tuple(tensor.shape), tensor.device.type) for tensor in (ours, theirs)]
        found += [] if seen[0] == seen[1] else [f"{path}: {seen[1]}, not {seen[0]}"]
        names = [name for name in vars(ours) if not name.startswith("fake_")]
    elif ours is None or isinstance(ours, int | float | str):
        return [] if ours == theirs else [f"{path}: {theirs!r}, not {ours!r}"]
    else:
        names = offered(ours)
    for name in names:
        if hasattr(theirs, name):
            found += compare(f"{path}.{name}", getattr(ours, name), getattr(theirs, name))
        else:
            found.append(f"{path}.{name}: gone")
    return found


def group_of(group: dict[str, Any]) -> list[Any]:
    """What we know a torch group by, and the shapes of what it steps."""
    return [group["name"], group["lr"], group["lr_ratio"], [list(parameter.shape) for parameter in group["params"]]]


def compare_call(path: str, ours: Any, theirs: Any) -> list[str]:
    """Whether it can be called as the fake is, and, as a method that `dropping` lays over, found on the class."""
    parameters = inspect.signature(ours).parameters.values()
    keywords = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    try:
        inspect.signature(theirs).bind(*[None] * (len(parameters) - len(keywords)), **keywords)
    except (TypeError, ValueError) as error:
        return [f"{path}: {error}"]
    owner = getattr(ours, "__self__", None)
    if owner is not None and not hasattr(type(getattr(theirs, "__self__", None)), ours.__name__):
        return [f"{path}: no method of its class"]
    return []


@functools.cache
def asked_for() -> list[str]:
    """Every name that `pretrain/engine/` asks for by hasattr or getattr."""
    calls = [
        node
        for path in (ROOT / "pretrain" / "engine").glob("*.py")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr")
    ]
    names = {call.args[1].value for call in calls if isinstance(call.args[1], ast.Constant)}
    assert {"cpu_offload", "_get_norm_groups", "ds_tensor", "overflow_checker"} <= names
    return sorted(names)


def probed(ours: Any, theirs: Any) -> list[str]:
    """What is asked for, and is there in only one of the two."""
    return [
        f"{type(theirs).__name__}.{name}: {hasattr(theirs, name)}, not {hasattr(ours, name)}"
        for name in asked_for()
        if hasattr(ours, name) != hasattr(theirs, name)
    ]


def compare_places(ours: DeepSpeedZeroEngine, theirs: DeepSpeedZeroEngine) -> list[str]:
    """Where each parameter's master weights lie, and their values and moments before the first step."""
    seen = [[(piece.span, piece.shape) for piece in engine.state._pieces] for engine in (ours, theirs)]
    values = [[f.tensors for f in engine.state.held_fragments()] for engine in (ours, theirs)]
    if seen[0] != seen[1]:
        return [f"spans: {seen[1]}, not {seen[0]}"]
    found = []
    for (span, _), one, other in zip(seen[0], *values, strict=True):
        if one.keys() != other.keys() or not all(torch.equal(one[key], other[key]) for key in one):
            found.append(f"{span}: other values")
    return found


def steps(engine: DeepSpeedZeroEngine, world: World) -> list[list[Any]]:
    """A step that is dropped and one that is taken: [skipped, norm, loss scale, weights and moments after] of each."""
    seen = []
    for drop in (True, False):
        batch = workers.rows_of(workers.global_batch(1), slice(MICRO * world.rank, MICRO * (world.rank + 1)))
        engine.forward_backward(batch, 0.125, True)
        update = engine.update(1e-2, drop)
        tensors = [t.detach().clone() for f in engine.state.held_fragments() for t in f.tensors.values()]
        seen.append([update.skipped, update.grad_norm, engine.state.scalars(), tensors])
    return seen


def compare_steps(ours: list[list[Any]], theirs: list[list[Any]]) -> list[str]:
    """The gradient is the same, and so are the weights after it, up to the order in which its norm is summed."""
    found = []
    for name, one, other in zip(("dropped", "taken"), ours, theirs, strict=True):
        # The norm of 30,000 values is summed in fp32, in another order. Where a gradient is near Adam's epsilon, its
        # last bits are bits of the step, which is at most 1e-2.
        norms = torch.tensor([one[1], other[1]])
        if not torch.allclose(norms[0], norms[1], rtol=1e-6, atol=0.0, equal_nan=True) or one[:1] != other[:1]:
            found.append(f"{name} step: {other[:2]}, not {one[:2]}")
        found += compare(f"{name} step: loss scale", one[2], other[2])
        if not all(torch.allclose(a, b, rtol=1e-5, atol=2e-6) for a, b in zip(one[3], other[3], strict=True)):
            found.append(f"{name} step: other weights or moments")
    return found


SECTIONS = {"zero_optimization": "zero_config", "bf16": "bfloat16_config", "fp16": "float16_config"}
TIMERS = {"throughput": "timers_config"}
"""What DeepSpeed calls a section of its config once it is read. Values of no section keep their names."""


def misread(world: World) -> list[str]:
    """What DeepSpeed refuses of each config that we write, or reads otherwise."""
    from deepspeed.runtime.config import DeepSpeedConfig

    found = []
    for device, stage, precision, offload in COMBINATIONS:
        config = build.deepspeed_config(engine_config(stage, precision, offload), device, 0.75, PLAN, 10**8)
        parsed = DeepSpeedConfig(copy.deepcopy(config))
        config |= {TIMERS[name]: section for name, section in config.pop("timers").items()}
        for key, value in config.items():
            read = getattr(parsed, SECTIONS.get(key, key), None)
            # By the names that are given in a config.
            read = read.model_dump(by_alias=True) if isinstance(value, dict) else read
            found += unequal(f"ZeRO {stage} {precision} {offload} on {device}: {key}", value, read)
    return found


def unequal(path: str, written: Any, read: Any) -> list[str]:
    """What was written and not read."""
    if isinstance(written, dict):
        return [text for key in written for text in unequal(f"{path}.{key}", written[key], read.get(key))]
    return [] if written == read else [f"{path}: {read!r}, not {written!r}"]


def refused(world: World) -> list[str]:
    """Of each section with a key that DeepSpeed does not know: what is said."""
    from deepspeed.runtime.config import DeepSpeedConfig

    said = []
    for section in (*SECTIONS, "zero_optimization.offload_optimizer", "zero_optimization.offload_param"):
        config = build.deepspeed_config(engine_config(3, "bf16", "both"), "cuda", 0.75, PLAN, 10**8)
        config = json.loads(json.dumps(config))  # its two sections of what is offloaded are one object
        place: Any = functools.reduce(dict.__getitem__, section.split("."), config)
        place["no_such_key"] = 1
        try:
            DeepSpeedConfig(config)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def compile_nothing(world: World, folder: str) -> list[str]:
    """What is left by a compiler that writes down how it is called, and what is in TMPDIR, after an engine's start."""
    import tempfile

    compiler, tempfile.tempdir = Path(folder) / "cc", folder
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\nexit 1\n')
    compiler.chmod(0o755)
    os.environ["CC"] = str(compiler)
    workers.build(world, "deepspeed", 2, "fp32", micro=2)
    import deepspeed

    assert not deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"]
    return sorted(path.name for path in Path(folder).iterdir() if not path.name.startswith(CACHES))


@pytest.mark.long
def test_an_engine_starts_without_a_compiler(tmp_path):
    """DeepSpeed would compile a probe in TMPDIR, where a kill leaves it."""
    arguments = {"folder": str(tmp_path)}
    (left,) = run_in_ranks("tests.integration.test_deepspeed_private:compile_nothing", 1, arguments, fresh=True)
    assert left == ["cc"]


def test_deepspeed_reads_every_key_of_every_config_that_we_write():
    """Its sections refuse a key that they do not know, and so would refuse one of ours that they have given up."""
    (found,) = run_in_ranks("tests.integration.test_deepspeed_private:misread", 1, {})
    assert found == []
    (said,) = run_in_ranks("tests.integration.test_deepspeed_private:refused", 1, {})
    assert len(said) == 5
    assert all("no_such_key" in text and "Extra inputs are not permitted" in text for text in said)


def test_the_installed_deepspeed_is_as_our_fakes_are():
    for found in run_in_ranks("tests.integration.test_deepspeed_private:differences", 2, {"cases": CASES}):
        assert found == [], "DeepSpeed moved what pretrain/engine/ relies on, and what its unit tests take for granted"


def test_the_installed_deepspeed_is_as_our_fakes_are_on_one_rank():
    """Where nothing is cut: one case for each fake."""
    cases = [CASES[0], CASES[1], [2, "fp16", "none", {}], CASES[-1]]
    (found,) = run_in_ranks("tests.integration.test_deepspeed_private:differences", 1, {"cases": cases})
    assert found == []
