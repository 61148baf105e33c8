"""Folders of sentence-transformers: files beside a Hugging Face model of hidden states.

    modules.json                        the model, pooling, vectors of length 1
    1_Pooling/config.json               the mean of a text's hidden states, its first or its last one
    sentence_bert_config.json           longest text in tokens
    config_sentence_transformers.json   prompts, and the similarity of vectors

Nothing of a folder is run: modules are known by the names of their classes.
"""

from pathlib import Path
from typing import Any

from pretrain.config.model import ModelConfig
from pretrain.config.model.any_kind import HeadConfig
from pretrain.errors import ConfigError
from pretrain.interop.release_files import read_object
from pretrain.kinds.heads import HEADS
from pretrain.utils.safe_read import read_json

MODULES = "modules.json"
POOLING = "1_Pooling/config.json"
SETTINGS = "config_sentence_transformers.json"
LENGTH = "sentence_bert_config.json"
FILES = (MODULES, POOLING, SETTINGS, LENGTH, "*_Pooling/config.json")

_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
"""Keys of a way of pooling, by its name."""
_MODULES = ("Transformer", "Pooling", "Normalize")
USE = """from sentence_transformers import SentenceTransformer

vectors = SentenceTransformer("FOLDER").encode(["A text"])"""
"""Lines of a model card."""


def _of_shape(config: ModelConfig) -> str:
    return "lasttoken" if config.decoder is not None else "cls"


def without_vectors(config: ModelConfig) -> ModelConfig:
    """Returns the model of hidden states of a model of vectors."""
    return config.model_copy(update={"head": HeadConfig(kind="none")})


def sentence_files(config: ModelConfig) -> dict[str, Any]:
    """Returns the contents of the files of a model of vectors, by their names."""
    mode = "mean" if config.head.mean else _of_shape(config)
    kinds = enumerate(_MODULES)
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": f"{number}_{kind}" if number else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, kind in kinds
    ]
    flags = {key: name == mode for name, key in _FLAGS.items()}
    return {
        MODULES: modules,
        POOLING: {"word_embedding_dimension": config.last_stack.width, **flags, "include_prompt": True},
        LENGTH: {"max_seq_length": config.max_seq_len, "do_lower_case": False},
        SETTINGS: {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    }


def read_sentence_folder(folder: Path, config: ModelConfig) -> ModelConfig | None:
    """Returns a model with the vectors of its folder; None: the folder says of none.

    Args:
        folder: Folder of a Hugging Face model.
        config: The model of hidden states in it.

    Raises:
        ConfigError: Another module, or another way of pooling, or a model of another head.
        CheckpointError: A file is damaged.
    """
    file = folder / MODULES
    if not file.is_file():
        return None
    place = _find_pooling(file)
    if config.head.record.has_scores:
        raise _refused("its model scores tokens, and vectors are of hidden states", file)
    mode = _pooling_of(folder / place / "config.json")
    if mode not in ("mean", _of_shape(config)):
        raise _refused(f"pooling by {mode} of a {config.shape} cannot be represented", file)
    kind = next(name for name, record in HEADS.items() if record.pools)
    head = HeadConfig(kind=kind, mean=mode == "mean")
    return config.model_copy(update={"head": head, "pooler": False})


def _find_pooling(file: Path) -> str:
    """Returns the folder of the pooling among the modules. Raises: ConfigError: Others are listed."""
    try:
        listed = [(str(one["type"]), str(one["path"])) for one in read_json(file)]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _refused(f"not a list of modules: {error}", file) from None
    kinds = [kind.rpartition(".")[2] for kind, _ in listed]
    for (kind, _), name in zip(listed, kinds, strict=True):
        if not kind.startswith("sentence_transformers.") or name not in _MODULES:
            raise _refused(f"module {kind} is none of {', '.join(_MODULES)}", file)
    if tuple(kinds) not in (_MODULES, _MODULES[:2]):
        raise _refused(f"modules {', '.join(kinds)} are in no order that is known", file)
    return listed[1][1]


def _pooling_of(file: Path) -> str:
    values = read_object(file)
    named = values.get("pooling_mode")
    chosen = [name for name, key in _FLAGS.items() if values.get(key) or name == named]
    if len(chosen) != 1:
        raise _refused(f"pools by {', '.join(chosen) or 'nothing'}: one way is needed", file)
    return chosen[0]


def _refused(text: str, file: Path) -> ConfigError:
    fix = f"remove {MODULES}, to read the model of hidden states alone"
    return ConfigError(text, where=str(file), fix=fix)
