"""Topology-free, crash-safe checkpoints: fragments by parameter name, a manifest last, one rename."""
