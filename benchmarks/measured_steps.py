"""Steps that were measured on one H200 (benchmarks/results.md), beside what the roofline of `pretrain plan` says.

LLaMA 1.1B and GPT-2 124M by medians of steps, and rows of 4,096 to 131,072 tokens by one step each. A run of 11
million parameters, through the whole trainer, is bound by the host: its step is that of `Constants.launch_s`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from benchmarks.published_runs import preset_model
from pretrain.config.engine import EngineConfig
from pretrain.config.lengths import RowLengths
from pretrain.plan.cluster import Cluster
from pretrain.plan.gpus import CONSTANTS, GPUS, Constants
from pretrain.plan.roofline import StepTime, Work, plan_work, time_step
from pretrain.plan.task import ParallelLayout, TrainingTask

H200 = Cluster(1, 1, GPUS["h200"])


class MeasuredStep(NamedTuple):
    """One measured step.

    Attributes:
        name: Row of `benchmarks/results.md`.
        model: Preset and its changes.
        seq_len: Tokens of a row.
        micro: Rows of a micro-batch.
        accumulation: Micro-batches of a step.
        engine: Settings other than DeepSpeed's ZeRO 1, compiled.
        ms: Milliseconds, the median where there are several steps.
        kernel: Kernel of attention, which the engine chose.
        fitted: True: the constants of kernels were fitted on it.
    """

    name: str
    model: str
    seq_len: int
    micro: int
    accumulation: int
    engine: dict[str, Any]
    ms: float
    kernel: str = "cudnn"
    fitted: bool = True


_FULL = {"activation_checkpointing": "full"}
AUTOCAST = {"kind": "single", "zero_stage": 0, "gradients": "fp32"}
"""One process as it was at the time: fp32 weights."""
MODELS: dict[str, dict[str, Any]] = {
    "llama2-7b": {"layers": 22, "width": 2048, "heads": 32, "kv_heads": 4, "ff_width": 5632},
    "gpt2-124m": {"activation": "gelu"},
    "llama-5m": {},
}
VOCABULARIES = {"llama2-7b": 32_000, "gpt2-124m": 50_304, "llama-5m": 32_000}
STEPS = [
    MeasuredStep("LLaMA 1.1B", "llama2-7b", 2048, 16, 2, {}, 878.3),
    MeasuredStep("LLaMA 1.1B, eager", "llama2-7b", 2048, 8, 4, {"compile": False}, 1052.9),
    MeasuredStep("GPT-2 124M", "gpt2-124m", 1024, 32, 1, {}, 70.5),
    MeasuredStep("GPT-2 124M, one process", "gpt2-124m", 1024, 32, 1, AUTOCAST, 68.4),
    MeasuredStep("row of 4,096", "llama2-7b", 4096, 1, 1, _FULL, 125, fitted=False),
    MeasuredStep("row of 8,192", "llama2-7b", 8192, 1, 1, _FULL, 210),
    MeasuredStep("row of 16,384", "llama2-7b", 16_384, 1, 1, _FULL, 496),
    MeasuredStep("row of 32,768", "llama2-7b", 32_768, 1, 1, _FULL, 1485),
    MeasuredStep("row of 65,536", "llama2-7b", 65_536, 1, 1, _FULL, 6831, "flash"),
    MeasuredStep("row of 131,072", "llama2-7b", 131_072, 1, 1, _FULL, 25_357, "flash"),
    MeasuredStep("11M, whole trainer", "llama-5m", 1024, 16, 4, {}, 58, "flash", fitted=False),
]


@cache
def _work_of(name: str) -> Work:
    step = next(step for step in STEPS if step.name == name)
    model = preset_model(step.model, VOCABULARIES[step.model], max_seq_len=step.seq_len, **MODELS[step.model])
    engine = EngineConfig.model_validate(
        {"kind": "deepspeed", "zero_stage": 1, "device": "cuda", "compile": True, **step.engine}
    )
    task = TrainingTask(model, RowLengths(step.seq_len, step.seq_len))
    work = plan_work(task, ParallelLayout(engine, step.micro, step.accumulation), 1)
    return replace(work, kernel=step.kernel)


def plan_step(step: MeasuredStep, constants: Constants = CONSTANTS) -> StepTime:
    """Returns the predicted time of a measured step by part."""
    return time_step(_work_of(step.name), H200, constants)


def step_errors(steps: Sequence[MeasuredStep], constants: Constants = CONSTANTS) -> list[float]:
    """Returns the predicted times over the measured ones, less 1."""
    return [1e3 * plan_step(step, constants).total / step.ms - 1 for step in steps]
