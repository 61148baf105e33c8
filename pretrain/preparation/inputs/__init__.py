"""Input files, local or remote: their listing and their bytes."""
