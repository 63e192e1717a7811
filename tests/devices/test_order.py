"""Work that a worker has queued on its GPU is finished before the server copies, also if it passes an event handle."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from kvdepot.adapters import IPCCacheEngineKey, KVCacheHandle, MessageQueueClient, RequestType, send_lmcache_request
from kvdepot.client import device_events as events
from kvdepot.errors import Unavailable
from tests.conftest import HANG_S, Depot, eventually
from tests.devices.tensors import Placed
from tests.devices.worker import DriverTensor
from tests.fakecuda.machine import VARIABLES, Machine

pytestmark = pytest.mark.faults

BLOCKS, BLOCK_BYTES = 16, 1 << 14
HANDLE = b"\7" * 64
"""What `ipc_handle()` of an event gives: nothing that its own process could open."""


class Worker:
    """An engine's process as it uses the contract by hand: one tensor on a GPU, and a stream."""

    def __init__(self, depot: Depot) -> None:
        from cuda.bindings import driver

        self.driver: Any = driver
        self.call("cuInit", 0)
        self.context = self.call("cuDevicePrimaryCtxRetain", 0)
        self.call("cuCtxPushCurrent", self.context)
        size = BLOCKS * BLOCK_BYTES
        self.address = int(self.call("cuMemAlloc", size))
        self.stream = self.call("cuStreamCreate", 1)
        self.host = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        self.call("cuMemHostRegister", self.host.ctypes.data, size, 1)
        placed = Placed("layer", 0, 0, (BLOCKS, BLOCK_BYTES), (BLOCK_BYTES, 1), "float8_e4m3fn")
        self.tensor: Any = DriverTensor(0, self.address, size, placed)
        self.client = MessageQueueClient(depot.url, depot.context)
        self.ask(RequestType.REGISTER_KV_CACHE, 1, [KVCacheHandle(self.tensor, "layer")]).result(HANG_S)

    def call(self, name: str, *args: Any) -> Any:
        result, *values = getattr(self.driver, name)(*args)
        assert result == 0, f"{name}: {result!r}"
        return values[0] if values else None

    def ask(self, kind: RequestType, *payloads: Any) -> Any:
        return send_lmcache_request(self.client, kind, list(payloads))

    def compute(self, blocks: list[int]) -> None:
        """Queue the writing of blocks, as a forward pass does; nobody waits for it."""
        for block in blocks:
            at = block * BLOCK_BYTES
            self.call("cuMemcpyHtoDAsync", self.address + at, self.host.ctypes.data + at, BLOCK_BYTES, self.stream)

    def read(self, block: int) -> bytes:
        out = np.zeros(BLOCK_BYTES, np.uint8)
        self.call("cuMemcpyDtoH", out.ctypes.data, self.address + block * BLOCK_BYTES, BLOCK_BYTES)
        return out.tobytes()

    def close(self) -> None:
        self.client.close()
        self.call("cuMemHostUnregister", self.host.ctypes.data)  # the next one's may lie at the same address


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with closing(Machine()) as made, made.here():
        yield made


@pytest.fixture(scope="module")
def depot(machine: Machine) -> Iterator[Depot]:
    environment = machine.environment()
    with pytest.MonkeyPatch.context() as patch:
        for name in VARIABLES:
            patch.setenv(name, environment[name])
        server = Depot()
    yield server.wait_ready()
    server.close()


@pytest.fixture
def worker(depot: Depot, machine: Machine) -> Iterator[Worker]:
    made = Worker(depot)
    yield made
    made.close()
    assert machine.failures() == []


def key() -> IPCCacheEngineKey:
    """Of a chunk that no other test has."""
    return IPCCacheEngineKey(uuid.uuid4().hex, 1, 0, tuple(range(256)), 0, 256, None, "r")


def test_a_store_with_an_events_handle_reads_what_was_queued_before(worker: Worker) -> None:
    chunk = key()
    worker.compute([0, 1, 2, 3])
    assert worker.ask(RequestType.STORE, [chunk], 1, [0, 1, 2, 3], HANDLE).result(HANG_S) is True
    assert worker.ask(RequestType.RETRIEVE, [chunk], 1, [4, 5, 6, 7], b"").result(HANG_S) == [True]
    for block in range(4):
        assert worker.read(block + 4) == worker.host[block * BLOCK_BYTES :][:BLOCK_BYTES].tobytes()


def test_a_retrieve_with_an_events_handle_writes_after_what_was_queued_before(worker: Worker, machine: Machine) -> None:
    chunk = key()
    worker.compute([0, 1, 2, 3])
    worker.ask(RequestType.STORE, [chunk], 1, [0, 1, 2, 3], HANDLE).result(HANG_S)
    worker.compute([4, 5, 6, 7])  # somebody else's: it must not end up over what is loaded
    assert worker.ask(RequestType.RETRIEVE, [chunk], 1, [4, 5, 6, 7], HANDLE).result(HANG_S) == [True]
    assert [worker.read(block) for block in range(4, 8)] == [worker.read(block) for block in range(4)]


def test_the_caller_waits_for_nothing_and_other_requests_overtake(worker: Worker, machine: Machine) -> None:
    chunk = key()
    with machine.gate():
        worker.compute([0])
        future = worker.ask(RequestType.STORE, [chunk], 1, [0, 1, 2, 3], HANDLE)
        eventually(lambda: machine.is_held(os.getpid()))
        assert not future.query()
        assert future.to_cuda_future() is future
        assert worker.ask(RequestType.NOOP).result(HANG_S) == "ok"
        assert not future.query()
    assert future.result(HANG_S) is True


def test_closing_ends_what_waits_for_a_gpu(worker: Worker, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_STOP_S", 0.1)
    with machine.gate():
        worker.compute([0])
        futures = [worker.ask(RequestType.STORE, [key()], 1, [0, 1, 2, 3], HANDLE)]
        eventually(lambda: machine.is_held(os.getpid()))
        futures.append(worker.ask(RequestType.STORE, [key()], 1, [0, 1, 2, 3], HANDLE))
        worker.client.close()
        for future in futures:
            with pytest.raises(Unavailable):
                future.result(0)
