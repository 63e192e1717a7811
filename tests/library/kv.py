"""KV for the library's tests: random bits, also of NaNs, that a seed determines in every process."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvdepot import Shape

Array = npt.NDArray[np.generic]

TOKENS = 16
"""Tokens of a chunk."""
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
