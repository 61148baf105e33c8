"""Sections of `filter` in a config of `pretrain prepare`."""
