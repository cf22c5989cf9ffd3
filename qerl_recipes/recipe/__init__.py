"""A recipe: its keys, its YAML file, the flags that stand above it."""
