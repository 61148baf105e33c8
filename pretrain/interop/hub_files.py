"""The release of a model: a folder of Hugging Face as it is, or fetched from the hub.

Only what can be read is fetched: config, weights, tokenizer and generation settings, never code.
"""

from pathlib import Path

from pretrain.errors import ConfigError
from pretrain.interop.fields import CONFIG, GENERATION, PICKLED_WEIGHTS, TOKENIZER_FILES, WEIGHTS
from pretrain.utils.hub import fetch_files, is_hub_name

_ALWAYS = [CONFIG, GENERATION, *TOKENIZER_FILES]


def _patterns(name: str) -> list[str]:
    """Of weights in one file or in shards; a repository may hold the same weights in other layouts too."""
    stem, _, suffix = name.rpartition(".")
    return [name, f"{name}.index.json", f"{stem}-*-of-*.{suffix}"]


def fetch_release(name_or_dir: str) -> Path:
    """Returns the folder of a Hugging Face model.

    Args:
        name_or_dir: A folder, taken as it is; or a name on the hub, `owner/model`, which is fetched: safetensors, or
            where it has none the `.bin` files.

    Raises:
        ConfigError: Neither a folder nor a name; or the hub has no such model, or it needs leave that we lack.
        LaunchError: The hub cannot be reached, and the cache lacks the model.
        DiskError: No room for it.
    """
    path = Path(name_or_dir).expanduser()
    if name_or_dir and path.is_dir():
        return path
    if path.is_file() or not is_hub_name(name_or_dir):
        raise ConfigError(
            f"{name_or_dir!r} is neither a folder nor a name on the Hugging Face hub", fix="check the path"
        )
    folder = fetch_files(name_or_dir, [*_ALWAYS, *_patterns(WEIGHTS)])
    if not any(folder.glob("*.safetensors")):
        folder = fetch_files(name_or_dir, [*_ALWAYS, *_patterns(PICKLED_WEIGHTS)])
    return folder
