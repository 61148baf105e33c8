"""Text to the ids that a model reads, and back, with the tokenizer that a run trained."""

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
    """A tokenizer of `pretrain prepare`: training text has no special tokens but the one that ends a document.

    Args:
        tokenizer: That of the run.
        ends_sources: A text ends like a document, as what an encoder reads for a decoder did in training.

    Attributes:
        eos_ids: The token that ends a document, or nothing where the tokenizer has none.
        mask_id: Token that stands for one to be filled in, if there is one.
    """

    def __init__(self, tokenizer: Tokenizer, ends_sources: bool = False) -> None:
        self._tokenizer = tokenizer
        special = special_tokens_of(tokenizer)
        self.eos_ids: tuple[int, ...] = () if special.eos is None else (special.eos,)
        self.mask_id: int | None = special.mask
        self._end = list(self.eos_ids) if ends_sources else []
        self._named = nameable_tokens(tokenizer)
        self._names = re.compile("|".join(map(re.escape, sorted(self._named, key=len, reverse=True))))
        # A word brings its space with it, and so does one that a mask stands for; a character does not.
        self._takes_space = not isinstance(tokenizer.model, models.WordLevel)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, with those special tokens that it names: masks, sentinels, modes."""
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
        """Returns what each id stands for, one string each, for display."""
        return [str(self._tokenizer.decode([number], skip_special_tokens=False)) for number in ids]


# A model on disk, described but not loaded: config, a way to read each weight, tokenizer,
# generation settings.
#
# a run            config.yaml, tokenizer.json, checkpoints/       its newest good checkpoint
# a checkpoint     a folder inside a run's checkpoints/            config and tokenizer are the run's
# a model folder   model.json, manifest.json, tokenizer/           what `pretrain import` writes
# Hugging Face     config.json, safetensors, tokenizer files       read as it is


FORMAT = 1


def open_source(what: Path) -> ModelSource:
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
    """Fills in what the run's tokenizer knows and its config does not say: how a text ends."""
    if special.eos is not None or not codec.eos_ids:
        return special
    return special.model_copy(update={"eos": codec.eos_ids[0]})


# What a WHAT is, and which of its checkpoints is good.


def is_release(what: Path) -> bool:
    """Whether `what` is a Hugging Face folder."""
    return (what / "config.json").is_file() and not (what / MANIFEST).is_file()


def find_checkpoint(what: Path) -> Path:
    """Returns the checkpoint that `what` names: itself, or the newest good one of a run. A model folder is one.

    RUN/best is the one that best.json of the run names (`checkpoint.best`), verified as any.

    Raises:
        CheckpointError: There is none, or none that verifies.
    """
    if (what / MANIFEST).is_file():
        problem = _problem(what)
        if problem:
            raise CheckpointError(f"damaged: {problem}", where=str(what), fix="use another checkpoint")
        return what
    if is_release(what):
        fix = f"make a model folder of it first: pretrain import {what} OUT"
        raise CheckpointError("a Hugging Face folder has no checkpoint of ours", where=str(what), fix=fix)
    if what.name == "best" and not what.exists():
        checkpoints = RunDir(what.parent).checkpoints
        best = read_best(checkpoints)
        if best is not None:
            return find_checkpoint(checkpoints / step_name(best.step))
    found = list_checkpoints(RunDir(what).checkpoints)
    if not found:
        raise CheckpointError("neither a checkpoint nor a run with one", where=str(what), fix="check the path")
    for path in reversed(found):
        if _problem(path) is None:
            return path
    raise CheckpointError(f"none of its {len(found)} checkpoints is intact", where=str(what), fix="restore one")


def _problem(path: Path) -> str | None:
    try:
        files = load_manifest(path).files
    except CheckpointError as error:
        return error.what
    return next((text for record in files if (text := check_file(path / record.name, record))), None)
