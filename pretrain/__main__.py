"""`python -m pretrain`: the same command line as `pretrain`, for launchers that start a module."""

from pretrain.cli import main

main()
