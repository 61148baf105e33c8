"""Token data of other systems: the registry of their formats, each a list of sources -> files of tokens."""

from collections.abc import Callable, Sequence

from pretrain.prepare.convert.flat import open_nanogpt, open_olmo
from pretrain.prepare.convert.mds import open_mds
from pretrain.prepare.convert.megatron import open_megatron
from pretrain.prepare.convert.token_file import ReadOptions, TokenFile

FORMATS: dict[str, Callable[[Sequence[str], ReadOptions], Sequence[TokenFile]]] = {
    "megatron": open_megatron,
    "nanogpt": open_nanogpt,
    "olmo": open_olmo,
    "mds": open_mds,
}
