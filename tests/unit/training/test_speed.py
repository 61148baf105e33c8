"""What MFU counts as the FLOPs of a token that is read, for each shape of row."""

import pytest

from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.plan.flops import count_flops
from pretrain.plan.task import RunFlops, task_of
from tests.unit.model.tiny import encoder_config, tiny_config, two_stacks_config

SEQ_LEN = 64


def config_of(model: ModelConfig, objective: dict, **batch) -> RunConfig:
    packing = "bins" if objective.get("kind") == "seq2seq" else "concat"
    return RunConfig.model_validate(
        {
            "run": {"name": "run"},
            "data": {"path": "data", "packing": packing},
            "batch": {"global_tokens": 2 * SEQ_LEN, "seq_len": SEQ_LEN, "micro": 1, **batch},
            "model": model.model_dump(),
            "objective": objective,
            "optim": {"lr": 1e-3},
            "train": {"steps": 1000},
        }
    )


def _flops_per_token(config: RunConfig) -> float:
    task = task_of(config)
    return RunFlops(config, task).before(1) / (config.batch.rows * task.tokens)


@pytest.mark.parametrize("kind", ["causal", "prefix", "supervised"])
def test_one_stack_counts_what_a_token_of_its_rows_costs(kind):
    model = tiny_config()
    packing = {"data": {"path": "data", "packing": "bins"}} if kind == "supervised" else {}
    config = config_of(model, {"kind": kind})
    config = RunConfig.model_validate(config.model_dump(by_alias=True) | packing)
    assert _flops_per_token(config) == count_flops(model, SEQ_LEN).whole.total / SEQ_LEN


def test_a_masked_model_counts_its_head_at_the_masked_share():
    model = encoder_config()
    rest = count_flops(model, SEQ_LEN, head_share=0.0).whole.total
    head = 6 * model.padded_vocab_size * model.last_stack.width * SEQ_LEN
    assert rest + head == count_flops(model, SEQ_LEN).whole.total
    assert head > 0.05 * rest
    found = _flops_per_token(config_of(model, {"kind": "masked", "masked": {"rate": 0.25}}))
    assert found == (rest + head / 4) / SEQ_LEN


def test_tokens_of_source_and_target_share_what_a_row_of_two_stacks_costs():
    model = two_stacks_config()
    pairs = config_of(model, {"kind": "seq2seq"}, source_len=96)
    assert _flops_per_token(pairs) * (SEQ_LEN + 96) == count_flops(model, SEQ_LEN, source_len=96).whole.total
    span = config_of(model, {"kind": "span"})
    lengths = span.lengths
    assert lengths.source is not None and lengths.target < SEQ_LEN
    expected = count_flops(model, lengths.target, source_len=lengths.source).whole.total
    assert _flops_per_token(span) * (lengths.target + lengths.source) == pytest.approx(expected, rel=1e-15)


def test_steps_of_short_rows_and_windows_cost_their_own_flops():
    model, tokens = tiny_config(), 2 * SEQ_LEN
    early = {
        "short_rows": [{"until_tokens": 3 * tokens, "seq_len": 16}],
        "short_windows": [{"until_tokens": 5 * tokens, "window": 24}],
        "schedule": [{"tokens": 4 * tokens, "global_tokens": 2 * tokens}],
    }
    config = config_of(model, {"kind": "causal"}, **early)
    flops = RunFlops(config, task_of(config))
    short, whole = (count_flops(model, length, window=24).whole.total for length in (16, SEQ_LEN))
    last = count_flops(model, SEQ_LEN).whole.total
    # Three steps of 2 rows in 8 parts, one of 2 rows, one of 4 rows, which passes 5 x tokens; then without a window.
    steps = [2 * 4 * short] * 3 + [2 * whole, 4 * whole] + [4 * last] * 3
    assert [flops.before(step) for step in range(9)] == [sum(steps[:step]) for step in range(9)]
    assert flops.before(-2) == -2 * steps[0]
    assert 4 * short < whole < last


def test_a_window_of_a_step_is_as_one_of_all_layers():
    for model, stack in ((tiny_config(), "decoder"), (encoder_config(), "encoder")):
        section = getattr(model, stack).model_copy(update={"window": 8})
        windowed = model.model_copy(update={stack: section})
        assert count_flops(model, SEQ_LEN, window=8) == count_flops(windowed, SEQ_LEN)
        assert count_flops(windowed, SEQ_LEN, window=16) == count_flops(windowed, SEQ_LEN)
