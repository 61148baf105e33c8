"""Models on disk, described but not loaded: any, read as another architecture, or with adapters."""

import hashlib
import shlex
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pretrain.artifact.quantized import round_to_nf4
from pretrain.checkpoint.load import WeightReader
from pretrain.config.model import GENERATOR, AnyModelConfig, ModelConfig
from pretrain.config.run import RunConfig
from pretrain.errors import CheckpointError, ConfigError
from pretrain.generation.constraints import Codec
from pretrain.interop.tensors import parameter_shapes
from pretrain.plan.params import count_parameters, names_of_tables
from pretrain.run.folder import RunDir
from pretrain.types import EMA, GenerationDefaults
from pretrain.utils.units import listed

TOKENIZER_FOLDER = "tokenizer"

TokenizerFiles = list[tuple[str, bytes]]


def split_average(path: Path) -> tuple[Path, bool]:
    """Returns a model path without `ema` at its end, and whether it had one: it names the average of the weights."""
    averaged = path.name == EMA and not path.exists()
    return (path.parent if averaged else path), averaged


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on disk."""

    path: Path  # checkpoint or folder of its weights; `ema` under a checkpoint for their average
    config: AnyModelConfig  # `vocab_size` and the known special tokens are filled in
    read: Callable[[str], Tensor]  # returns one parameter by name, fp32, whole
    shapes: Mapping[str, tuple[int, ...]]
    load_codec: Callable[[], Codec]  # raises DataError where there is no tokenizer
    # (name, content) of the tokenizer's files in the format of Hugging Face; empty: there is none.
    load_tokenizer_files: Callable[[], TokenizerFiles]
    generation: GenerationDefaults
    like: str = ""  # class that an export takes where several have the same tensors, or its ending
    run: RunDir | None = None  # the run of a checkpoint; None: it was imported
    checkpoint: WeightReader | None = None  # its open files; None: a Hugging Face folder
    # Fills a 1-D tensor with the elements of a parameter from an offset on, and reads no more;
    # None: parameters are read whole only.
    read_part: Callable[[str, int, Tensor], None] | None = None
    merged: "MergedModel | None" = None  # the adapters that `read` merges, and the base model

    @property
    def name(self) -> str:
        """Name of its folder; `step-N/ema` of an average."""
        is_average = self.checkpoint is not None and self.checkpoint.averaged
        return f"{self.path.parent.name}/{EMA}" if is_average else self.path.name


def take_apart(source: ModelSource, *, generator: bool) -> ModelSource:
    """Returns a model without the generator of replaced tokens beside it, or that generator alone.

    Raises: ConfigError: There is no generator.
    """
    config = source.config
    if not isinstance(config, ModelConfig) or not config.generator_heads:
        if generator:
            raise ConfigError(
                "the model has no generator of replaced tokens",
                where=str(source.path),
                fix="leave --generator out",
            )
        return source
    part = config.generator if generator else config.model_copy(update={"generator_heads": 0})
    reads = config.generator_reads

    def name_of(name: str) -> str:
        return GENERATOR + name if generator and not name.startswith(reads) else name

    shapes = {name: source.shapes[name_of(name)] for name in parameter_shapes(part)}
    return replace(source, config=part, shapes=shapes, read=lambda name: source.read(name_of(name)), read_part=None)


HEAD_PARTS = ("head.", "pooler.")
SCORES = ("head.weight", "head.bias")
_SHOWN = 8

Shape = tuple[int, ...]


class AdaptedModel:
    """The weights of one model, read for a model with a larger vocabulary or another head.

        same name, same shape        copied
        embeddings, scores of ids    new tokens get the mean of the existing rows, which makes them
                                     as likely as an average token (Hewitt 2021)
        positions of patches         where there are more or fewer, resized by bicubic interpolation
        another head                 initialised
        feed-forward -> experts      a copy for each expert, the router initialised ("upcycling",
                                     Komatsuzaki et al. 2023, 3): where weights of the chosen sum to 1,
                                     the new model begins as the same function

    `model` and `shapes` are those of the new model; its `vocab_size` and labels are filled in.

    Raises:
        CheckpointError: A parameter outside of the head is missing or has another shape.
    """

    def __init__(self, source: ModelSource, model: AnyModelConfig, shapes: Mapping[str, Shape]) -> None:
        self.source, self.model, self.shapes = source, model, shapes
        theirs = source.config
        # Rows of both tables, without padding; a model of images has none.
        self._old = theirs.vocab_size or 0
        self._new = model.vocab_size or 0
        self.num_added = max(0, self._new - self._old)  # tokens that `source` lacks
        same_kind = model.head.kind == theirs.head.kind
        is_lm = same_kind and model.head.record.scores_words
        self._tables = set(names_of_tables(model)) & shapes.keys()
        if not is_lm:
            self._tables.difference_update(SCORES)
        # Scores of other labels are learned anew, even where their number is the same.
        same_scores = is_lm or (same_kind and model.head.labels == theirs.head.labels)
        may_lack = not same_kind or model.head.record.names_labels
        self.copied = {name for name in shapes if self._is_copied(name)}  # to each expert of their layer
        self.resized = {name for name in shapes if self._is_resized(name)}
        self.anew = self._find_anew(same_scores=same_scores, may_lack=HEAD_PARTS if may_lack else ())
        used = shapes.keys() - self.anew
        self.left = {name: shape for name, shape in source.shapes.items() if name not in used}
        self._crcs: dict[str, int] = {}
        self._last: tuple[str, Tensor] | None = None

    @property
    def tables(self) -> list[str]:
        """Names of the parameters with a row for each token."""
        return sorted(self._tables)

    def _find_anew(self, *, same_scores: bool, may_lack: tuple[str, ...]) -> set[str]:
        """Returns the parameters that are initialised, not read. Raises: CheckpointError: One may not be."""
        anew = [name for name in self.shapes if not self._is_read(name, same_scores=same_scores)]
        for name in anew:
            if not self._is_added(name) and not name.startswith(may_lack):
                raise self._mismatch(name)
        return set(anew)

    def _is_read(self, name: str, *, same_scores: bool) -> bool:
        if name in self.copied or name in self.resized:
            return True
        return self._fits(name, self.shapes[name]) and (same_scores or name not in SCORES)

    def _is_added(self, name: str) -> bool:
        """Returns whether a parameter is of a part that a model of the source's may get, and has not."""
        may_be_added = ".router." in name or name.startswith(("multi_token.", GENERATOR))
        return may_be_added and name not in self.source.shapes

    def _mismatch(self, name: str) -> CheckpointError:
        stored = "no such parameter"
        if name in self.source.shapes:
            stored = f"shape {list(self.source.shapes[name])}"
        fix = "use the config of its training, or leave the keys of model out"
        if ".feedforward." in name and _has_experts(self.model) and not _has_experts(self.source.config):
            fix = "leave width and shared of its experts out: each is a copy of the whole dense layer"
        return CheckpointError(
            f"{name} has shape {list(self.shapes[name])} in this model, in the checkpoint {stored}",
            where=str(self.source.path),
            fix=fix,
        )

    def _fits(self, name: str, shape: Shape) -> bool:
        theirs = self.source.shapes.get(name)
        if theirs is not None and name in self._tables and self._new >= self._old:
            return theirs[1:] == shape[1:]
        return theirs == shape

    def _is_copied(self, name: str) -> bool:
        """Returns whether a parameter has a matrix for each expert, and is one for all tokens there."""
        theirs, shape = self.source.shapes.get(name), self.shapes[name]
        weight = name.removesuffix("bias") + "weight" if name.endswith(".bias") else name
        if ".feedforward." not in name or len(self.shapes.get(weight, ())) != 3 or theirs is None:
            return False
        # Biases of all experts are one vector.
        return theirs in (shape[1:], (shape[0] // self.shapes[weight][0],))

    def _is_resized(self, name: str) -> bool:
        """Returns whether a parameter is a table of positions of another number of patches."""
        ours, theirs = self.model.input, self.source.config.input
        if name != "encoder.position.weight" or ours is None or theirs is None:
            return False
        old, new = self.source.shapes.get(name), self.shapes[name]
        same = ours.num_before == theirs.num_before
        return old is not None and same and old[1:] == new[1:] and old != new

    def __contains__(self, name: str) -> bool:
        return name in self.shapes and name not in self.anew

    def read(self, name: str) -> Tensor:
        """Returns one parameter, fp32, whole. Raises: CheckpointError."""
        weight = self.source.read(name)
        shape = self.shapes[name]
        if name in self._tables and (self.num_added or weight.shape != shape):
            rows = weight[: self._old]
            weight = torch.zeros(shape)
            weight[: self._old] = rows
            if self.num_added:
                weight[self._old : self._new] = rows.mean(dim=0, dtype=torch.float64).float()
        if name in self.resized:
            assert self.model.input is not None
            weight = _resize_positions(weight, self.model.input.num_before, shape[0])
        if name in self.copied:
            weight = weight.repeat(shape[0], 1, 1) if len(shape) == 3 else weight.repeat(shape[0] // len(weight))
        self._crcs[name] = zlib.crc32(memoryview(weight.contiguous().view(-1).numpy()))
        return weight

    def read_part(self, name: str, offset: int, out: Tensor) -> None:
        """Fills a 1-D tensor with a range of a parameter, read alone where possible. Raises: CheckpointError."""
        same_shape = self.source.shapes[name] == self.shapes[name]
        # New tokens may fit into the padding, so that a table grows without another shape.
        is_grown = self.num_added and name in self._tables
        if self.source.read_part is not None and same_shape and not is_grown:
            self.source.read_part(name, offset, out)
            return
        # Fragments of a parameter come one after another: it is read once for all.
        if self._last is None or self._last[0] != name:
            self._last = (name, self.read(name).view(-1))
        out.copy_(self._last[1][offset : offset + out.numel()])

    def fingerprint(self) -> str:
        """Returns a sha256 over the CRC32 of every copied parameter; reads the remaining ones."""
        for name in self.shapes:
            if name in self and name not in self._crcs:
                self.read(name)
        lines = [f"{name} {self.shapes[name]} {crc}\n" for name, crc in sorted(self._crcs.items())]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def describe(self) -> list[str]:
        """Returns a description of the transfer, line by line."""
        line = f"weights are those of {self.source.path}"
        if self.anew:
            anew = {name: self.shapes[name] for name in self.anew}
            line += f", but for these, which begin anew: {_listed(anew)}"
        else:
            num_values = count_parameters(self.model.model_copy(update={"vocab_multiple": 1}))  # without padding
            line += f": {len(self.shapes)} parameters, {num_values:,} values"
        lines = [line + (f"; left there: {_listed(self.left)}" if self.left else "")]
        for name in self.resized:
            sizes = f"{self.source.shapes[name][0]} positions to {self.shapes[name][0]}"
            lines.append(f"{name} is resized from {sizes}")
        if self.copied:
            assert isinstance(self.model, ModelConfig) and self.model.last_stack.experts is not None
            experts = self.model.last_stack.experts
            line = f"each feed-forward layer is copied to {experts.count} experts"
            same = experts.normalize and experts.scale == 1.0
            lines.append(line if same else f"{line}; their weights do not sum to 1, so outputs change")
        if self.num_added:
            tables = ", ".join(self.tables)
            lines.append(
                f"{self.num_added} tokens are new to the model of {self._old:,}: "
                f"their rows of {tables} are the mean of the others"
            )
        return lines


def _has_experts(model: AnyModelConfig) -> bool:
    return isinstance(model, ModelConfig) and model.last_stack.experts is not None


def _resize_positions(table_TD: Tensor, before: int, length: int) -> Tensor:
    """Returns a table of `length` positions; those before the square of patches stay as they are."""
    old, new = (round((count - before) ** 0.5) for count in (len(table_TD), length))
    grid = table_TD[before:].view(1, old, old, -1).permute(0, 3, 1, 2)
    # The arguments are those of transformers' `interpolate_pos_encoding`.
    grid = torch.nn.functional.interpolate(grid, (new, new), mode="bicubic", align_corners=False)
    return torch.cat((table_TD[:before], grid.permute(0, 2, 3, 1).flatten(0, 2)))


def _listed(shapes: Mapping[str, Shape]) -> str:
    return listed([f"{name} {list(shape)}" for name, shape in sorted(shapes.items())], _SHOWN)


A_SUFFIX = ".lora_A.default.weight"
B_SUFFIX = ".lora_B.default.weight"
MAGNITUDE_SUFFIX = ".lora_magnitude_vector.default.weight"


def is_adapter(name: str) -> bool:
    """Returns whether a parameter is one of an adapter's two matrices, or its vector of norms."""
    return name.endswith((A_SUFFIX, B_SUFFIX, MAGNITUDE_SUFFIX))


def row_norms(weight: Tensor) -> Tensor:
    """Returns the norm of each row of a matrix, with `B A` in it, as peft takes them for DoRA."""
    return torch.linalg.norm(weight, dim=1)


def name_without_adapter(name: str) -> str:
    """Returns the name that a parameter has in a model without adapters."""
    return name.replace(".base_layer.", ".")


class MergedModel:
    """A model with adapters merged into it (Hu et al. 2022, 4.1).

        X.lora_A.default.weight [r, in]    X.weight + alpha / r * B A
        X.lora_B.default.weight [out, r]
        X.lora_magnitude_vector.default.weight [out]    that times m / the norms of its rows (DoRA)
        any other name                     replaces the parameter of the base model

    Names of the checkpoint are peft's, without `base_layer`, which only marks a layer.

    `layers` have an adapter, with the factor `scale` = alpha / r; `replaced` were trained in full.
    With `quantized` W of these layers is what adapters were trained beside, of 4 bits.
    """

    def __init__(self, base: AdaptedModel, trained: WeightReader, scale: float, *, quantized: bool = False) -> None:
        self.base, self.shapes, self.scale, self.quantized = base, base.shapes, scale, quantized
        self._trained = trained
        names = trained.shapes
        self.layers = [name.removesuffix(A_SUFFIX) for name in names if name.endswith(A_SUFFIX)]
        self._full = {name_without_adapter(name): name for name in names if not is_adapter(name)}
        self.replaced = sorted(self._full)

    def matrices(self, layer: str) -> tuple[Tensor, Tensor]:
        """Returns A [r, in] and B [out, r] of a layer."""
        return self._trained.read(layer + A_SUFFIX), self._trained.read(layer + B_SUFFIX)

    def magnitude(self, layer: str) -> Tensor | None:
        """Returns the norms of the rows of a layer, fp32 [out]; None: adapters without them."""
        name = layer + MAGNITUDE_SUFFIX
        return self._trained.read(name) if name in self._trained.shapes else None

    def read(self, name: str) -> Tensor:
        """Returns one parameter, fp32, whole. Raises: CheckpointError."""
        if name in self._full:
            return self._trained.read(self._full[name])
        weight = self.base.read(name)
        layer = name.removesuffix(".weight")
        if layer not in self.layers:
            return weight
        weight = round_to_nf4(weight) if self.quantized else weight
        a, b = self.matrices(layer)
        weight = weight + self.scale * (b @ a)
        magnitude = self.magnitude(layer)
        return weight if magnitude is None else weight * (magnitude / row_norms(weight))[:, None]


def find_start(start: Path, run: Path) -> Path:
    """Returns the place of the model that `init.from` of a run names; `start` itself where none is found.

    A relative path is that of the current folder. Where nothing is there, as for a run that was
    moved or is named from elsewhere, the folders above the run are tried, and the end of the path
    beside it.
    """
    run = run.resolve()
    names = start.relative_to(start.anchor).parts
    places = [start, *(folder / start for folder in run.parents)]
    places += [run.parent.joinpath(*names[number:]) for number in range(len(names))]
    return next((place for place in places if split_average(place)[0].exists() and place.resolve() != run), start)


def find_base(start: Path, run: RunDir) -> Path:
    """Returns the place of the model under the adapters of a run. Raises: CheckpointError: It is nowhere."""
    start_path = find_start(start, run.path)
    if not split_average(start_path)[0].exists():
        raise CheckpointError(
            f"its adapters belong to {start}, and there is nothing there, above or beside the run",
            where=str(run.path),
            fix=f"put that model back, or name its place, in {run.config} as init.from or by "
            f"pretrain train {shlex.quote(str(run.config))} init.from=NEW/PLACE",
        )
    return start_path


def merge_adapters(trained: WeightReader, config: RunConfig, open_other: Callable[[Path], ModelSource]) -> MergedModel:
    """Opens the base model of a checkpoint of adapters, and reads it once to verify its hash.

    `open_other` is `open_source`, which imports this module. Raises: CheckpointError: The base
    model is missing or has changed.
    """
    assert config.init.from_ is not None
    run = RunDir(trained.path.resolve().parent.parent)
    start = find_base(Path(config.init.from_), run)
    base = AdaptedModel(open_other(start), config.model, parameter_shapes(config.model))
    check_base(str(trained.manifest.state.get("base_hash", "")), base, run, open_other)
    return MergedModel(base, trained, config.finetune.scale, quantized=config.finetune.quantize != "none")


def check_base(saved: str, base: AdaptedModel, run: RunDir, open_other: Callable[[Path], ModelSource]) -> None:
    """Verifies the weights that the adapters of a run were trained with. Raises: CheckpointError.

    Where the base model is another checkpoint of the same run, the error names the right one.
    """
    fingerprint = base.fingerprint()
    if saved == fingerprint:
        return
    fix = f"put back the model that init.from named when the run began, or write its place into {run.config}"
    beside = [] if base.source.run is None else sorted(base.source.run.checkpoints.glob("step-*"), reverse=True)
    for path in beside:
        with suppress(CheckpointError):  # damaged, or not of this model
            if AdaptedModel(open_other(path), base.model, base.shapes).fingerprint() == saved:
                config, start = shlex.quote(str(run.config)), shlex.quote(str(path))
                fix = f"those were {path}: pretrain train {config} init.from={start}"
                break
    raise CheckpointError(
        f"its adapters were trained beside other weights than those of {base.source.path} "
        f"(sha256 {saved[:12]} -> {fingerprint[:12]})",
        where=str(run.path),
        fix=fix,
    )
