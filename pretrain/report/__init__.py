"""`pretrain report`: runs as one HTML page."""
