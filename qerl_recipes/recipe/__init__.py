"""Define the keys of a recipe, and read them from its YAML file and from command-line flags."""
