"""Activation offload: the same gradients to the bit; one block ahead; nothing is held longer than needed."""

import gc
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.model import build_model
from pretrain.model.activation_offload import SMALLEST_BYTES, ActivationOffload
from tests.helpers.tables import alternating
from tests.unit.model.test_transformer import SHAPES, gradients
from tests.unit.model.tiny import CPU, build, packed_batch, random_batch, random_pairs, tiny_config, two_stacks_config

MODES = ["none", "selective", "full"]
LAYERS = 4


def assert_same_gradients(config, batch, **options):
    """Compares two steps with and two without offload; dropout draws the same."""
    found = []
    for offload in ("none", "cpu"):
        model = build(config, offload=offload, **options)
        torch.manual_seed(5)
        found += [gradients(model, batch), gradients(model, batch)]
    for number, (loss, grads) in enumerate(found[:2]):
        other_loss, others = found[number + 2]
        assert torch.equal(loss, other_loss)
        assert all(torch.equal(grad, others[name]) for name, grad in grads.items())


@pytest.mark.parametrize(("shape", "mode"), alternating(SHAPES, MODES))
def test_gradients_are_the_same_to_the_bit(shape, mode):
    config = tiny_config(layers=3, **SHAPES[shape])
    assert_same_gradients(config, packed_batch([[20, 12], [32]]), checkpointing=mode)


@pytest.mark.parametrize(("mode", "attention"), alternating(MODES, ["eager", "sdpa"]))
def test_two_stacks_with_dropout_and_relative_positions_have_the_same_gradients(mode, attention):
    config = two_stacks_config(layers=3, dropout=0.2, attention_dropout=0.1, position="relative")
    batch, _ = random_pairs([20, 30], [32, 9])
    assert_same_gradients(config, batch, checkpointing=mode, attention=attention)


def test_every_second_block_checkpointed_and_bf16_weights_have_the_same_gradients():
    config = tiny_config(layers=LAYERS)
    assert_same_gradients(config, random_batch(2, 64), checkpointing="full", every=2, dtype=torch.bfloat16)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_compiled_blocks_have_the_same_gradients_and_break_no_graph(mode):
    batch, found = random_batch(2, 64), []
    for offload in ("none", "cpu"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        engine = {"compile": True, "activation_checkpointing": mode, "offload_activations": offload}
        model = build_model(tiny_config(layers=3), PLAIN_ENGINE.model_copy(update=engine), CPU)
        for block in model.decoder.blocks:
            block.forward = torch.compile(type(block).forward.__get__(block), backend="aot_eager")
        model.load_state_dict(build(tiny_config(layers=3)).state_dict())
        watched = Watched(model) if offload == "cpu" else None
        model.head.compiles_loss = False
        found.append(gradients(model, batch))
        assert torch._dynamo.utils.counters["graph_break"].total() == 0
    assert watched is not None and len(watched.events) == 2 + 2 + 3, "copies of two blocks, backward passes of three"
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert not weights & watched.addresses
    (loss, grads), (other_loss, others) = found
    assert torch.equal(loss, other_loss)
    assert all(torch.equal(grad, others[name]) for name, grad in grads.items())


class Watched(ActivationOffload):
    """The offload of a decoder; remembers what it packed, and the order of copies and backward passes."""

    def __init__(self, model):
        super().__init__(CPU, len(model.decoder.blocks))
        model.decoder.offload = self
        self.numbers, self.saved, self.originals, self.addresses, self.events = {}, {}, {}, set(), []
        for number, block in enumerate(model.decoder.blocks):
            block.register_full_backward_pre_hook(lambda *_, number=number: self.events.append(f"backward {number}"))

    def _pack(self, block, stays, tensor):
        number = self.numbers.setdefault(id(block), len(self.numbers))
        packed = super()._pack(block, stays, tensor)
        if not isinstance(packed[1], torch.Tensor):
            self.originals.setdefault(number, []).append(StorageWeakRef(tensor.untyped_storage()))
            self.saved.setdefault(number, []).append(weakref.ref(packed[1].saved))
            self.addresses.add(tensor.untyped_storage().data_ptr())
        return packed

    def _copy_to_host(self, block):
        if block.saved:
            self.events.append(f"to host {self.numbers[id(block)]}")
        super()._copy_to_host(block)

    def _copy_to_device(self, block):
        if any(saved.device is None for saved in block.saved):
            self.events.append(f"to device {self.numbers[id(block)]}")
        super()._copy_to_device(block)

    def copied(self, number):
        """The storages that were packed of a block and still are known to its graph, one for each view."""
        return [saved for one in self.saved.get(number, []) if (saved := one()) is not None]

    def on_device(self):
        """The blocks of which something is on the device."""
        return [number for number in self.saved if any(one.device is not None for one in self.copied(number))]


def watched_model(**options):
    model = build(tiny_config("gpt2-tiny", layers=LAYERS), offload="cpu", **options)
    return model, Watched(model)


@pytest.mark.parametrize("mode", MODES)
def test_copies_run_behind_the_forward_and_one_block_ahead_of_the_backward_pass(mode):
    model, watched = watched_model(checkpointing=mode)
    gradients(model, random_batch(2, 64))
    assert watched.events == [
        *("to host 0", "to host 1", "to host 2"),
        *("backward 3", "to device 2", "backward 2", "to device 1", "backward 1", "to device 0", "backward 0"),
    ]


@pytest.mark.parametrize("mode", MODES)
def test_memory_of_the_device_is_free_after_the_next_block_and_after_the_backward_pass(mode):
    model, watched = watched_model(checkpointing=mode)
    seen = []
    for block in model.decoder.blocks:
        block.register_forward_pre_hook(lambda *_: seen.append(watched.on_device()))
        block.register_full_backward_pre_hook(lambda *_: seen.append(watched.on_device()))
    output = model(random_batch(2, 64))
    gc.collect()
    assert seen == [[], [0], [1], [2]], "at the start of each block"
    assert watched.on_device() == []
    assert all(original.expired() for saved in watched.originals.values() for original in saved)
    seen.clear()
    output.logits_BTV.logsumexp(-1).sum().backward()
    assert seen == [[], [2], [1], [0]], "before the backward pass of each block"
    gc.collect()
    assert [watched.copied(number) for number in range(LAYERS)] == [[], [], [], []]


def test_a_storage_is_copied_once_whole_and_small_ones_and_weights_are_not():
    model, watched = watched_model()
    output = model(random_batch(2, 64))
    views = watched.copied(1)
    assert output.logits_BTV.requires_grad
    assert len({id(saved) for saved in views}) < len(views), "queries, keys and values are views of one result"
    assert all(saved.host.numel() >= SMALLEST_BYTES for saved in views)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert not weights & watched.addresses


def test_host_buffers_are_used_again_by_the_next_micro_batch():
    model, watched = watched_model()
    batch = random_batch(2, 64)

    def buffers():
        gradients(model, batch)
        return {buffer.data_ptr() for found in watched._buffers.values() for buffer in found}

    first = buffers()
    assert first
    assert buffers() == first


def test_a_forward_pass_that_failed_leaves_nothing_to_the_next():
    model, _ = watched_model(checkpointing="full")
    batch = random_batch(2, 64)
    _, expected = gradients(build(tiny_config("gpt2-tiny", layers=LAYERS)), batch)
    broken = model.decoder.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch)
    broken.remove()
    _, grads = gradients(model, batch)
    assert all(torch.equal(grad, expected[name]) for name, grad in grads.items())


def test_without_gradients_nothing_is_copied():
    model, watched = watched_model()
    with torch.no_grad():
        model(random_batch(2, 64))
    assert watched.events == []
