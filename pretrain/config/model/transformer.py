"""`model:` of `kind: transformer` -- one or two stacks, embeddings and a head.

One stack is a GPT (decoder), a BERT (encoder) or, over image patches, a ViT (encoder); two are a
T5, or over image patches a masked autoencoder, or a ViT whose states a text decoder reads (image
captions). Families differ only in these values: a preset is
plain data over them, and no code in `model/` depends on a family.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pretrain.config.base import MAX_HEADS, MAX_LAYERS, MAX_ROWS, OFF, Conflicts, OnResume, SameKeys
from pretrain.config.model.any_kind import AnyKindConfig, HeadConfig
from pretrain.config.model.patches import PatchesConfig
from pretrain.config.model.stack import StackConfig
from pretrain.kinds.heads import HEADS


class ModelConfig(AnyKindConfig):
    """Stacks, embeddings and head of the model."""

    kind: Annotated[Literal["transformer"], OnResume.NEVER] = "transformer"
    """`transformer`, or `recurrent`, which has the other keys of this section."""
    input: PatchesConfig | None = None
    """Image patches that the encoder reads. None: token ids. A decoder beside it reads token ids,
    or with a head of pixels the patches."""
    encoder: Annotated[StackConfig | None, SameKeys("model.decoder")] = None
    """Bidirectional stack. None: no encoder."""
    decoder: StackConfig | None = None
    """Causal stack; its blocks attend to the output of the encoder, if any: of one over image
    patches through a matrix, `bridge`, where widths differ. With a head of pixels
    bidirectional, of any width: it reads the output of the encoder in its places, and a learned
    vector in those of hidden patches (He et al. 2022, MAE). None: no decoder."""
    scaled_embeddings: Annotated[bool, OnResume.ALLOW] = False
    """Multiply the embeddings by sqrt(D) (Vaswani et al. 2017, 3.4)."""
    embedding_scale: Annotated[float, OnResume.ALLOW] = Field(default=1.0, gt=0)
    """Multiply the embeddings of tokens by this number (Granite)."""
    ngram_embeddings: Annotated[int, OFF, OnResume.NEVER] = Field(default=0, ge=0, le=MAX_LAYERS)
    """Number n of hashed tables whose vectors are added to the embedding of a token: that of the
    last 2 tokens of its document, of the last 3, up to n + 1 (Huang et al. 2025, Over-Tokenized
    Transformer). 0: none."""
    ngram_rows: Annotated[int, OnResume.NEVER] = Field(default=16384, ge=1, le=MAX_ROWS)
    """Rows of each of these tables; two n-grams of one hash share a row."""
    multi_token: Annotated[int, OFF, OnResume.NEVER] = Field(default=0, ge=0, le=MAX_LAYERS)
    """Number of modules that predict further tokens in training (DeepSeek-V3, 2.2): one predicts the
    token after the next, two also the one after that. Each is a block more; its loss is weighted by
    `objective.multi_token_weight`. Generation and evaluation leave them out. 0: none."""
    generator_heads: Annotated[int, OFF, OnResume.NEVER] = Field(default=0, ge=0, le=MAX_HEADS)
    """Heads of a second encoder, which predicts masked tokens and so makes the input of a head of `replaced`
    in training (Clark et al. 2020, 3.2): as deep as the encoder, narrower as it has fewer heads, with the same
    tables and norm of embeddings. The paper has a third or a quarter of the heads. 0: none."""
    pooler: Annotated[bool, OnResume.NEVER] = False
    """Linear layer and tanh over the first position of a document, or over its mean (BERT)."""
    pooler_activation: Annotated[Literal["tanh", "relu", "gelu"], OnResume.ALLOW] = "tanh"
    """Activation of the pooler: `tanh` (BERT, RoBERTa), `relu` (DistilBERT) or `gelu` (ELECTRA)."""
    init: Annotated[Literal["normal", "xavier", "t5"], OnResume.WARN] = "normal"
    """Weight initialization. `normal`: normal distribution with `init_std`. `xavier`: uniform, with
    embeddings of standard deviation 1/sqrt(D) (Vaswani et al. 2017, as in tensor2tensor). `t5`: by
    fan-in, which compensates for unscaled attention (Raffel et al. 2020)."""
    init_std: Annotated[float, OnResume.WARN] = Field(default=0.02, gt=0)
    """Standard deviation of `normal`."""
    init_scaled: Annotated[bool, OnResume.WARN] = True
    """With `normal`: initialize the output projections of residual branches with `init_std / sqrt(2
    layers)` (GPT-2, 2.3); `sqrt(3 layers)` with cross-attention."""
    init_output: Annotated[Literal["drawn", "zero"], OnResume.WARN] = "drawn"
    """`zero`: the output projections of residual branches, and the weight of an untied head, start at
    0 (modded-nanoGPT). `drawn`: they start as `init` says."""

    @property
    def reads(self) -> str:
        """Input of the model: `tokens` or `patches`."""
        return "tokens" if self.input is None else self.input.kind

    @property
    def restores(self) -> bool:
        """True of a masked autoencoder: the decoder fills in patches that are not read."""
        return self.head.record.restores

    @property
    def reads_encoder(self) -> bool:
        """True if the blocks of the decoder have cross attention to the output of the encoder."""
        return self.encoder is not None and self.decoder is not None and not self.restores

    @property
    def captions(self) -> bool:
        """True of a decoder of text over an encoder of images."""
        return self.input is not None and self.reads_encoder

    @property
    def has_bridge(self) -> bool:
        """True if a matrix maps the output of the encoder to the width of the decoder."""
        widths_differ = self.captions and self.input_stack.width != self.last_stack.width
        return self.restores or widths_differ

    @property
    def generator(self) -> "ModelConfig":
        """The model of `generator_heads`, of masked tokens."""
        stack, table = self.input_stack, self.input_stack.table_width
        sizes = {name: getattr(stack, name) for name in ("heads", "width", "ff_width", "kv_heads")}
        update = {name: size and size * self.generator_heads // stack.heads for name, size in sizes.items()}
        update["embedding_width"] = None if update["width"] == table else table
        head = HeadConfig(transform=True, bias=True, activation="gelu")
        keys = {"encoder": stack.model_copy(update=update), "head": head, "tied_embeddings": True}
        return self.model_copy(update=keys | {"generator_heads": 0, "pooler": False})

    @property
    def generator_reads(self) -> tuple[str, ...]:
        """Beginnings of the names of weights that a generator has in common with its model."""
        position = ("encoder.position.",) if self.input_stack.position == "learned" else ()
        return ("embedding.", "encoder.token_type.", "encoder.input_norm.", *position)

    def patches_of(self, stack: str) -> PatchesConfig | None:
        """Returns the patches at whose places a stack, `encoder` or `decoder`, is. None: tokens."""
        return None if stack == "decoder" and self.captions else self.input

    def positions_of(self, stack: str) -> int:
        """Returns the most positions of a stack, the rows of a learned table."""
        patches = self.patches_of(stack)
        return self.max_seq_len if patches is None else patches.positions

    def first_position(self, stack: str) -> int:
        """Returns the row of the first position in a learned table; without a padding token, its id counts as 1."""
        offset: int | str = (getattr(self, stack) or self.last_stack).position_offset
        pad = 1 if self.special_tokens.pad is None else self.special_tokens.pad
        return pad + 1 if isinstance(offset, str) else offset

    @property
    def input_stack(self) -> StackConfig:
        """Stack that reads the embeddings of a model of one input, or of the source of two."""
        return self.encoder or self.last_stack

    @property
    def num_scores(self) -> int:
        """Number of classes of the head, ids, labels or pixels of a patch, which must be known."""
        if self.input is not None and self.restores:
            return self.input.patch_values
        scores = self.vocab_size if self.head.record.scales else self.head.num_scores
        assert scores, "fit_config fills in vocab_size and labels"
        return scores

    @property
    def num_head_rows(self) -> int:
        """Rows of the weight of the head: `num_scores`, with a padded vocabulary."""
        return self.padded_vocab_size if self.head.record.scores_words else self.num_scores

    @property
    def head_width(self) -> int:
        """Width of the input of the scores: of tied tables narrower than the stack, their width."""
        narrow = self.head.record.scores_words and self.head.transform
        return self.last_stack.table_width if narrow else self.last_stack.width

    @property
    def last_stack(self) -> StackConfig:
        """Stack before the head: the decoder, if there is one."""
        stack = self.decoder or self.encoder
        assert stack is not None
        return stack

    @model_validator(mode="before")
    @classmethod
    def _fill_length(cls, values: Any) -> Any:
        section = values.get("input") if isinstance(values, dict) else None
        if not section or "max_seq_len" in values:
            return values
        head = values.get("head") or {}
        kind = head.kind if isinstance(head, HeadConfig) else head.get("kind", "lm")
        if values.get("decoder") and kind in [name for name, record in HEADS.items() if record.scores_words]:
            return values  # the length of captions
        try:
            patches = section if isinstance(section, PatchesConfig) else PatchesConfig.model_validate(section)
        except ValueError:
            return values  # reported by the field, with its place
        return values | {"max_seq_len": patches.positions}

    def _conflicts(self) -> Conflicts:
        named = {"encoder": self.encoder, "decoder": self.decoder}
        stacks = {name: stack for name, stack in named.items() if stack is not None}
        if self.input is None:
            yield from self._token_conflicts(stacks)
        else:
            yield from self._patch_conflicts(self.input, stacks)
        yield from self._multi_token_conflicts()
        yield from self._generator_conflicts()
        if not stacks:
            yield "needs an encoder, a decoder, or a preset that has one"
            return
        yield from self._stack_conflicts()
        yield from self._head_conflicts()

    def _token_conflicts(self, stacks: dict[str, StackConfig]) -> Conflicts:
        if self.restores:
            yield "head.kind=pixels is of patches", "set model.input, or another head"
        for name, stack in stacks.items():
            if stack.position.endswith("_2d"):
                yield (
                    f"{name}.position={stack.position} is of patches",
                    f"set model.input, or use {stack.position.removesuffix('_2d')}",
                )

    def _patch_conflicts(self, patches: PatchesConfig, stacks: dict[str, StackConfig]) -> Conflicts:
        need = f"input.kind=patches with head.kind={self.head.kind} needs an encoder"
        has_decoder = self.restores or self.head.record.scores_words
        if has_decoder and len(stacks) < 2:
            alone = "" if self.restores else "; for an encoder alone use head.kind=labels or none"
            yield f"{need} and a decoder{alone}"
        if not has_decoder and [*stacks] != ["encoder"]:
            yield f"{need} alone", "set decoder to null"
        for key, value in self._keys_of_ids().items():
            if value:
                yield f"{key} is of token ids, which input.kind=patches replaces", "leave it out"
        if not self.captions and self.max_seq_len != patches.positions:
            rule = f"must be {patches.positions}, the positions of an image ({patches.describe()})"
            yield f"max_seq_len={self.max_seq_len} {rule}", "leave it out"
        if self.head.record.names_labels and not (self.head.mean or patches.class_token):
            yield "input.class_token=false leaves nothing that stands for the image", "set head.mean=true"
        yield from self._place_conflicts(stacks)

    def _place_conflicts(self, stacks: dict[str, StackConfig]) -> Conflicts:
        if self.restores and (stacks["encoder"].position == "relative" or stacks["encoder"].window):
            yield (
                "relative positions and windows count all patches, and with head.kind=pixels the encoder reads some",
                "use another encoder.position, and no window",
            )
        if self.captions and self.last_stack.position.endswith("_2d"):
            position = self.last_stack.position
            yield (
                f"decoder.position={position} is of patches, captions are tokens",
                f"use {position.removesuffix('_2d')}",
            )
        for name, stack in stacks.items():
            if stack.position == "sinusoidal_2d" and stack.width % 4:
                yield f"{name}.position=sinusoidal_2d needs a width that 4 divides, not {stack.width}"

    def _keys_of_ids(self) -> dict[str, Any]:
        """Returns the keys of token ids that stacks of patches have no place for, with their values."""
        values: dict[str, Any] = {}
        if not self.captions:
            for key in ("tied_embeddings", "scaled_embeddings", "vocab_size", "ngram_embeddings"):
                values[key] = getattr(self, key)
            values["embedding_scale"] = self.embedding_scale != 1.0
        for name in ("encoder", "decoder"):
            if self.patches_of(name) is not None:
                for key in ("token_types", "value_embeddings"):
                    values[f"{name}.{key}"] = getattr(getattr(self, name), key, None)
        return values

    def _multi_token_conflicts(self) -> Conflicts:
        if not self.multi_token:
            return
        key = f"multi_token={self.multi_token}"
        if self.decoder is None or self.encoder is not None or not self.head.record.scores_words:
            yield (
                f"{key} predicts further tokens of a text: it needs a decoder alone and head.kind=lm",
                "use multi_token=0",
            )
        # A block reads hidden states alone: no tables of the stack, no results of other blocks.
        for name in ("embedding_width", "value_embeddings", "value_residual", "residual_scalars"):
            if value := getattr(self.decoder, name):
                setting = f"decoder.{name}={str(value).lower()}"
                yield (
                    f"{key} does not go with {setting}, of which its blocks have nothing",
                    "use multi_token=0, or leave it out",
                )

    def _generator_conflicts(self) -> Conflicts:
        heads, stack = self.generator_heads, self.encoder
        if not heads:
            return
        if not self.head.record.reads_samples or stack is None or stack.experts:
            yield f"generator_heads={heads} needs an encoder without experts and head.kind=replaced", "leave it out"
            return
        parts = [stack.width, stack.ff_width, stack.num_kv_heads]
        if heads > stack.heads or any(size * heads % stack.heads for size in parts):
            rule = "must leave whole sizes of width, ff_width and kv_heads"
            yield f"generator_heads={heads} of encoder.heads={stack.heads} {rule}", "use a divisor of them"

    def _stack_conflicts(self) -> Conflicts:
        encoder, decoder = self.encoder, self.decoder
        if encoder is not None and decoder is not None:
            if encoder.width != decoder.width and not self.has_bridge:
                sizes = f"encoder.width={encoder.width} must equal decoder.width={decoder.width}"
                yield f"{sizes}: they share embeddings"
            if encoder.experts or decoder.experts:
                yield (
                    "experts are balanced over the tokens of one stack, and this model has two",
                    "leave them out, or the encoder",
                )
        if self.input is not None and self.head.record.of_texts:
            yield f"head.kind={self.head.kind} is of texts, and input.kind=patches reads images"
        if self.head.record.pools and self.pooler:
            yield f"head.kind={self.head.kind} compares hidden states, and model.pooler maps them", "set it to false"
        if self.head.record.scores_tokens and self.pooler:
            yield f"head.kind={self.head.kind} scores tokens, and model.pooler summarizes them", "set it to false"
        yield from self._mixer_conflicts()
        if self.input is not None and self.last_stack.experts:
            yield "experts are balanced over tokens, and input.kind=patches reads images", "leave one out"

    def _mixer_conflicts(self) -> Conflicts:
        if self.encoder is not None and (mixers := self.encoder.lacking("both_sides")):
            order = "reads from left to right, and an encoder both sides"
            yield f"encoder.{mixers} {order}", "use attention"
        if self.decoder is None:
            return
        if self.encoder is not None and (mixers := self.decoder.lacking("both_sides")):
            alone = "is for a decoder alone, and this model has an encoder"
            yield f"decoder.{mixers} {alone}", "use attention"
        if self.multi_token and (mixers := self.decoder.lacking("multi_token")):
            yield f"multi_token={self.multi_token} was not tried with {mixers}", "use multi_token=0"
        if self.init != "normal" and (mixers := self.decoder.lacking("inits")):
            yield f"init={self.init} was not tried with {mixers}", "use init=normal"

    def _head_conflicts(self) -> Conflicts:
        yield from self._table_conflicts()
        if not self.pooler and self.differs("pooler_activation"):
            yield f"pooler_activation={self.pooler_activation} needs pooler=true", "leave it out"
        kind, head = self.head.kind, self.head.record
        if not head.scores_words and self.tied_embeddings:
            yield f"tied_embeddings=true needs head.kind=lm, not {kind}", "set it to false"
        if head.stacks and self.shape not in head.stacks:
            alone = " or ".join({"encoder": "an encoder", "decoder": "a decoder"}[name] for name in head.stacks)
            yield f"head.kind={kind} needs a model of {alone} alone"
        if self.pooler and self.decoder is not None:
            yield "pooler=true needs a model of an encoder alone"

    def _table_conflicts(self) -> Conflicts:
        stacks = [stack for stack in (self.encoder, self.decoder) if stack is not None]
        if all(stack.embedding_width is None for stack in stacks):
            return
        if self.input is not None or len(stacks) == 2:
            yield "embedding_width goes with one stack over token ids", "leave it out"
        if self.tied_embeddings and self.head_width != self.last_stack.table_width:
            yield "embedding_width with tied_embeddings=true needs head.transform=true, which maps to that width"
