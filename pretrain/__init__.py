"""Distributed pretraining of Transformers, from raw text to a released checkpoint."""

__version__ = "0.1.0"
