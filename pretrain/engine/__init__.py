"""What runs a step, behind one interface: DeepSpeed ZeRO, DDP, or one process."""
