"""Crash-safe checkpoints of any topology: fragments by parameter, a manifest last, one rename."""
