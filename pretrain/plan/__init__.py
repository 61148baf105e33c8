"""Needs of a run by arithmetic alone: parameters, FLOPs, memory, time. Imports no torch."""
