"""Resolves a model path to its newest valid checkpoint, and describes the model there without loading it.

run                  config.yaml, tokenizer.json, checkpoints/     newest valid checkpoint
checkpoint           folder inside a run's checkpoints/            config and tokenizer of the run
model folder         model.json, manifest.json, tokenizer/         written by `pretrain import` and `average`
Hugging Face folder  config.json, safetensors, tokenizer files     read in place
"""

import json
import re
from pathlib import Path

import pydantic
from tokenizers import Tokenizer, models

from pretrain.artifact.source import TOKENIZER_FOLDER, MergedModel, ModelSource, merge_adapters
from pretrain.checkpoint.format import MANIFEST, MODEL_FILE, list_checkpoints, load_manifest, step_name
from pretrain.checkpoint.load import WeightReader
from pretrain.checkpoint.retention import read_best
from pretrain.config.load import load_config
from pretrain.config.model import SpecialTokens
from pretrain.config.recurrent import parse_model
from pretrain.errors import CheckpointError, DataError
from pretrain.interop.generation import GenerationDefaults, load_generation_defaults, read_generation_defaults
from pretrain.interop.release import open_release
from pretrain.interop.tokenizer import load_hub_tokenizer, tokenizer_files, wrap_tokenizer_json
from pretrain.run.folder import RunDir
from pretrain.tokenizer import load_tokenizer, nameable_tokens, special_tokens_of
from pretrain.utils.checksum import check_file


class PlainCodec:
    """A tokenizer of `pretrain prepare`: it adds no special tokens, except the end-of-document token of sources.

    Args:
        tokenizer: Tokenizer of the run.
        ends_sources: Append the end-of-document token to a source, as in the training of an encoder-decoder.

    Attributes:
        eos_ids: End-of-document token; empty if the tokenizer has none.
        mask_id: Mask token, if the tokenizer has one.
    """

    def __init__(self, tokenizer: Tokenizer, ends_sources: bool = False) -> None:
        self._tokenizer = tokenizer
        special = special_tokens_of(tokenizer)
        self.eos_ids: tuple[int, ...] = () if special.eos is None else (special.eos,)
        self.mask_id: int | None = special.mask
        self._end = list(self.eos_ids) if ends_sources else []
        self._named = nameable_tokens(tokenizer)
        self._names = re.compile("|".join(map(re.escape, sorted(self._named, key=len, reverse=True))))
        # A token of a word includes the space before it, and so does a mask in its place; a character does not.
        self._takes_space = not isinstance(tokenizer.model, models.WordLevel)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text; special tokens that it spells (masks, sentinels, modes) become their ids."""
        ids: list[int] = []
        first = 0
        for match in self._names.finditer(text) if self._named else ():
            part = text[first : match.start()]
            ids += [*self._encode(part.removesuffix(" ") if self._takes_space else part), self._named[match[0]]]
            first = match.end()
        return ids + self._encode(text[first:]) + self._end

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_target(self, text: str) -> list[int]:
        """The same as `encode`: there is one language."""
        return self.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids, without special tokens."""
        return str(self._tokenizer.decode(ids))

    def tokens(self, ids: list[int]) -> list[str]:
        """Returns the text of each id, for display."""
        return [str(self._tokenizer.decode([number], skip_special_tokens=False)) for number in ids]


FORMAT = 1
"""Of model.json."""


def open_source(path: Path) -> ModelSource:
    """Describes the model at a path of any of the four forms.

    Raises:
        CheckpointError: None of the forms, no intact checkpoint, or missing files.
        ConfigError: The config is damaged, or the model cannot be represented exactly.
    """
    if is_release(path):
        return _open_release(path)
    checkpoint = find_checkpoint(path)
    if (checkpoint / MODEL_FILE).is_file():
        return _open_model_folder(checkpoint)
    return _open_run(checkpoint)


def _open_release(folder: Path) -> ModelSource:
    release = open_release(folder)
    return ModelSource(
        path=folder,
        config=release.config,
        read=release.read,
        shapes=release.shapes,
        load_codec=lambda: load_hub_tokenizer(folder),
        load_tokenizer_files=lambda: tokenizer_files(folder),
        generation=load_generation_defaults(folder),
    )


def _open_model_folder(folder: Path) -> ModelSource:
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
    return ModelSource(
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


def _open_run(checkpoint: Path) -> ModelSource:
    run = RunDir(checkpoint.resolve().parent.parent)
    for needed in (run.config, run.tokenizer):
        if not needed.is_file():
            raise CheckpointError(f"{needed.name} is missing", where=str(run.path), fix="keep the run folder together")
    whole = load_config(run.config)
    config = whole.model
    codec = PlainCodec(load_tokenizer(run.tokenizer), ends_sources=config.shape == "encoder+decoder")
    special = _with_end(config.special_tokens, codec)
    weights: WeightReader | MergedModel = WeightReader(checkpoint)
    if whole.finetune.kind == "lora":
        weights = merge_adapters(checkpoint, whole, open_source)
    return ModelSource(
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
        merged=weights if isinstance(weights, MergedModel) else None,
    )


def _with_end(special: SpecialTokens, codec: PlainCodec) -> SpecialTokens:
    """Fills in the end-of-text token from the run's tokenizer where the config has none."""
    if special.eos is not None or not codec.eos_ids:
        return special
    return special.model_copy(update={"eos": codec.eos_ids[0]})


def is_release(path: Path) -> bool:
    """Tells whether a path is a Hugging Face folder."""
    return (path / "config.json").is_file() and not (path / MANIFEST).is_file()


def find_checkpoint(path: Path) -> Path:
    """Returns the checkpoint at a path: the path itself, a model folder too, or the newest valid one of a run.

    RUN/best is the checkpoint named in best.json of the run (`checkpoint.best`), verified like any other.

    Raises:
        CheckpointError: No checkpoint, or none is valid.
    """
    if (path / MANIFEST).is_file():
        problem = _problem(path)
        if problem:
            raise CheckpointError(f"damaged: {problem}", where=str(path), fix="use another checkpoint")
        return path
    if is_release(path):
        fix = f"make a model folder of it first: pretrain import {path} OUT"
        raise CheckpointError("a Hugging Face folder has no checkpoint of ours", where=str(path), fix=fix)
    if path.name == "best" and not path.exists():
        checkpoints = RunDir(path.parent).checkpoints
        best = read_best(checkpoints)
        if best is not None:
            return find_checkpoint(checkpoints / step_name(best.step))
    found = list_checkpoints(RunDir(path).checkpoints)
    if not found:
        raise CheckpointError("neither a checkpoint nor a run with one", where=str(path), fix="check the path")
    for checkpoint in reversed(found):
        if _problem(checkpoint) is None:
            return checkpoint
    raise CheckpointError(f"none of its {len(found)} checkpoints is intact", where=str(path), fix="restore one")


def _problem(path: Path) -> str | None:
    try:
        files = load_manifest(path).files
    except CheckpointError as error:
        return error.what
    return next((text for record in files if (text := check_file(path / record.name, record))), None)
