"""A model on disk, described but not loaded: config, a way to read each weight, tokenizer, generation settings.

a run            config.yaml, tokenizer.json, checkpoints/       its newest good checkpoint
a checkpoint     a folder inside a run's checkpoints/            config and tokenizer are the run's
a model folder   model.json, manifest.json, tokenizer/           what `pretrain import` writes
Hugging Face     config.json, safetensors, tokenizer files       read as it is
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pydantic
from torch import Tensor

from pretrain.artifact.adapters import Merged, merge_adapters
from pretrain.artifact.codec import PlainCodec
from pretrain.artifact.find import find_checkpoint, is_release
from pretrain.checkpoint.layout import MODEL_FILE
from pretrain.checkpoint.weights import WeightReader
from pretrain.config.load import load_config
from pretrain.config.model import SpecialTokens
from pretrain.config.recurrent import AnyModelConfig, parse_model
from pretrain.errors import CheckpointError, DataError
from pretrain.generate.codec import Codec
from pretrain.interop.generation import GenerationDefaults, load_generation_defaults, read_generation_defaults
from pretrain.interop.read import open_release
from pretrain.interop.tokenizer import load_hub_tokenizer, tokenizer_files, wrap_tokenizer_json
from pretrain.run.folder import RunDir
from pretrain.tokenizer import load_tokenizer

FORMAT = 1
TOKENIZER_FOLDER = "tokenizer"

TokenizerFiles = list[tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class What:
    """A model on disk.

    Attributes:
        path: The checkpoint or folder that holds its weights.
        config: The model; `vocab_size` and, where they are known, its special tokens are filled in.
        read: Returns one parameter by name, fp32, whole.
        shapes: Shape of every parameter that can be read, by name.
        load_codec: Loads the tokenizer. Raises DataError where there is none.
        load_tokenizer_files: Returns (name, content) of the files that Hugging Face reads the tokenizer from; empty
            where there is none.
        generation: Settings that the model's makers generate with.
        run: The run that it came from; None where it was imported.
        read_part: Fills a 1-D tensor with the elements of a parameter from an offset on, and reads no more; None where
            a parameter is read whole or not at all.
        merged: The adapters that `read` merges, and the model under them; None where there are none.
    """

    path: Path
    config: AnyModelConfig
    read: Callable[[str], Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    load_codec: Callable[[], Codec]
    load_tokenizer_files: Callable[[], TokenizerFiles]
    generation: GenerationDefaults
    run: RunDir | None = None
    read_part: Callable[[str, int, Tensor], None] | None = None
    merged: Merged | None = None

    @property
    def names(self) -> frozenset[str]:
        """Every parameter that can be read."""
        return frozenset(self.shapes)


def open_what(what: Path) -> What:
    """Finds out what `what` is, and describes it.

    Raises:
        CheckpointError: It is none of these, or has no intact checkpoint, or files are missing.
        ConfigError: Its config is damaged, or of a model that this core cannot express exactly.
    """
    if is_release(what):
        return _open_release(what)
    checkpoint = find_checkpoint(what)
    if (checkpoint / MODEL_FILE).is_file():
        return _open_model_folder(checkpoint)
    return _open_run(checkpoint)


def _open_release(folder: Path) -> What:
    release = open_release(folder)
    return What(
        path=folder,
        config=release.config,
        read=release.read,
        shapes=release.shapes,
        load_codec=lambda: load_hub_tokenizer(folder),
        load_tokenizer_files=lambda: tokenizer_files(folder),
        generation=load_generation_defaults(folder),
    )


def _open_model_folder(folder: Path) -> What:
    file, tokenizer = folder / MODEL_FILE, folder / TOKENIZER_FOLDER
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        if facts["format"] != FORMAT:
            raise CheckpointError(
                f"written in format {facts['format']}, this version reads {FORMAT}",
                where=str(file),
                fix="update pretrain",
            )
        config, generation = parse_model(facts["model"]), read_generation_defaults(facts["generation"])
    except (OSError, ValueError, KeyError, TypeError, pydantic.ValidationError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(f"damaged: {reason}", where=str(file), fix="import the model again") from None
    reader = WeightReader(folder)
    return What(
        path=folder,
        config=config,
        read=reader.read,
        shapes=reader.shapes,
        load_codec=lambda: load_hub_tokenizer(_existing(tokenizer)),
        load_tokenizer_files=lambda: tokenizer_files(tokenizer) if tokenizer.is_dir() else [],
        generation=generation,
        read_part=reader.read_part,
    )


def _existing(tokenizer: Path) -> Path:
    if not tokenizer.is_dir():
        raise DataError(
            "the model was imported without a tokenizer", where=str(tokenizer.parent), fix="import it again"
        )
    return tokenizer


def _open_run(checkpoint: Path) -> What:
    run = RunDir(checkpoint.resolve().parent.parent)
    for needed in (run.config, run.tokenizer):
        if not needed.is_file():
            raise CheckpointError(f"{needed.name} is missing", where=str(run.path), fix="keep the run folder together")
    whole = load_config(run.config)
    config = whole.model
    codec = PlainCodec(load_tokenizer(run.tokenizer), ends_sources=config.shape == "encoder+decoder")
    special = _with_end(config.special_tokens, codec)
    weights: WeightReader | Merged = WeightReader(checkpoint)
    if whole.finetune.kind == "lora":
        weights = merge_adapters(checkpoint, whole, open_what)
    return What(
        path=checkpoint,
        config=config.model_copy(update={"special_tokens": special}),
        read=weights.read,
        shapes=weights.shapes,
        load_codec=lambda: codec,
        load_tokenizer_files=lambda: wrap_tokenizer_json(run.tokenizer.read_bytes(), special, config.max_seq_len),
        generation=GenerationDefaults(
            sees_prompt_whole=config.shape == "decoder" and whole.objective.sees_prompts_whole
        ),
        run=run,
        read_part=weights.read_part if isinstance(weights, WeightReader) else None,
        merged=weights if isinstance(weights, Merged) else None,
    )


def _with_end(special: SpecialTokens, codec: PlainCodec) -> SpecialTokens:
    """Fills in what the run's tokenizer knows and its config does not say: how a text ends."""
    if special.eos is not None or not codec.eos_ids:
        return special
    return special.model_copy(update={"eos": codec.eos_ids[0]})
