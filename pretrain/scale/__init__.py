"""Scaling laws: a ladder of small runs, the law that is fitted to it, and a prediction of the large run."""
