"""Turn a checkpoint into an engine's layers, and show the frozen weights to a trainer."""
