"""Chunks in which a rule with a state computes a row."""

CHUNK = 64
"""Tokens that a rule computes at once; cost grows with it, and the number of steps falls."""


def chunks_of(tokens: int) -> tuple[int, int]:
    """Returns the number of chunks of a row, and their tokens."""
    chunk = min(CHUNK, tokens)
    return -(-tokens // chunk), chunk
