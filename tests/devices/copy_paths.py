"""The conformance suite for GPUs: each copy path, with buffers so small that a chunk needs several."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, ClassVar

import pytest

from kvdepot.devices import Devices
from kvdepot.memory.allocator import PAGE
from kvdepot.memory.arena import Arena
from kvdepot.protocol.layout import build_layout
from tests.devices.conformance import DeviceConformance
from tests.devices.tensors import Model
from tests.devices.worker import WorkerProcess

SMALL_PIECES = 10 * PAGE
SMALL_TABLE = 24
STAGING = 4 * (SMALL_TABLE * 24 + (48 << 10))
"""Four slots; in each a table and three tiles of the kernel's."""


def prepare(devices: Devices, patch: pytest.MonkeyPatch, *paths: str) -> Any:
    """The server's GPUs, with small pinned pieces. paths: the copy path of all stores, and of all retrieves."""
    cuda, pins, how = (import_module(f"kvdepot.devices.cuda{part}") for part in (".gpus", ".pins", ".copy_paths"))
    for module in (cuda, pins):
        patch.setattr(module, "PIECE_BYTES", SMALL_PIECES)
    patch.setattr(how, "_TABLE_ROWS", SMALL_TABLE)
    patch.setattr(how, "_BOUNCE_BYTES", 3 * PAGE)
    store, retrieve = paths or ("dma", "dma")
    patch.setattr(how, "_choose", lambda *_: {"store": [(0, store)], "retrieve": [(0, retrieve)]})
    devices._gpus = gpus = cuda.Gpus(devices._memory, *devices._limits)
    return gpus


class CopyPathsConformance(DeviceConformance):
    """A subclass provides `start_worker`."""

    paths: ClassVar[tuple[str, ...]] = ("dma", "dma")
    """Stores, retrieves."""
    is_registered: ClassVar[bool] = True
    """Whether the server may register the arena with the driver."""
    how: ClassVar[str] = "one"
    """The worker's memory: see worker.py."""

    @classmethod
    def start_worker(cls, how: str, first: bool) -> WorkerProcess:
        """first: the one whose tensors the tests copy; another keeps the GPU in use."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def gpus(cls) -> Iterator[object]:
        """What must be there before, and is checked after all else."""
        yield None

    @pytest.fixture(scope="class")
    @classmethod
    def worker(cls, gpus: object) -> Iterator[WorkerProcess]:
        worker = cls.start_worker(cls.how, True)
        yield worker
        worker.close()

    @pytest.fixture(scope="class")
    @classmethod
    def devices(cls, arena: Arena, gpus: object) -> Iterator[Devices]:
        made = Devices(arena, STAGING)
        with pytest.MonkeyPatch.context() as patch:
            prepare(made, patch, *cls.paths)
            if not cls.is_registered:  # the thread that registers the arena never begins
                patch.setattr(import_module("kvdepot.devices.cuda.pins").Pins, "attach", lambda pins, context: None)
            yield made
            made.close()

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def busy(cls, devices: Devices) -> Iterator[None]:
        """Another worker keeps the GPU in use: the tests need not make its context each time."""
        other = cls.start_worker("one", False)
        model = Model().add("mla", 2, 1, 1, 8, "bfloat16")
        mapped = devices.map(build_layout(other.make(model), model.axes))
        gpu = next(iter(devices._gpus._gpus.values()))  # type: ignore[union-attr]
        try:
            if "staged" in cls.paths and gpu.copy_paths.without:
                pytest.skip(gpu.copy_paths.without)
            yield
            assert cls.is_registered or not devices.status()[0].pinned_bytes
        finally:
            mapped.close()
            other.close()
