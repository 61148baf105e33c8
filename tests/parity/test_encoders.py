"""BERT and what came after it against transformers: logits, hidden states, loss, gradients; padded and packed rows."""

import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pretrain.interop.release import open_release
from pretrain.objective.loss import sum_token_loss
from pretrain.types import IGNORE_INDEX, Batch
from tests.helpers.lent import build_imported, check_gradients, lend
from tests.helpers.theirs import makers
from tests.parity.exchange import check_round_trip
from tests.unit.model.tiny import packed_batch, random_batch

VOCAB = 61
PAD = 60
"""Not among the tokens: theirs give the embedding of padding no gradient."""
LENGTH = 40
# Logits and hidden states are of order 1: two orders of summation of fp32 differ by a few of its last bits.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


BERT_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 96,
    "max_position_embeddings": 64, "type_vocab_size": 3, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "initializer_range": 0.1, "pad_token_id": PAD, "attn_implementation": "eager",
}  # fmt: skip


def bert_config(**values):
    return transformers.BertConfig(**BERT_SIZES | values)


def modernbert_config(*, layers=4, **values):
    # Windows of 4 to each side, in layers 1 and 2 of 4; LENGTH is far above them.
    return transformers.ModernBertConfig(
        vocab_size=VOCAB, hidden_size=48, num_hidden_layers=layers, num_attention_heads=6, intermediate_size=80,
        max_position_embeddings=64, local_attention=8, initializer_range=0.1, pad_token_id=PAD, bos_token_id=1,
        eos_token_id=2, cls_token_id=1, sep_token_id=2, attn_implementation="eager", **values,
    )  # fmt: skip


def bare_bert():
    return transformers.BertModel(bert_config())


def roberta(name="Roberta", **values):
    """Positions begin after the id of padding, in a table that is as much longer."""
    given = BERT_SIZES | {"max_position_embeddings": 64 + PAD + 1} | values
    return getattr(transformers, f"{name}ForMaskedLM")(getattr(transformers, f"{name}Config")(**given))


def distilbert(**values):
    return transformers.DistilBertForMaskedLM(
        transformers.DistilBertConfig(
            vocab_size=VOCAB, dim=48, n_layers=3, n_heads=6, hidden_dim=96, max_position_embeddings=64, dropout=0.0,
            attention_dropout=0.0, initializer_range=0.1, pad_token_id=PAD, attn_implementation="eager", **values,
        )
    )  # fmt: skip


def electra(**values):
    return transformers.ElectraForMaskedLM(transformers.ElectraConfig(**BERT_SIZES | values))


def modernbert():
    return transformers.ModernBertForMaskedLM(modernbert_config(global_rope_theta=800.0, local_rope_theta=50.0))


def untied_modernbert():
    return transformers.ModernBertForMaskedLM(
        modernbert_config(
            tie_word_embeddings=False, decoder_bias=False, norm_bias=True, attention_bias=True, mlp_bias=True,
            classifier_bias=True, hidden_activation="silu", classifier_activation="silu",
        )
    )  # fmt: skip


def bare_modernbert():
    return transformers.ModernBertModel(modernbert_config())


MAKERS = {
    **makers("encoder", special_tokens={"pad": PAD, "bos": 1, "eos": 2}),
    "untied-bert": lambda: transformers.BertForMaskedLM(bert_config(tie_word_embeddings=False)),
    "bare-bert": bare_bert,
    "untied-roberta": lambda: roberta(tie_word_embeddings=False, hidden_act="relu"),
    "untied-distilbert": lambda: distilbert(tie_word_embeddings=False, activation="relu"),
    "electra": lambda: electra(embedding_size=16, hidden_act="relu"),
    "untied-electra": lambda: electra(embedding_size=16, tie_word_embeddings=False),
    "electra-wide": lambda: electra(embedding_size=48),
    "modernbert": modernbert,
    "untied-modernbert": untied_modernbert,
    "bare-modernbert": bare_modernbert,
}


@pytest.fixture(scope="module", params=MAKERS)
def made(request, tmp_path_factory):
    torch.manual_seed(0)
    return lend(MAKERS[request.param](), tmp_path_factory.mktemp("theirs"))


def token_types(lent, batch):
    """Random token types for a model that has them, for both models."""
    count = lent.release.config.encoder.token_types
    if not count:
        return batch, {}
    types = torch.randint(count, batch.tokens_BT.shape, generator=torch.Generator().manual_seed(1))
    typed = Batch(
        batch.tokens_BT,
        batch.targets_BT,
        positions_BT=batch.positions_BT,
        documents_BT=batch.documents_BT,
        lengths_B=batch.lengths_B,
        token_types_BT=types,
    )
    return typed, {"token_type_ids": types}


def found_by(lent, batch):
    """Our logits, or hidden states of a bare model."""
    output = lent.ours(batch)
    return output.hidden_BTD if output.logits_BTV is None else output.logits_BTV[..., :VOCAB]


def expected_by(lent, **inputs):
    """Theirs."""
    output = lent.theirs(**inputs)
    return output.last_hidden_state if lent.ours.head is None else output.logits


def test_outputs_loss_and_gradients_agree(lent):
    batch, extra = token_types(lent, random_batch(3, LENGTH, vocab_size=PAD))
    expected = expected_by(lent, input_ids=batch.tokens_BT, **extra)
    torch.testing.assert_close(found_by(lent, batch), expected, **TOLERANCE)
    # A third of the positions is predicted, as in masked language modelling.
    batch.targets_BT[torch.rand(batch.targets_BT.shape, generator=torch.Generator().manual_seed(2)) > 0.3] = (
        IGNORE_INDEX
    )
    if lent.ours.head is None:
        ours, theirs = bare_losses(lent, batch, extra)
    else:
        theirs = torch.nn.functional.cross_entropy(expected.flatten(0, 1), batch.targets_BT.flatten())
        loss = sum_token_loss(lent.ours, batch)
        ours = loss.loss_sum / batch.num_targets()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    ours.backward()
    theirs.backward()
    check_gradients(lent)


