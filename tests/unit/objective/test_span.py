"""Span corruption: against the published algorithm, and rows put back together from what was made of them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pretrain.data.loader import build_batch
from pretrain.errors import ConfigError
from pretrain.kinds.corruption import SpanConfig, corruption_of
from pretrain.objective import build_rows
from pretrain.objective.span import corrupt, draw_noise
from pretrain.rows import IGNORE_INDEX, TokenRows, select_rows
from pretrain.types import Batch, ModelRows, StackRows
from tests.unit.model.tiny import build, two_stacks_config
from tests.unit.objective.texts import EOS, PAD, SENTINELS, context_of, logits_of, put_back, rows_of


def published_noise_mask(length: int, density: float, mean_length: float, rng: np.random.Generator) -> np.ndarray:
    """`random_spans_noise_mask` of Raffel et al. 2020, in its own steps."""
    num_noise = min(max(round(length * density), 1), length - 1)
    num_spans = max(round(num_noise / mean_length), 1)

    def random_segmentation(num_items: int, num_segments: int) -> np.ndarray:
        first_in_segment = np.arange(num_items - 1) < num_segments - 1
        rng.shuffle(first_in_segment)
        segments = np.cumsum(np.append(0, first_in_segment))
        return np.bincount(segments, minlength=num_segments)

    noise = random_segmentation(num_noise, num_spans)
    kept = random_segmentation(length - num_noise, num_spans)
    starts = np.cumsum(np.stack((kept, noise), axis=1).reshape(-1))[:-1]
    is_start = np.zeros(length, dtype=int)
    is_start[starts] = 1
    return np.cumsum(is_start) % 2 == 1


def span_lengths(noise: np.ndarray) -> np.ndarray:
    """Lengths of the spans of rows that have equally many, [B, spans]."""
    edges = np.diff(np.pad(noise.astype(int), ((0, 0), (1, 1))), axis=1)
    begin, end = np.nonzero(edges == 1)[1], np.nonzero(edges == -1)[1]
    return (end - begin).reshape(len(noise), -1)


def drawn(row: int, density: float, mean_length: float, num_rows: int, seed: int = 0) -> np.ndarray:
    found = corruption_of(row, SpanConfig(density=density, mean_length=mean_length))
    return draw_noise(found, row, seed, np.arange(num_rows))


@given(st.integers(2, 300), st.floats(0.01, 0.99), st.floats(1, 20), st.integers(0, 2**40))
def test_noise_has_exactly_as_many_tokens_and_spans_as_counted(row, density, mean_length, seed):
    found = corruption_of(row, SpanConfig(density=density, mean_length=mean_length))
    noise = draw_noise(found, row, seed, np.arange(5) + seed)
    assert noise.sum(axis=1).tolist() == [found.num_noise] * 5
    assert span_lengths(noise).shape == (5, found.num_spans)
    assert not noise[:, 0].any()
    assert noise[:, -1].all()


@pytest.mark.parametrize(("row", "density", "mean_length"), [(568, 0.15, 3.0), (64, 0.5, 8.0), (40, 0.3, 2.0)])
def test_lengths_of_spans_are_distributed_like_the_published_ones(row, density, mean_length):
    num_rows = 3000
    found = corruption_of(row, SpanConfig(density=density, mean_length=mean_length))
    noise = drawn(row, density, mean_length, num_rows)
    rng = np.random.default_rng(3)
    reference = np.stack([published_noise_mask(row, density, mean_length, rng) for _ in range(num_rows)])
    for mask, count in ((noise, found.num_noise), (~noise, row - found.num_noise)):
        # Cuts are uniform: n tokens in k parts, of which one has l in C(n - l - 1, k - 2) of C(n - 1, k - 1) ways.
        parts, ours = found.num_spans, span_lengths(mask)
        whole = math.comb(count - 1, parts - 1)
        for length in range(1, 8):
            chance = math.comb(count - length - 1, parts - 2) / whole
            # Of one part: independent over the rows. Five deviations: 1 in 1.7 million of each of a few hundred.
            bound = 5 * math.sqrt(chance * (1 - chance) / num_rows) + 1e-9
            for part in (0, parts // 2, parts - 1):
                assert abs(np.mean(ours[:, part] == length) - chance) <= bound, (length, part)
            # Over all parts, the published algorithm's frequency is the same; its own error is in the bound.
            theirs = span_lengths(reference if mask is noise else ~reference)
            assert abs(np.mean(ours == length) - np.mean(theirs == length)) <= 2 * bound


def test_every_token_is_taken_out_as_often_as_in_the_published_algorithm():
    num_rows, rng = 3000, np.random.default_rng(4)
    ours = drawn(64, 0.25, 3.0, num_rows).mean(axis=0)
    theirs = np.stack([published_noise_mask(64, 0.25, 3.0, rng) for _ in range(num_rows)]).mean(axis=0)
    # Two frequencies of `num_rows` draws each, five deviations.
    assert np.abs(ours - theirs).max() <= 5 * math.sqrt(2 * 0.25 / num_rows)


def make(raw: TokenRows, seq_len: int, *, document_mask: bool = False, seed: int = 7, **span: float) -> ModelRows:
    config, context = context_of(seq_len, document_mask=document_mask, seed=seed, kind="span", span=span)
    return build_rows(config, context)(raw)


def row_len_of(seq_len: int, **span: float) -> int:
    return context_of(seq_len, kind="span", span=span)[1].lengths.row


SPANS = st.fixed_dictionaries({"density": st.floats(0.05, 0.6), "mean_length": st.floats(2, 12)})


@given(st.integers(8, 80), SPANS, st.booleans(), st.integers(0, 1000))
def test_source_and_target_together_are_the_row(seq_len, span, document_mask, seed):
    config, context = context_of(seq_len, document_mask=document_mask, seed=seed, kind="span", span=span)
    row_len = context.lengths.row
    raw = rows_of(4, row_len, seed=seed)
    found = corrupt(raw, config.span, context)
    assert found.source.shape[1] == context.lengths.source and found.target.shape[1] == context.lengths.target
    for row in range(4):
        assert found.source[row, -1] == found.target[row, -1] == EOS
        together = []
        for number in sorted(set(found.source_documents[row].tolist())):
            source = found.source[row, :-1][found.source_documents[row, :-1] == number]
            target = found.target[row, :-1][found.target_documents[row, :-1] == number]
            together += put_back(source.tolist(), target.tolist())
        assert together == raw.tokens_BT[row, :row_len].tolist()


def corrupt_slowly(
    tokens: list[int], documents: list[int], noise: list[bool]
) -> tuple[list[list[int]], list[list[int]]]:
    """Walks over a row: [token, document] of the source, [token, document, whether learned] of the target."""
    source, target = [], []
    used: dict[int, int] = {}
    of_span = 0
    for column, (token, document) in enumerate(zip(tokens, documents, strict=True)):
        if not noise[column]:
            source.append([token, document])
            continue
        if not noise[column - 1]:
            of_span = document
            sentinel = SENTINELS[used.get(document, 0)]
            used[document] = used.get(document, 0) + 1
            source.append([sentinel, document])
            target.append([sentinel, document, document >= 0])
        target.append([token, of_span, document == of_span >= 0])
    ends = documents[-1] >= 0
    return [*source, [EOS, documents[-1]]], [*target, [EOS, of_span, ends]]


@given(st.integers(8, 60), SPANS, st.booleans(), st.booleans(), st.integers(0, 1000))
def test_rows_equal_the_slow_reference(seq_len, span, document_mask, is_short, seed):
    config, context = context_of(seq_len, document_mask=document_mask, seed=seed, kind="span", span=span)
    row_len = context.lengths.row
    raw = rows_of(4, row_len, seed=seed, longest=10)
    if is_short:
        raw = TokenRows(raw.tokens_BT, raw.sample_ids_B, raw.starts, np.array([row_len + 1, row_len // 2, 0, 1]))
    made = build_rows(config, context)(raw)
    noise = draw_noise(corruption_of(row_len, config.span), row_len, seed, raw.sample_ids_B)
    starts, count = set(raw.starts.tolist()), 0
    for row in range(4):
        begins = [column > 0 and row * (row_len + 1) + column in starts for column in range(row_len)]
        documents = np.cumsum(begins) * document_mask
        if raw.num_tokens_B is not None:
            documents[raw.num_tokens_B[row] :] = -1
        source, target = corrupt_slowly(raw.tokens_BT[row, :-1].tolist(), documents.tolist(), noise[row].tolist())
        assert made.source.tokens_BT[row].tolist() == [token for token, _ in source]
        assert made.targets_BT[row].tolist() == [token if learned else IGNORE_INDEX for token, _, learned in target]
        of_source, of_target = [d for _, d in source], [d for _, d, _ in target]
        if made.documents_BT is None:
            assert not any(of_source) and not any(of_target)
        else:
            assert (made.source.documents_BT[row].tolist(), made.documents_BT[row].tolist()) == (of_source, of_target)
            assert made.source.positions_BT[row].tolist() == [n - of_source.index(d) for n, d in enumerate(of_source)]
            assert made.positions_BT[row].tolist() == [n - of_target.index(d) for n, d in enumerate(of_target)]
        shifted = [PAD, *(token for token, _, _ in target[:-1])]
        assert made.tokens_BT[row].tolist() == [
            PAD if n == of_target.index(d) else shifted[n] for n, d in enumerate(of_target)
        ]
        count += sum(learned for _, _, learned in target)
    assert made.num_targets() == count


@given(SPANS, st.booleans(), st.integers(0, 2**40))
def test_a_row_depends_on_seed_and_sample_id_and_not_on_the_rows_beside_it(span, document_mask, seed):
    raw = rows_of(5, row_len_of(40, **span))
    whole = make(raw, 40, document_mask=document_mask, seed=seed, **span)
    for row in range(5):
        alone = make(select_rows(raw, np.arange(5) == row), 40, document_mask=document_mask, seed=seed, **span)
        assert alone.source.tokens_BT.tolist() == whole.source.tokens_BT[row : row + 1].tolist()
        assert alone.tokens_BT.tolist() == whole.tokens_BT[row : row + 1].tolist()
        assert alone.targets_BT.tolist() == whole.targets_BT[row : row + 1].tolist()
        for part, of_whole in (
            (alone.documents_BT, whole.documents_BT),
            (alone.source.documents_BT, whole.source.documents_BT),
        ):
            assert of_whole is None or part is None or part.tolist() == of_whole[row : row + 1].tolist()


def test_another_seed_or_sample_is_corrupted_elsewhere():
    raw = rows_of(1, row_len_of(64))
    again = TokenRows(raw.tokens_BT, raw.sample_ids_B + 1, raw.starts, None)
    sources = [make(rows, 64, seed=seed).source.tokens_BT.tolist() for rows, seed in ((raw, 1), (raw, 2), (again, 1))]
    assert sources[0] != sources[1] and sources[0] != sources[2] and sources[1] != sources[2]
    assert make(raw, 64, seed=1).source.tokens_BT.tolist() == sources[0]


def test_the_decoder_reads_the_start_and_then_its_targets():
    made = make(rows_of(3, row_len_of(64)), 64)
    assert made.documents_BT is None and made.positions_BT is None
    assert (made.tokens_BT[:, 0] == PAD).all()
    assert made.tokens_BT[:, 1:].tolist() == made.targets_BT[:, :-1].tolist()
    assert made.num_targets() == made.targets_BT.size


def test_a_span_that_reaches_into_the_next_document_keeps_its_place_and_loses_the_loss_of_it():
    #          one document       another
    tokens = [10, 11, 12, EOS, 20, 21, 22, 23, 24, EOS]
    documents = [0] * 4 + [1] * 6
    noise = [column in (3, 4, 7) for column in range(10)]
    source, target = corrupt_slowly(tokens, documents, noise)
    assert [token for token, _ in source] == [10, 11, 12, 199, 21, 22, 199, 24, EOS, EOS]
    assert target == [[199, 0, True], [EOS, 0, True], [20, 0, False], [199, 1, True], [23, 1, True], [EOS, 1, True]]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("position", ["rotary", "relative"])
def test_documents_of_a_row_are_read_as_they_are_alone(position, attention):
    shape = {"position": position, "relative_buckets": 8, "relative_max_distance": 10}
    config = two_stacks_config(**shape).model_copy(update={"vocab_size": 200})
    model = build(config, attention=attention, dtype=torch.float64, scale=3.0)
    made = make(rows_of(2, row_len_of(56), longest=16), 56, document_mask=True)
    batch, alone = build_batch(made), 0
    logits = logits_of(model, batch)
    for row in range(2):
        for number in np.unique(made.documents_BT[row]).tolist():
            inside = torch.from_numpy(made.documents_BT[row] == number)
            of_source = torch.from_numpy(made.source.documents_BT[row] == number)
            one = Batch(
                batch.tokens_BT[row : row + 1, inside],
                batch.targets_BT[row : row + 1, inside],
                source=StackRows(batch.source.tokens_BT[row : row + 1, of_source]),
            )
            torch.testing.assert_close(logits[row, inside], logits_of(model, one)[0], rtol=1e-10, atol=1e-10)
            alone += 1
    assert alone > 4


def test_padding_of_rows_that_are_not_full_is_not_seen():
    row_len = row_len_of(40)
    raw = rows_of(2, row_len)
    sizes, logits = np.array([row_len + 1, row_len // 2]), []
    model = build(two_stacks_config().model_copy(update={"vocab_size": 200}), dtype=torch.float64)
    for other in (EOS, 77):
        tokens = raw.tokens_BT.copy()
        tokens[1, row_len // 2 :] = other
        made = make(TokenRows(tokens, raw.sample_ids_B, raw.starts, sizes), 40)
        assert made.num_padding == (made.documents_BT < 0).sum() + (made.source.documents_BT < 0).sum() > 0
        logits.append(logits_of(model, build_batch(made))[torch.from_numpy(made.targets_BT != IGNORE_INDEX)])
    torch.testing.assert_close(*logits, rtol=1e-12, atol=1e-12)


def test_a_tokenizer_without_enough_sentinels_is_refused():
    message = (
        r"^rows of 1138 tokens lose 57 spans \(density=0.1, mean_length=2.0\), and the tokenizer has 50 sentinels; "
        r"prepare with tokenizer.roles=t5 and tokenizer.sentinels=57 or more, raise mean_length, or lower batch.seq_len"
    )
    with pytest.raises(ConfigError, match=message):
        refuse(1082, sentinels=SENTINELS[:50], density=0.1, mean_length=2.0)
    with pytest.raises(ConfigError, match=r"and the tokenizer has 0 sentinels; prepare with tokenizer.roles=t5"):
        refuse(64, sentinels=())


def test_a_tokenizer_without_a_start_is_refused():
    with pytest.raises(ConfigError, match="no token that a decoder reads first; prepare with a <pad> or <s> token"):
        refuse(64, start=None)


def refuse(seq_len: int, **vocabulary: object) -> None:
    span = {name: vocabulary.pop(name) for name in ("density", "mean_length") if name in vocabulary}
    config, context = context_of(seq_len, kind="span", span=span)
    build_rows(config, replace(context, vocabulary=replace(context.vocabulary, **vocabulary)))
