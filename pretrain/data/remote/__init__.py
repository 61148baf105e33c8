"""Shards that are elsewhere: fetched, verified and kept on a disk of this machine (store.py is where to start)."""
