"""Arms of the GPU campaign about training steps: equal losses, speed beside peers and without an engine, memory.

Losses of the first ten steps are compared with those of the first case before any timing counts. They may differ by
1e-4 in fp32 and by 1e-2 in bf16, relative to the loss: a case that differs by more is a failure, its figures are kept.
"""

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_bench import Bench
from benchmarks.gpu_peers import (
    MicroBatches,
    Step,
    Weights,
    Work,
    build_bare,
    build_hugging_face,
    build_nanogpt,
    build_ours,
    draw_weights,
    plan_model,
    random_steps,
)
from benchmarks.gpu_plan import beside_plan
from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.data.bins import pack_documents
from pretrain.types import IGNORE_INDEX, Batch

COMPARED_STEPS = 10
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
"""Largest difference of a loss, relative to it. bf16 rounds each value by up to 2**-9."""
MASKED_SHARE = 0.15
TINY_STACK = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ff_width": 96}


class Comparison:
    """Cases that do the same work, timed one after another; the first one's losses are the reference."""

    def __init__(
        self,
        bench: Bench,
        work: Work,
        data: list[MicroBatches],
        timed_steps: int = 10,
        tolerance: dict[str, float] = TOLERANCE,
    ) -> None:
        self.bench, self.work, self.data, self.timed_steps = bench, work, data, timed_steps
        self.tolerance = tolerance
        self.reference: list[float] = []
        self.ms: dict[str, float] = {}
        self.figures: dict[str, dict[str, Any]] = {}

    def run(self, name: str, build: Callable[[], Step], engine: EngineConfig | None = None, **other: Any) -> None:
        """Builds a case, compares its losses, times it and writes its row.

        `other`: `work` and `data` where they differ, `tokens` of a step without padding, figures of the row.
        """
        if not self.bench.wants(name):
            return
        bench, work = self.bench, other.pop("work", self.work)
        data, tokens = other.pop("data", self.data), other.pop("tokens", work.tokens)
        with bench.case(name, work.shape), closing(build()) as step:
            count = bench.pick(COMPARED_STEPS, 3)
            losses = [float(step(data[number % len(data)])) for number in range(count)]
            self.reference = self.reference or losses
            # A loss of 0 is one of the dry CUDA runtime.
            apart = max(abs(a - b) / (abs(b) or 1) for a, b in zip(losses, self.reference, strict=True))
            same = apart <= self.tolerance[work.precision]
            if not same:
                bench.failed.append(f"{name}: losses differ by {apart:.2g}")
            figures: dict[str, Any] = {"losses": losses, "loss_difference": apart, "same_work": same}
            if self.timed_steps:
                figures |= bench.measure(lambda: step(data[0]), self.timed_steps, warmup=1)
                self.ms[name] = figures["ms"]["median"]
                causal = work.model.decoder is not None
                figures |= bench.rates(self.ms[name], tokens, work.flops, work.rows, causal)
            if engine is not None:
                figures |= beside_plan(bench, work, engine, figures)
            self.figures[name] = figures
            bench.write(name, work.shape, **figures, **other)

    def judge(self, ours: str, again: str, musts: dict[str, float], aims: dict[str, float] | None = None) -> None:
        """Writes the speed of a case of ours over others, that of a repeated case over itself, and the bounds held."""
        first = again.removesuffix(" again")
        if not {ours, first, again} <= self.ms.keys():
            return
        speeds = {name: round(ms / self.ms[ours], 4) for name, ms in self.ms.items() if name not in (ours, again)}
        bounds = {"must": musts, "aim": aims or {}}
        held, reached = (
            {name: speeds[name] >= bound for name, bound in one.items() if name in speeds} for one in bounds.values()
        )
        aa = round(self.ms[again] / self.ms[first], 4)
        figures = {"value": speeds, "aa": aa, **bounds, "held": held, "aim_held": reached}
        self.bench.write(f"speed of {ours}", self.work.shape, **figures)

    def judge_best(self, figure: str, cases: Iterable[str], **bounds: float) -> None:
        """Writes the best of a figure over cases, and which bounds it reaches; `ms` is best low, others high.

        Nothing where no case has it, as the MFU of an unknown GPU.
        """
        values = {name: self._figure(name, figure) for name in cases}
        known = {name: value for name, value in values.items() if value is not None}
        if not known:
            return
        sign = -1 if figure == "ms" else 1
        best = max(known, key=lambda name: sign * known[name])
        held = {name: sign * known[best] >= sign * bound for name, bound in bounds.items()}
        self.bench.write(f"{figure} of {best}", self.work.shape, value=known[best], bounds=bounds, held=held)

    def _figure(self, case: str, figure: str) -> float | None:
        return self.ms.get(case) if figure == "ms" else self.figures.get(case, {}).get(figure)