def bare_losses(lent, batch, extra):
    """A number made of all hidden states, and of the pooled one, for models without a head."""
    weights = torch.randn(48, generator=torch.Generator().manual_seed(3))
    hidden, output = lent.ours(batch).hidden_BTD, lent.theirs(input_ids=batch.tokens_BT, **extra)
    ours, theirs = (hidden @ weights).sigmoid().sum(), (output.last_hidden_state @ weights).sigmoid().sum()
    if lent.ours.pooler is None:
        return ours, theirs
    torch.testing.assert_close(lent.ours.pooler(hidden), output.pooler_output, **TOLERANCE)
    return ours + (lent.ours.pooler(hidden) @ weights).sum(), theirs + (output.pooler_output @ weights).sum()


def test_padded_rows_agree_with_theirs_and_with_the_rows_alone(lent):
    lengths = torch.tensor([LENGTH, 1, 17], dtype=torch.int32)
    real = torch.arange(LENGTH) < lengths[:, None]
    plain, extra = token_types(lent, random_batch(3, LENGTH, vocab_size=PAD))
    batch = Batch(plain.tokens_BT, plain.targets_BT, lengths_B=lengths, token_types_BT=plain.token_types_BT)
    with torch.no_grad():
        found = found_by(lent, batch)[real]
        expected = expected_by(lent, input_ids=batch.tokens_BT, attention_mask=real.long(), **extra)[real]
        alone = [
            found_by(lent, Batch(tokens[None, :n], tokens[None, :n], token_types_BT=types))
            for tokens, types, n in zip(plain.tokens_BT, row_types(plain, lengths), lengths.tolist(), strict=True)
        ]
    torch.testing.assert_close(found, expected, **TOLERANCE)
    torch.testing.assert_close(found, torch.cat([rows[0] for rows in alone]), **TOLERANCE)


def row_types(batch, lengths):
    """Token types of each row without its padding."""
    if batch.token_types_BT is None:
        return [None] * len(lengths)
    return [row[None, :n] for row, n in zip(batch.token_types_BT, lengths.tolist(), strict=True)]


def test_packed_rows_agree_with_the_documents_alone(lent):
    lengths = [9, 1, 20, 10]
    batch, extra = token_types(lent, packed_batch([lengths], vocab_size=PAD))
    with torch.no_grad():
        found = found_by(lent, batch)[0]
        parts = zip(
            batch.tokens_BT.split(lengths, dim=1),
            *(value.split(lengths, dim=1) for value in extra.values()),
            strict=True,
        )
        alone = [
            expected_by(lent, input_ids=tokens, **dict(zip(extra, values, strict=True)))[0] for tokens, *values in parts
        ]
    torch.testing.assert_close(found, torch.cat(alone), **TOLERANCE)


def test_an_export_is_the_model_that_was_imported(lent, tmp_path):
    auto_class = transformers.AutoModel if lent.ours.head is None else transformers.AutoModelForMaskedLM
    tokens = random_batch(2, LENGTH, vocab_size=PAD).tokens_BT
    check_round_trip(lent, auto_class, tmp_path / "ours", input_ids=tokens)


def test_a_release_with_old_names_and_a_head_of_next_sentences_is_the_same_model(tmp_path, caplog):
    torch.manual_seed(0)
    lent = lend(transformers.BertForPreTraining(bert_config()), tmp_path)
    file = tmp_path / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {re.sub("LayerNorm.(weight|bias)", lambda m: old[m[0]], k): v for k, v in load_file(file).items()}
    tensors["bert.embeddings.position_ids"] = torch.arange(64)[None]
    save_file(tensors, file)
    release = open_release(tmp_path)
    assert release.ignored == [
        "bert.embeddings.position_ids", "bert.pooler.dense.bias", "bert.pooler.dense.weight",
        "cls.seq_relationship.bias", "cls.seq_relationship.weight",
    ]  # fmt: skip
    left = ", ".join(release.ignored)
    said = f"{tmp_path}: a BertForPreTraining is read, and exported, as BertForMaskedLM, without {left}"
    assert said in caplog.messages
    ours, batch = build_imported(release), random_batch(2, LENGTH, vocab_size=PAD)
    with torch.no_grad():
        expected = lent.theirs(input_ids=batch.tokens_BT).prediction_logits
        torch.testing.assert_close(ours(batch).logits_BTV[..., :VOCAB], expected, **TOLERANCE)


def test_a_window_reaches_half_of_local_attention_to_each_side(tmp_path):
    torch.manual_seed(0)
    config = modernbert_config(layers=1, layer_types=["sliding_attention"])
    lent = lend(transformers.ModernBertModel(config), tmp_path)
    assert lent.release.config.encoder.windows == (5,)
    batch = random_batch(1, LENGTH, vocab_size=PAD)
    changed = batch.tokens_BT.clone()
    changed[0, 20] = (changed[0, 20] + 1) % VOCAB
    with torch.no_grad():
        before, after = found_by(lent, batch), found_by(lent, Batch(changed, changed))
    moved = (before != after).any(dim=-1)[0].nonzero().flatten().tolist()
    assert moved == list(range(16, 25))
