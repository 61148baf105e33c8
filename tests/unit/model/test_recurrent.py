"""Recurrent models: torch's cells, documents that do not see each other, attention by its formulas, decoding."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pretrain.config.engine import PLAIN_ENGINE
from pretrain.config.model import ModelConfig, RecurrentConfig
from pretrain.config.objective import ObjectiveConfig
from pretrain.errors import ConfigError
from pretrain.model import Recurrent, build_model, init_weights
from pretrain.model.build import initial_weight
from pretrain.objective import build_loss
from pretrain.plan.flops import count_flops
from pretrain.plan.params import count_parameters, count_parts
from pretrain.types import IGNORE_INDEX, Batch, StackRows

CPU = torch.device("cpu")
VOCAB, WIDTH = 29, 12
LANGUAGE_MODELS = [{"cell": cell} for cell in ("rnn", "lstm", "gru")]
DECODERS = [
    {"attention": "none"},
    {"attention": "bahdanau"},
    {"attention": "luong"},
    {"attention": "luong", "score": "dot"},
    {"attention": "luong", "input_feeding": True},
]
TWO_STACKS = [
    *({"encoder": True, **decoder} for decoder in DECODERS),
    {"encoder": True, "attention": "bahdanau", "cell": "gru", "bidirectional": True},
    {"encoder": True, "attention": "luong", "cell": "rnn", "bidirectional": True},
]
# float64: what is left between two orders of summing.
EXACT = {"rtol": 1e-11, "atol": 1e-12}


def configured(encoder=False, cell="lstm", bidirectional=False, layers=2, width=WIDTH, **values) -> RecurrentConfig:
    stack = {"cell": cell, "layers": layers, "width": width}
    return RecurrentConfig.model_validate(
        {
            "kind": "recurrent",
            "encoder": {**stack, "bidirectional": bidirectional} if encoder else None,
            "decoder": stack,
            "vocab_size": VOCAB,
            "vocab_multiple": 8,
            **values,
        }
    )


def built(config: RecurrentConfig) -> Recurrent:
    model = build_model(config, PLAIN_ENGINE, CPU)
    init_weights(model, config, seed=3)
    return model.double()


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def packed_batch(two_stacks: bool) -> Batch:
    """Rows of one to three documents, of different lengths in source and target."""
    documents_BT = torch.tensor([[0] * 4 + [1] * 5, [0] * 9, [0] + [1] * 6 + [2] * 2], dtype=torch.int32)
    documents_BS = torch.tensor([[0] * 5 + [1] * 2, [0] * 7, [0, 1, 1, 2, 2, 2, 2]], dtype=torch.int32)
    source = StackRows(tokens(3, 7, seed=1), documents_BT=documents_BS) if two_stacks else None
    read_BT = tokens(3, 9)
    return Batch(read_BT, read_BT, documents_BT=documents_BT, source=source)


def documents_of(batch: Batch):
    """Yields row, columns, and the batch of each document alone."""
    assert batch.documents_BT is not None
    for row, numbers in enumerate(batch.documents_BT):
        for number in numbers.unique().tolist():
            columns = (numbers == number).nonzero()[:, 0]
            source = None
            if batch.source is not None:
                source = StackRows(batch.source.tokens_BT[row, batch.source.documents_BT[row] == number][None])
            read = batch.tokens_BT[row, columns][None]
            yield row, columns, Batch(read, read, source=source)


@pytest.mark.parametrize("values", [*LANGUAGE_MODELS, *TWO_STACKS], ids=str)
def test_packed_documents_give_what_each_gives_alone(values):
    model, batch = built(configured(**values)), packed_batch("encoder" in values)
    whole_BTD = model(batch).hidden_BTD
    for row, columns, alone in documents_of(batch):
        torch.testing.assert_close(whole_BTD[row, columns], model(alone).hidden_BTD[0], **EXACT)


@pytest.mark.parametrize("values", [*LANGUAGE_MODELS, *TWO_STACKS], ids=str)
def test_no_gradient_passes_from_a_document_to_another(values):
    model, batch = built(configured(**values)), packed_batch("encoder" in values)
    (row, columns, alone), *_ = [found for found in documents_of(batch) if found[0] == 2 and len(found[1]) == 6]
    model(batch).hidden_BTD[row, columns].square().sum().backward()
    together = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    model(alone).hidden_BTD.square().sum().backward()
    for name, parameter in model.named_parameters():
        if name != "head.weight":
            torch.testing.assert_close(together[name], parameter.grad, **EXACT)


@pytest.mark.parametrize("values", TWO_STACKS, ids=str)
def test_padding_of_source_and_target_is_not_seen(values):
    model = built(configured(**values))
    source = StackRows(tokens(2, 6, seed=1), lengths_B=torch.tensor([6, 4], dtype=torch.int32))
    batch = Batch(tokens(2, 5), tokens(2, 5), lengths_B=torch.tensor([5, 3], dtype=torch.int32), source=source)
    hidden_BTD = model(batch).hidden_BTD
    alone = Batch(batch.tokens_BT[1:, :3], batch.tokens_BT[1:, :3], source=StackRows(source.tokens_BT[1:, :4]))
    torch.testing.assert_close(hidden_BTD[1, :3], model(alone).hidden_BTD[0], **EXACT)


def test_a_target_document_without_a_source_sees_no_other():
    model = built(configured(encoder=True, attention="luong"))
    documents_BT = torch.tensor([[0, 0, 1, 1]], dtype=torch.int32)
    batch = Batch(tokens(1, 4), tokens(1, 4), documents_BT=documents_BT, source=StackRows(tokens(1, 3, seed=1)))
    other = replace(batch, source=StackRows(tokens(1, 3, seed=2)))
    ours, theirs = (model(each).hidden_BTD for each in (batch, other))
    assert torch.equal(ours[:, 2:], theirs[:, 2:])
    assert not torch.equal(ours[:, :2], theirs[:, :2])


def run_lstm(rnn: nn.LSTM, x_TD: Tensor, state_D: Tensor, cell_D: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Hochreiter and Schmidhuber's cell with a forget gate, in torch's order of gates: input, forget, cell, output."""
    found = []
    for x_D in x_TD:
        gates = rnn.weight_ih_l0 @ x_D + rnn.bias_ih_l0 + rnn.weight_hh_l0 @ state_D + rnn.bias_hh_l0
        write, keep, value, show = gates.chunk(4)
        cell_D = keep.sigmoid() * cell_D + write.sigmoid() * value.tanh()
        state_D = show.sigmoid() * cell_D.tanh()
        found.append((state_D, cell_D))
    return found


