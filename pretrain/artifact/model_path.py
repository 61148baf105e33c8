"""Resolves a model path to its newest valid checkpoint, and describes that model without loading it.

run                  config.yaml, tokenizer.json, checkpoints/      newest valid checkpoint
checkpoint           folder inside a run's checkpoints/             config, tokenizer of the run
model folder         model.json, manifest.json, tokenizer/          of `import` and `average`
Hugging Face folder  config.json, safetensors, tokenizer files      read in place
"""

import logging
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pydantic
from torch import Tensor

from pretrain.artifact.plain_codec import PlainCodec
from pretrain.artifact.source import TOKENIZER_FOLDER, ModelSource, TokenizerFiles, merge_adapters, split_average
from pretrain.checkpoint.format import MANIFEST, MODEL_FILE, list_checkpoints, load_manifest, step_name
from pretrain.checkpoint.load import WeightReader, write_weights
from pretrain.checkpoint.retention import read_best
from pretrain.config.load import load_config
from pretrain.config.model import AnyModelConfig, parse_model
from pretrain.config.run import RunConfig
from pretrain.config.texts.templates import Template, check_template, is_jinja, to_named, turns_of
from pretrain.errors import CheckpointError, ConfigError, DataError
from pretrain.families.label_names import WORDS
from pretrain.generation.constraints import Codec
from pretrain.interop.generation import load_generation_defaults, read_generation_defaults
from pretrain.interop.release import open_release
from pretrain.interop.tokenizer import HubTokenizer, load_hub_tokenizer, tokenizer_files, wrap_tokenizer_json
from pretrain.kinds.objectives import OBJECTIVES
from pretrain.run.folder import RunDir
from pretrain.tokenizer.file import fit_documents, fit_start, load_tokenizer
from pretrain.types import EMA, GenerationDefaults
from pretrain.utils.foreign_files import name_model
from pretrain.utils.io import check_file, make_dir, new_folder, write_file, write_json
from pretrain.utils.safe_read import read_json

log = logging.getLogger(__name__)

FORMAT = 1
"""Version of model.json."""
TEMPLATE_KEY = "template"
"""Key of the template of conversations in a run's normalize.json."""
BEGIN_KEY = "begin"
"""Key of the token that begins documents in a run's normalize.json; missing: none does."""


def open_source(path: Path) -> ModelSource:
    """Describes the model at a path of any of the four forms.

    Raises:
        CheckpointError: None of the forms, no intact checkpoint, or missing files.
        ConfigError: The config is damaged, or the model cannot be represented exactly.
    """
    if not is_release(path):
        reader = open_newest(path)
        is_folder = (reader.path / MODEL_FILE).is_file()
        return _open_model_folder(reader) if is_folder else _open_run(reader)
    release = open_release(path)
    # read_part is missing: a tensor of theirs is read whole.
    return ModelSource(
        path=path,
        config=release.config,
        read=release.read,
        shapes=release.shapes,
        load_codec=lambda: load_hub_tokenizer(path),
        load_tokenizer_files=lambda: tokenizer_files(path),
        generation=load_generation_defaults(path),
        like=release.architecture,
    )


def _open_model_folder(reader: WeightReader) -> ModelSource:
    folder = reader.path
    file = folder / MODEL_FILE
    tokenizer = folder / TOKENIZER_FOLDER

    def load_codec() -> HubTokenizer:
        if not tokenizer.is_dir():
            raise DataError(
                "the model was imported without a tokenizer",
                where=str(folder),
                fix="import it again",
            )
        return load_hub_tokenizer(tokenizer)

    try:
        facts = read_json(file)
        if facts["format"] != FORMAT:
            raise CheckpointError(
                f"written in format {facts['format']}, this version reads {FORMAT}",
                where=str(file),
                fix="update pretrain",
            )
        config = parse_model(facts["model"])
        if config.family is None:  # of a version that kept it with the origin alone
            config = config.model_copy(update={"family": facts["origin"].get("model_type")})
        generation = read_generation_defaults(facts["generation"])
    except (OSError, ValueError, KeyError, TypeError, pydantic.ValidationError) as error:
        reason = f"damaged: {type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(reason, where=str(file), fix="import the model again") from None
    return ModelSource(
        path=folder,
        config=config,
        read=reader.read,
        shapes=reader.shapes,
        load_codec=load_codec,
        load_tokenizer_files=lambda: tokenizer_files(tokenizer) if tokenizer.is_dir() else [],
        generation=generation,
        like=str(facts["origin"].get("architecture", "")),
        checkpoint=reader,
        read_part=reader.read_part,
    )


