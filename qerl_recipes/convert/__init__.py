"""Write checkpoints from checkpoints: quantize them, export and merge adapters, extract text models."""