def llama_model(bench: Bench, length: int = 2048) -> ModelConfig:
    """Returns a LLaMA of 1.1B parameters (TinyLlama's shape)."""
    full = {"layers": 22, "width": 2048, "heads": 32, "kv_heads": 4, "ff_width": 5632}
    stack = bench.pick(full, TINY_STACK)
    return plan_model("llama2-7b", bench.pick(32_000, 128), stack=stack, max_seq_len=length)


def engine_of(bench: Bench, stage: int | None, *, compiled: bool = True, **options: Any) -> EngineConfig:
    """Returns a ZeRO stage, or one process, on the device of the campaign."""
    kind = {"kind": "single", "zero_stage": 0} if stage is None else {"kind": "deepspeed", "zero_stage": stage}
    return EngineConfig.model_validate({**kind, "device": bench.device.type, "compile": compiled, **options})


def _ours(work: Work, weights: Weights, config: EngineConfig) -> Callable[[], Step]:
    return lambda: build_ours(work, weights, config)[0]


def same_losses(bench: Bench) -> None:
    """Compares losses of every engine and backend with one process, eager: dense and packed rows, fp32 and bf16."""
    stack = bench.pick({"layers": 4, "width": 512, "heads": 8, "kv_heads": 2, "ff_width": 1408}, TINY_STACK)
    length = bench.pick(512, 32)
    model = plan_model("llama2-7b", bench.pick(8192, 128), stack=stack, max_seq_len=length)
    weights = draw_weights(model, bench.device, sensitive=True)
    for precision in ("fp32", "bf16"):
        work = Work(model, length, micro=8, precision=precision)
        plain = partial(engine_of, bench, compiled=False, precision=precision)
        for packed in (False, True):
            data = random_steps(work, bench.device, count=2)
            if packed:
                data = [with_documents(step) for step in data]
            found = Comparison(bench, work, data, timed_steps=0)
            if packed:
                backends = ("sdpa", "eager", "auto", "varlen", "flex")
                engines = {name: plain(None, attention=name) for name in backends}
            else:
                engines = {"one process": plain(None), "compiled": plain(None, compiled=True)}
                engines |= {f"ZeRO {stage}": plain(stage) for stage in range(4)}
            rows = f"{precision}, {'packed' if packed else 'dense'}"
            for name, config in engines.items():
                found.run(f"{name}, {rows}", _ours(work, weights, config))
            if not packed:
                peer = partial(build_hugging_face, work, weights, bench.device, compiled=False)
                found.run(f"Hugging Face, {rows}", peer)


