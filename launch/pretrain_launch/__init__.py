"""Starting ranks, on this machine and under Slurm. Imports no torch."""
