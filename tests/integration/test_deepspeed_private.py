"""A canary: every attribute of DeepSpeed that it does not promise to keep, and that we read, is where we expect it."""

from tests.helpers.ranks import run_in_ranks

CASES = [["deepspeed", stage, precision] for stage in range(4) for precision in ("fp32", "bf16")]


def test_private_attributes_are_where_they_were():
    (missing,) = run_in_ranks("tests.integration.workers:missing_private", 1, {"cases": CASES})
    assert missing == [], "DeepSpeed moved what zero_state.py and deepspeed_engine.py rely on"
