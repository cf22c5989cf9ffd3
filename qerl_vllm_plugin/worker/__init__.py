"""What one worker of an engine does: the methods that a driver calls, the two-phase change, the KV cache."""
