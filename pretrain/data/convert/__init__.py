"""Token data of other systems: the registry of their formats, each a list of sources -> files of tokens."""

from collections.abc import Callable, Sequence

from pretrain.data.convert.mds import open_mds
from pretrain.data.convert.megatron import open_megatron
from pretrain.data.convert.nanogpt import open_nanogpt
from pretrain.data.convert.olmo import open_olmo
from pretrain.data.convert.token_file import ReadOptions, TokenFile

FORMATS: dict[str, Callable[[Sequence[str], ReadOptions], Sequence[TokenFile]]] = {
    "megatron": open_megatron,
    "nanogpt": open_nanogpt,
    "olmo": open_olmo,
    "mds": open_mds,
}
