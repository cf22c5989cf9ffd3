"""Train with GRPO and DAPO: check a recipe, run its steps, save and resume."""
