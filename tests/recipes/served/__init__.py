"""Make this folder a package. Its tests share the server of conftest.py, which stops after the last of them."""
