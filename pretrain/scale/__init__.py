"""Scaling: a ladder of small runs that predicts the loss of a large one, and a check of activations over the width."""
