"""The KV of a chunk: which arrays it consists of, and how their values lie in the chunk's bytes.

Arrays of NumPy and tensors of torch become arrays of plain integers of the same size, so that a copy needs no dtype and
moves each bit, NaNs and bfloat16 included. So the dtype is compared before: values of another type would be read back
as other numbers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from kvdepot.errors import BadRequest

if TYPE_CHECKING:
    import torch

    Array: TypeAlias = np.ndarray | torch.Tensor
    Kv: TypeAlias = Array | Sequence[Array] | Sequence[tuple[Array, Array]]
    """One array of all layers, a list with one array of each layer, or a list with the keys and values of each
    layer."""
    Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor
    NumPyType: TypeAlias = str | np.dtype[np.generic] | type[np.generic]

Plain: TypeAlias = npt.NDArray[np.unsignedinteger]
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1,
    "uint8": 1,
}  # fmt: skip
"""Bytes of a value, by the names that torch gives dtypes."""
_PLAIN = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_ORDERS = ("tokens", "heads")


class Layers:
    """Layers of one kind: a Shape, or a State."""


@dataclass(frozen=True)
class Shape(Layers):
    """Layers of attention with equally shaped KV.

    parts: 2 for keys and values, 1 where a layer keeps one tensor (MLA). order: "tokens" for arrays of `[layers, parts,
    tokens, heads, head_dim]`, "heads" for `[layers, parts, heads, tokens, head_dim]`. window: number of tokens before a
    position that these layers attend to there; 0: all.
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
        return self.layers * self.parts * self.heads * self.head_dim

    @property
    def token_axis(self) -> int:
        return 2 if self.order == "tokens" else 3

    def sized(self, tokens: int) -> tuple[int, ...]:
        inner = (tokens, self.heads) if self.order == "tokens" else (self.heads, tokens)
        return (self.layers, self.parts, *inner, self.head_dim)

    def reach(self, chunk_tokens: int) -> int:
        """Chunks before a boundary that resuming there needs; 0: all (wire.Group.reach). chunk_tokens: of a chunk."""
        return math.ceil(self.window / chunk_tokens)


@dataclass(frozen=True)
class State(Layers):
    """Layers that keep `size` bytes of state after a chunk instead of KV of each token (Mamba, linear attention)."""

    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or isinstance(self.size, bool) or not 1 <= self.size <= 1 << 40:
            raise BadRequest(f"State: size must be a number of bytes, not {self.size!r:.40}")

    def reach(self, chunk_tokens: int) -> int:
        """Chunks before a boundary that resuming there needs; 0: all (wire.Group.reach). chunk_tokens: of a chunk."""
        return 1


def library_of(dtype: object) -> str:
    """The library whose arrays a dtype asks for: "torch" for a type of torch, else "numpy"."""
    torch = sys.modules.get("torch")
    return "torch" if torch is not None and isinstance(dtype, torch.dtype) else "numpy"


def name_of(dtype: object) -> str:
    """The name of a dtype of KV that is given by name, or as NumPy's, ml_dtypes' or torch's type. Raises BadRequest."""
    name = dtype
    if library_of(dtype) == "torch":
        name = str(dtype).removeprefix("torch.")
    elif isinstance(dtype, np.dtype):
        name = dtype.name if dtype.isnative else repr(dtype)
    elif isinstance(dtype, type) and issubclass(dtype, np.generic):
        name = dtype.__name__
    if dtype is None or name == "":
        raise BadRequest("a namespace needs dtype: without it, KV of other precisions could be served")
    if not isinstance(name, str) or name not in ITEM_BYTES:
        raise BadRequest(f"dtype must be one of {', '.join(ITEM_BYTES)}, or the type of that name, not {name!r:.40}")
    return name


@cache
def _numpy_type(name: str) -> np.dtype[np.generic]:
    """NumPy's or, if installed, ml_dtypes' type of this name; else unsigned integers of the same width."""
    found: type | None = getattr(np, name, None)
    with suppress(ImportError):
        found = found or getattr(import_module("ml_dtypes"), name, None)
    return np.dtype(found or _PLAIN[ITEM_BYTES[name]])


def new_array(sizes: tuple[int, ...], dtype: str, library: str) -> Array:
    """An array of these sizes, whose values are not set. library: "numpy" or "torch"."""
    if library == "numpy":
        return np.empty(sizes, _numpy_type(dtype))
    torch = import_module("torch")
    made: Array = torch.empty(sizes, dtype=getattr(torch, dtype))
    return made


