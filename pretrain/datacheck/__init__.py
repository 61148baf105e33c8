"""`pretrain data show`, `stats` and `verify`."""
