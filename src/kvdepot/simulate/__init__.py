"""`kvdepot simulate`: a trace of requests replayed through the index and its policies."""
