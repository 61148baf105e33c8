"""Keys of the mixers of layers, `layer_types`, and tensors of the layers whose mixer is not attention."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pretrain.config.model import StackConfig
from pretrain.families.config_json import Fields, refusal
from pretrain.families.family import Weight
from pretrain.families.rotary_keys import FULL
from pretrain.kinds.mixers import ATTENTION

LINEAR = "linear_attention"
"""Kind of a layer in `layer_types` whose mixer has a state."""


@dataclass(frozen=True, slots=True)
class MixerTensors:
    """Tensors of the layers of one mixer, where others have attention.

    Attributes:
        weights: Parameters of the mixer, with names within a layer.
        modules: Further modules that have other names in these layers: ours -> theirs.
    """

    weights: Callable[[StackConfig], list[Weight]]
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def read_mixers(
    fields: Fields, usual: list[str], kinds: Mapping[str, str], key: str = "layer_types"
) -> list[str]:  # fmt: skip
    """Returns the shortest pattern of our mixers that gives the listed layers.

    Args:
        fields: Keys of config.json.
        usual: Kinds of layers that the config does not list.
        kinds: Mixers of ours by further kinds than that of attention.
        key: Key of the list.
    """
    names = {FULL: ATTENTION, "attention": ATTENTION, **kinds}
    listed = fields.values.get(key)
    listed = usual if listed is None else listed
    if not isinstance(listed, list) or not all(kind in names for kind in listed):
        raise refusal(key, listed, f"only {FULL} and {', '.join(kinds)} can be represented")
    if len(listed) != len(usual):
        raise refusal(key, listed, f"must name each of {len(usual)} layers")
    return shortest_pattern([names[kind] for kind in listed])


def shortest_pattern(mixers: list[str]) -> list[str]:
    """Returns the fewest first mixers whose repetition is the list."""
    lengths = range(1, len(mixers) + 1)
    fitting = (size for size in lengths if mixers == mixers[:size] * (len(mixers) // size))
    return mixers[: next(fitting, len(mixers))]


def write_mixers(stack: StackConfig, kinds: Mapping[str, str]) -> list[str]:
    """Returns the list that `read_mixers` reads."""
    names = {mixer: kind for kind, mixer in kinds.items()} | {ATTENTION: FULL}
    return [names.get(stack.mixer_name(number), FULL) for number in range(stack.layers)]


def of_layer(place: tuple[str, str], weight: Weight) -> dict[str, Any]:
    """Returns the full names of a weight that has those within a layer; `place`: ours and theirs."""
    ours, theirs = place
    names = tuple((f"{theirs}{name}", rows) for name, rows in weight.theirs)
    return {"ours": f"{ours}{weight.ours}", "theirs": names}


def filter_weight(theirs: str, channels: int, kernel: int, prefix: str = "attention.convolution") -> Weight:
    """Returns the filters of a short convolution, which torch has as [channels, 1, kernel]."""
    return Weight(f"{prefix}.weight", ((f"{theirs}.weight", channels),), shape=(channels, 1, kernel))
