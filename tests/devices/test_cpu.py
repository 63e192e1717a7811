"""The processor's own memory, by the suite of all devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kvdepot.devices import share
from kvdepot.layout import TensorView
from tests.devices.conformance import DeviceConformance
from tests.devices.tensors import DTYPES, Bytes, Model


class TorchWorker:
    """Tensors of torch, in this process; `device` of torch's."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self.storages: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []

    def make(self, model: Model) -> list[TensorView]:
        self.storages = [torch.zeros(size, dtype=torch.uint8, device=self._device) for size in model.sizes]
        self.tensors = []
        for layer in model.layers:
            item, dtype = DTYPES[layer.dtype], getattr(torch, layer.dtype)
            flat = self.storages[layer.storage].view(dtype)
            strides = [stride // item for stride in layer.strides]
            self.tensors.append(flat.as_strided(layer.shape, strides, layer.offset // item))
        return [share(tensor, layer.name) for tensor, layer in zip(self.tensors, model.layers, strict=True)]

    def write(self, storages: Sequence[Bytes]) -> None:
        for storage, new in zip(self.storages, storages, strict=True):
            storage.copy_(torch.from_numpy(np.array(new)))
        self._settle()

    def read(self) -> list[Bytes]:
        self._settle()
        return [storage.cpu().numpy().copy() for storage in self.storages]

    def _settle(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()


class TestProcessor(DeviceConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def worker(cls) -> Iterator[Any]:
        yield TorchWorker()
