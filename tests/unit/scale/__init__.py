"""The ladder of small runs, its law, and the prediction of a large run."""
