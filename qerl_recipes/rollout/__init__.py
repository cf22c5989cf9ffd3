"""The engine as the trainer sees it."""
