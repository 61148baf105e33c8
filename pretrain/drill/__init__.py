"""`pretrain drill`: a run of a config, killed at random moments, against an uninterrupted one."""
