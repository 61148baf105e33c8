"""Normalisation of an input's text, before filters, split, duplicates and tokenizer.

Further text for a model that was trained on such a folder, to translate or to score, needs the same
`build_normalizers` first.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from importlib.util import find_spec
from typing import Any

from pretrain.config.prepare import NormalizeConfig
from pretrain.errors import LaunchError, install_fix
from pretrain.preparation.filters import Document

PACKAGE = "sacremoses"

Normalize = Callable[[str], str]


def check_normalize(config: NormalizeConfig) -> None:
    """Checks that the package of the steps is installed. Raises: LaunchError."""
    if config.needs_language and find_spec(PACKAGE) is None:
        raise LaunchError(
            f"normalize.steps={config.steps} are done by {PACKAGE}, which is not installed",
            fix=install_fix(),
        )


def build_normalizers(config: NormalizeConfig) -> tuple[Normalize, Normalize]:
    """Returns the normalizers of texts and sources, and of targets. Raises: LaunchError."""
    check_normalize(config)
    source = _build(config, config.language)
    if config.target_language in (None, config.language):
        return source, source
    return source, _build(config, config.target_language)


def build_detokenizer(config: NormalizeConfig | None) -> Normalize | None:
    """Returns what joins the tokens of a target as people write them; None where Moses did not part them."""
    if config is None or "moses" not in config.steps:
        return None
    check_normalize(config)
    import sacremoses  # type: ignore[import-untyped]

    detokenizer = sacremoses.MosesDetokenizer(config.target_language or config.language)
    return lambda text: str(detokenizer.detokenize(text.split()))


def normalize_document(document: Document, source: Normalize, target: Normalize) -> Document:
    """Returns the document, normalized by `source`, and the target of a pair by `target`."""
    changes: dict[str, Any] = {}
    if document.source is not None:
        changes["source"] = source(document.source)
        text = target(document.text)
    elif document.segments:
        segments = tuple(
            (text if number in document.markers else source(text), is_learned)
            for number, (text, is_learned) in enumerate(document.segments)
        )
        changes["segments"] = segments
        text = "".join(part for part, _ in segments)
    else:
        text = source(document.text)
    return replace(document, text=text, utf8=text.encode(), **changes)


def _build(config: NormalizeConfig, language: str | None) -> Normalize:
    return partial(_apply, [_build_step(step, language) for step in config.steps])


def _apply(steps: list[Normalize], text: str) -> str:
    """Normalizes line by line: Moses takes the end of a line for a space."""
    lines = text.split("\n")
    return "\n".join(reduce(lambda line, step: step(line), steps, line) for line in lines)


def _build_step(step: str, language: str | None) -> Normalize:
    if step == "lowercase":
        return str.lower
    import sacremoses

    if step == "punctuation":
        normalize: Normalize = sacremoses.MosesPunctNormalizer(language).normalize
        return normalize
    # Without escapes: `&apos;` would be seven characters for the tokenizer, and changes no score.
    tokenize = sacremoses.MosesTokenizer(language).tokenize
    return partial(tokenize, return_str=True, escape=False)
