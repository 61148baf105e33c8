"""Notes of run.json about ranks that are slow, or whose memory grows: under `ranks` of an attempt.

{"rank": 3, "kind": "slow", "step": 120, "text": "rank 3 on n2, GPU 1: ...", "until": 310}
"""

from typing import Any

RANKS = "ranks"
"""Key of an attempt: its notes, oldest first."""


def add_note(attempt: dict[str, Any], rank: int, kind: str, step: int, text: str) -> None:
    """Begins a note at a step."""
    attempt.setdefault(RANKS, []).append({"rank": rank, "kind": kind, "step": step, "text": text})


def end_note(attempt: dict[str, Any], rank: int, kind: str, step: int) -> None:
    """Ends the last note about a rank of this kind."""
    for note in reversed(attempt.get(RANKS, [])):
        if (note["rank"], note["kind"]) == (rank, kind):
            note["until"] = step
            return


def describe_notes(notes: Any) -> list[str]:
    """Returns a line for each note, of a run.json that may hold anything."""
    lines = []
    for note in notes if isinstance(notes, list) else ():
        if isinstance(note, dict):
            ended = f" to {note['until']}" if "until" in note else " on"
            lines.append(f"from step {note.get('step')}{ended}: {note.get('text')}")
    return lines
