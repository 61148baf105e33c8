"""Runs `pretrain train` on the CUDA build of torch without a GPU, and shows what a step asks of the device.

    python -m tests.cuda_dry                      all cases against the table of this torch
    python -m tests.cuda_dry zero3 varlen         some of them
    python -m tests.cuda_dry --update             writes the table anew
    python -m tests.cuda_dry --show zero1 engine.compile=true model.preset=gpt2-124m        any run, to be read
    python -m tests.cuda_dry --run -m benchmarks.gpu --out DIR     any Python program; its times mean nothing

A preloaded library stands for the CUDA runtime, the driver, cuBLAS and NCCL (runtime.c, driver.c, nothing.c). Under it
run the real torch, DeepSpeed, Triton and ptxas for an H200: each case goes from its config to a checkpoint. Kernels are
counted and not run, so no number that a model computes means anything. What does: crashes, waits for the device with
the function that waits, launches, products in FLOPs, copies and collectives in bytes, and the allocator's peak.

Needs Linux, gcc, and the CUDA build of torch in this environment (5 GB); no GPU and no driver. 10 to 60 s a case.
"""

import argparse
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from PIL import Image

from pretrain.utils.net import reserved_port

HERE = Path(__file__).parent
SOURCES = ("runtime.c", "driver.c", "nothing.c")
STEPS, STEADY = 8, 6
CONFIG = """\
data: {path: data}
batch: {global_tokens: 8192, seq_len: 512, micro: 4}
model: {preset: llama-5m, max_seq_len: 512}
optim: {lr: 0.001, schedule: {warmup_steps: 2}}
engine: {kind: deepspeed, zero_stage: 1, precision: bf16, compile: false}
checkpoint: {every_steps: 100}  # the last step alone: the thread of a save would wait at any later one
eval: {every_steps: 100}
tracking: {wandb: "off"}
"""
TOKENIZERS = {
    "data": "{kind: char}",
    "bert": "{kind: wordpiece, vocab_size: 300, roles: bert}",
    "t5": "{kind: bpe, vocab_size: 400, roles: t5, sentinels: 100}",
}
DDP = ["engine.kind=ddp", "engine.zero_stage=0"]
SINGLE = ["engine.kind=single", "engine.zero_stage=0"]
OF_8 = ["WORLD_SIZE=8", "batch.micro=1"]
# No prefetching thread: with rows of another length each step, the thread's pace decides which
# pinned blocks are free again.
PADDED = [
    *("data.path=bert", "data.packing=padded", "data.workers=0"),
    *("model.preset=bert-tiny", "objective.kind=masked"),
]
MODERNBERT = ["data.path=bert", "model.preset=modernbert-tiny", "objective.kind=masked"]
IMAGES = [
    *("data.path=images", "objective.kind=images", "model.preset=vit-tiny", "model.max_seq_len=17"),
    *("batch.seq_len=17", "batch.global_tokens=1088", "batch.micro=16"),
]
T5 = ["data.path=t5", "model.preset=t5-v1.1-tiny", "objective.kind=span"]
CASES = {
    "zero0": ["engine.zero_stage=0"],
    "zero1": [],
    "zero2": ["engine.zero_stage=2"],
    "zero3": ["engine.zero_stage=3"],
    "ddp": DDP,
    "zero1, 8 ranks": OF_8,
    "zero2, 8 ranks": [*OF_8, "engine.zero_stage=2"],
    "zero3, 8 ranks": [*OF_8, "engine.zero_stage=3"],
    "ddp, 8 ranks": [*OF_8, *DDP],
    "single": SINGLE,
    "autocast": [*SINGLE, "engine.gradients=fp32"],
    "fp16": ["engine.zero_stage=2", "engine.precision=fp16"],
    "fp32": ["engine.precision=fp32"],
    "fp32 gradients": ["engine.zero_stage=2", "engine.gradients=fp32"],
    "offload": ["engine.zero_stage=2", "engine.offload_optimizer=cpu"],
    "muon": ["engine.zero_stage=2", "optim.kind=muon"],
    "adafactor": ["engine.zero_stage=2", "optim.kind=adafactor"],
    "lora": ["init.from=base", "finetune.kind=lora"],
    "evaluation": [f"eval.every_steps={STEADY // 2}"],
    "sdpa": ["engine.attention=sdpa"],
    "flex": ["engine.attention=flex"],
    "whole rows": ["data.document_mask=false"],
    "compiled": ["engine.compile=true"],
    "compiled, flex": ["engine.compile=true", "engine.attention=flex"],
    "compiled, zero3": ["engine.compile=true", "engine.zero_stage=3"],
    "compiled, selective": ["engine.compile=true", "engine.activation_checkpointing=selective"],
    "compiled, ddp": ["engine.compile=true", *DDP],
    "compiled, single": ["engine.compile=true", *SINGLE],
    "compiled, stack": ["engine.compile=true", "engine.compile_scope=stack", *SINGLE],
    "compiled, ddp, 8 ranks": ["engine.compile=true", *OF_8, *DDP],
    "compiled, muon": ["engine.compile=true", "engine.zero_stage=2", "optim.kind=muon"],
    "compiled, fp8": ["engine.compile=true", "engine.fp8=tensorwise"],
    "compiled, fp8, zero3": [
        *("engine.compile=true", "engine.fp8=rowwise", "engine.zero_stage=3"),
        "engine.activation_checkpointing=full",
    ],
    "full": ["engine.activation_checkpointing=full"],
    "full, offload": ["engine.activation_checkpointing=full", "engine.offload_activations=cpu"],
    "compiled, offload": ["engine.compile=true", "engine.offload_activations=cpu"],
    "gpt2": ["model.preset=gpt2-tiny"],
    "compiled, gpt2": ["model.preset=gpt2-tiny", "engine.compile=true"],
    "mistral": ["model.preset=mistral-tiny"],
    "bert, padded": PADDED,
    "modernbert": MODERNBERT,
    "compiled, modernbert": [*MODERNBERT, "engine.compile=true"],
    "t5": T5,
    "compiled, t5": [*T5, "engine.compile=true"],
    "experts": ["model.preset=mixtral-tiny"],
    "compiled, experts": ["model.preset=mixtral-tiny", "engine.compile=true"],
    "experts, zero3": ["model.preset=deepseek_v3-tiny", "engine.zero_stage=3"],
    "images": IMAGES,
    "compiled, images": [*IMAGES, "engine.compile=true"],
    "decode": ["decode"],
    "update": ["update"],
}
"""Overrides by name; `decode` is no training, and `update` is that of our own engine alone. Documents of a row are
masked by `varlen`, which `auto` chooses.
With WORLD_SIZE a case is rank 0 of so many: collectives have their sizes, and every rank holds what this one holds.
`evaluation` counts a step and the second evaluation, after it."""


