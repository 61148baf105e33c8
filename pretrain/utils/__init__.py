"""Helpers without a domain: durable writes, checksums, network addresses, processes, random numbers, logging."""
