"""Arms x seeds of one recipe, resumable, with paired statistics."""
