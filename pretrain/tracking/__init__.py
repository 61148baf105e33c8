"""What a run shows and leaves behind: console, metrics.jsonl, audit.jsonl, Weights & Biases."""

from pretrain.tracking.tracker import Tracker

__all__ = ["Tracker"]
