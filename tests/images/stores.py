"""A program that stores KV at KVDEPOT_URL and loads it again, as test_images.py runs it in a container.

Prints "stored and loaded", or the error of kvdepot.
"""

import numpy as np

import kvdepot
from kvdepot.errors import KVDepotError

TOKENS = list(range(256))

try:
    with kvdepot.connect() as depot:
        shape = kvdepot.Shape(layers=2, heads=2, head_dim=8)
        ns = depot.namespace(model="images", revision="1", dtype="uint8", shape=shape, chunk_tokens=256)
        kv = np.random.default_rng(1).integers(0, 256, (2, 2, len(TOKENS), 2, 8), dtype=np.uint8)
        stored = ns.put(TOKENS, kv)
        found, count = ns.get(TOKENS)
        is_same = found is not None and np.array_equal(found, kv)
        print("stored and loaded" if is_same else f"{stored} tokens stored, {count} found")
except KVDepotError as exc:
    print(f"{type(exc).__name__}: {exc}")
