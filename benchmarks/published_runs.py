"""Published speeds of training, on which the roofline's constants are fitted and tested, and its errors on them.

All without pipeline parallelism, which `plan` does not have, in bf16, 8 GPUs a node. Sources:

    foundry    MosaicML llm-foundry, scripts/train/benchmarking/README.md: MPT, FSDP FULL_SHARD, 1600 Gb/s a node (A100)
    titan      torchtitan, docs/performance.md (A100) and benchmarks/llama3_h100_202412_torchtitan.md (500 W, 2.4 TB/s);
               matrices over 8 ranks, without overlap: benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md, "vanilla"
    megatron   Megatron-LM, README.md, the smallest model of its table: 192 rows a step, distributed optimizer
    nanotron   LLaMA 1.1B at T=2048 on one node; its layout was not printed, ZeRO-1 is assumed
    automodel  NeMo AutoModel, docs/performance-summary.mdx and examples/benchmark/configs: experts over ranks (DeepEP,
               an even load), and rows over two ranks (a ring there, all-to-alls here), by tokens a second

MFU counts 6 N + 12 L D T FLOPs a token over the dense bf16 peak, for automodel those of `plan`. torchtitan's selective
checkpointing recomputes every second product, ours none.
"""

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from pretrain.config.engine import EngineConfig
from pretrain.config.lengths import RowLengths
from pretrain.config.model import ModelConfig, StackConfig, parse_model
from pretrain.config.presets import expand_preset
from pretrain.plan.cluster import Cluster
from pretrain.plan.gpus import CONSTANTS, GPUS, Constants
from pretrain.plan.roofline import Work, plan_work, time_step
from pretrain.plan.task import ParallelLayout, TrainingTask


class PublishedRun(NamedTuple):
    """One published run.

    Attributes:
        source: Publisher, one of those above.
        model: Key of `MODELS`.
        gpu: Key of `gpus.GPUS`.
        gpus: Number of GPUs.
        seq_len: Tokens of a row.
        micro: Rows of a micro-batch.
        accumulation: Micro-batches of a step.
        recompute: Share of the forward pass that is run again.
        mfu: Published MFU in percent; 0: computed from `tokens_s`.
        fitted: True: the constants were fitted on it. False: it tests them.
        zero_stage: ZeRO stage.
        tokens_s: Published tokens a second of a GPU.
        experts: Ranks that share experts.
        sequence: Ranks that share rows.
        tensor: Ranks that share matrices.
    """

    source: str
    model: str
    gpu: str
    gpus: int
    seq_len: int
    micro: int
    accumulation: int
    recompute: float
    mfu: float
    fitted: bool = False
    zero_stage: int = 3
    tokens_s: float = 0.0
    experts: int = 1
    sequence: int = 1
    tensor: int = 1

    @property
    def is_cut(self) -> bool:
        """Whether experts, rows or matrices are cut over ranks."""
        return max(self.experts, self.sequence, self.tensor) > 1


