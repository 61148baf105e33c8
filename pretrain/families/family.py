"""A family of Hugging Face models: the correspondence of its config.json and tensors to ours.

    config.json, names  -> read_config  -> ModelConfig  -> weights -> [Weight(ours, theirs), ...]
    ModelConfig         -> write_config -> config.json

A family is data and pure functions over a dict: no tensor, no file, no model of transformers.
`interop` does the arithmetic of one `Weight`, and streams over files, so that a model of any size
converts shard by shard.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pretrain.config.model import ModelConfig
from pretrain.families.sizes import Sizes


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter of ours, and the tensors of theirs that it is made of.

    Attributes:
        ours: Name of our parameter.
        theirs: (name, rows) of each tensor of theirs, stacked along dimension 0 in this order, for
            experts along the first two; rows are counted after transposing. A tensor of one
            dimension counts its elements.
        transposed: Theirs is [in, out] where ours is [out, in] (GPT-2's Conv1D).
        vocab: Dimension 0 is the vocabulary, `vocab_size` rows in theirs: padded with rows of
            zeros on import, cut on export.
        row: Theirs is [1, n] where ours is [n] (Marian's final_logits_bias).
        shape: Shape of each tensor of theirs, which has the elements of ours in their order (the
            kernel of a convolution, a table of one image). -1 first: of as many rows as `theirs`
            says, or others that are as many together. None: that of ours.
        fused: Number E of experts: theirs is one tensor, [E, inputs, outputs], or [E, outputs] of
            biases, where ours has the rows of all experts (gpt-oss). 0: no such tensor.
        order: Each run of so many rows of ours has the rows of a run of theirs in this order. Empty:
            theirs.
        interleaved: Outputs of a fused tensor alternate between the halves of ours, gate and up.
        unread: Further names under which an export writes the whole of it: tensors of a class of
            theirs that it does not use. Not read, and `Family.ignored` need not name them.
        copies: Further names under which theirs, one tensor, is stored again: written, and compared on
            import where they are there.
        optional: Zeros where the files lack it, as in transformers.
    """

    ours: str
    theirs: tuple[tuple[str, int], ...]
    transposed: bool = False
    vocab: bool = False
    row: bool = False
    shape: tuple[int, ...] | None = None
    fused: int = 0
    interleaved: bool = False
    order: tuple[int, ...] = ()
    unread: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type` of Hugging Face.

    Attributes:
        model_type: `model_type` of config.json.
        read_config: From a config.json as published (old and new spellings, defaults of
            transformers) and the names of the tensors, spelled as in `weights`, which show whether
            there is a head or a pooler. Raises ConfigError naming key, value and reason where the
            model is not exactly one of ours. `vocab_multiple` stays at its default.
        write_config: Inverse of `read_config`, best effort: an export is allowed where reading
            back gives the same config. `architectures`, `model_type` and dtype are added by the
            writer. Like `weights` and `architecture` it must not raise for any config of ours.
        architecture: Class that has exactly the tensors of `weights`: "LlamaForCausalLM".
        weights: Every parameter of ours, with names as `AutoModelFor*.save_pretrained` writes them.
            They have `prefix` even where `head.kind` is none; the writer then leaves it out, as
            `AutoModel.save_pretrained` does.
        aliases: Second name of a tied tensor -> its name in `weights`. Accepted on import where
            the values are equal, unless `weights` has a tensor of that name; not written.
        ignored: Patterns (`re.fullmatch`) of tensors that are skipped unless `weights` has them:
            buffers that no other family has (masks, sinusoids), and parts without a counterpart
            (next-sentence prediction, a pooler of a model with another head).
        renames: (pattern, replacement) of `re.sub`, applied to their names first: old spellings.
        prefix: Prefix of names under a head ("bert.", "model."). A name of a checkpoint may lack it,
            or have it once more, as of a base model or in a larger one.
        written: What an export writes for `prefix`, by the kind of a head, where it is another.
        sinusoids: Names and widths of tables of theirs that a model of ours computes, the positions
            of patches: written, and compared on import.
        reads: Input of its models, `tokens` or `patches`; `weights` is called for no other config.
        sizes: Models by name, the values of `model.preset`.
    """

    model_type: str
    read_config: Callable[[dict[str, Any], frozenset[str]], ModelConfig]
    write_config: Callable[[ModelConfig], dict[str, Any]]
    architecture: Callable[[ModelConfig], str]
    weights: Callable[[ModelConfig], list[Weight]]
    aliases: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    prefix: str = ""
    written: dict[str, str] = field(default_factory=lambda: {"none": ""})
    sinusoids: Callable[[ModelConfig], dict[str, int]] = lambda config: {}
    reads: str = "tokens"
    sizes: Sizes = field(default_factory=dict)

    @property
    def tiny(self) -> str:
        """Name of the smallest model, which tests build."""
        return next(name for name in self.sizes if name.endswith("-tiny"))


Modules = Mapping[str, Mapping[str, int]]
"""Name of a module of ours -> names and rows of the modules of theirs that are stacked for it."""


def affine(ours: str, theirs: str, modules: Modules, *, bias: bool, transposed: bool = False) -> list[Weight]:
    """Returns the weight, and with `bias` the bias, of linear layers or norms.

    `ours` and `theirs` are prefixes of all names, such as "encoder.blocks.0."; `transposed` is that
    of `Weight`.
    """
    weights = []
    for name, parts in modules.items():
        for kind in ("weight", "bias") if bias else ("weight",):
            stacked = tuple((f"{theirs}{part}.{kind}", rows) for part, rows in parts.items())
            weights.append(Weight(f"{ours}{name}.{kind}", stacked, transposed and kind == "weight"))
    return weights


def table(ours: str, theirs: str, vocab_size: int | None, *, row: bool = False) -> Weight:
    """Returns a parameter of one row for each token of the vocabulary."""
    assert vocab_size is not None  # filled in when a model is opened
    return Weight(ours, ((theirs, vocab_size),), vocab=True, row=row)


def own_head(config: ModelConfig, theirs: str) -> list[Weight]:
    """Returns the weight of a language model's head that is not tied to the embedding, if any."""
    if not config.head.record.scores_words or config.tied_embeddings:
        return []
    return [table("head.weight", theirs, config.vocab_size)]
