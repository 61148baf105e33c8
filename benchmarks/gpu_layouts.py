"""Models and layouts of the arm `ranks`, as overrides of one config; no torch is imported.

REFERENCES["experts"]     a model and its recipe: in one process the reference of all layouts that name it
LAYOUTS["four"]           layouts by group, each on so many ranks
"""

from dataclasses import dataclass

GROUPS = {
    "abort": 35,
    "one": 35,
    "two": 90,
    "kinds": 90,
    "four": 80,
    "race": 120,
    "kill": 20,
    "again": 55,
    "stop": 35,
    "save": 30,
}
"""Groups in order, and seconds that each is expected to take on a GPU, estimates at 15 ms a collective; the first of a
call also imports and prepares a text."""
RANKS = {
    "abort": 2,
    "one": 1,
    "two": 2,
    "kinds": 2,
    "four": 4,
    "race": 2,
    "kill": 2,
    "again": 2,
    "stop": 2,
    "save": 2,
}
ROWS = 16
"""Rows of a step over all ranks."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the campaign, or of the rehearsal.

    Attributes:
        steps: Steps of a layout.
        race_steps: Steps of a disturbed run.
        long_steps: Steps of a run that is interrupted.
        interrupted_at: Step from which it is.
        save_every: Steps between saves of the last two.
        width: Width of the dense model; that of experts is half of it.
        layers: Layers of the dense model.
        race: Overrides of the model of a disturbed run.
        saved: Overrides of the model whose state is saved.
    """

    steps: int
    race_steps: int
    long_steps: int
    interrupted_at: int
    save_every: int
    width: int
    layers: int
    race: tuple[str, ...]
    saved: tuple[str, ...]


def _llama(layers: int, width: int, head_width: int) -> tuple[str, ...]:
    heads = f"heads: {width // head_width}, kv_heads: {width // head_width}, head_width: {head_width}"
    decoder = f"model.decoder={{layers: {layers}, width: {width}, {heads}, ff_width: {4 * width}}}"
    return ("model.preset=llama-tiny", "model.max_seq_len=64", decoder)


FULL = Sizes(
    steps=10,
    race_steps=50,
    long_steps=60,
    interrupted_at=25,
    save_every=20,
    width=128,
    layers=4,
    race=_llama(2, 512, 64),
    saved=_llama(8, 1024, 64),
)
"""The model of a race has more parameters a layer than ZeRO 3 gathers ahead."""
TINY = Sizes(
    steps=4,
    race_steps=12,
    long_steps=30,
    interrupted_at=12,
    save_every=5,
    width=32,
    layers=2,
    race=_llama(2, 32, 16),
    saved=_llama(2, 64, 16),
)

CONFIG = """\
seed: 7
run: {{dir: {runs}}}
data: {{path: {data}}}
batch: {{global_tokens: 1024, seq_len: 64, micro: 8}}
optim: {{lr: 1e-3, schedule: {{warmup_steps: 5}}}}
train: {{steps: {steps}}}
eval: {{every_steps: 0}}
engine: {{kind: deepspeed, zero_stage: 1, precision: fp32, compile: false, device: {device}, timeout_s: 60}}
checkpoint: {{every_steps: 0, keep: 4}}
tracking: {{log_every_steps: 1, norms_every_steps: 0, wandb: "off"}}
"""


