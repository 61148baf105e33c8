"""`pretrain inspect`: the description of a run, checkpoint or model."""
