"""A canary: every attribute of DeepSpeed that it does not promise to keep, and that we read, is where we expect it."""

import os
from pathlib import Path
from typing import Any

from pretrain.dist import World
from pretrain.drill.leftovers import CACHES
from tests.helpers.ranks import run_in_ranks
from tests.integration.workers import build

CASES = [["deepspeed", stage, precision] for stage in range(4) for precision in ("fp32", "bf16")]

PRIVATE = {
    (0, "fp32"): [],
    (0, "bf16"): ["optimizer.fp16_groups", "optimizer.fp32_groups", "optimizer.overflow_checker.has_overflow"],
    (1, None): [
        "optimizer.bit16_groups",
        "optimizer.single_partition_of_fp32_groups",
        "optimizer.update_lp_params",
        "optimizer.scaled_global_norm",
    ],
    (3, None): [
        "optimizer._get_norm_groups",
        "optimizer.fp16_groups",
        "optimizer.fp32_partitioned_groups_flat",
        "optimizer.persistent_parameters",
        "optimizer.grad_position",
        "optimizer.get_param_id",
    ],
}
OF_PARAMETER = {
    1: ["_hp_mapping.hp_fragment_address.numel", "_hp_mapping.lp_fragment_address.start"],
    3: ["ds_tensor.ds_numel", "ds_numel", "ds_shape", "partition", "all_gather"],
}


def missing_private(world: World, cases: list[list[Any]]) -> list[str]:
    """The paths of attributes that are absent, by case."""
    missing = []
    for _, stage, precision in cases:
        wrapped: Any = build(world, "deepspeed", stage, precision, micro=2)
        engine, kind = wrapped._engine, 1 if stage in (1, 2) else stage
        paths = ["basic_optimizer.param_groups", "was_step_applied", "get_global_grad_norm"]
        paths += PRIVATE[kind, precision if stage == 0 else None]
        missing += [f"ZeRO {stage} {precision}: {path}" for path in paths if not _has(engine, path)]
        parameter = next(engine.module.parameters())
        missing += [
            f"ZeRO {stage}: parameter.{path}" for path in OF_PARAMETER.get(kind, []) if not _has(parameter, path)
        ]
    return missing


def _has(root: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(root, name):
            return False
        root = getattr(root, name)
    return True


def compile_nothing(world: World, folder: str) -> list[str]:
    """What is left by a compiler that writes down how it is called, and what is in TMPDIR, after an engine's start."""
    import tempfile

    compiler, tempfile.tempdir = Path(folder) / "cc", folder
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\nexit 1\n')
    compiler.chmod(0o755)
    os.environ["CC"] = str(compiler)
    build(world, "deepspeed", 2, "fp32", micro=2)
    import deepspeed

    assert not deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"]
    return sorted(path.name for path in Path(folder).iterdir() if not path.name.startswith(CACHES))


def test_an_engine_starts_without_a_compiler(tmp_path):
    """DeepSpeed would compile a probe in TMPDIR, where a kill leaves it."""
    arguments = {"folder": str(tmp_path)}
    (left,) = run_in_ranks("tests.integration.test_deepspeed_private:compile_nothing", 1, arguments, fresh=True)
    assert left == ["cc"]


def test_private_attributes_are_where_they_were():
    (missing,) = run_in_ranks("tests.integration.test_deepspeed_private:missing_private", 1, {"cases": CASES})
    assert missing == [], "DeepSpeed moved what zero_state.py, drop.py and deepspeed_engine.py rely on"
