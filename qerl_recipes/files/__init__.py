"""Read and write folders on disk: checkpoints, saved adapters and their model cards, base models."""
