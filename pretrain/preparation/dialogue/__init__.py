"""Texts, conversations and held-out questions, from the documentation that a machine has."""
