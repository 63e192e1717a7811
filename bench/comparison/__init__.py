"""Several KV caches under one engine and the same requests: what compare.py and the demo's second half run."""