GOLDEN = HERE / f"torch-{'.'.join(torch.__version__.split('.')[:2])}.txt"
"""What each case asks of the device under this torch."""


def read_table() -> dict[str, list[str]]:
    """Returns the lines of each case of the table, by name; empty for a torch that has none."""
    blocks = GOLDEN.read_text().strip().split("\n\n") if GOLDEN.exists() else []
    return {block.partition("\n")[0]: block.split("\n") for block in blocks}


def build(folder: Path) -> None:
    """Compiles the library, which is found under the names of all that it stands for."""
    triton = find_spec("triton")
    nvidia = find_spec("nvidia")
    assert triton is not None and triton.origin is not None, "the CUDA build of torch comes with Triton"
    assert nvidia is not None and nvidia.submodule_search_locations is not None, "and with the CUDA runtime"
    # Headers of this runtime's version first: Triton's may be of an older one, but are all of them.
    found = Path(nvidia.submodule_search_locations[0]).glob("*/include/cuda_runtime_api.h")
    headers = [*(path.parent for path in found), Path(triton.origin).parent / "backends/nvidia/include"]
    library = folder / "libcuda.so.1"
    options = ["-O1", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", *(f"-I{path}" for path in headers)]
    subprocess.run(
        ["gcc", *options, "-o", library, *(HERE / name for name in SOURCES), "-ldl", "-lpthread"], check=True
    )
    (folder / "libnvidia-ml.so.1").symlink_to(library.name)


def prepare(folder: Path) -> None:
    """Writes config, token shards of 1,500 documents for each kind of model, and shards of 600 images."""
    draw = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    texts = ({"text": " ".join(draw.choices(words, k=draw.randint(5, 120)))} for _ in range(1500))
    (folder / "texts.jsonl").write_text("".join(f"{json.dumps(text)}\n" for text in texts))
    (folder / "dry.yaml").write_text(CONFIG)
    for name, tokenizer in TOKENIZERS.items():
        config = f"output: {name}\ninputs: [{{path: texts.jsonl}}]\ntokenizer: {tokenizer}\n"
        (folder / f"{name}.yaml").write_text(config)
        command = [sys.executable, "-m", "pretrain", "prepare", f"{name}.yaml"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    for number in range(600):
        at = folder / f"photos/{number % 2}/{number}.png"
        at.parent.mkdir(parents=True, exist_ok=True)
        Image.frombytes("RGB", (16, 16), draw.randbytes(3 * 16 * 16)).save(at)
    command = ["prepare", "--input", "photos", "--kind", "images", "--output", "images"]
    subprocess.run([sys.executable, "-m", "pretrain", *command], cwd=folder, check=True, capture_output=True)


def train_base(folder: Path) -> None:
    """Trains the model that fine-tuning begins with, for a step on the CPU."""
    engine = ["engine.kind=single", "engine.zero_stage=0", "engine.device=cpu", "engine.precision=fp32"]
    words = ["run.dir=.", "run.name=base", "train.steps=1", "optim.schedule.warmup_steps=0", *engine]
    command = [sys.executable, "-m", "pretrain", "train", "dry.yaml", *words]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def environment(folder: Path) -> dict[str, str]:
    """Returns the environment of a process on the runtime that `build` left in a folder."""
    return {
        **os.environ,
        "LD_PRELOAD": str(folder / "libcuda.so.1"),
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }


def place_among(ranks: str) -> dict[str, str]:
    """Returns the launcher's environment of rank 0."""
    with reserved_port(None) as port:
        of_store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, **of_store}


def run(folder: Path, overrides: list[str]) -> dict[str, list[float]]:
    """Trains from a config to its last checkpoint, or decodes; returns calls and amounts of a steady step.

    Raises: RuntimeError: The run failed; with all that it printed.
    """
    shutil.rmtree(folder / "runs", ignore_errors=True)
    out = folder / "table.json"
    ranks = next((word.partition("=")[2] for word in overrides if word.startswith("WORLD_SIZE=")), "")
    trains = overrides not in (CASES["decode"], CASES["update"])
    if "init.from=base" in overrides and not (folder / "base").exists():
        train_base(folder)
    words = [word for word in overrides if not word.startswith("WORLD_SIZE=")]
    command = ["train", "dry.yaml", "run.name=dry", *words, f"train.steps={STEPS}"] if trains else words
    case = ["-m", "tests.cuda_dry.case", str(out), str(STEADY)]
    done = subprocess.run(
        [sys.executable, *case, *command],
        cwd=folder,
        env=environment(folder) | (place_among(ranks) if ranks else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {' '.join(overrides)}\n{done.stdout}{done.stderr}")
    assert ranks or not trains or (folder / f"runs/dry/checkpoints/step-{STEPS:08d}").is_dir()
    return json.loads(out.read_text())


def lines_of(name: str, table: dict[str, list[float]]) -> list[str]:
    """Returns a case as lines."""
    rows = [f"  {calls:6.0f}  {amount:16,.0f}  {what}" for what, (calls, amount) in sorted(table.items())]
    return [name, *rows]


def main() -> None:
    """Runs what the command line names; exit code 1 where a case differs from the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="names of cases, or with --show a case and overrides; none: all")
    parser.add_argument("--update", action="store_true", help="write the table of this torch anew")
    parser.add_argument("--show", action="store_true", help="print the step of one run with more overrides")
    parser.add_argument("--run", nargs=argparse.REMAINDER, help="run Python with these arguments on the runtime")
    given = parser.parse_args()
    if torch.version.cuda is None:
        parser.error(f"torch {torch.__version__} is not a CUDA build: install the one for CUDA in this environment")
    table = read_table()
    differs = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        build(folder)
        if given.run:
            raise SystemExit(
                subprocess.run([sys.executable, *given.run], env=environment(folder), check=False).returncode
            )
        prepare(folder)
        if given.show:
            name, *overrides = given.cases
            print("\n".join(lines_of(name, run(folder, [*CASES[name], *overrides]))))
            return
        for name in given.cases or CASES:
            try:
                found = lines_of(name, run(folder, CASES[name]))
            except RuntimeError as error:
                print(f"{name}: {error}", flush=True)
                differs = True
                continue
            changes = list(difflib.unified_diff(table.get(name, []), found, lineterm="", n=0))[2:]
            print(f"{name}: {'as in the table' if not changes else 'differs'}", *changes, sep="\n  ", flush=True)
            differs = differs or bool(changes)
            table[name] = found
            if given.update:  # after each: another may fail, or take long
                GOLDEN.write_text("\n\n".join("\n".join(table[name]) for name in CASES if name in table) + "\n")
    if differs and not given.update:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
