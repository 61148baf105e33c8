"""`pretrain doctor`: whether machines are fit to train on, before a job waits for them or spends its time on them."""
