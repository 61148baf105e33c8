"""Imports released models as model folders, exports models as Hugging Face folders, and verifies exports.

    import   Hugging Face folder or name -> config, names and shapes compared -> model folder
    export   run, checkpoint or model folder -> Hugging Face folder -> its scores compared with ours

Both stream weight by weight, without a GPU. A misplaced, transposed or missing weight changes the
scores of transformers' model far more than rounding does.
"""

import json
import logging
import re
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.artifact.model_path import is_release, open_source, write_model_folder
from pretrain.artifact.open import load_model
from pretrain.artifact.source import TOKENIZER_FOLDER, ModelSource, take_apart
from pretrain.checkpoint.load import WeightReader
from pretrain.config.lengths import RowLengths, image_lengths
from pretrain.config.load import dump_config, load_config
from pretrain.config.model import AnyModelConfig, ModelConfig, RecurrentConfig, SpecialTokens
from pretrain.config.objective import ObjectiveConfig
from pretrain.errors import CheckpointError, ConfigError
from pretrain.families.label_names import CHOICES, SPANS, TEXTS
from pretrain.interop.choose import why_not_its_own
from pretrain.interop.generation import load_generation_defaults, write_generation_defaults
from pretrain.interop.release import fetch_release, open_release
from pretrain.interop.release_files import CHAT_TEMPLATE, GENERATION, read_object
from pretrain.interop.sentence_folder import USE, sentence_files, without_vectors
from pretrain.interop.tensors import parameter_shapes
from pretrain.interop.tokenizer import load_hub_tokenizer, reads_otherwise, tokenizer_files
from pretrain.interop.write import About, ExportReport, as_released, write_release
from pretrain.kinds.objectives import TARGET_COUNTS
from pretrain.plan.params import count_parameters
from pretrain.run.folder import RunDir
from pretrain.tokenizer.released import refusal_of_foreign
from pretrain.types import Batch, StackRows
from pretrain.utils.jsonl import each_row

log = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""Relative to the largest score: fp32 rounding over many layers; less than a missing bias."""

_PROBE = [("user", "Is it so?"), ("assistant", "It is."), ("user", "Why")]
"""Turns with full stops, which some tokenizers join with a line break after them."""

_OF_AVERAGE = "val_ema_loss"
"""The metric of the average of the weights; others are of the weights themselves."""

_MEMORY_INFO = Path("/proc/meminfo")


def check_scores(source: ModelSource, folder: Path, architecture: str, dtype: torch.dtype) -> None:
    """Compares the scores of an export and of its source on the same tokens.

    Logs a warning instead where memory is too small for both models. `architecture` is a class of
    transformers. Raises: CheckpointError: It cannot load the folder, or scores differ.
    """
    needed = 2 * 4 * sum(prod(shape) for shape in source.shapes.values())
    if needed > (free := _available_bytes()):
        text = "scores of the export were not compared: two models in fp32 take %.1f GiB, there are %.1f GiB"
        log.warning(text, needed / 2**30, free / 2**30)
        return
    batch = probe(source.config)
    theirs, is_hidden = _their_scores(folder, architecture, batch)
    ours = our_scores(source, batch, dtype, is_hidden)
    if theirs.dim() == 2:  # of a document: ours are at its first token
        ours = ours[:, 0]
    elif batch.pixels_BCYX is not None:  # of hidden patches: theirs have no places before them
        ours = ours[:, -theirs.shape[1] :]
    require_equal(ours, theirs, source)


def require_equal(ours: Tensor, theirs: Tensor, source: ModelSource) -> None:
    """Compares scores. Raises: CheckpointError: They differ by more than rounding does."""
    how = ""
    if ours.shape != theirs.shape:
        how = f"{list(ours.shape)} scores became {list(theirs.shape)}"
    else:
        difference, scale = float((ours - theirs).abs().max()), float(ours.abs().max())
        if not difference <= TOLERANCE * scale:  # a NaN is no match either
            how = f"by up to {difference:.3g}, the largest is {scale:.3g}"
    if how:
        raise CheckpointError(
            f"the export gives other scores than the model ({how}): nothing was written",
            where=str(source.path),
            fix="report it; --no-check writes it all the same",
        )


def probe(config: AnyModelConfig) -> Batch:
    """Returns two rows of ordinary tokens, two images of noise, or both, by the model alone."""
    generator = torch.Generator().manual_seed(0)
    patches = config.input
    pixels_BCYX = None
    if patches is not None:
        size = (patches.channels, patches.image, patches.image)
        pixels_BCYX = torch.randn(2, *size, generator=generator)
    if patches is not None and not config.captions:
        zeros = torch.zeros(2, patches.positions, dtype=torch.int64)
        source = None
        if config.head.record.restores:
            # The first patches are visible, as many as in their default.
            lengths = RowLengths(patches.positions, patches.positions)
            read = image_lengths(lengths, ObjectiveConfig(kind="masked_patches"), patches).source
            source = StackRows(zeros[:, :read], positions_BT=torch.arange(read).expand(2, -1))
        return Batch(zeros, zeros, source=source, pixels_BCYX=pixels_BCYX)
    assert config.vocab_size is not None
    special = set(config.special_tokens.model_dump().values())
    every = range(config.vocab_size)
    ordinary = torch.tensor([number for number in every if number not in special])
    shape = (2, min(32, config.max_seq_len))
    tokens_BT = ordinary[torch.randint(len(ordinary), shape, generator=generator)]
    source = None
    if patches is None and config.shape == "encoder+decoder":
        if (start := config.special_tokens.start) is not None:
            tokens_BT[:, 0] = start  # as in generation
        source = StackRows(tokens_BT)
    return Batch(tokens_BT, tokens_BT, source=source, pixels_BCYX=pixels_BCYX)


@torch.no_grad()
def our_scores(source: ModelSource, batch: Batch, dtype: torch.dtype, hidden: bool = False) -> Tensor:
    """Returns fp32 [B, T, V], no padding of the vocabulary; `hidden` or without a head: states."""
    read = source.read
    # The same rounding as in the files.
    rounded = replace(source, read=lambda name: read(name).to(dtype).float())
    model = load_model(rounded, torch.device("cpu"))
    output = model(batch)
    if output.logits_BTV is None or hidden:
        return output.hidden_BTD
    assert model.head is not None
    return output.logits_BTV[..., : model.head.num_scores]


@torch.no_grad()
def _their_scores(folder: Path, architecture: str, batch: Batch) -> tuple[Tensor, bool]:
    """Returns transformers' scores, or True and states without a head. Raises: CheckpointError."""
    import transformers

    bar = transformers.logging.is_progress_bar_enabled()
    level = transformers.logging.get_verbosity()
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    try:
        model: Any = getattr(transformers, architecture).from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
        if hasattr(model, "set_experts_implementation"):  # grouped ones take multiples of 16 bytes
            model.set_experts_implementation("eager")
        return _run_theirs(model.eval(), architecture, batch)
    except Exception as error:  # transformers raises nearly anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(
            f"transformers cannot run the export: {reason}",
            where=architecture,
            fix="report it; --no-check writes it all the same",
        ) from None
    finally:
        transformers.logging.set_verbosity(level)
        if bar:
            transformers.logging.enable_progress_bar()


