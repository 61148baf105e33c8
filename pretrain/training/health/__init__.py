"""Health of a run: its ranks, and the stack below it."""
