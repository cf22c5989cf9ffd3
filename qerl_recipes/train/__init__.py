"""GRPO and DAPO: the run, the trainer, saving and resuming."""
