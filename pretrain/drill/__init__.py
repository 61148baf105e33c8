"""The kill-and-resume drill: the user's own config, killed at random moments, against an uninterrupted run."""
