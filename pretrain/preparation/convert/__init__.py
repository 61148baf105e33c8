"""Token data of other systems, re-sharded without tokenising again."""
