"""Output of a run: console, metrics.jsonl, audit.jsonl, experiment trackers."""

from pretrain.tracking.run_output import RunOutput

__all__ = ["RunOutput"]
