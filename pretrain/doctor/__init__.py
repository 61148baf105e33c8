"""`pretrain doctor`: checks of machines before a job waits for them."""
