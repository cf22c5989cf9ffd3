"""Folders on disk: written whole or not at all, base model, run state, adapter folder, card."""
