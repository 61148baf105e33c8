"""Families of hybrids: layers of attention, and of mixers with a state."""