def _array(kv: object) -> npt.NDArray[np.generic]:
    """The memory of an array, or of a tensor on the CPU as integers of its values' size. Raises BadRequest."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(kv, torch.Tensor):
        if kv.device.type != "cpu":
            raise BadRequest(f"KV on {kv.device}: pass a tensor on the CPU (kv.cpu())")
        if kv.layout is not torch.strided or kv.is_quantized or kv.is_conj() or kv.is_neg():
            raise BadRequest(f"KV must be a plain strided tensor, not one of layout {kv.layout} or a lazy view")
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(kv.element_size())
        try:
            kv = kv.detach().view(integers or kv.dtype).numpy()
        except (RuntimeError, TypeError) as exc:  # a class of tensors without memory of their own
            raise BadRequest(f"KV of {type(kv).__name__} cannot be read: {exc}") from exc
    if not isinstance(kv, np.ndarray):
        raise BadRequest(f"KV must be a NumPy array or a torch tensor, not {type(kv).__name__}")
    if isinstance(kv, np.ma.MaskedArray):
        raise BadRequest("KV must have a value everywhere: a masked array's mask would be lost")
    if kv.dtype.hasobject:
        raise BadRequest(f"KV must be numbers, not {kv.dtype}")
    return kv


def _plain(kv: Array, dtype: str) -> Plain:
    """The memory of KV of a dtype of this name, which may also be given as unsigned integers of its width. Raises
    BadRequest."""
    found = _array(kv)
    is_native = not isinstance(kv, np.ndarray) or kv.dtype.isnative
    name = (kv.dtype.name if isinstance(kv, np.ndarray) else str(kv.dtype)).removeprefix("torch.")
    if name not in (dtype, f"uint{8 * ITEM_BYTES[dtype]}") or not is_native:
        order = "" if is_native else " in another byte order"
        raise BadRequest(
            f"KV of {name}{order} in a namespace of {dtype}: pass its values as {dtype}, or their bits as "
            f"uint{8 * ITEM_BYTES[dtype]}"
        )
    return found.view(_PLAIN[ITEM_BYTES[dtype]])


def layers_of(kv: Kv, shape: Shape, dtype: str) -> tuple[list[Plain], int]:
    """The arrays of an argument, each `[..., tokens and heads by the shape's order, head_dim]`, in the order of their
    bytes in a chunk; and the number of tokens that they have. Raises BadRequest."""
    if isinstance(kv, list | tuple):
        parts = [part for layer in kv for part in (layer if isinstance(layer, list | tuple) else (layer,))]
        arrays = [_plain(part, dtype) for part in parts]
        expected, leading = shape.layers * shape.parts, 0
        what = f"{shape.layers} layers of {shape.parts} arrays"
    else:
        arrays, expected, leading = [_plain(kv, dtype)], 1, 2
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
    try:
        found = _array(kv)
    except BadRequest as exc:
        raise BadRequest(f"a state must be a contiguous array of {size} bytes: {exc}") from exc
    if found.nbytes != size or not found.flags.c_contiguous:
        raise BadRequest(f"a state must be a contiguous array of {size} bytes, not one of {found.nbytes}")
    return found.reshape(-1).view(np.uint8)


def refuse_overlaps(arrays: Sequence[Plain]) -> None:
    """Raise BadRequest if elements of arrays that are to be filled share memory, in one of them or between two. An
    array whose strides leave it open counts as one that shares memory."""
    spans = []
    for each in arrays:
        first = each.__array_interface__["data"][0]
        if each.flags.c_contiguous:
            spans.append((first, first + each.nbytes, each))
            continue
        axes = [(step, count - 1) for step, count in zip(each.strides, each.shape, strict=True) if count > 1]
        size = each.itemsize
        for step, others in sorted((abs(step), others) for step, others in axes):
            if step < size:
                raise BadRequest(f"KV is loaded into an array whose elements overlap: its strides are {each.strides}")
            size += step * others
        first += sum(step * others for step, others in axes if step < 0)
        spans.append((first, first + size, each))
    spans.sort(key=itemgetter(0))
    for index, (_, end, one) in enumerate(spans):
        for first, _, other in spans[index + 1 :]:
            if first >= end:
                break
            if np.shares_memory(one, other):
                raise BadRequest("KV is loaded into arrays that share memory")
