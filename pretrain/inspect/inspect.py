"""`pretrain inspect`: describes, verifies and lists, in this order; what is damaged is shown before it is refused."""

from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import CheckpointError
from pretrain.inspect.describe import describe, print_facts, verify


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """What to say of a path beside its facts.

    Attributes:
        verify: Whether every byte is what was written.
        tensors: Every parameter.
        stats: What its values are like; implies `tensors`.
        as_json: Print JSON.
    """

    verify: bool = False
    tensors: bool = False
    stats: bool = False
    as_json: bool = False


def inspect(path: Path, asked: InspectOptions) -> None:
    """Prints what is at `path`.

    Raises:
        DataError: It is nothing of ours, or its shards are damaged.
        CheckpointError: A checkpoint is damaged; with `verify`, after each bad file and chunk has been printed.
        ConfigError: It is a run whose record is damaged, or `verify` was asked of what carries no checksums.
    """
    found = verify(path) if asked.verify else {}
    bad = {where: problems for where, problems in found.items() if problems}
    if bad:
        _refuse(found, bad, asked.as_json)
    facts = describe(path)
    if found:
        facts["verified"] = f"every byte of {len(found)} checkpoint{'s'[: len(found) != 1]} is as it was written"
    tensors = []
    if asked.tensors or asked.stats:
        from pretrain.inspect.tensor_list import list_tensors, print_tensors

        tensors = list_tensors(path, asked.stats)
        if asked.as_json:
            facts["tensors"] = [tensor.facts() for tensor in tensors]
    print_facts(facts, asked.as_json)
    if tensors and not asked.as_json:
        print()
        print_tensors(tensors)


def _refuse(found: dict[str, list[str]], bad: dict[str, list[str]], as_json: bool) -> None:
    """Prints all that is wrong, and raises with the first of it."""
    print_facts(
        {"damaged": bad} if as_json else {Path(where).name: problems for where, problems in bad.items()}, as_json
    )
    where, problems = next(iter(bad.items()))
    count = f"{len(bad)} of {len(found)} checkpoints damaged: " if len(found) > 1 else "damaged: "
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    whole = [name for name in found if name not in bad]
    fix = f"use {whole[-1]}" if whole else "use another checkpoint"
    raise CheckpointError(f"{count}{problems[0]}{more}", where=where, fix=fix)
