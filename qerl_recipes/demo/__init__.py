"""Run `qerl demo`, and make the starting models of the demo and of the SmolLM2 recipes."""
