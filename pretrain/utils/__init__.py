"""Helpers without a domain: durable writes, checksums, network, processes, random numbers, logs."""
