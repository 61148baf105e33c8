"""From raw text to shards."""
