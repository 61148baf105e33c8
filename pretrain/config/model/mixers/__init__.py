"""Counts of the mixers in the place of attention, as `parts/` of all others."""
