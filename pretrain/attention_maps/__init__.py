"""Attention of a model over a text: numbers, figures, and a terminal rendering."""