@pytest.fixture
def pair() -> Batch:
    return Batch(tokens(1, 5), tokens(1, 5), source=StackRows(tokens(1, 7, seed=1)))


def encoded_by_hand(model: Recurrent, pair: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    zero_D = torch.zeros(WIDTH, dtype=torch.float64)
    steps = run_lstm(model.encoder.rnn, model.embedding(pair.source.tokens_BT[0]), zero_D, zero_D)
    return torch.stack([state for state, _ in steps]), steps[-1]


def test_an_encoder_decoder_without_attention_is_that_of_sutskever(pair):
    model = built(configured(encoder=True, layers=1))
    _, (state_D, cell_D) = encoded_by_hand(model, pair)
    steps = run_lstm(model.decoder.rnn, model.embedding(pair.tokens_BT[0]), state_D, cell_D)
    expected = torch.stack([state for state, _ in steps])
    torch.testing.assert_close(model(pair).hidden_BTD[0], expected, **EXACT)


def test_bahdanau_scores_the_state_before_and_feeds_the_context_to_the_cell(pair):
    model = built(configured(encoder=True, layers=1, attention="bahdanau"))
    memory_SD, (state_D, cell_D) = encoded_by_hand(model, pair)
    score, outputs = model.decoder.score, []
    for x_D in model.embedding(pair.tokens_BT[0]):
        energies = [
            score.energy.weight[0] @ (score.query.weight @ state_D + score.key.weight @ h_D).tanh() for h_D in memory_SD
        ]
        context_D = sum(a * h_D for a, h_D in zip(torch.stack(energies).softmax(0), memory_SD, strict=True))
        ((state_D, cell_D),) = run_lstm(model.decoder.rnn, torch.cat((x_D, context_D))[None], state_D, cell_D)
        outputs.append((model.decoder.readout.weight @ torch.cat((context_D, state_D))).tanh())
    torch.testing.assert_close(model(pair).hidden_BTD[0], torch.stack(outputs), **EXACT)


@pytest.mark.parametrize("input_feeding", [False, True])
@pytest.mark.parametrize("score", ["general", "dot"])
def test_luong_scores_the_state_after_and_ends_with_an_attentional_vector(pair, score, input_feeding):
    model = built(configured(encoder=True, layers=1, attention="luong", score=score, input_feeding=input_feeding))
    memory_SD, (state_D, cell_D) = encoded_by_hand(model, pair)
    matrix = model.decoder.score.key.weight if score == "general" else torch.eye(WIDTH, dtype=torch.float64)
    attentional_D, outputs = torch.zeros(WIDTH, dtype=torch.float64), []
    for x_D in model.embedding(pair.tokens_BT[0]):
        read_D = torch.cat((x_D, attentional_D)) if input_feeding else x_D
        ((state_D, cell_D),) = run_lstm(model.decoder.rnn, read_D[None], state_D, cell_D)
        weights = torch.stack([state_D @ matrix @ h_D for h_D in memory_SD]).softmax(0)
        context_D = weights @ memory_SD
        attentional_D = (model.decoder.readout.weight @ torch.cat((context_D, state_D))).tanh()
        outputs.append(attentional_D)
    torch.testing.assert_close(model(pair).hidden_BTD[0], torch.stack(outputs), **EXACT)


def test_a_gru_and_a_plain_rnn_are_by_their_formulas():
    for cell in ("gru", "rnn"):
        model = built(configured(cell=cell, layers=1))
        rnn, state_D, outputs = model.decoder.rnn, torch.zeros(WIDTH, dtype=torch.float64), []
        nn.init.uniform_(rnn.bias_hh_l0, -1, 1)
        read_BT = tokens(1, 6)
        for x_D in model.embedding(read_BT[0]):
            of_x = rnn.weight_ih_l0 @ x_D + rnn.bias_ih_l0
            of_state = rnn.weight_hh_l0 @ state_D + rnn.bias_hh_l0
            if cell == "rnn":
                state_D = (of_x + of_state).tanh()
            else:
                (reset_x, update_x, new_x), (reset_h, update_h, new_h) = of_x.chunk(3), of_state.chunk(3)
                update = (update_x + update_h).sigmoid()
                state_D = (1 - update) * (new_x + (reset_x + reset_h).sigmoid() * new_h).tanh() + update * state_D
            outputs.append(state_D)
        torch.testing.assert_close(model(Batch(read_BT, read_BT)).hidden_BTD[0], torch.stack(outputs), **EXACT)


@pytest.mark.parametrize("values", [*LANGUAGE_MODELS, *TWO_STACKS], ids=str)
def test_decoding_token_by_token_gives_the_scores_of_the_whole(values):
    model = built(configured(**values))
    source = StackRows(tokens(3, 7, seed=1), lengths_B=torch.tensor([7, 5, 2], dtype=torch.int32))
    batch = Batch(tokens(3, 6), tokens(3, 6), source=source if "encoder" in values else None)
    whole_BTV = model(batch).logits_BTV
    cache = model.new_cache(6)
    rows_B = torch.arange(3)
    for place in range(6):
        read_B1 = batch.tokens_BT[rows_B, place, None]
        logits_BTV = model(replace(batch, tokens_BT=read_B1), cache=cache).logits_BTV
        torch.testing.assert_close(logits_BTV[:, 0], whole_BTV[rows_B, place], **EXACT)
        if place == 2:  # as a beam search does: rows are left, doubled and swapped
            chosen_B = torch.tensor([2, 0, 2])
            cache.select(chosen_B)
            rows_B = rows_B[chosen_B]
    assert cache.length == 6


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("values", [*LANGUAGE_MODELS, *TWO_STACKS], ids=str)
def test_parameters_are_counted_as_they_are_built(values, tied):
    config = configured(**values, tied_embeddings=tied, head={"bias": True})
    parts: dict[str, int] = {}
    for name, parameter in build_model(config, PLAIN_ENGINE, torch.device("meta")).named_parameters():
        part = "recurrent" if ".rnn." in name else name.partition(".")[0].replace("decoder", "attention")
        parts[part] = parts.get(part, 0) + parameter.numel()
    counted = count_parts(config)
    assert count_parameters(config) == sum(parts.values())
    assert {part: counted[part] for part in parts} == parts


def test_flops_are_those_of_the_matrix_products():
    config = configured(encoder=True, cell="gru", layers=1, attention="bahdanau")
    square, target, source = WIDTH**2, 5, 7
    encoder = 2 * 3 * square * source
    decoder = (3 * 2 * square + 3 * square) * target  # reads token and context, and its state
    attention = (1 + 2) * square * target + square * source + 2 * WIDTH * target * source
    head = config.padded_vocab_size * WIDTH * target
    counted = count_flops(config, target, source_len=source)
    assert counted.whole.total == 6 * (encoder + decoder + attention + head)


def test_initial_weights_are_a_function_of_seed_and_name_and_an_lstm_begins_by_keeping():
    config = configured()
    first, second = (initial_weight("decoder.rnn.weight_hh_l0", torch.Size((48, 12)), config, seed) for seed in (3, 4))
    model = build_model(config, PLAIN_ENGINE, CPU)
    init_weights(model, config, seed=3)
    assert torch.equal(model.decoder.rnn.weight_hh_l0, first)
    assert not torch.equal(first, second)
    for gate in first.double().split(WIDTH):
        torch.testing.assert_close(gate @ gate.T, torch.eye(WIDTH, dtype=torch.float64), rtol=0, atol=1e-6)  # fp32
    into = model.decoder.rnn.weight_ih_l0.detach()
    assert 0.9 * WIDTH**-0.5 < into.abs().max() <= WIDTH**-0.5
    assert model.decoder.rnn.bias_ih_l1.view(4, -1).sum(1).tolist() == [0, WIDTH, 0, 0]
    assert model.decoder.rnn.bias_hh_l1.count_nonzero() == 0
    # The standard deviation of 384 draws has an error of 0.036 of it: three of these.
    assert model.embedding.weight.detach().std().item() == pytest.approx(1.0, abs=0.12)
    tied = initial_weight("embedding.weight", torch.Size((32, 12)), configured(tied_embeddings=True), 3)
    assert tied.std().item() == pytest.approx(12**-0.5, abs=0.04)


@pytest.mark.parametrize(
    ("key", "value"),
    [("compile", True), ("activation_checkpointing", "full"), ("offload_activations", "cpu"), ("fp8", "rowwise")],
)
def test_what_only_blocks_can_do_is_refused(key, value):
    engine = PLAIN_ENGINE.model_copy(update={key: value})
    with pytest.raises(ConfigError, match=f"engine.{key}={str(value).lower()} is for blocks of a Transformer"):
        build_model(configured(), engine, CPU)


def test_the_head_is_the_transformers_and_padding_of_the_vocabulary_has_no_mass():
    config = configured(tied_embeddings=True)
    model = built(config)
    assert isinstance(config.head_model, ModelConfig)
    assert model.head.weight is model.embedding.weight
    logits_BTV = model(Batch(tokens(1, 3), tokens(1, 3))).logits_BTV
    assert logits_BTV.shape == (1, 3, 32)
    assert (logits_BTV[..., VOCAB:] == -torch.inf).all()


def train(model: Recurrent, make_batch, steps: int, lr: float) -> float:
    """Trains by the objective's own loss; returns the share of targets that it gets right on the last batch."""
    loss, optimizer = build_loss(ObjectiveConfig()), torch.optim.Adam(model.parameters(), lr=lr)
    for step in range(steps):
        batch = make_batch(step)
        found = loss(model, batch)
        optimizer.zero_grad()
        (found.loss_sum / batch.num_targets()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return int(found.num_correct) / batch.num_targets()


def reversal(step: int) -> Batch:
    """Pairs whose target is the source backwards; the decoder begins with token 0, padding has no loss."""
    source_BS = 1 + tokens(32, 6, seed=step) % 9
    targets_BT = source_BS.flip(1)
    inputs_BT = torch.cat((torch.zeros(32, 1, dtype=torch.int64), targets_BT[:, :-1]), dim=1)
    return Batch(inputs_BT, targets_BT, source=StackRows(source_BS))


@pytest.mark.long
@pytest.mark.parametrize("attention", ["bahdanau", "luong"])
def test_attention_learns_to_reverse_in_seconds(attention):
    config = configured(encoder=True, layers=1, width=32, bidirectional=True, attention=attention)
    assert train(built(config).float(), reversal, steps=100, lr=1e-2) > 0.9


@pytest.mark.parametrize("values", LANGUAGE_MODELS, ids=str)
def test_a_language_model_learns_to_copy_in_seconds(values):
    def copying(step: int) -> Batch:
        """Three tokens, a mark, and the same three again, which alone have a loss."""
        known_BT = 1 + tokens(32, 3, seed=step) % 5
        row_BT = torch.cat((known_BT, torch.zeros(32, 1, dtype=torch.int64), known_BT), dim=1)
        targets_BT = row_BT[:, 1:].clone()
        targets_BT[:, :3] = IGNORE_INDEX
        return Batch(row_BT[:, :-1], targets_BT)

    model = built(configured(layers=1, width=32, **values)).float()
    assert train(model, copying, steps=150, lr=1e-2) > 0.9
