"""The KV of a chunk: which arrays it consists of, and how their values lie in the chunk's bytes.

Arrays of NumPy and tensors of torch become arrays of plain integers of the same size, so that a copy needs no dtype and
moves each bit, NaNs and bfloat16 included.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from kvdepot.errors import BadRequest

if TYPE_CHECKING:
    import torch

    Kv: TypeAlias = "npt.NDArray[np.generic] | torch.Tensor | list[tuple[Kv, Kv]]"
    """One array of all layers, or a list with the keys and the values of each layer."""

Plain: TypeAlias = npt.NDArray[np.unsignedinteger]
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1,
    "uint8": 1,
}  # fmt: skip
"""Bytes of a value, by the names that torch gives dtypes."""
_PLAIN = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_ORDERS = ("tokens", "heads")


@dataclass(frozen=True)
class Shape:
    """Layers of attention with equally shaped KV.

    parts: 2 for keys and values, 1 where a layer keeps one tensor (MLA). order: "tokens" for arrays of
    `[layers, parts, tokens, heads, head_dim]`, "heads" for `[layers, parts, heads, tokens, head_dim]`. window: tokens
    before a position that these layers attend to there; 0: all.
    """

    layers: int
    heads: int
    head_dim: int
    parts: int = 2
    order: str = "tokens"
    window: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "head_dim", "parts"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 20:
                raise BadRequest(f"Shape: {name} must be a positive integer, not {value!r:.40}")
        if self.order not in _ORDERS:
            raise BadRequest(f"Shape: order must be one of {', '.join(_ORDERS)}, not {self.order!r:.40}")
        if not isinstance(self.window, int) or self.window < 0:
            raise BadRequest(f"Shape: window must be a number of tokens, or 0, not {self.window!r:.40}")

    @property
    def values(self) -> int:
        """Number of values of a token."""
        return self.layers * self.parts * self.heads * self.head_dim

    @property
    def token_axis(self) -> int:
        return 2 if self.order == "tokens" else 3

    def sized(self, tokens: int) -> tuple[int, ...]:
        """The shape of the array of this many tokens."""
        inner = (tokens, self.heads) if self.order == "tokens" else (self.heads, tokens)
        return (self.layers, self.parts, *inner, self.head_dim)

    def reach(self, chunk_tokens: int) -> int:
        """As wire.Group.reach."""
        return math.ceil(self.window / chunk_tokens)


@dataclass(frozen=True)
class State:
    """Layers that keep `size` bytes of state after a chunk instead of KV of each token (Mamba, linear attention)."""

    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or isinstance(self.size, bool) or not 1 <= self.size <= 1 << 40:
            raise BadRequest(f"State: size must be a number of bytes, not {self.size!r:.40}")

    def reach(self, chunk_tokens: int) -> int:
        """As wire.Group.reach."""
        return 1


def plain(kv: Kv, item_bytes: int) -> Plain:
    """The memory of an array or a tensor on the CPU, as integers of its values' size. Raises BadRequest."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(kv, torch.Tensor):
        if kv.device.type != "cpu":
            raise BadRequest(f"KV on {kv.device}: pass a tensor on the CPU (kv.cpu())")
        if kv.element_size() != item_bytes:
            raise BadRequest(f"KV of {kv.dtype} in a namespace whose values have {item_bytes} bytes")
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[item_bytes]
        if kv.layout is not torch.strided or kv.is_quantized or kv.is_conj() or kv.is_neg():
            raise BadRequest(f"KV must be a plain strided tensor, not one of layout {kv.layout} or a lazy view")
        kv = kv.detach().view(integers).numpy()
    if not isinstance(kv, np.ndarray):
        raise BadRequest(f"KV must be a NumPy array or a torch tensor, not {type(kv).__name__}")
    if kv.dtype.itemsize != item_bytes or kv.dtype.hasobject:
        raise BadRequest(f"KV of {kv.dtype} in a namespace whose values have {item_bytes} bytes")
    return kv.view(_PLAIN[item_bytes])


def layers_of(kv: Kv, shape: Shape, item_bytes: int) -> tuple[list[Plain], int]:
    """The arrays of an argument, each `[..., tokens and heads by the shape's order, head_dim]`, in the order of their
    bytes in a chunk; and the number of tokens that they have. Raises BadRequest."""
    if isinstance(kv, list | tuple):
        parts = [part for layer in kv for part in (layer if isinstance(layer, list | tuple) else (layer,))]
        arrays = [plain(part, item_bytes) for part in parts]
        expected, leading = shape.layers * shape.parts, 0
        what = f"{shape.layers} layers of {shape.parts} arrays"
    else:
        arrays, expected, leading = [plain(kv, item_bytes)], 1, 2
        what = "one array"
    axis = shape.token_axis - 2 + leading
    tokens = arrays[0].shape[axis] if arrays and arrays[0].ndim == 3 + leading else 0
    wanted = shape.sized(tokens)[2 - leading :]
    if len(arrays) != expected or any(each.shape != wanted for each in arrays):
        named = [f"{name}={getattr(shape, name)}" for name in ("layers", "parts", "heads", "head_dim", "order")]
        raise BadRequest(
            f"KV of {len(arrays)} arrays {[list(each.shape) for each in arrays[:2]]} is not {what} of "
            f"{['tokens', *named] if leading else named}"
        )
    return arrays, tokens


def state_bytes(kv: Kv, size: int) -> npt.NDArray[np.uint8]:
    """The memory of a state. Raises BadRequest unless it is one contiguous array of this many bytes."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(kv, torch.Tensor):
        kv = plain(kv, kv.element_size()) if kv.element_size() in _PLAIN else None
    if not isinstance(kv, np.ndarray) or kv.nbytes != size or not kv.flags.c_contiguous:
        found = f"{kv.nbytes} bytes" if isinstance(kv, np.ndarray) else type(kv).__name__
        raise BadRequest(f"a state must be a contiguous array of {size} bytes, not {found}")
    return kv.reshape(-1).view(np.uint8)
