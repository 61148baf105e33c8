"""Starting ranks: on this machine (`local.py`). Imports no torch."""
