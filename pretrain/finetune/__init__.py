"""Training on from a model: its weights, adapters beside them, and what stays frozen."""
