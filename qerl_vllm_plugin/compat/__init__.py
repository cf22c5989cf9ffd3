"""Keep all code that touches vLLM's insides, one file a subject; each names the releases that it was read in."""