def references(sizes: Sizes, base: str) -> dict[str, list[str]]:
    """Returns the overrides of each model and recipe; adapters begin with the run `base`."""
    width, half = sizes.width, sizes.width // 2
    length = "model.max_seq_len=64"
    dense = (
        f"model.decoder={{layers: {sizes.layers}, width: {width}, heads: 8, kv_heads: 4, "
        f"head_width: {width // 8}, ff_width: {2 * width}}}"
    )
    experts = (
        f"model.decoder={{layers: 2, width: {half}, heads: 4, kv_heads: 4, head_width: {half // 4}, "
        f"ff_width: {3 * half // 2}, experts: {{count: 8, top_k: 2}}}}"
    )
    llama = ["model.preset=llama-tiny", length, dense]
    averaged = ["optim.ema={horizon_steps: 5}", f"eval={{every_steps: {sizes.steps}, max_tokens: 4096}}"]
    return {
        "dense": llama,
        "experts": ["model.preset=mixtral-tiny", length, experts],
        "bf16": [*llama, "engine.precision=bf16"],
        "LoRA": [f"init.from={base}", "finetune={kind: lora, rank: 8, alpha: 16}"],
        "Muon": [*llama, "optim.kind=muon"],
        "average": [*llama, *averaged],
    }


ALONE = ["engine.kind=single", "engine.zero_stage=0"]
"""Overrides of a reference."""
COMPILED = ["engine.compile=true"]


@dataclass(frozen=True)
class Layout:
    """A layout of ranks.

    Attributes:
        reference: Name of its model and recipe.
        stage: ZeRO stage; None: DDP.
        sequence: Ranks that share rows.
        tensor: Ranks that share matrices, and rows.
        experts: Ranks that share experts.
        more: Further overrides, by the words that describe them.
    """

    reference: str
    stage: int | None
    sequence: int = 1
    tensor: int = 1
    experts: int = 1
    more: tuple[str, tuple[str, ...]] = ("", ())

    @property
    def name(self) -> str:
        """Its name: `experts, ZeRO 3, experts 2`."""
        engine = "DDP" if self.stage is None else f"ZeRO {self.stage}"
        shared = {"sequence": self.sequence, "tensor": self.tensor, "experts": self.experts}
        parts = [f"{key} {ranks}" for key, ranks in shared.items() if ranks > 1]
        return ", ".join(filter(None, [self.reference, engine, *parts, self.more[0]]))

    def overrides(self, ranks: int) -> list[str]:
        """Returns the overrides beyond the reference: two micro-batches a step."""
        engine = ["engine.kind=ddp", "engine.zero_stage=0"]
        if self.stage is not None:
            engine = [f"engine.zero_stage={self.stage}"]
        micro = ROWS * self.sequence * self.tensor // ranks // 2
        shared = [f"parallel.sequence={self.sequence}", f"parallel.tensor={self.tensor}"]
        shared.append(f"parallel.experts={self.experts}")
        return [*engine, *shared, f"batch.micro={micro}", *self.more[1]]


def _offloaded(*names: str) -> tuple[str, tuple[str, ...]]:
    return f"{' and '.join(names)} offloaded", tuple(f"engine.offload_{name}=cpu" for name in names)


_COMPILED = ("compiled", tuple(COMPILED))

LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "two": (
        Layout("dense", 3),
        Layout("dense", 2),
        Layout("dense", 1),
        Layout("dense", None),
        Layout("dense", 1, tensor=2),
        Layout("dense", 2, sequence=2),
        Layout("experts", 1, experts=2),
        Layout("dense", 3, tensor=2),
        Layout("experts", 3, experts=2),
    ),
    "kinds": (
        Layout("bf16", 3),
        Layout("bf16", 1),
        Layout("bf16", None),
        Layout("dense", 3, more=_COMPILED),
        Layout("dense", 1, more=_COMPILED),
        Layout("Muon", 2),
        Layout("Muon", 3),
        Layout("average", 1),
        Layout("average", 3),
        Layout("LoRA", 2),
        Layout("dense", 2, more=_offloaded("optimizer")),
        Layout("dense", 3, more=_offloaded("optimizer", "params")),
    ),
    "four": (
        Layout("dense", 3),
        Layout("dense", 3, sequence=2, tensor=2),
        Layout("dense", 1, tensor=4),
        Layout("experts", 3, experts=2),
        Layout("experts", 2, sequence=2, experts=4),
        Layout("bf16", 2, sequence=2),
    ),
}
"""In order of worth: rows are written as layouts end."""
