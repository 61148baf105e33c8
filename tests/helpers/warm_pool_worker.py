"""Imported by the process of which `warm_pool.py` has workers: their parent is that one, and no tests'."""

from pretrain.preparation import pool

pool._die_with_parent = lambda: None
