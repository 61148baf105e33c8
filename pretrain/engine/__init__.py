"""Runs a training step behind one interface: DeepSpeed ZeRO, DDP, or one process."""
