"""What a run, a checkpoint or a shard folder looks like to a person."""
