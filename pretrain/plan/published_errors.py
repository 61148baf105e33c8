"""How far the roofline is from what others have measured: the table of docs/plan.md."""

from pretrain.config.engine import EngineConfig
from pretrain.config.lengths import RowLengths
from pretrain.plan.gpus import GPUS
from pretrain.plan.published import MODELS, ROWS, PublishedRun
from pretrain.plan.roofline import Network, time_step
from pretrain.plan.work import TrainingTask, plan_work

_PER_NODE = 8


def predict_row(row: PublishedRun) -> float:
    """Returns the MFU in percent that is predicted for a published run, whose communication overlaps."""
    task = TrainingTask(MODELS[row.model], RowLengths(row.seq_len, row.seq_len))
    engine = EngineConfig(zero_stage=row.zero_stage)
    work = plan_work(task, engine, row.gpus, row.micro, row.accumulation, recompute=row.recompute)
    nodes = max(1, row.gpus // _PER_NODE)
    found = time_step(work, Network(nodes, row.gpus // nodes, row.zero_stage, overlaps=True), GPUS[row.gpu])
    return 100 * work.model_flops / found.total / GPUS[row.gpu].flops


def error_table() -> str:
    """Returns the table, as Markdown: rows that were fitted, rows that were not, and the mean and largest error."""
    lines = ["| run | GPUs | T | published MFU | predicted | error | |", "|---|---|---|---|---|---|---|"]
    for row in ROWS:
        found = predict_row(row)
        use = "fitted" if row.fitted else "tested"
        lines.append(
            f"| {row.source} {row.model} | {row.gpus} {row.gpu} | {row.seq_len} | {row.mfu:.1f} | {found:.1f} "
            f"| {100 * (found / row.mfu - 1):+.0f}% | {use} |"
        )
    lines.append("")
    for fitted, name in ((True, "fitted"), (False, "tested")):
        errors = [abs(predict_row(row) / row.mfu - 1) for row in ROWS if row.fitted == fitted]
        mean, worst = 100 * sum(errors) / len(errors), 100 * max(errors)
        lines.append(f"{len(errors)} rows {name}: mean error {mean:.1f}%, largest {worst:.1f}%.")
    return "\n".join(lines)
