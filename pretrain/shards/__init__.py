"""Shards on a disk or behind an address: index, writer, reader, and the cache of remote ones."""
