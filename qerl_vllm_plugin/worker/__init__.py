"""Do a worker's part: the methods that a driver calls, the two-phase change of the policy, and the KV cache."""
