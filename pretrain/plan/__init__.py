"""What a run will need, by arithmetic alone: parameters, FLOPs, memory. Imports no torch."""
