"""Families of an encoder and a decoder."""
