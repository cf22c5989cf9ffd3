"""Build the trainer's model and compute its log-probabilities."""
