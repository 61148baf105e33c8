"""Counts of a Transformer: of its embeddings, stacks, further modules and head, added up."""

from pretrain.config.model import GENERATOR
from pretrain.config.model.parts import embedding, further_tokens, head
from pretrain.config.model.parts.counts import FlopCounter, MicroBatch, RowTokens, Weights
from pretrain.config.model.parts.stack import StackCounts
from pretrain.config.model.transformer import ModelConfig


class TransformerCounts:
    """Counts of a Transformer whose vocabulary, and labels, are known."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        named = [name for name in ("encoder", "decoder") if getattr(model, name) is not None]
        self.stacks = [StackCounts(model, name) for name in named]

    @property
    def width(self) -> int:
        """Width D of the hidden states that the head reads."""
        return self.stacks[-1].width

    @property
    def has_head(self) -> bool:
        """True if it scores something, and does not end with hidden states."""
        return self.model.head.record.has_scores

    @property
    def head_width(self) -> int:
        """Width of the input of the scores."""
        return self.model.head_width

    @property
    def reads_table_twice(self) -> bool:
        """True if the table of tokens is the weight of the head too."""
        return self.model.tied_embeddings

    @property
    def generator(self) -> ModelConfig | None:
        """Model of masked tokens, whose samples replace them in training. None: there is none."""
        return self.model.generator if self.model.generator_heads else None

    @property
    def num_blocks(self) -> int:
        """Blocks of all stacks, further modules and a generator."""
        blocks = sum(len(stack.numbers) for stack in self.stacks)
        return blocks if self.generator is None else blocks + TransformerCounts(self.generator).num_blocks

    def weights(self) -> Weights:
        """Yields every parameter; a shared one has its first name only."""
        model = self.model
        yield from embedding.weights(model)
        for stack in self.stacks:
            yield from stack.weights()
        yield from further_tokens.weights(model)
        yield from head.weights(model)
        if model.generator_heads:
            yield from self._generator_weights()

    def names_in_order(self) -> list[str]:
        """Returns the names of parameters in the order of use; a generator reads some before the model."""
        names = [weight.name for weight in self.weights()]
        if self.generator is None:
            return names
        reads = self.model.generator_reads
        read = [weight.name for weight in TransformerCounts(self.generator).weights()]
        first = [name if name.startswith(reads) else GENERATOR + name for name in read]
        return [*first, "embedding.weight", *(name for name in names if not name.startswith(GENERATOR))]

    def norms_first(self, block: str) -> bool:
        """Returns True if the sub-layers of a block read a norm, and add what they make as it is."""
        if block.startswith(GENERATOR):
            assert self.generator is not None
            return TransformerCounts(self.generator).norms_first(block.removeprefix(GENERATOR))
        named = {stack.name: stack for stack in self.stacks}
        return named.get(block.split(".")[0], self.stacks[-1]).norms_first

    def _generator_weights(self) -> Weights:
        for weight in TransformerCounts(self.model.generator).weights():
            if weight.group == "head":  # its scores are of places, and neither cut nor lengthened
                weight = weight._replace(is_table=False, is_cut=False)
            if not weight.name.startswith(self.model.generator_reads):
                yield weight._replace(name=GENERATOR + weight.name, group="generator")

    def flops(self, count: FlopCounter, target: int, source: int) -> dict[str, int]:
        """Adds a row of so many tokens, of two stacks with a source of so many.

        Returns the number of the first blocks of each stack that no gradient reaches.
        """
        model = self.model
        frozen: dict[str, int] = {}
        stream = False
        for stack in self.stacks:
            is_last = stack is self.stacks[-1]
            tokens = target if is_last else source
            reads = False
            if stack.name == "decoder":
                if model.has_bridge:
                    stream = count.linear("bridge", source, stream)
                reads = model.restores and (stream or count.has("mask.weight"))
            elif model.input is not None:
                cut = tokens - model.input.num_before
                reads = count.linear(f"{embedding.patches_name(model)}.projection", cut, reads=False)
            row = RowTokens(tokens, source if stack.reads_encoder else None, stream)
            stream, frozen[stack.name] = stack.flops(count, row, reads)
        head.flops(count, model, target, stream)
        further_tokens.flops(count, model, target, stream)
        return frozen

    def encoded(self, batch: MicroBatch, source: int) -> int:
        """Returns bytes of the encoder's output, which every decoder block reads, or of the bridge."""
        return batch.rows * source * self.stacks[0].width * batch.residual * (len(self.stacks) - 1)

    def head(self, batch: MicroBatch, positions: int, *, trains_head: bool) -> tuple[int, int]:
        """Returns bytes of the layers before the scores, and of the gradients that the loss makes forward."""
        return head.kept(batch, self.model, positions, trains_head=trains_head)
