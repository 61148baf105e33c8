"""How long rows are: computed from what the model reads, with nothing padded and nothing cropped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrain.config.data import BatchConfig
from pretrain.config.lengths import RowLengths, describe_rows, padding_share, row_lengths
from pretrain.config.objective import ObjectiveConfig
from pretrain.kinds.corruption import DenoiserConfig, SpanConfig, corruption_of


def lengths(seq_len: int, num_stacks: int = 2, source_len: int | None = None, **objective: object) -> RowLengths:
    batch = BatchConfig(global_tokens=seq_len, seq_len=seq_len, source_len=source_len, micro=1)
    return row_lengths(ObjectiveConfig.model_validate(objective), batch, num_stacks)


def share(seq_len: int, num_stacks: int = 2, **objective: object) -> float:
    batch = BatchConfig(global_tokens=seq_len, seq_len=seq_len, micro=1)
    return padding_share(ObjectiveConfig.model_validate(objective), batch, num_stacks)


def test_the_published_lengths_of_t5():
    # Raffel et al. 2020, 3.1.4, and the release: 512 tokens of the encoder are 568 of text, 114 of the decoder.
    assert lengths(512, kind="span") == RowLengths(row=568, target=114, source=512)
    assert lengths(1024, kind="span") == RowLengths(row=1137, target=229, source=1024)


SPANS = st.builds(SpanConfig, density=st.floats(0.01, 0.99), mean_length=st.floats(1, 70))
PREFIXES = st.builds(
    DenoiserConfig, density=st.floats(0.01, 0.99), prefix=st.just(True), mode=st.sampled_from([None, "[S2S]"])
)


@given(st.one_of(SPANS, PREFIXES), st.integers(8, 5000), st.sampled_from([1, 2]))
def test_a_row_is_the_longest_whose_corruption_fits(span, seq_len, num_stacks):
    objective = {"kind": "ul2", "ul2": {"denoisers": [span.model_dump()]}}
    found = lengths(seq_len, num_stacks, **objective)
    made, longer = (corruption_of(row, span) for row in (found.row, found.row + 1))
    if num_stacks == 2:
        assert (found.source, found.target) == (made.source, made.target)
        assert max(made.source, made.target) <= seq_len < max(longer.source, longer.target)
    else:
        assert found.target == made.source + made.target - 1 <= seq_len < longer.source + longer.target - 1
    # No token is lost and none is padding: what was taken out, what is left, two sentinels a span, an end for each.
    sentinels = 0 if isinstance(span, DenoiserConfig) and span.prefix else made.num_spans
    mode = int(isinstance(span, DenoiserConfig) and span.mode is not None)
    assert made.source + made.target == found.row + 2 * sentinels + 2 + mode
    assert share(seq_len, num_stacks, **objective) == 0


@given(st.floats(0.01, 0.4), st.floats(1, 70), st.integers(16, 3000))
def test_a_source_is_exactly_as_long_as_the_encoder_reads(density, mean_length, seq_len):
    # A token more of the row is a token more of the source, or none, where spans are not crowded out.
    assert lengths(seq_len, kind="span", span={"density": density, "mean_length": mean_length}).source == seq_len


@given(st.integers(2, 4000), SPANS)
def test_noise_is_rounded_like_the_reference(row, span):
    made = corruption_of(row, span)
    # random_spans_noise_mask: at least one token and not all of them, at least one span, none of no tokens.
    assert made.num_noise == min(max(round(row * span.density), 1), row - 1)
    assert 1 <= made.num_spans <= min(made.num_noise, row - made.num_noise)
    assert made.num_spans == min(max(round(made.num_noise / span.mean_length), 1), row - made.num_noise)


def test_other_objectives_read_what_they_are_given():
    for kind in ("causal", "masked", "prefix", "supervised"):
        assert lengths(512, 1, kind=kind) == RowLengths(512, 512)
    assert lengths(512, kind="seq2seq") == RowLengths(512, 512, 512)
    assert lengths(64, kind="seq2seq", source_len=96) == RowLengths(64, 64, 96)
    assert lengths(512, 1, kind="fim", fim={"max_documents": 4}) == RowLengths(500, 512)


def test_a_mixture_holds_the_longest_of_each():
    mixture = [{"kind": "causal", "weight": 3}, {"kind": "fim", "weight": 1, "fim": {"max_documents": 2}}]
    assert lengths(64, 1, mixture=mixture) == RowLengths(58, 64)
    assert share(64, 1, mixture=mixture) == pytest.approx(3 / 4 * 6 / 64)
    spans = [
        {"kind": "span", "weight": 1},
        {"kind": "span", "weight": 1, "span": {"density": 0.5}},
    ]
    assert lengths(512, mixture=spans) == RowLengths(568, 284 + 95 + 1, 512)
    assert share(512, mixture=spans) == pytest.approx(1 - (512 + 114 + 2 * 380) / 2 / (512 + 380))


def test_the_seven_denoisers_read_the_row_of_the_one_that_leaves_most():
    found = lengths(512, kind="ul2")
    made = [corruption_of(found.row, denoiser) for denoiser in ObjectiveConfig().ul2.denoisers]
    assert found == RowLengths(567, max(one.target for one in made), 512)
    assert max(one.source for one in made) == 512
    padded = 1 - sum(one.source + one.target for one in made) / 7 / (found.source + found.target)
    assert share(512, kind="ul2") == pytest.approx(padded)
    assert padded == pytest.approx(0.305, abs=1e-3)


def test_what_becomes_of_rows_is_said_in_words():
    def said(seq_len: int, num_stacks: int, **objective: object) -> str | None:
        batch = BatchConfig(global_tokens=seq_len, seq_len=seq_len, micro=1)
        return describe_rows(ObjectiveConfig.model_validate(objective), batch, num_stacks)

    assert said(512, 1) is None
    assert said(512, 2, kind="seq2seq") is None
    assert said(512, 2, kind="span") == "rows of 568 tokens become a source of 512 and 114 tokens"
    assert said(512, 2, kind="ul2") == "rows of 567 tokens become a source of 512 and 380 tokens, 30% of it padding"
    assert said(512, 1, kind="fim") == "rows of 500 tokens become 512 tokens"


@pytest.mark.parametrize(
    ("seq_len", "objective"),
    [(1, {"kind": "span"}), (2, {"kind": "span"}), (3, {"kind": "ul2"}), (13, {"kind": "fim"})],
)
def test_rows_that_are_too_short_are_refused(seq_len, objective):
    stacks = 1 if objective["kind"] == "fim" else 2
    with pytest.raises(ValueError, match=rf"batch.seq_len={seq_len} is too short for .*{objective['kind']}; raise it"):
        lengths(seq_len, stacks, **objective)
