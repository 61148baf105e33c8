"""T5, Marian, BART and mBART against transformers, and the Transformer of 2017 against its paper, written out as loops.

Rows are padded on both sides, packed on both sides, and decoded step by step with both caches.
"""

import math

import pytest
import torch
import transformers

from pretrain.config.model import HeadConfig, ModelConfig, StackConfig
from pretrain.errors import ConfigError
from pretrain.interop.choose import choose_family
from pretrain.interop.release import open_release
from pretrain.model.kv_cache import KVCache
from pretrain.objective.loss import sum_token_loss
from pretrain.types import Batch, StackRows
from tests.helpers.lent import check_gradients, lend
from tests.helpers.theirs import makers
from tests.parity.exchange import check_round_trip
from tests.unit.model.tiny import build, packed_pairs, random_pairs

VOCAB = 61
PAD = 60
"""Not among the tokens: theirs give the embedding of padding no gradient."""
SOURCES, TARGETS = [33, 1, 20, 40], [14, 30, 1, 25]
# Logits are of order 1: two orders of summation of fp32 differ by a few of its last bits.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def t5(name="T5", own=False, **values):
    # The last bucket begins at a distance of 20: below the lengths.
    sizes = {"d_kv": 8, "num_heads": 6, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
    config = getattr(transformers, f"{name}Config")(
        **(sizes | values), vocab_size=VOCAB, d_model=48, d_ff=96, num_layers=3, num_decoder_layers=2,
        dropout_rate=0.0, decoder_start_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    theirs = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    with torch.no_grad():
        if name == "MT5":
            theirs.lm_head.weight.mul_(0.2)  # logits of order 1, although nothing divides them
        if own:
            theirs.lm_head.weight = torch.nn.Parameter(0.2 * torch.randn(VOCAB, 48))
    return theirs


def t5_as_transformers_5_trains_it():
    """v1.1, whose head transformers 5 ties when it begins from nothing."""
    theirs = t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False, d_kv=16)
    with torch.no_grad():
        theirs.lm_head.weight.mul_(0.2)  # logits of order 1, although nothing divides them
    return theirs


def t5_v1_1():
    """As released, with a head of its own."""
    theirs = t5_as_transformers_5_trains_it()
    theirs.lm_head.weight = torch.nn.Parameter(0.2 * torch.randn(VOCAB, 48))
    return theirs


def marian(**values):
    config = transformers.MarianConfig(
        **values, vocab_size=VOCAB, d_model=48, encoder_layers=2, decoder_layers=3, encoder_attention_heads=6,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=80, max_position_embeddings=128, init_std=0.1,
        dropout=0.0, pad_token_id=PAD, decoder_start_token_id=PAD, eos_token_id=0, forced_eos_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    theirs = transformers.MarianMTModel(config)
    theirs.final_logits_bias.requires_grad_()  # a buffer in theirs, a parameter in ours
    return theirs


def bart(name="Bart", **values):
    config = getattr(transformers, f"{name}Config")(
        **values, vocab_size=VOCAB, d_model=48, encoder_layers=2, decoder_layers=3, encoder_attention_heads=6,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=80, max_position_embeddings=128, init_std=0.1,
        dropout=0.0, pad_token_id=PAD, attn_implementation="eager",
    )  # fmt: skip
    theirs = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    theirs.final_logits_bias.requires_grad_()
    return theirs


MAKERS = {
    **makers("encoder+decoder", special_tokens={"pad": PAD, "eos": 1, "start": 0}),
    "t5": t5,
    "t5-v1.1": t5_v1_1,
    "t5-v1.1-tied": t5_as_transformers_5_trains_it,
    "t5-odd-buckets": lambda: t5(relative_attention_num_buckets=11),
    "t5-named-activation": lambda: t5(feed_forward_proj="gated-gelu", dense_act_fn="silu"),
    "t5-own-head": lambda: t5(own=True, relative_attention_num_buckets=10),
    "mt5": lambda: t5("MT5", feed_forward_proj="gated-gelu"),
    "mt5-own-head": lambda: t5("MT5", own=True, feed_forward_proj="relu"),
    "umt5": lambda: t5("UMT5", relative_attention_num_buckets=10),
    "umt5-own-head": lambda: t5("UMT5", own=True),
    "marian": lambda: marian(activation_function="swish", scale_embedding=True),
    "marian-relu": lambda: marian(activation_function="relu"),
    "bart": bart,
    "bart-scaled": lambda: bart(activation_function="relu", scale_embedding=True),
    "plbart": lambda: bart("PLBart", attention_dropout=0.0),
    "mbart": lambda: bart("MBart", scale_embedding=True, decoder_start_token_id=7),
    "mbart-unscaled": lambda: bart("MBart", activation_function="relu"),
}


@pytest.fixture(scope="module", params=MAKERS)
def made(request, tmp_path_factory):
    torch.manual_seed(0)
    return lend(MAKERS[request.param](), tmp_path_factory.mktemp("theirs"))


def mask(lengths, length):
    """Their attention mask."""
    return (torch.arange(length) < torch.as_tensor(lengths)[:, None]).long()


def their_logits(lent, batch):
    """Theirs for a batch that is padded at its end, or not at all."""
    source = batch.source
    inputs = {"input_ids": source.tokens_BT, "decoder_input_ids": batch.tokens_BT}
    if source.lengths_B is not None:
        inputs["attention_mask"] = mask(source.lengths_B, source.tokens_BT.shape[1])
    if batch.lengths_B is not None:
        inputs["decoder_attention_mask"] = mask(batch.lengths_B, batch.tokens_BT.shape[1])
    return lent.theirs(**inputs).logits


def test_logits_loss_and_gradients_agree_with_padding_on_both_sides(lent):
    batch, _ = random_pairs(SOURCES, TARGETS, vocab_size=PAD)
    real = mask(TARGETS, max(TARGETS)).bool()
    expected = their_logits(lent, batch)
    torch.testing.assert_close(lent.ours(batch).logits_BTV[real][:, :VOCAB], expected[real], **TOLERANCE)
    theirs = torch.nn.functional.cross_entropy(expected.flatten(0, 1), batch.targets_BT.flatten())
    found = sum_token_loss(lent.ours, batch)
    ours = found.loss_sum / batch.num_targets()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    theirs.backward()
    ours.backward()
    check_gradients(lent)


def test_rows_packed_on_both_sides_agree_with_the_pairs_alone(lent):
    _, alone = random_pairs(SOURCES, TARGETS, vocab_size=PAD)
    with torch.no_grad():
        found = lent.ours(packed_pairs(alone)).logits_BTV[0, :, :VOCAB]
        expected = torch.cat([their_logits(lent, pair)[0] for pair in alone])
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_steps_with_both_caches_agree_with_the_whole_rows(lent):
    lengths = [14] * len(SOURCES)
    batch, _ = random_pairs(SOURCES, lengths, vocab_size=PAD)
    layers, found = lent.release.config.decoder.layers, []
    cache = KVCache(layers, 14)
    with torch.no_grad():
        for tokens in batch.tokens_BT.split([3, 1, 1, 2, 1, 1, 5], dim=1):
            step = Batch(tokens, tokens, source=batch.source)
            found.append(lent.ours(step, cache=cache).logits_BTV[..., :VOCAB])
        expected = their_logits(lent, batch)
    torch.testing.assert_close(torch.cat(found, dim=1), expected, **TOLERANCE)


def export_and_import(lent, out):
    batch, _ = random_pairs([20, 20], [14, 14], vocab_size=PAD)
    inputs = {"input_ids": batch.source.tokens_BT, "decoder_input_ids": batch.tokens_BT}
    # Sinusoids that both compute.
    positions = {f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")}
    unread = frozenset(positions if lent.release.family.model_type == "pegasus" else ())
    check_round_trip(lent, transformers.AutoModelForSeq2SeqLM, out, unread, **inputs)


@pytest.mark.parametrize("name", MAKERS)
def test_an_export_is_the_model_that_was_imported(name, tmp_path):
    torch.manual_seed(0)
    lent = lend(MAKERS[name](), tmp_path / "theirs")
    export_and_import(lent, tmp_path / "ours")
    assert open_release(tmp_path / "ours").config == lent.release.config


def test_a_transformer_of_2017_is_exported_as_marian_only_with_the_sinusoids_and_the_bias_of_marian(tmp_path):
    torch.manual_seed(0)
    config = lend(marian(), tmp_path / "theirs").release.config
    assert choose_family(config).model_type == "marian"
    stacks = {
        name: getattr(config, name).model_copy(update={"sinusoid": "interleaved"}) for name in ("encoder", "decoder")
    }
    with pytest.raises(ConfigError, match=r"nearest, marian, has encoder\.sinusoid=halves, not interleaved"):
        choose_family(config.model_copy(update=stacks))
    with pytest.raises(ConfigError, match=r"nearest, marian, has head\.bias=true, not false"):
        choose_family(config.model_copy(update={"head": HeadConfig()}))


# The Transformer of 2017, from the paper's formulas: a vector at a time, in float64, sharing no code with the model.


def linear(weights, name, x):
    return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]


def layer_norm(weights, name, x):
    mean = sum(x) / len(x)
    variance = sum((value - mean) ** 2 for value in x) / len(x)
    scaled = torch.stack([(value - mean) / math.sqrt(variance + 1e-5) for value in x])
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def embed(weights, token, position, width):
    """3.4 and 3.5: scaled embeddings, sines at even dimensions and cosines at odd ones."""
    vector = weights["embedding.weight"][token] * math.sqrt(width)
    for i in range(0, width, 2):
        angle = position / 10000 ** (i / width)
        vector[i] += math.sin(angle)
        vector[i + 1] += math.cos(angle)
    return vector


def attend(queries, keys, values, heads, *, causal):
    """3.2: softmax(q k / sqrt(d)) v in each head, for one query after another."""
    size, mixed = len(queries[0]) // heads, []
    for t, query in enumerate(queries):
        seen = range(t + 1) if causal else range(len(keys))
        parts = []
        for head in range(heads):
            of_head = slice(head * size, (head + 1) * size)
            scores = [float(query[of_head] @ keys[s][of_head]) / math.sqrt(size) for s in seen]
            exponentials = [math.exp(score - max(scores)) for score in scores]
            total = sum(exponentials)
            parts.append(sum(e / total * values[s][of_head] for e, s in zip(exponentials, seen, strict=True)))
        mixed.append(torch.cat(parts))
    return mixed


def sublayer(weights, norm, xs, outputs):
    """3.1: LayerNorm(x + Sublayer(x))."""
    return [layer_norm(weights, norm, x + y) for x, y in zip(xs, outputs, strict=True)]


def stack(weights, name, xs, layers, heads, memory=None):
    """Figure 1, left without a memory, right with one."""
    for number in range(layers):
        block = f"{name}.blocks.{number}"
        qkv = [linear(weights, f"{block}.attention.qkv", x).chunk(3) for x in xs]
        mixed = attend(*zip(*qkv, strict=True), heads, causal=memory is not None)
        outputs = [linear(weights, f"{block}.attention.output", m) for m in mixed]
        xs = sublayer(weights, f"{block}.attention_norm", xs, outputs)
        if memory is not None:
            queries = [linear(weights, f"{block}.cross.query", x) for x in xs]
            pairs = [linear(weights, f"{block}.cross.key_value", m).chunk(2) for m in memory]
            mixed = attend(queries, *zip(*pairs, strict=True), heads, causal=False)
            outputs = [linear(weights, f"{block}.cross.output", m) for m in mixed]
            xs = sublayer(weights, f"{block}.cross_norm", xs, outputs)
        hidden = [linear(weights, f"{block}.feedforward.up", x).clamp(min=0) for x in xs]
        outputs = [linear(weights, f"{block}.feedforward.down", h) for h in hidden]
        xs = sublayer(weights, f"{block}.feedforward_norm", xs, outputs)
    return xs


def test_the_transformer_of_2017_agrees_with_the_formulas_of_its_paper():
    width, heads, layers = 12, 3, 2
    one = StackConfig(
        layers=layers, width=width, heads=heads, ff_width=20, activation="relu", gated=False, norm="layer",
        norm_placement="post", bias=True, position="sinusoidal", sinusoid="interleaved",
    )  # fmt: skip
    config = ModelConfig(
        encoder=one, decoder=one, vocab_size=11, vocab_multiple=1, max_seq_len=16, tied_embeddings=True,
        scaled_embeddings=True,
    )  # fmt: skip
    model = build(config, dtype=torch.float64).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    source, target = [3, 7, 0, 10, 5], [1, 4, 4, 9]
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    memory = stack(weights, "encoder", [embed(weights, n, p, width) for p, n in enumerate(source)], layers, heads)
    inputs = [embed(weights, n, p, width) for p, n in enumerate(target)]
    hidden = stack(weights, "decoder", inputs, layers, heads, memory)
    expected = torch.stack([weights["embedding.weight"] @ x for x in hidden])
    with torch.no_grad():
        tokens = torch.tensor([target])
        found = model(Batch(tokens, tokens, source=StackRows(torch.tensor([source])))).logits_BTV[0]
    # The model keeps its sinusoids in fp32.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