def with_documents(step: MicroBatches) -> MicroBatches:
    """Cuts each row into four documents of different lengths."""
    batches = []
    for batch in step.batches:
        length = batch.tokens_BT.shape[1]
        starts = torch.zeros(length, dtype=torch.int32)
        starts[[length // 8, length // 2, 3 * length // 4]] = 1
        documents_BT = starts.cumsum(0).to(torch.int32).expand(batch.tokens_BT.shape).contiguous()
        places = torch.arange(length)
        first = torch.where(starts.bool(), places, 0).cummax(0).values
        positions_BT = (places - first).expand(batch.tokens_BT.shape).contiguous()
        packed = Batch(
            batch.tokens_BT.cpu(), batch.targets_BT.cpu(), positions_BT=positions_BT, documents_BT=documents_BT
        )
        batches.append(packed.to(batch.tokens_BT.device))
    return MicroBatches(batches, step.num_targets)


def llama(bench: Bench) -> None:
    """Times LLaMA 1.1B through the ordinary engine at several micro-batches, without one, and Hugging Face."""
    rows, length = bench.pick((32, 2048), (4, 32))
    model = llama_model(bench, length)
    weights = draw_weights(model, bench.device)
    micros = bench.pick((8, 16, 32), (2, 4))
    works = {micro: Work(model, length, micro, rows // micro) for micro in micros}
    data = {micro: random_steps(work, bench.device, count=2) for micro, work in works.items()}
    work, first = works[micros[0]], data[micros[0]]
    found = Comparison(bench, work, first, timed_steps=6)
    compiled, eager = engine_of(bench, 1), engine_of(bench, 1, compiled=False)
    ours = _ours(work, weights, compiled)
    found.run("ours", ours, compiled)
    single = engine_of(bench, None)
    found.run("ours, own engine", _ours(work, weights, single), single)
    found.run("Hugging Face, compiled", partial(build_hugging_face, work, weights, bench.device, compiled=True))
    found.run("no engine", lambda: build_bare(work, weights, bench.device, compiled=True)[0])
    found.run("ours again", ours, compiled)
    for name in ("ours", "ours, own engine"):
        found.judge(name, "ours again", {"Hugging Face, compiled": 1.3}, {"Hugging Face, compiled": 1.4})
    larger = {f"ours, micro {micro}": micro for micro in micros[1:]}
    for name, micro in larger.items():
        build = _ours(works[micro], weights, single)
        found.run(name, build, single, work=works[micro], data=data[micro])
    found.judge_best("mfu", ["ours", "ours, own engine", *larger], least=0.50, must=0.58, aim=0.62)
    found.run("ours, eager", _ours(work, weights, eager), eager)
    found.run("Hugging Face", partial(build_hugging_face, work, weights, bench.device, compiled=False))


def zero(bench: Bench) -> None:
    """Times ZeRO 0 to 3 at one rank against our own loop without an engine."""
    rows, length = bench.pick((16, 2048), (4, 32))
    model = llama_model(bench, length)
    work = Work(model, length, rows // 2, 2)
    weights = draw_weights(model, bench.device)
    data = random_steps(work, bench.device, count=2)
    found = Comparison(bench, work, data, timed_steps=8)

    def no_engine() -> Step:
        return build_bare(work, weights, bench.device, compiled=True)[0]

    found.run("no engine", no_engine)
    for stage in range(4):
        config = engine_of(bench, stage)
        found.run(f"ZeRO {stage}", _ours(work, weights, config), config)
    single = engine_of(bench, None)
    found.run("one process", _ours(work, weights, single), single)
    found.run("no engine again", no_engine)
    for name in [name for name in found.ms if not name.startswith("no engine")]:
        found.judge(name, "no engine again", {"no engine": 0.97}, {"no engine": 0.98})


def gpt2_work(bench: Bench) -> Work:
    """Returns a step of GPT-2 124M with the vocabulary and the activation of nanoGPT."""
    length, rows = bench.pick((1024, 32), (32, 2))
    stack = {"activation": "gelu", **bench.pick({}, {"layers": 2, "width": 64, "heads": 4, "ff_width": 256})}
    return Work(plan_model("gpt2-124m", bench.pick(50_304, 128), stack=stack, max_seq_len=length), length, rows)


def gpt2(bench: Bench) -> None:
    """Times GPT-2 124M against nanoGPT and Hugging Face."""
    work = gpt2_work(bench)
    weights = draw_weights(work.model, bench.device)
    found = Comparison(bench, work, random_steps(work, bench.device, count=2), timed_steps=20)
    ours, single = engine_of(bench, 1), engine_of(bench, None)
    found.run("ours", _ours(work, weights, ours), ours)
    found.run("ours, one process", _ours(work, weights, single), single)
    if bench.nanogpt is not None:
        for compiled in (True, False):
            build = partial(build_nanogpt, work, weights, bench.device, bench.nanogpt, compiled=compiled)
            found.run("nanoGPT, compiled" if compiled else "nanoGPT", build)
    for compiled in (True, False):
        build = partial(build_hugging_face, work, weights, bench.device, compiled=compiled)
        found.run("Hugging Face, compiled" if compiled else "Hugging Face", build)
    found.run("ours again", _ours(work, weights, ours), ours)
    found.judge(
        "ours",
        "ours again",
        {"nanoGPT, compiled": 1.0, "Hugging Face": 2.0},
        {"nanoGPT, compiled": 1.15, "Hugging Face": 2.5},
    )
    found.judge_best("tokens_per_s", ["ours", "ours, one process"], aim=450_000)


MODES: dict[str, dict[str, Any]] = {
    "one graph": {"compile_scope": "stack"},
    "autotuned": {"compile_mode": "max-autotune-no-cudagraphs"},
    "loss at once": {"loss_chunk": "whole"},
}
"""Ways to run the same step, none of which is the default."""


def modes(bench: Bench) -> None:
    """Times each of `MODES` beside the defaults in one process: LLaMA 1.1B, then GPT-2."""
    rows, length = bench.pick((16, 2048), (4, 32))
    for name, work in {"LLaMA": Work(llama_model(bench, length), length, rows), "GPT-2": gpt2_work(bench)}.items():
        weights = draw_weights(work.model, bench.device)
        found = Comparison(bench, work, random_steps(work, bench.device, count=2))
        plain, again = f"{name}, defaults", f"{name}, defaults again"
        cases = {plain: {}, **{f"{name}, {mode}": keys for mode, keys in MODES.items()}, again: {}}
        for case, keys in cases.items():
            config = engine_of(bench, None, **keys)
            found.run(case, _ours(work, weights, config), config)
        for case in cases:
            if case not in (plain, again):
                found.judge(case, again, {plain: 1.0}, {plain: 1.02})


def t5(bench: Bench) -> None:
    """Times T5-base v1.1, 512 tokens in and 114 out, against Hugging Face."""
    source, target, rows = bench.pick((512, 114, 128), (24, 8, 2))
    values: dict[str, Any] = {"max_seq_len": source}
    if bench.rehearse:
        values["stack"] = {"layers": 2, "width": 64, "heads": 4, "head_width": 16, "ff_width": 96}
    model = plan_model("t5-v1.1-base", bench.pick(32_128, 128), **values)
    work = Work(model, target, rows, source_len=source)
    weights = draw_weights(model, bench.device)
    found = Comparison(bench, work, random_steps(work, bench.device, count=2), timed_steps=20)
    ours = engine_of(bench, 1)
    found.run("ours", _ours(work, weights, ours), ours)
    for compiled in (True, False):
        build = partial(build_hugging_face, work, weights, bench.device, compiled=compiled)
        found.run("Hugging Face, compiled" if compiled else "Hugging Face", build)
    found.run("ours again", _ours(work, weights, ours), ours)
    found.judge("ours", "ours again", {}, {"Hugging Face": 2.5})
    found.judge_best("ms", ["ours", "ours again"], must=220, aim=170)


def bert(bench: Bench) -> None:
    """Times BERT-base on documents of real lengths: ours packs them, Hugging Face pads them."""
    length, count = bench.pick((512, 128), (32, 8))
    stack = {"dropout": 0.0, **bench.pick({}, {"layers": 2, "width": 64, "heads": 4, "ff_width": 96})}
    model = plan_model("bert-base", bench.pick(30_522, 128), stack=stack, max_seq_len=length)
    weights = draw_weights(model, bench.device)
    rng = np.random.default_rng(0)
    # Log-normal, as the lengths of articles are; a sixth is cut to the row.
    lengths = np.clip(rng.lognormal(np.log(length / 2.5), 0.9, count), 8, length).astype(np.int64)
    texts = [torch.from_numpy(rng.integers(1, model.vocab_size or 2, size)) for size in lengths]
    chosen = [torch.from_numpy(rng.random(size) < MASKED_SHARE) for size in lengths]
    padded, packed = pad_rows(texts, chosen, length), pack_rows(texts, chosen, lengths, length)
    work = Work(model, length, len(packed.tokens_BT), head_share=MASKED_SHARE)
    step = MicroBatches([packed.to(bench.device)], [packed.num_targets()])
    padded_work = replace(work, micro=count)
    found = Comparison(bench, work, [step], timed_steps=20)
    total = int(lengths.sum())
    kept: dict[str, Any] = {
        "tokens": total,
        "padding": {"ours": _padding(total, work), "Hugging Face": _padding(total, padded_work)},
    }
    ours = engine_of(bench, 1)
    found.run("ours", _ours(work, weights, ours), ours, **kept)
    peer: dict[str, Any] = {"work": padded_work, "data": [MicroBatches([padded.to(bench.device)], step.num_targets)]}
    for compiled in (True, False):
        build = partial(build_hugging_face, padded_work, weights, bench.device, compiled=compiled)
        found.run("Hugging Face, compiled" if compiled else "Hugging Face", build, **peer, **kept)
    found.run("ours again", _ours(work, weights, ours), ours, **kept)
    found.judge("ours", "ours again", {"Hugging Face": 2.0})
    found.judge_best("tokens_per_s", ["ours", "ours again"], aim=650_000)


def _padding(tokens: int, work: Work) -> float:
    return round(1 - tokens / (work.rows * work.seq_len), 3)


def pad_rows(texts: list[torch.Tensor], chosen: list[torch.Tensor], length: int) -> Batch:
    tokens_BT = torch.zeros(len(texts), length, dtype=torch.int64)
    targets_BT = torch.full_like(tokens_BT, IGNORE_INDEX)
    for row, (text, mask) in enumerate(zip(texts, chosen, strict=True)):
        tokens_BT[row, : len(text)] = text
        targets_BT[row, : len(text)][mask] = text[mask]
    lengths_B = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    return Batch(tokens_BT, targets_BT, lengths_B=lengths_B)


def pack_rows(texts: list[torch.Tensor], chosen: list[torch.Tensor], lengths: np.ndarray, length: int) -> Batch:
    bins = pack_documents(lengths, length)
    rows = len(bins)
    tokens_BT = torch.zeros(rows, length, dtype=torch.int64)
    targets_BT = torch.full_like(tokens_BT, IGNORE_INDEX)
    positions_BT = torch.zeros_like(tokens_BT)
    documents_BT = torch.full((rows, length), -1, dtype=torch.int32)
    for row, (first, end) in enumerate(pairwise(bins.starts.tolist())):
        place = 0
        for number, document in enumerate(bins.document[first:end].tolist()):
            text = texts[document]
            span = slice(place, place + len(text))
            tokens_BT[row, span] = text
            targets_BT[row, span][chosen[document]] = text[chosen[document]]
            positions_BT[row, span] = torch.arange(len(text))
            documents_BT[row, span] = number
            place += len(text)
    targets_P = (targets_BT.flatten() != IGNORE_INDEX).nonzero()[:, 0]
    return Batch(
        tokens_BT, targets_BT, positions_BT=positions_BT, documents_BT=documents_BT, target_positions_P=targets_P
    )


def lora(bench: Bench) -> None:
    """Times adapters of rank 16 on LLaMA-3 8B, whose published speed is 12,473 tokens/s on one H100."""
    length, rows = bench.pick((2048, 8), (32, 2))
    stack = bench.pick({}, TINY_STACK)
    model = plan_model("llama3-8b", bench.pick(128_256, 128), stack=stack, max_seq_len=length)
    weights = draw_weights(model, bench.device)
    work = Work(model, length, rows // 2, 2, lora_rank=16)
    found = Comparison(bench, work, random_steps(work, bench.device, count=2), timed_steps=5)
    config = engine_of(bench, 1)
    found.run("ours", _ours(work, weights, config), config)
    found.judge_best("tokens_per_s", ["ours"], must=12_000, aim=14_000)
