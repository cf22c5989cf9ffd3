"""This computer: environment, versions, what it can do, serving."""
