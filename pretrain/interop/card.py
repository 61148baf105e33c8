"""The model card of an export: what the model is, how to load it, and the run that made it."""

from dataclasses import dataclass, field
from typing import Any

from pretrain.config.model import ModelConfig
from pretrain.interop.family import Family
from pretrain.interop.labels import TEXTS, WORDS
from pretrain.utils.log import redact


@dataclass(frozen=True, slots=True)
class About:
    """What a card says beyond the model itself.

    Attributes:
        name: Title.
        source: Where the weights came from, one line.
        run_config: The run's config as YAML; empty where there was none.
        metrics: The last values measured, by name.
    """

    name: str = "Model"
    source: str = ""
    run_config: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


_TASKS = {"decoder": "text-generation", "encoder+decoder": "translation", "encoder": "fill-mask"}
_AUTO_CLASSES = {
    "decoder": "AutoModelForCausalLM",
    "encoder+decoder": "AutoModelForSeq2SeqLM",
    "encoder": "AutoModelForMaskedLM",
}
_LABELLING = {TEXTS: ("text-classification", f"AutoModel{TEXTS}"), WORDS: ("token-classification", f"AutoModel{WORDS}")}
_LOADED = ("model", "tokenizer")


def model_card(
    config: ModelConfig,
    family: Family,
    about: About,
    *,
    architecture: str,
    num_parameters: int,
    dtype: str,
    has_tokenizer: bool,
) -> str:
    """Returns README.md of an export. Secrets of the environment are blotted out.

    Args:
        config: The model.
        family: As what it is exported.
        about: Name, source, config and metrics of the run.
        architecture: Class of transformers that it is exported as.
        num_parameters: Number of values in the files.
        dtype: Of the values in the files.
        has_tokenizer: Whether one lies beside them.
    """
    task, auto_class = _usage(config, architecture)
    parts = [
        f"---\nlibrary_name: transformers\npipeline_tag: {task}\ntags:\n- {family.model_type}\n---",
        f"# {about.name}",
        "\n".join(f"- {key}: {value}" for key, value in _model_facts(config, architecture, num_parameters, dtype)),
    ]
    if about.source:
        parts.append(f"Made from {about.source}.")
    classes = [auto_class, "AutoTokenizer"] if has_tokenizer else [auto_class]
    loads = "\n".join(f'{name} = {of}.from_pretrained("PATH")' for name, of in zip(_LOADED, classes, strict=False))
    parts.append(f"## Loading\n\n```python\nfrom transformers import {', '.join(classes)}\n\n{loads}\n```")
    if about.metrics:
        rows = "\n".join(f"| {name} | {value:.6g} |" for name, value in about.metrics.items())
        parts.append(f"## Metrics\n\n| metric | value |\n|---|---|\n{rows}")
    if about.run_config:
        parts.append(f"## Config of the run\n\n```yaml\n{about.run_config.strip()}\n```")
    return redact("\n\n".join(parts) + "\n")


def _usage(config: ModelConfig, architecture: str) -> tuple[str, str]:
    """Returns the task as the hub names it, and the class that loads the model for it."""
    for kind, usage in _LABELLING.items():
        if architecture.endswith(kind):
            return usage
    if config.head.kind == "none":
        return "feature-extraction", "AutoModel"
    return _TASKS[config.shape], _AUTO_CLASSES[config.shape]


def _model_facts(config: ModelConfig, architecture: str, num_parameters: int, dtype: str) -> list[tuple[str, Any]]:
    stack = config.last_stack
    layers = [str(part.layers) for part in (config.encoder, config.decoder) if part is not None]
    return [
        ("architecture", f"{architecture} ({config.shape})"),
        ("parameters", f"{num_parameters:,}, {dtype}"),
        ("layers, width, heads", f"{'+'.join(layers)}, {stack.width}, {stack.heads}"),
        ("vocabulary", config.vocab_size),
        ("longest sequence", config.max_seq_len),
        *([("labels", ", ".join(config.head.labels))] if config.head.labels else []),
    ]
