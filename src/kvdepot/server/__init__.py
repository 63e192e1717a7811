"""`kvdepot serve`: the loop, and what listens."""
