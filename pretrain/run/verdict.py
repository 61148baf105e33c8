"""Who is to blame when a job stands still: pure functions of the heartbeats.

no heartbeat any more      ->  frozen, or gone: the process was stopped or killed, its host is dead
fewest marks, then fewest
collectives begun          ->  hangs: all others wait for it; those that wait are never blamed
all at the same place      ->  nobody can be named: each says where it stands
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pretrain.errors import EXIT_HANG, EXIT_UNAVAILABLE
from pretrain.run.progress import Beat

SILENT_S = 3.0
MAX_NAMED = 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why the job ends.

    Attributes:
        text: What a user reads; the first line says it all.
        exit_code: What every rank ends with.
        culprits: The ranks that are named.
    """

    text: str
    exit_code: int = EXIT_HANG
    culprits: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON."""
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Verdict":
        """Reads what `to_json` gave."""
        return Verdict(values["text"], values["exit_code"], tuple(values["culprits"]))


@dataclass(frozen=True, slots=True)
class Standing:
    """What a rank knows of another: the last heartbeat, and for how long there has been no new one."""

    beat: Beat
    silent_s: float


def find_missing(own: Beat, others: Mapping[int, Standing], world_size: int) -> Verdict | None:
    """Returns the verdict on the ranks that have no heartbeat, or none any more; None where all have one."""
    absent = [rank for rank in range(world_size) if rank != own.rank and rank not in others]
    if absent and own.phase in ("start", "meet"):
        text = f"{_name_ranks(absent)} never came up; {_name(own)} has been waiting {own.where()}"
        return Verdict(text, EXIT_UNAVAILABLE, tuple(absent))
    silent = [standing for standing in others.values() if standing.silent_s >= SILENT_S]
    lines = [describe_silent(standing) for standing in silent[:MAX_NAMED]]
    if absent:
        gone = f"{_name_ranks(absent)} {'are' if len(absent) > 1 else 'is'} frozen or gone"
        lines.insert(0, f"{gone}: no heartbeat has ever come from there")
    culprits = (*absent, *(standing.beat.rank for standing in silent))
    return Verdict("\n".join(lines), EXIT_HANG, culprits) if lines else None


def judge(own: Beat, others: Mapping[int, Standing], world_size: int) -> Verdict | None:
    """Says who holds the job up, asked by a rank that has waited for longer than its own phase may take.

    Returns:
        The verdict; None where those behind are within the limit of what they are doing.
    """
    if (missing := find_missing(own, others, world_size)) is not None:
        return missing
    beats = [own, *(standing.beat for standing in others.values())]
    place = min((beat.marks, beat.collectives) for beat in beats)
    behind = [beat for beat in beats if (beat.marks, beat.collectives) == place]
    if len(behind) == world_size > 1:
        return Verdict(_stand_still(beats))
    if any(beat.for_s < beat.limit_s for beat in behind):
        return None
    waiting = world_size - len(behind)
    lines = [_describe_hung(beat, waiting) for beat in behind[:MAX_NAMED]]
    return Verdict("\n".join(lines), EXIT_HANG, tuple(beat.rank for beat in behind))


def judge_alone(own: Beat) -> Verdict:
    """The verdict on a rank that takes longer than its phase may, and for which no other waits."""
    return Verdict(_describe_hung(own, 0), EXIT_HANG, (own.rank,))


def describe_silent(standing: Standing) -> str:
    """Returns what there is to say of a rank whose heartbeat has stopped."""
    beat = standing.beat
    return (
        f"{_name(beat)} is frozen or gone: no heartbeat for {standing.silent_s:.0f} s (its process was stopped or "
        f"killed, or its host is dead); it was last seen {beat.where()}, at:\n{_stack(beat)}"
    )


def describe_store(place: str, holder: Beat | None, silent_s: float | None) -> str:
    """Returns what there is to say when the job's store does not answer.

    Args:
        place: Where it is.
        holder: The last heartbeat of the rank that keeps it; None: no rank does, or none has come.
        silent_s: For how long; None: it has closed.
    """
    if holder is None:
        what = "has closed" if silent_s is None else f"has not answered for {silent_s:.0f} s"
        return f"the store of the job at {place} {what}: who keeps it is frozen, gone, or unreachable"
    if silent_s is None:
        place = f"the store of the job, which it keeps at {place}, has closed"
        return f"{_name(holder)} is gone: {place}; it was last seen {holder.where()}, at:\n{_stack(holder)}"
    return describe_silent(Standing(holder, silent_s))


def _describe_hung(beat: Beat, waiting: int) -> str:
    wait = (
        f", while {waiting} rank{'s' if waiting > 1 else ''} wait{'' if waiting > 1 else 's'} for it" if waiting else ""
    )
    return f"{_name(beat)} hangs: {beat.where()} (limit {beat.limit_s:.0f} s){wait}, at:\n{_stack(beat)}"


def _stand_still(beats: Sequence[Beat]) -> str:
    lines = [f"all {len(beats)} ranks stand still at the same place: none can be named; the network may be down"]
    for beat in beats[:MAX_NAMED]:
        lines.append(f"  {_name(beat)} is {beat.where()}, at:\n{_stack(beat)}")
    return "\n".join(lines)


def _name(beat: Beat) -> str:
    return f"rank {beat.rank} ({beat.host}, process {beat.pid})"


def _name_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:MAX_NAMED])
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{', ...' if len(ranks) > MAX_NAMED else ''}"


def _stack(beat: Beat) -> str:
    return "\n".join(f"    {call}" for call in beat.stack)
