"""Training: `build.py` wires a run together, in order; `loop.py` runs it."""
