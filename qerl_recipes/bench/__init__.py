"""Measure on this machine."""
