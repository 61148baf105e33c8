"""Readers by format: slices of open input files -> documents, streamed, errors with file and line or byte."""
