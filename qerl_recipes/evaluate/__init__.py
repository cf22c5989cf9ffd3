"""Measures the accuracy of a policy with confidence intervals, and writes the report of a run."""
