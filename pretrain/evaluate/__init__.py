"""Measuring a trained model."""
