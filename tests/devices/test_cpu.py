"""The processor's own memory, by the suite of all devices."""

from __future__ import annotations

import subprocess
import sys
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


_HELD_UP = """
import os, signal, threading
from pathlib import Path
import torch
from kvdepot.devices import share
share(torch.zeros(4096, dtype=torch.uint8), "one")  # which starts torch's helper
(helper,) = Path("/proc/self/task", str(os.getpid()), "children").read_text().split()
os.kill(int(helper), signal.SIGSTOP)
threading.Timer(2.5, os.kill, (int(helper), signal.SIGCONT)).start()
tensor = torch.full((4096,), 7, dtype=torch.uint8)
view = share(tensor, "two")
tensor[0] = 8
assert Path("/dev/shm", view.mapping).read_bytes()[view.offset :] == bytes([8, *[7] * 4095])
"""


@pytest.mark.faults
def test_tensors_are_shared_also_where_torchs_helper_is_held_up_for_longer_than_torch_waits() -> None:
    done = subprocess.run([sys.executable, "-c", _HELD_UP], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
