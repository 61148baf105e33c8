"""`pretrain inspect`."""

from pathlib import Path

from pretrain.cli.options import Json


def inspect_command(path: Path, as_json: Json = False) -> None:
    """Describe a shard folder, a run, or a checkpoint.

    Example: pretrain inspect runs/quickstart
    """
    from pretrain.report.describe import describe, print_facts

    print_facts(describe(path), as_json)
