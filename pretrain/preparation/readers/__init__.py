"""Readers by format: slices of open input files -> documents; errors have file and place."""