def _run_theirs(model: Any, architecture: str, batch: Batch) -> tuple[Tensor, bool]:
    if batch.pixels_BCYX is not None:
        inputs = {"pixel_values": batch.pixels_BCYX}
        if batch.source is not None:  # patches of the lowest noise are visible
            number = (model.config.image_size // model.config.patch_size) ** 2
            inputs["noise"] = torch.arange(number, dtype=torch.float32).expand(2, -1)
    else:
        inputs = {"input_ids": batch.tokens_BT, "attention_mask": torch.ones_like(batch.tokens_BT)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = batch.tokens_BT
    if architecture.endswith(CHOICES):  # of one question
        output = model(**{key: value[None] for key, value in inputs.items()})
        return output.logits[0][:, None].float(), False
    if architecture.endswith(TEXTS) and model.config.pad_token_id is None:
        # Decoders of theirs then read a row at a time.
        rows = [{key: value[row : row + 1] for key, value in inputs.items()} for row in range(len(batch.tokens_BT))]
        return torch.cat([model(**row).logits for row in rows]).float(), False
    output = model(**inputs)
    if architecture.endswith(SPANS):
        return torch.stack((output.start_logits, output.end_logits), dim=-1).float(), False
    is_hidden = getattr(output, "logits", None) is None
    scores = output.last_hidden_state if is_hidden else output.logits
    return (scores[..., None] if architecture == "ElectraForPreTraining" else scores).float(), is_hidden


def _available_bytes() -> float:
    """Returns the available memory; infinity if unknown."""
    try:
        lines = _MEMORY_INFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return float("inf")
    values = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return float(next(values, "inf")) * 1024


@dataclass(frozen=True, slots=True)
class ImportReport:
    """Result of an import."""

    model_type: str
    shape: str
    num_parameters: int  # values; tied ones once, without padding of the vocabulary
    tokenizer: bool  # the release has one
    ignored: list[str]  # tensors without a counterpart, such as next-sentence prediction
    not_honoured: list[str]  # unsupported generation settings, as `key=value`


def import_model(source: str, out: Path) -> ImportReport:
    """Writes a model folder of a Hugging Face folder, or of a name on the hub; weights are fp32.

    Raises:
        ConfigError: No such model, no exact equal of ours, or `out` is not empty.
        CheckpointError: Files are missing or damaged, or not those of the config.
        LaunchError: The hub cannot be reached.
    """
    release = open_release(fetch_release(source))
    defaults = load_generation_defaults(release.folder)
    files = tokenizer_files(release.folder)
    config = release.config
    if files:
        # Some tokens are defined by the tokenizer only, such as BERT's mask.
        tokenizer = load_hub_tokenizer(release.folder)
        if config.vocab_size is not None and tokenizer.vocab_size > config.vocab_size:
            text = (
                "%s: its tokenizer has ids up to %d, and its model %s tokens: texts with those in between are refused; "
                "import the release that the tokenizer belongs to"
            )
            log.warning(text, source, tokenizer.vocab_size - 1, f"{config.vocab_size:,}")
        tokens = tokenizer.special_tokens.model_dump()
        tokens |= config.special_tokens.model_dump(exclude_none=True)
        config = config.model_copy(update={"special_tokens": SpecialTokens(**tokens)})
    elif (refusal := refusal_of_foreign(release.folder)) is not None:
        log.warning("%s: imported without its tokenizer: %s", source, refusal.line())
    model_type = release.family.model_type
    kind = {"model_type": model_type, "architecture": release.architecture, "dtype": release.dtype}
    facts = {"model": config.model_dump(mode="json"), "origin": {"imported_from": source} | kind}
    facts["generation"] = write_generation_defaults(defaults)
    write_model_folder(out, facts, files, ((name, release.read(name)) for name in release.shapes))
    if files and (other := reads_otherwise(out / TOKENIZER_FOLDER)) is not None:
        text = "%s: without the release's config.json, AutoTokenizer encodes %r as %s, not %s"
        log.warning(text, out / TOKENIZER_FOLDER, other.text, other.theirs, other.ours)
    return ImportReport(
        model_type=model_type,
        shape=config.shape,
        num_parameters=count_parameters(config.model_copy(update={"vocab_multiple": 1})),
        tokenizer=bool(files),
        ignored=release.ignored,
        not_honoured=list(defaults.not_honoured),
    )


def origin_of(source: ModelSource) -> str:
    """Returns the origin of weights for a model card: a run and its step, or a folder."""
    if source.run is None:
        return source.name
    return f"run {load_config(source.run.config, extensions='ignore').run.name}, {source.name}"


def open_released(path: Path, *, generator: bool = False) -> tuple[ModelSource, ModelConfig]:
    """Opens a model of a kind that Hugging Face has, or its generator. Raises: ConfigError, CheckpointError."""
    described = take_apart(open_source(path), generator=generator)
    if isinstance(described.config, RecurrentConfig):
        raise ConfigError(
            "no Hugging Face family represents a model of model.kind=recurrent",
            where=str(path),
            fix="use it with `pretrain generate` and `pretrain evaluate`",
        )
    return described, described.config


def export_model(
    path: Path,
    out: Path,
    *,
    dtype: str = "fp32",
    family: str | None = None,
    check: bool = True,
    shown: About | None = None,
    generator: bool = False,
) -> ExportReport:
    """Writes a Hugging Face folder that `AutoModelFor*.from_pretrained` loads, with tokenizer and card.

    `dtype` is fp32 or bf16, `family` the `model_type` to write; None: the first that represents the
    model exactly. `check` runs both models on a few tokens, where there is memory for them. `shown`
    has the name, folder, library and use of the card; None: those of transformers. `generator`: that
    of replaced tokens, which is left out otherwise.

    Raises:
        ConfigError: There is no generator, or no family represents the model exactly; names the
            keys of the nearest.
        CheckpointError: No intact checkpoint, or transformers gives other scores.
    """
    described, config = open_released(path, generator=generator)
    about = shown or About(name=out.name, folder=out.name)
    documents: dict[str, Any] = {}
    if config.head.record.pools:
        documents = sentence_files(config)
        described = _hidden_states(described, config)
        config = without_vectors(config)
        about = replace(about, library="sentence-transformers", use=USE.replace("FOLDER", out.name))
    files = described.load_tokenizer_files()
    chats = any(name == CHAT_TEMPLATE or b'"chat_template"' in content for name, content in files)
    about = replace(about, source=origin_of(described), chats=chats)
    if described.run is not None:
        run = load_config(described.run.config, extensions="ignore")
        assert described.checkpoint is not None
        metrics = {} if generator else _metrics_of(described.run, described.checkpoint)
        published = dump_config(run, is_published=True)
        about = replace(about, name=run.run.name, run_config=published)
        about = replace(about, metrics=metrics)
    written = write_release(
        config,
        described.read,
        out,
        dtype=dtype,
        family=family,
        generation=write_generation_defaults(described.generation, config.special_tokens),
        tokenizer_files=files,
        further=documents,
        about=about,
        like=described.like,
        check=partial(check_scores, described) if check else None,
    )
    if family is None and (why := why_not_its_own(as_released(config), written.model_type)):
        log.warning("%s: %s", out, why)
    if not files:
        return written
    if (other := reads_otherwise(out)) is not None:
        text = (
            "%s: AutoTokenizer reads this tokenizer by the rules of %s, which gives other ids: "
            "%r is %s, not %s; load its tokenizer.json with PreTrainedTokenizerFast instead"
        )
        log.warning(text, out, written.model_type, other.text, other.theirs, other.ours)
    if described.run is not None and not _chats_as_trained(described, out):
        log.warning(
            "%s: its chat template gives other ids than the training, which encodes turns and the text around them "
            "apart; they agree where special tokens stand between, as in the template chatml",
            out,
        )
    return written


def _hidden_states(source: ModelSource, config: ModelConfig) -> ModelSource:
    """Returns a model of vectors as one of hidden states."""
    bare = without_vectors(config)
    shapes = {name: source.shapes[name] for name in parameter_shapes(bare)}
    return replace(source, config=bare, shapes=shapes)


def write_served(model: Path, parent: Path, dtype: str) -> tuple[Path, bool]:
    """Writes a folder for `transformers serve`; returns it, and if it has a chat template.

    Its files are an export, or links to those of a Hugging Face folder. Raises: ConfigError,
    CheckpointError.
    """
    # Transformers gives "@" and ":" in the name of a model a meaning.
    folder = parent / re.sub(r"[^\w.-]", "-", model.resolve().name)
    if is_release(model):
        folder.mkdir()
        for path in model.resolve().iterdir():
            (folder / path.name).symlink_to(path)
        for name, content in tokenizer_files(model.resolve()):
            (folder / name).unlink(missing_ok=True)  # else a link's file would be written
            (folder / name).write_bytes(content)
    else:
        config = open_source(model).config
        if config.shape != "decoder" or not config.head.record.scores_words:
            raise ConfigError(
                f"a server continues texts, unlike this model: {config.shape}, head.kind={config.head.kind}",
                where=str(model),
                fix="use a decoder alone, with head.kind=lm",
            )
        export_model(model, folder, dtype=dtype)
    path = folder / GENERATION
    values = read_object(path) if path.is_file() else {}
    path.unlink(missing_ok=True)
    # A request with a temperature draws only where this says so; one of 0 is greedy all the same.
    # What a release says stays.
    path.write_text(json.dumps({"do_sample": True} | values, indent=2) + "\n", encoding="utf-8")
    settings_file = folder / "tokenizer_config.json"  # older ones have it in there
    text = settings_file.read_text(encoding="utf-8") if settings_file.is_file() else ""
    return folder, (folder / CHAT_TEMPLATE).exists() or '"chat_template"' in text


def _metrics_of(run: RunDir, checkpoint: WeightReader) -> dict[str, float]:
    """Returns the metrics of a model card: those that the run logged at the step of the checkpoint, of these weights.

    Those of other steps are of other weights. A run that was not evaluated at that step has none of
    validation.
    """
    step = int(checkpoint.manifest.state["step"])
    metrics = {"step": float(step)}
    for row in each_row(run.metrics):
        if row.get("step") != step:
            continue
        for key, value in row.items():
            is_own = (key == _OF_AVERAGE) == checkpoint.averaged
            is_measured = (key == "loss" or key.startswith("val_")) and is_own
            if isinstance(value, int | float) and (is_measured or key in TARGET_COUNTS):
                metrics[key] = float(value)
    return metrics


def _chats_as_trained(source: ModelSource, out: Path) -> bool:
    """Returns whether transformers encodes a conversation as the run does; True without a template."""
    codec = load_hub_tokenizer(out)
    return not codec.has_chat_template or codec.encode_chat(_PROBE) == source.load_codec().encode_chat(_PROBE)
