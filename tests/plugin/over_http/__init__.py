"""A package, for its tests share the server of conftest.py, which ends with the last of them."""