def write_model_folder(
    out: Path, facts: dict[str, Any], tokenizer: TokenizerFiles, weights: Iterable[tuple[str, Tensor]]
) -> None:
    """Writes a model folder, which must not exist, or be empty, and appears when it is complete.

    `facts` has model, generation and origin; `tokenizer` may be empty; `weights` are fp32, consumed
    one at a time.
    """
    with new_folder(out) as folder:
        write_json(folder / MODEL_FILE, {"format": FORMAT} | facts)
        if tokenizer:
            place = make_dir(folder / TOKENIZER_FOLDER)
            for name, content in tokenizer:
                write_file(place / name, content)
        write_weights(folder, weights, facts["origin"])


def _open_run(reader: WeightReader) -> ModelSource:
    checkpoint = reader.path
    run = RunDir(checkpoint.resolve().parent.parent)
    _check_there(run, run.config)
    whole = load_config(run.config, extensions="require")
    config = whole.model
    if config.input is not None and not config.captions:

        def refuse_text() -> PlainCodec:
            raise ConfigError(
                "the model reads images, not text",
                where=str(run.path),
                fix="measure it by pretrain evaluate",
            )

        return _describe_run(reader, run, whole, config, refuse_text, list, GenerationDefaults())
    _check_there(run, run.tokenizer)
    has_source = config.shape == "encoder+decoder"
    template, begin = read_texts(run)
    special = config.special_tokens
    tokenizer = load_tokenizer(run.tokenizer)
    codec = PlainCodec(tokenizer, has_source, template, eos=special.eos, begin=begin)
    if special.eos is None and codec.eos_ids:
        special = special.model_copy(update={"eos": codec.eos_ids[0]})

    def load_tokenizer_files() -> TokenizerFiles:
        content = run.tokenizer.read_bytes()
        if config.head.record.fine_tuned or config.head.record.pools:
            assert special.eos is not None, "documents end"
            content = fit_documents(content, special.eos, str(run.tokenizer))
        else:
            content = fit_start(content, begin is not None, str(run.tokenizer))
        name = "" if begin is None else str(tokenizer.id_to_token(begin))
        chat = None if template is None else to_named(template, name)
        stack = config.encoder if config.head.record.answers_questions else None
        types = getattr(stack, "token_types", 0) > 1
        return wrap_tokenizer_json(content, special, config.max_seq_len, chat, _tokens_of(template), types)

    # As transformers and servers do, a chat stops at the end of a turn.
    ends_of_turn = codec.ends_of_turn
    ends = (*codec.eos_ids, *ends_of_turn) if ends_of_turn else ()
    sees_whole = config.shape == "decoder" and whole.objective.sees_prompts_whole
    config = config.model_copy(update={"special_tokens": special})
    generation = GenerationDefaults(sees_prompt_whole=sees_whole, eos=tuple(dict.fromkeys(ends)))
    return _describe_run(reader, run, whole, config, lambda: codec, load_tokenizer_files, generation)


def _tokens_of(template: Template | None) -> dict[str, str]:
    """Returns the special tokens that a chat template of transformers reads."""
    if not isinstance(template, dict) or not is_jinja(template):
        return {}
    return {key: token for key, token in template.items() if key.endswith("_token")}


def _check_there(run: RunDir, file: Path) -> None:
    if not file.is_file():
        raise CheckpointError(
            f"{file.name} is missing",
            where=str(run.path),
            fix="keep the run folder together",
        )


def _describe_run(
    reader: WeightReader,
    run: RunDir,
    whole: RunConfig,
    config: AnyModelConfig,
    load_codec: Callable[[], Codec],
    load_tokenizer_files: Callable[[], TokenizerFiles],
    generation: GenerationDefaults,
) -> ModelSource:
    """Describes the model of a run, with its adapters merged; `whole` is the config of the run."""
    merged = merge_adapters(reader, whole, open_source) if whole.finetune.kind == "lora" else None
    return ModelSource(
        path=reader.place,
        config=config,
        read=(merged or reader).read,
        shapes=(merged or reader).shapes,
        load_codec=load_codec,
        load_tokenizer_files=load_tokenizer_files,
        generation=generation,
        like=WORDS if any(OBJECTIVES[task.kind].labels_words for task in whole.objective.tasks) else "",
        run=run,
        checkpoint=reader,
        read_part=None if merged else reader.read_part,
        merged=merged,
    )


