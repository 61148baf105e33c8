"""Exports a model for another program: `pretrain export --to gguf`, `onnx` or `ctranslate2`.

    rules of the program -> Hugging Face folder, compared with the model -> converted -> its scores
    compared with the model -> the folder appears

What the program does not compute exactly is refused before anything is written.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from pretrain.artifact.model_path import open_source
from pretrain.artifact.source import ModelSource
from pretrain.artifact.transfer import export_model, open_released, origin_of, our_scores, probe, require_equal
from pretrain.config.model import ModelConfig
from pretrain.errors import CheckpointError, ConfigError
from pretrain.interop.choose import choose_family
from pretrain.interop.release_files import CARD
from pretrain.interop.runtimes import Exported, Runtime, find_runtime
from pretrain.interop.write import About, ExportReport, as_released, choose_release, made_from
from pretrain.utils.io import disk_error, fsync_dir, new_folder, remove_tree, write_file

log = logging.getLogger(__name__)


def export_for_runtime(
    path: Path,
    out: Path,
    to: str,
    *,
    dtype: str = "fp32",
    family: str | None = None,
    check: bool = True,
) -> ExportReport:
    """Writes a folder with the files of a program, the tokenizer and a model card.

    Args:
        path: A run, checkpoint, model folder or Hugging Face folder.
        out: The folder; must not exist, or be empty.
        to: A key of `RUNTIMES`.
        dtype: fp32 or bf16, of matrices.
        family: `model_type` to take; None: the first that represents the model exactly.
        check: Compares scores on a few tokens, those of fp32 where the program is installed.

    Raises:
        ConfigError: The program does not compute this model, or its tokenizer; names the key.
        CheckpointError: No intact checkpoint, or other scores.
        LaunchError: A package is missing.
        DiskError: The disk refused; nothing is left under `out`.
    """
    runtime, source, exported = _plan(path, out.name, to, dtype, family, check)
    config, files = exported.config, exported.files
    with new_folder(out) as folder:
        release = folder / "release"
        shown = About(out.name, out.name, library=to, use=runtime.use(config))
        kind = exported.model_type
        written = export_model(path, release, dtype=dtype, family=kind, check=check, shown=shown)
        _run(runtime.convert, replace(exported, folder=release), folder)
        for name, content in [*files.items(), (CARD, (release / CARD).read_bytes())]:
            if not (folder / name).exists():
                write_file(folder / name, content)
        remove_tree(release)
        if check and dtype == "fp32" and find_spec(runtime.runner) is not None:
            batch = probe(config)
            ours = our_scores(source, batch, torch.float32)
            theirs = runtime.scores(folder, config, batch.tokens_BT)
            if theirs.dim() == 2:
                ours[..., list(exported.suppressed)] = -torch.inf
                next_BT1 = batch.tokens_BT[:, 1:, None]
                ours = ours.log_softmax(dim=-1)[:, :-1].gather(2, next_BT1)[..., 0]
            else:
                theirs = theirs[..., : ours.shape[-1]]
            require_equal(ours, theirs, source)
        elif check:
            log.warning("scores were compared by transformers alone, not by %s", runtime.name)
        names = sorted(file.name for file in folder.iterdir())
        for name in names:
            fsync_dir(folder / name)  # files too: libraries have written them
        total = sum((folder / name).stat().st_size for name in names)
    return replace(written, total_bytes=total, files=names)


def _plan(
    path: Path, name: str, to: str, dtype: str, family: str | None, check: bool
) -> tuple[Runtime, ModelSource, Exported]:
    """Returns the program, the model, and what it is exported as. Raises: ConfigError, LaunchError."""
    runtime = find_runtime(to)
    runtime.require(to, dtype)
    source = open_source(path)
    config = source.config
    if not isinstance(config, ModelConfig):
        raise ConfigError(
            f"model.kind={config.kind}: no model of {runtime.name}",
            where=str(path),
            fix="use it with `pretrain generate`",
        )
    chosen = choose_family(as_released(config), family)
    runtime.check_model(config, chosen)
    files = dict(source.load_tokenizer_files())
    suppressed = source.generation.suppressed
    exported = Exported(path, name, config, chosen.model_type, files, dtype, check, suppressed)
    runtime.check(exported)
    return runtime, source, exported


def check_export(path: Path, to: str, *, dtype: str, family: str | None, check: bool) -> None:
    """Refuses what an export would refuse by the model's description, without reading weights.

    Raises: ConfigError, LaunchError, CheckpointError: As `export_model` and `export_for_runtime`.
    """
    if to != "hf":
        _plan(path, "", to, dtype, family, check)
        return
    choose_release(open_released(path)[1], dtype, family)


def was_exported(path: Path, out: Path, to: str, dtype: str) -> bool:
    """Returns whether a folder is an export of this model, by its card: exports appear whole."""
    try:
        card = (out / CARD).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    library = "transformers" if to == "hf" else to
    origin = f"\n{made_from(origin_of(open_source(path)))} "
    return all(part in card for part in (f"library_name: {library}\n", f", {dtype}\n", origin))


def _run(convert: Callable[[Exported, Path], None], exported: Exported, folder: Path) -> None:
    """Converts; an error of a library is one line. Raises: what that of an export does."""
    try:
        convert(exported, folder)
    except ConfigError:
        raise
    except OSError as error:
        raise disk_error("write", folder, error) from error
    except Exception as error:  # libraries raise nearly anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"the converter failed: {type(error).__name__}: {reason}",
            where=exported.model_type,
            fix="export to hf, and report it",
        ) from error
