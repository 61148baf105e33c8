"""Objectives of answers that are compared: pairs of them, and records that are wanted or not."""
