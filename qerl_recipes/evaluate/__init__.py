"""Accuracy with intervals, and the report of a run."""
