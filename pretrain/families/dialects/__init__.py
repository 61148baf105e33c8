"""Decoders that differ from LLaMA in keys and names alone, or from another decoder here."""
