"""Turn a checkpoint into an engine's layers, and lend the frozen weights to a trainer."""
