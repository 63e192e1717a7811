"""KV tensors like those of engines: where their elements are in storages of plain bytes.

It also has the oracle: the expected result of a store or a retrieve, computed with numpy, element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvdepot.devices import describe
from kvdepot.protocol.layout import TensorView

Bytes = npt.NDArray[np.uint8]

DTYPES = {
    "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
"""Bytes an element; of each type every pattern of bits is somebody's KV."""


@dataclass(frozen=True)
class Placed:
    """A tensor in one of several storages; offset and strides in bytes."""

    name: str
    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    def of(self, storage: Bytes) -> npt.NDArray[Any]:
        """Its elements as numpy sees them in these bytes."""
        kind = np.dtype(f"V{DTYPES[self.dtype]}")
        return np.ndarray(self.shape, kind, storage.data, self.offset, self.strides)


@dataclass
class Model:
    """The layers of one worker, and their block axes."""

    sizes: list[int] = field(default_factory=list)  # bytes of each storage
    layers: list[Placed] = field(default_factory=list)
    axes: list[int] = field(default_factory=list)

    def add(self, kind: str, nb: int, rows: int, heads: int, dim: int, dtype: str) -> Model:
        """Layers of a kind, in a storage of their own."""
        shape, axis, layers = _kinds(nb, rows, heads, dim)[kind]
        base = np.zeros(shape, f"V{DTYPES[dtype]}")
        start, views = base.__array_interface__["data"][0], layers(base)
        for view in views if isinstance(views, list) else [views]:
            offset = view.__array_interface__["data"][0] - start
            name = f"layer {len(self.layers)}"
            self.layers.append(Placed(name, len(self.sizes), offset, view.shape, view.strides, dtype))
            self.axes.append(axis)
        self.sizes.append(base.nbytes)
        return self

    def move(self, source: Sequence[Bytes], target: Sequence[Bytes], blocks: Mapping[int, int]) -> None:
        """Blocks in `source`'s storages go to the blocks of `target`'s that they are mapped to."""
        for layer, axis in zip(self.layers, self.axes, strict=True):
            old, new = (np.moveaxis(layer.of(memory[layer.storage]), axis, 0) for memory in (source, target))
            for one, other in blocks.items():
                new[other] = old[one]


_Array: TypeAlias = npt.NDArray[Any]


def _kinds(nb: int, rows: int, heads: int, dim: int) -> dict[str, tuple[tuple[int, ...], int, Callable[[_Array], Any]]]:
    """Layouts by name: the shape of the storage, the block axis of its layers, and its layers (one, or a list)."""
    size = rows * dim
    ends = [((i + 1) * rows, heads * rows + i + 1) for i in range(heads)]  # of layers of two sizes
    return {
        "blocks first": ((nb, rows, heads, dim), 0, lambda base: base),
        "keys and values apart": ((2, nb, rows, heads, dim), 1, lambda base: base),
        "keys and values together": ((nb, 2, rows, heads, dim), 0, lambda base: base),
        "mla": ((nb, rows, dim), 0, lambda base: base),
        "rows padded": ((nb, rows, dim + 3), 0, lambda base: base[..., :dim]),
        "every second block": ((2 * nb, rows, dim), 0, lambda base: base[1::2]),
        "behind others": ((nb + 1, rows, dim), 0, lambda base: base[1:]),
        "heads before rows": ((nb, heads, rows, dim), 0, lambda base: base.transpose(0, 2, 1, 3)),
        "heads outside": ((heads, nb, rows, dim), 0, lambda base: base.transpose(1, 2, 0, 3)),
        "blocks last": ((rows, min(dim, 4), nb), 2, lambda base: base),
        "layers side by side": ((nb, heads, rows, dim), 0, lambda base: [base[:, i] for i in range(heads)]),
        "layers of two sizes side by side": (  # all of one size, then all of the other; named in turns
            (nb, heads * (rows + 1), dim), 0,
            lambda base: [part for a, b in ends for part in (base[:, a - rows : a], base[:, b - 1 : b])],
        ),
        "layers behind each other": ((heads, nb, rows, dim), 0, list),
        "states with padding": (  # two states a block, and bytes that belong to neither
            (nb, size + heads + 3), 0, lambda base: [base[:, :size], base[:, size : size + heads]]
        ),
    }  # fmt: skip


KINDS = list(_kinds(1, 1, 1, 1))


class Worker:
    """The tensors of a model in torch's memory of a device, and all bytes of their storages."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.tensors: list[torch.Tensor] = []
        self._storages: list[torch.Tensor] = []

    def make(self, model: Model) -> list[TensorView]:
        """Give the model memory, and describe its tensors. What was made before is gone."""
        self._storages = [torch.zeros(size, dtype=torch.uint8, device=self.device) for size in model.sizes]
        self.tensors = []
        for layer in model.layers:
            item, dtype = DTYPES[layer.dtype], getattr(torch, layer.dtype)
            flat = self._storages[layer.storage].view(dtype)
            strides = [stride // item for stride in layer.strides]
            self.tensors.append(flat.as_strided(layer.shape, strides, layer.offset // item))
        return [describe(tensor, layer.name) for tensor, layer in zip(self.tensors, model.layers, strict=True)]

    def write(self, storages: Sequence[Bytes]) -> None:
        for storage, new in zip(self._storages, storages, strict=True):
            storage.copy_(torch.from_numpy(np.array(new)))

    def read(self) -> list[Bytes]:
        return [storage.to("cpu", copy=True).numpy() for storage in self._storages]
