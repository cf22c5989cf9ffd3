"""Checkpoint in, checkpoint out: quantize, export, merge."""
