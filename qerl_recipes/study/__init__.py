"""Run the arms and seeds of one recipe, resumable, with paired statistics."""
