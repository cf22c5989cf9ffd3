"""The trainer's model and its log-probabilities."""
