"""A batch that grows by tokens, in rows that do: the samples of each step, resumed within a size, on other ranks."""

from pretrain.tracking.audit import read_audit
from tests.helpers.runs import assert_same_run

GROWTH = (
    "batch.global_tokens=128",
    "batch.schedule=[{tokens: 200, global_tokens: 384}, {tokens: 1400, global_tokens: 768}]",
    "batch.short_rows=[{until_tokens: 200, seq_len: 8}, {until_tokens: 1400, seq_len: 16}]",
    "batch.short_windows=[{until_tokens: 600, window: 3}, {until_tokens: 1000, window: 12}]",
    "optim.schedule.warmup_steps=0",
    "optim.schedule.warmup_tokens=300",
    "train.steps=8",
    "tracking.log_every_steps=1",
)
ROWS = [4, 4, 12, 12, 12, 24, 24, 24]


def test_a_run_whose_batch_grows_is_resumed_to_the_bit_and_reads_the_same_on_other_ranks(make_run):
    make_run.train("golden", *GROWTH)
    make_run.train("ours", *GROWTH, "train.stop_after=4")
    make_run.train("ours", *GROWTH)
    assert_same_run(make_run, "ours", "golden", 8)
    alone = ("engine.kind=single", "engine.zero_stage=0", "batch.micro=4")
    make_run.train("alone", *GROWTH, *alone, ranks=1)
    ledgers = [read_audit(make_run.folder(name).audit) for name in ("golden", "alone")]
    assert [row.digest for row in ledgers[0]] == [row.digest for row in ledgers[1]]
    # All but a few tokens of a row are targets: the first of a document is none.
    assert [round(row.tokens / 32) for row in ledgers[0]] == ROWS
    refused = make_run.train("alone", *GROWTH, *alone, "batch.schedule=[]", ranks=1, expect=64)
    assert "batch.schedule[0].global_tokens: 384 -> null" in refused