def read_texts(run: RunDir) -> tuple[Template | None, int | None]:
    """Returns the template of a run's conversations, and the token that begins its documents.

    None: no template with both sides; no such token. Raises: CheckpointError.
    """
    if not run.normalize.is_file():
        return None, None
    try:
        facts = read_json(run.normalize)
        template, begin = check_template(facts.get(TEMPLATE_KEY)), facts.get(BEGIN_KEY)
        if begin is not None and type(begin) is not int:
            raise ValueError(f"{BEGIN_KEY}={begin!r} is no token")
        has_both = template is not None and (is_jinja(template) or {"user", "assistant"} <= turns_of(template).keys())
        return (template if has_both else None), begin
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"damaged: {error}".splitlines()[0],
            where=str(run.normalize),
            fix="restore it",
        ) from None


def is_release(path: Path) -> bool:
    """Returns whether a path is a Hugging Face folder."""
    return (path / "config.json").is_file() and not (path / MANIFEST).is_file()


def refuse_release(path: Path) -> None:
    """Refuses a Hugging Face folder. Raises: CheckpointError."""
    if is_release(path):
        raise CheckpointError(
            "a Hugging Face folder has no checkpoint of ours",
            where=str(path),
            fix=f"make a model folder of it first: pretrain import {shlex.quote(str(path))} OUT",
        )


def find_checkpoint(path: Path) -> Path:
    """Returns the checkpoint or model folder at a path, or the newest valid checkpoint of a run.

    RUN/best is the checkpoint that best.json of the run names (`checkpoint.best`). Raises:
    CheckpointError: No checkpoint, or none is valid.
    """
    if (path / MANIFEST).is_file():
        if problem := _problem(path):
            raise CheckpointError(
                f"damaged: {problem}",
                where=str(path),
                fix="use another checkpoint",
            )
        return path
    refuse_release(path)
    if path.name == "best" and not path.exists():
        checkpoints = RunDir(path.parent).checkpoints
        best = read_best(checkpoints)
        if best is not None:
            return find_checkpoint(checkpoints / step_name(best.step))
        if list_checkpoints(checkpoints):
            raise CheckpointError(
                "this run marks no best checkpoint",
                where=str(path),
                fix=f"set checkpoint.best to a metric of the validation, or use {path.parent}: its newest checkpoint",
            )
    while folders := list_checkpoints(RunDir(path).checkpoints):
        for checkpoint in reversed(folders):
            if _problem(checkpoint) is None:
                return checkpoint
            if not checkpoint.exists():
                log.info("%s was removed by its run meanwhile: looking for a newer one", checkpoint)
                break
        else:
            raise CheckpointError(
                f"none of its {len(folders)} checkpoints is intact",
                where=str(path),
                fix="restore one",
            )
    text, fix = name_model(path) or ("neither a checkpoint nor a run with one", "check the path")
    raise CheckpointError(text, where=str(path), fix=fix)


def open_newest(path: Path) -> WeightReader:
    """Opens what `find_checkpoint` finds; where a run removes it before, the next it finds. Raises: as it does.

    With `ema` at its end, as in RUN/ema, the path is that of the average of the weights.
    """
    place, averaged = split_average(path)
    while True:
        checkpoint = find_checkpoint(place)
        try:
            return WeightReader(checkpoint, averaged=averaged)
        except CheckpointError:
            if checkpoint.exists():
                raise


def newest_checkpoint(path: Path) -> tuple[Path, bool]:
    """Returns the checkpoint of a model path, and whether it is of a run; an imported model as it is.

    RUN/ema becomes `ema` under that checkpoint. Raises: CheckpointError: A run without an intact
    checkpoint.
    """
    if is_release(path) or (path / MODEL_FILE).is_file():
        return path, False
    place, averaged = split_average(path)
    checkpoint = place if (place / MANIFEST).is_file() else find_checkpoint(place)
    return (checkpoint / EMA if averaged else checkpoint), True


def _problem(path: Path) -> str | None:
    try:
        files = load_manifest(path).files
    except CheckpointError as error:
        return error.what
    problems = (check_file(path / record.name, record) for record in files)
    return next(filter(None, problems), None)
