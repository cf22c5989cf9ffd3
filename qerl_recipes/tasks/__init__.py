"""Provide the training problems, and the rewards that score completions."""
