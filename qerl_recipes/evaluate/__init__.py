"""Measure the accuracy of a policy with confidence intervals, and write the report of a run."""
