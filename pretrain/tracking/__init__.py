"""Output of a run: console, metrics.jsonl, audit.jsonl, Weights & Biases."""

from pretrain.tracking.tracker import Tracker

__all__ = ["Tracker"]
