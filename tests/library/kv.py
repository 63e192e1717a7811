"""KV for the library's tests: random bits, also of NaNs, that a seed determines in every process. Imports no pytest."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import kvdepot
from kvdepot import Namespace, Shape, State

Array = npt.NDArray[np.generic]

TOKENS = 16
"""Tokens of a chunk."""
COUNT = 6 * TOKENS
SMALL = Shape(layers=2, heads=2, head_dim=8)


def random_kv(shape: Shape, tokens: int, seed: int = 0, kind: str = "u2") -> Array:
    """The KV of all tokens; kind: an integer type of the values' size."""
    size = np.dtype(kind).itemsize * shape.layers * shape.parts * shape.heads * shape.head_dim * tokens
    inner = (tokens, shape.heads) if shape.order == "tokens" else (shape.heads, tokens)
    values = np.frombuffer(np.random.default_rng(seed).bytes(size), kind)
    return values.reshape(shape.layers, shape.parts, *inner, shape.head_dim).copy()


def cut(kv: Array, shape: Shape, first: int, end: int) -> Array:
    """The KV of the tokens `[first, end)`."""
    return kv[:, :, first:end] if shape.order == "tokens" else kv[:, :, :, first:end]


def random_tokens(count: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, 1 << 32, count).tolist()
    return ids


def open_namespace(depot: kvdepot.Depot, revision: str, *shapes: Shape | State, dtype: Any = "bfloat16") -> Namespace:
    shape = shapes[0] if len(shapes) == 1 else list(shapes) or SMALL
    return depot.namespace(model="toy", revision=revision, dtype=dtype, shape=shape, chunk_tokens=TOKENS)


def put(ns: Namespace, seed: int) -> int:
    return ns.put(random_tokens(COUNT, seed), random_kv(SMALL, COUNT, seed))


def check(ns: Namespace, seed: int) -> int:
    """The tokens found of a sequence, whose bytes are right."""
    found, n = ns.get(random_tokens(COUNT, seed))
    assert n == 0 or np.array_equal(found.view("u2"), cut(random_kv(SMALL, COUNT, seed), SMALL, 0, n))
    return n
