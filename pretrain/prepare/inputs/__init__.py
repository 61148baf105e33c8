"""Where text comes from: which files an input names, local or remote, and their bytes."""