def _model(layers: int, width: int, vocab_size: int, tied: bool = True, **stack: Any) -> ModelConfig:
    values = {"heads": width // 64, "ff_width": 4 * width, "gated": False, "activation": "gelu", "norm": "layer"}
    config = StackConfig(layers=layers, width=width, **{**values, "position": "none", **stack})
    return ModelConfig(decoder=config, vocab_size=vocab_size, max_seq_len=131072, tied_embeddings=tied)


def _llama(layers: int, width: int, heads: int, kv_heads: int, ff_width: int, vocab_size: int) -> ModelConfig:
    stack = {"heads": heads, "kv_heads": kv_heads, "ff_width": ff_width, "gated": True, "activation": "silu"}
    return _model(layers, width, vocab_size, tied=False, norm="rms", **stack)


def preset_model(name: str, vocab_size: int, max_seq_len: int | None = None, **stack: Any) -> ModelConfig:
    """Returns a preset with a vocabulary, and a decoder with other values."""
    values = expand_preset({"preset": name, "vocab_size": vocab_size})
    values["decoder"] |= stack
    model = parse_model(values | ({} if max_seq_len is None else {"max_seq_len": max_seq_len}))
    assert isinstance(model, ModelConfig)
    return model


MODELS: dict[str, ModelConfig] = {
    "mpt-125m": _model(12, 768, 50368),
    "mpt-350m": _model(24, 1024, 50368),
    "mpt-760m": _model(24, 1536, 50368),
    "mpt-1b": _model(24, 2048, 50368),
    "mpt-3b": _model(32, 2560, 50368),
    "mpt-7b": _model(32, 4096, 50368),
    "mpt-13b": _model(40, 5120, 50368),
    "mpt-30b": _model(48, 7168, 50368),
    "mpt-70b": _model(80, 8192, 50368),
    "llama2-13b": _llama(40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672, 32000),
    "llama3-8b": _llama(32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": _llama(80, 8192, 64, 8, 28672, 128256),
    "gpt-1.7b": _model(24, 2048, 131072),
    "llama-1.1b": _llama(22, 2048, 32, 4, 5632, 32000),
    "qwen3-30b-a3b": preset_model("qwen3_moe-30b-a3b", 151936),
    "gpt-oss-20b": preset_model("gpt_oss-20b", 201088),
    "gpt-oss-120b": preset_model("gpt_oss-120b", 201088),
}

EAGER = {"foundry"}
"""Sources whose blocks are not compiled, nor of fused kernels."""
CUDNN = {"automodel"}
"""Sources with cuDNN's kernel of attention (Transformer Engine); others have FlashAttention 2."""

FLASH_BEFORE = 0.33
"""Share of the peak of an H100 that the kernels of these sources reach, older than ours; fitted."""
MEMORY = {"titan": 2.4e12}
"""Memory bandwidth of the H100 of a source, where it is not that of the data sheet."""

ROWS: list[PublishedRun] = [
    PublishedRun("foundry", "mpt-70b", "a100", 64, 2048, 8, 4, 1, 53.33, True),
    PublishedRun("foundry", "mpt-70b", "a100", 32, 2048, 2, 16, 1, 48.56),
    PublishedRun("foundry", "mpt-30b", "a100", 8, 2048, 3, 21, 1, 55.30),
    PublishedRun("foundry", "mpt-13b", "a100", 8, 16384, 3, 3, 1, 54.07),
    PublishedRun("foundry", "mpt-13b", "a100", 8, 2048, 2, 3, 0, 59.57, True),
    PublishedRun("foundry", "mpt-7b", "a100", 8, 32768, 2, 2, 1, 49.46, True),
    PublishedRun("foundry", "mpt-7b", "a100", 8, 8192, 8, 2, 1, 54.47),
    PublishedRun("foundry", "mpt-7b", "a100", 8, 2048, 6, 2, 0, 64.23),
    PublishedRun("foundry", "mpt-3b", "a100", 8, 16384, 1, 6, 0, 57.13),
    PublishedRun("foundry", "mpt-3b", "a100", 8, 2048, 10, 2, 0, 62.11, True),
    PublishedRun("foundry", "mpt-1b", "a100", 8, 2048, 14, 4, 0, 59.86),
    PublishedRun("foundry", "mpt-1b", "a100", 8, 8192, 3, 4, 0, 56.69, True),
    PublishedRun("foundry", "mpt-760m", "a100", 8, 2048, 24, 2, 0, 56.85),
    PublishedRun("foundry", "mpt-350m", "a100", 8, 2048, 32, 2, 0, 51.62, True),
    PublishedRun("foundry", "mpt-350m", "a100", 8, 8192, 8, 2, 0, 53.80),
    PublishedRun("foundry", "mpt-125m", "a100", 8, 2048, 32, 2, 0, 44.45),
    PublishedRun("foundry", "mpt-125m", "a100", 8, 1024, 64, 2, 0, 43.15, True),
    PublishedRun("foundry", "mpt-13b", "a100-40", 128, 2048, 16, 1, 1, 51.93),
    PublishedRun("foundry", "mpt-7b", "a100-40", 128, 2048, 18, 1, 1, 50.14, True),
    PublishedRun("foundry", "mpt-1b", "a100-40", 128, 2048, 10, 1, 0, 54.41),
    PublishedRun("foundry", "mpt-125m", "a100-40", 128, 2048, 26, 1, 0, 38.86),
    PublishedRun("foundry", "mpt-70b", "h100", 64, 2048, 8, 4, 1, 42.57, True),
    PublishedRun("foundry", "mpt-70b", "h100", 32, 2048, 2, 16, 1, 36.15),
    PublishedRun("foundry", "mpt-30b", "h100", 32, 2048, 14, 3, 1, 43.92),
    PublishedRun("foundry", "mpt-30b", "h100", 8, 4096, 1, 21, 1, 35.86),
    PublishedRun("foundry", "mpt-13b", "h100", 64, 2048, 2, 1, 0, 39.86),
    PublishedRun("foundry", "mpt-13b", "h100", 8, 2048, 2, 1, 0, 39.79, True),
    PublishedRun("foundry", "mpt-7b", "h100", 8, 2048, 6, 1, 0, 46.44),
    PublishedRun("foundry", "mpt-7b", "h100", 8, 32768, 2, 2, 1, 30.94, True),
    PublishedRun("foundry", "mpt-7b", "h100", 8, 4096, 16, 2, 1, 40.42),
    PublishedRun("foundry", "mpt-3b", "h100", 64, 2048, 6, 3, 0, 40.80, True),
    PublishedRun("foundry", "mpt-3b", "h100", 8, 8192, 3, 6, 0, 40.31),
    PublishedRun("foundry", "mpt-1b", "h100", 8, 2048, 14, 1, 0, 41.82),
    PublishedRun("foundry", "mpt-1b", "h100", 64, 2048, 20, 1, 0, 40.85),
    PublishedRun("foundry", "mpt-1b", "h100", 8, 16384, 2, 4, 0, 35.22, True),
    PublishedRun("foundry", "mpt-760m", "h100", 8, 1024, 48, 2, 0, 39.76),
    PublishedRun("foundry", "mpt-760m", "h100", 32, 2048, 24, 1, 0, 37.57, True),
    PublishedRun("titan", "llama3-8b", "a100", 64, 8192, 1, 1, 0.5, 58.2),
    PublishedRun("titan", "llama3-70b", "a100", 64, 8192, 1, 1, 1, 51.7),
    PublishedRun("titan", "llama2-13b", "a100", 64, 4096, 2, 1, 0, 61.1),
    PublishedRun("titan", "llama2-70b", "a100", 64, 4096, 2, 1, 1, 50.5),
    PublishedRun("titan", "llama3-8b", "h100", 8, 8192, 2, 1, 0.5, 39.0),
    PublishedRun("titan", "llama3-8b", "h100", 128, 8192, 2, 1, 0.5, 38.1),
    PublishedRun("megatron", "gpt-1.7b", "h100", 48, 4096, 4, 1, 0, 41.0, zero_stage=1),
    PublishedRun("nanotron", "llama-1.1b", "h100", 8, 2048, 8, 1, 0, 44.3, zero_stage=1),
    PublishedRun("automodel", "qwen3-30b-a3b", "h100", 8, 4096, 4, 16, 1, 0, tokens_s=12040, experts=8),
    PublishedRun("automodel", "gpt-oss-20b", "h100", 8, 4096, 2, 16, 0, 0, tokens_s=13058, experts=8),
    PublishedRun("automodel", "gpt-oss-120b", "h100", 64, 4096, 2, 4, 0, 0, tokens_s=7626, experts=64),
    PublishedRun("automodel", "llama3-70b", "h100", 64, 8192, 1, 4, 1, 0, tokens_s=866.77, sequence=2),
    PublishedRun("titan", "llama3-70b", "h100", 256, 8192, 16, 1, 1, 0, tokens_s=597.3, tensor=8),
    PublishedRun("titan", "llama3-8b", "h100", 64, 8192, 12, 1, 0.5, 0, tokens_s=4378, tensor=8),
]


@cache
def work_of(row: PublishedRun) -> Work:
    """Returns the work of a rank of a published run."""
    lengths = RowLengths(row.seq_len, row.seq_len)
    task = TrainingTask(MODELS[row.model], lengths, experts=row.experts, sequence=row.sequence, tensor=row.tensor)
    compiled = row.source not in EAGER
    engine = EngineConfig(kind="deepspeed", zero_stage=row.zero_stage, compile=compiled)
    work = plan_work(task, ParallelLayout(engine, row.micro, row.accumulation), row.gpus)
    kernel = "cudnn" if row.source in CUDNN else "flash"
    return replace(work, recompute=row.recompute, overlaps=True, kernel=kernel, launches=0.0)


def predict_row(row: PublishedRun, constants: Constants = CONSTANTS) -> float:
    """Returns the predicted MFU of a published run in percent, with overlapping communication."""
    nodes, work = max(1, row.gpus // 8), work_of(row)
    gpu, shares = GPUS[row.gpu], constants.shares
    if gpu.generation == "hopper":
        shares = shares | {"hopper": replace(shares["hopper"], flash=FLASH_BEFORE)}
        constants = replace(constants, shares=shares)
        gpu = replace(gpu, memory_bytes_s=MEMORY.get(row.source, gpu.memory_bytes_s))
    cluster = Cluster(nodes, row.gpus // nodes, gpu)
    return 100 * work.model_flops / time_step(work, cluster, constants).total / cluster.gpu.flops


def published_mfu(row: PublishedRun) -> float:
    """Returns the published MFU in percent."""
    if row.mfu:
        return row.mfu
    step_s = row.micro * row.accumulation * row.seq_len / (row.sequence * row.tensor) / row.tokens_s
    return 100 * work_of(row).model_flops / step_s / GPUS[row.gpu].flops


def errors_of(rows: list[PublishedRun]) -> list[float]:
    """Returns the relative errors of the predicted MFU, without their sign."""
    return [abs(predict_row(row) / published_mfu(row) - 1) for row in rows]


def error_table() -> str:
    """Returns the table of docs/plan.md: every row, and the mean and largest error of each kind."""
    lines = ["| run | GPUs | T | published MFU | predicted | error | |", "|---|---|---|---|---|---|---|"]
    for row in ROWS:
        found, published = predict_row(row), published_mfu(row)
        use = "cut" if row.is_cut else "fitted" if row.fitted else "tested"
        lines.append(
            f"| {row.source} {row.model} | {row.gpus} {row.gpu} | {row.seq_len} | {published:.1f} | {found:.1f} "
            f"| {100 * (found / published - 1):+.0f}% | {use} |"
        )
    lines.append("")
    kinds = {
        "fitted": [row for row in ROWS if row.fitted],
        "tested": [row for row in ROWS if not row.fitted and not row.is_cut],
        "with experts, rows or matrices cut over ranks": [row for row in ROWS if row.is_cut],
        "in all": ROWS,
    }
    for name, rows in kinds.items():
        errors = errors_of(rows)
        mean, worst = 100 * sum(errors) / len(errors), 100 * max(errors)
        lines.append(f"{len(errors)} rows {name}: mean error {mean:.1f}%, largest {worst:.1f}%.")
    return "\n".join(lines)
