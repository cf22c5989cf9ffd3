"""Examine this computer, set its environment variables, and run servers on it."""
