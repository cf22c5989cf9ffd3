"""Run `qerl demo`, and make the starting models of the SmolLM2 recipes."""
