"""KV tensors like those of engines: where their elements are in storages of plain bytes.

It also has the oracle: the expected result of a store or a retrieve, computed with numpy, element by element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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

KINDS = [
    "blocks first", "keys and values apart", "keys and values together", "mla", "rows padded", "every second block",
    "behind others", "heads before rows", "heads outside", "blocks last", "layers side by side",
    "layers of two sizes side by side", "layers behind each other", "states with padding",
]  # fmt: skip


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
        base, views, axis = _paged(kind, nb, rows, heads, dim, np.dtype(f"V{DTYPES[dtype]}"))
        start = base.__array_interface__["data"][0]
        for view in views:
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


def _paged(
    kind: str, nb: int, rows: int, heads: int, dim: int, item: np.dtype[Any]
) -> tuple[npt.NDArray[Any], list[npt.NDArray[Any]], int]:
    """The whole storage, the layers in it, and their block axis."""

    def make(*shape: int) -> npt.NDArray[Any]:
        return np.zeros(shape, item)

    match kind:
        case "blocks first":
            base = make(nb, rows, heads, dim)
            return base, [base], 0
        case "keys and values apart":
            base = make(2, nb, rows, heads, dim)
            return base, [base], 1
        case "keys and values together":
            base = make(nb, 2, rows, heads, dim)
            return base, [base], 0
        case "mla":
            base = make(nb, rows, dim)
            return base, [base], 0
        case "rows padded":
            base = make(nb, rows, dim + 3)
            return base, [base[..., :dim]], 0
        case "every second block":
            base = make(2 * nb, rows, dim)
            return base, [base[1::2]], 0
        case "behind others":
            base = make(nb + 1, rows, dim)
            return base, [base[1:]], 0
        case "heads before rows":
            base = make(nb, heads, rows, dim)
            return base, [base.transpose(0, 2, 1, 3)], 0
        case "heads outside":
            base = make(heads, nb, rows, dim)
            return base, [base.transpose(1, 2, 0, 3)], 0
        case "blocks last":
            base = make(rows, min(dim, 4), nb)
            return base, [base], 2
        case "layers side by side":
            base = make(nb, heads, rows, dim)
            return base, [base[:, i] for i in range(heads)], 0
        case "layers of two sizes side by side":  # all of one size, then all of the other; named in turns
            base = make(nb, heads * (rows + 1), dim)
            ends = [((i + 1) * rows, heads * rows + i + 1) for i in range(heads)]
            return base, [part for one, two in ends for part in (base[:, one - rows : one], base[:, two - 1 : two])], 0
        case "states with padding":  # two states a block, and bytes that belong to neither
            base = make(nb, rows * dim + heads + 3)
            return base, [base[:, : rows * dim], base[:, rows * dim : rows * dim + heads]], 0
    assert kind == "layers behind each other", kind
    base = make(heads, nb, rows, dim)
    return base, [base[i] for i in range(heads)], 0


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
