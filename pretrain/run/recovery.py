"""Recovery of a job that has lost a rank, as its ranks know of it.

    launcher   a rank is lost  ->  all ranks end  ->  forks of the launcher take their places
    ranks      `Recovery` in the environment  ->  newest checkpoint  ->  first step: run.json, log

A world is the processes of its ranks: groups, engine, caches, pinned buffers, captured graphs and
exchanges in flight end with them, and nothing of it has to be aborted or found. Not here: the
decision to recover (pretrain/run/worlds.py).
"""

import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

from pretrain.errors import EXIT_BUG, EXIT_UNAVAILABLE, ConfigError, DiskError
from pretrain.run.folder import RECOVERY, RunDir, change_record
from pretrain.utils.safe_read import parse_json

log = logging.getLogger(__name__)

_VARIABLE = "PRETRAIN_RECOVERY"
MAY_REPEAT = (EXIT_BUG, EXIT_UNAVAILABLE)
"""Exit codes of ranks that are replaced after a first step: those of a bug, and of too little memory."""
COPIES = 3
"""Copies in memory at once (`run.recover_every_steps`), the one being written included."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """The recovery that a world of ranks begins with."""

    number: int = -1  # recoveries of the launcher so far; 0: its first ranks; -1: it replaces none
    lost: str = ""  # rank, host, and how it was lost, of the world before
    lost_at: float = 0.0  # when the launcher saw it, by the monotonic clock of this machine
    memory: str = ""  # folder of copies of the state; empty: there are none

    @property
    def is_on(self) -> bool:
        """Whether the launcher replaces ranks."""
        return self.number >= 0

    def variable(self) -> dict[str, str]:
        """Returns the variable of the ranks."""
        return {_VARIABLE: json.dumps(asdict(self))}

    def facts(self) -> dict[str, Any]:
        """Returns the entry of the attempt in run.json; empty for the first ranks."""
        return {RECOVERY: {"number": self.number, "lost": self.lost}} if self.number > 0 else {}

    def end(self, run: RunDir, step: int) -> "Recovery":
        """Notes on rank 0 the first step after it, in run.json and the log; returns what then holds."""
        if self.number <= 0:
            return self
        seconds = round(time.monotonic() - self.lost_at, 2)
        text = "recovery %d: step %d is done %.1f s after the loss: %s"
        log.info(text, self.number, step, seconds, self.lost)

        def change(record: dict[str, Any]) -> None:
            record["attempts"][-1][RECOVERY]["seconds"] = seconds

        try:
            change_record(run, change)
        except (ConfigError, DiskError) as error:
            log.warning("%s", error)
        return Recovery()


def read_recovery() -> Recovery:
    """Returns the recovery that this rank begins with, by its environment."""
    text = os.environ.get(_VARIABLE)
    return Recovery(**parse_json(text)) if text else Recovery()


def describe_recovery(entry: Any) -> str:
    """Returns the entry of an attempt in words; empty where it is no recovery."""
    if not isinstance(entry, dict):
        return ""
    seconds = entry.get("seconds")
    lasted = "no step done" if seconds is None else f"a step done after {seconds:.1f} s"
    return f"recovery {entry.get('number')}, {lasted}, of the loss: {entry.get('lost')}"
