"""Stores and retrieves of KV in a GPU's memory, beside one large copy between it and pinned memory.

From `submit_*` until `get_finished` reports it, as an engine sees it, through a server process. The floor is one copy
of pinned memory each way, or one each way at once, taken right before the pair that it stands beside. The tensors are
made with the driver alone; torch is needed for the matrix products that stores must not slow down.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq
from common import Peer, Scale, Serve, say
from report import Figure, at_least, at_most

from kvdepot import wire
from kvdepot.adapters import LMCacheMPWorkerAdapter, LoadStoreOp, RequestType, send_lmcache_request
from kvdepot.devices.cuda.driver import Driver, load
from kvdepot.errors import DeviceError

__all__ = ["run"]

Ids = npt.NDArray[np.intp]

_CHUNK_TOKENS = 256
_DEADLINE_S = 60.0
_ITEM_BYTES = 2  # bf16
_SLACK_MB = 8.0
"""Memory comes and goes in pieces; what 100 registrations leave behind must be less than a few of those."""


@dataclass(frozen=True)
class _Kind:
    """How an engine lays its KV out: `layers` allocations of `[blocks, *block]` bf16."""

    name: str
    layers: int
    block: tuple[int, ...]
    block_tokens: int
    bar: float
    both_bar: float = 0.0

    @property
    def block_bytes(self) -> int:
        """Of one layer."""
        return math.prod(self.block) * _ITEM_BYTES


def _kinds(scale: Scale) -> list[_Kind]:
    return [
        _Kind("Llama-8B", scale.layers, (2, 16, 8, 128), 16, 0.85, 0.75),
        _Kind("cross-layer", 1, (scale.layers, 2, 16, 8, 128), 16, 0.95),
        _Kind("MLA", scale.mla_layers, (64, 576), 64, 0.85),
    ]


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """All figures of the first GPU; none, and a line that says why, where there is no GPU."""
    try:
        gpu = _Gpu(load(), scale.peak_mib << 20)
    except DeviceError as exc:
        say(f"gpu: left out: {exc}")
        return []
    context: zmq.Context[Any] = zmq.Context()
    figures: list[Figure] = []
    with gpu.opened():
        notes.append(f"gpu: {gpu.name}; a floor is one copy of {scale.peak_mib} MiB of pinned memory")
        for kind in _kinds(scale):
            figures += _measure(scale, gpu, kind, context, notes)
        figures += _register_often(scale, gpu, context)
    context.term()
    return figures


def _measure(scale: Scale, gpu: _Gpu, kind: _Kind, context: zmq.Context[Any], notes: list[str]) -> list[Figure]:
    """Everything of one layout."""
    say(f"gpu: {kind.name}, filling the engine's KV")
    blocks = 2 * max(scale.copy_tokens) // kind.block_tokens
    figures: list[Figure] = []
    with gpu.tensors(kind, blocks) as caches, _serving(gpu, context, scale.copy_arena_gib) as server:
        worker = LMCacheMPWorkerAdapter(server.url, context, kind.name, 1, 0, kind.block_tokens)
        try:
            worker.register_kv_caches(caches, [0] * len(caches))
            server.wait_populated(context)
            engine = _Engine(scale, gpu, kind, blocks, caches, worker)
            engine.wait_pinned()
            say(f"gpu: {kind.name}, measuring")
            figures += engine.copies()
            if kind.both_bar:
                figures += engine.both_ways()
                figures += engine.one_chunk()
                figures += engine.slowdown(notes)
        finally:
            worker.shutdown()
    return figures


@contextmanager
def _serving(gpu: _Gpu, context: zmq.Context[Any], arena_gib: float) -> Iterator[Serve]:
    server = Serve(arena_gib=arena_gib, chunk_size=_CHUNK_TOKENS)
    try:
        server.wait_first_answer(context)
        yield server
    finally:
        server.close()


class _Engine:
    """An engine with one layout of KV, and the depot it uses."""

    def __init__(
        self,
        scale: Scale,
        gpu: _Gpu,
        kind: _Kind,
        blocks: int,
        caches: dict[str, Any],
        worker: LMCacheMPWorkerAdapter,
    ) -> None:
        self._scale, self._gpu, self._kind, self._blocks = scale, gpu, kind, blocks
        self._caches = caches
        self._worker = worker
        self._rng = np.random.default_rng(7)
        self._count = 0

    def wait_pinned(self) -> None:
        """Until the arena is registered with the driver: that is done once, and not what is measured."""
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            status = self._worker.mq_client.ask(wire.Status()).result()
            if all(device["pinned_bytes"] >= status["capacity_bytes"] for device in status["devices"]):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"the arena is not pinned: {status['devices']}")
            time.sleep(0.02)

    # -- the figures

    def copies(self) -> list[Figure]:
        """Each way by itself, shuffled blocks."""
        speeds: dict[tuple[str, int], list[float]] = {}
        floors: dict[str, list[float]] = {"store": [], "retrieve": []}
        for number in range(-1, self._scale.copy_runs):  # the first warms everything up
            for tokens in self._scale.copy_tokens:
                source, target = self._shuffled(tokens, tokens)
                prompt = self._prompt(tokens)
                store_peak, retrieve_peak = self._gpu.peak(True), self._gpu.peak(False)
                store_s = self._timed(("store", prompt, source))
                retrieve_s = self._timed(("retrieve", prompt, target))
                if number < 0:
                    self._compare(source, target)
                else:
                    floors["store"].append(store_peak)
                    floors["retrieve"].append(retrieve_peak)
                    speeds.setdefault(("store", tokens), []).append(self._size(source) / store_s / 1e9)
                    speeds.setdefault(("retrieve", tokens), []).append(self._size(target) / retrieve_s / 1e9)
                self._clear()
        return [
            at_least(
                f"gpu {what} {name} tokens, {self._kind.name}", "GB/s", speeds[what, tokens], floors[what],
                self._kind.bar,
            )
            for what in ("store", "retrieve")
            for tokens, name in zip(self._scale.copy_tokens, ("2k", "8k"), strict=True)
        ]  # fmt: skip

    def both_ways(self) -> list[Figure]:
        """A store and a retrieve of another prompt at once; both directions' bytes together."""
        figures = []
        for tokens, name in zip(self._scale.copy_tokens, ("2k", "8k"), strict=True):
            speeds, floors = [], []
            for number in range(-1, self._scale.copy_runs):
                source, target = self._shuffled(tokens, tokens)
                stored, prompt = self._prompt(tokens), self._prompt(tokens)
                self._timed(("store", stored, source))
                floor = self._gpu.peak_both()
                seconds = self._timed(("retrieve", stored, target), ("store", prompt, source))
                if number < 0:
                    self._compare(source, target)
                else:
                    speeds.append((self._size(source) + self._size(target)) / seconds / 1e9)
                    floors.append(floor)
                self._clear()
            title = f"gpu store and retrieve at once {name} tokens, {self._kind.name}"
            figures.append(at_least(title, "GB/s", speeds, floors, self._kind.both_bar))
        return figures

    def one_chunk(self) -> list[Figure]:
        """What a short retrieve costs beyond its bytes."""
        times, floors = [], []
        for number in range(-3, 5 * self._scale.copy_runs):
            source, target = self._shuffled(_CHUNK_TOKENS, _CHUNK_TOKENS)
            prompt = self._prompt(_CHUNK_TOKENS)
            self._timed(("store", prompt, source))
            floor_s = self._size(target) / self._gpu.peak(False) / 1e9
            seconds = self._timed(("retrieve", prompt, target))
            if number >= 0:
                times.append(seconds * 1e3)
                floors.append(floor_s * 1e3)
            self._clear()
        return [at_most(f"gpu retrieve of one 256-token chunk, {self._kind.name}", "ms", times, floors, 1, 0.5)]

    def slowdown(self, notes: list[str]) -> list[Figure]:
        """Matrix products a second in another process, while stores run and while nothing runs, in turn."""
        if not _torch_has(self._gpu):
            say("gpu: no torch for this GPU: the slowdown of matrix products is left out")
            return []
        say("gpu: matrix products beside stores")
        tokens = max(self._scale.copy_tokens)
        source, target = self._shuffled(tokens, tokens)
        seconds = self._scale.rate_seconds
        rates: dict[str, list[float]] = {"nothing": [], "stores": [], "retrieves": []}
        moved: dict[str, list[float]] = {"stores": [], "retrieves": []}
        products = Peer("matmul")
        try:
            products.hear()
            for _ in range(2 * self._scale.rate_runs):
                for beside, values in rates.items():
                    prompt = self._prompt(tokens)
                    if beside == "retrieves":
                        self._timed(("store", prompt, source))
                    products.tell(str(seconds))
                    begun, copying_s, size = time.perf_counter(), 0.0, 0
                    while beside != "nothing" and time.perf_counter() < begun + seconds:
                        if beside == "stores":
                            copying_s += self._timed(("store", self._prompt(tokens), source))
                            self._clear()
                        else:
                            copying_s += self._timed(("retrieve", prompt, target))
                        size += self._size(source)
                    count, took_s = products.hear()
                    values.append(count / took_s)
                    if beside != "nothing":
                        moved[beside].append(size / copying_s / 1e9)
                    self._clear()
        finally:
            products.close()
        for beside, speeds in moved.items():
            share = np.median(rates[beside]) / np.median(rates["nothing"])
            notes.append(
                f"gpu: beside {beside} of {np.median(speeds):.1f} GB/s, {share:.3f} of the matrix products a second"
            )
        return [at_least("gpu matrix products while stores run", "1/s", rates["stores"], rates["nothing"], 0.95)]

    # -- what they are made of

    def _prompt(self, tokens: int) -> list[int]:
        prompt: list[int] = self._rng.integers(0, 1 << 17, tokens).tolist()
        return prompt

    def _shuffled(self, *tokens: int) -> list[Ids]:
        """Blocks for so many tokens each, none twice."""
        ids = self._rng.permutation(self._blocks)
        edges = np.cumsum([count // self._kind.block_tokens for count in tokens])
        return np.split(ids[: edges[-1]], edges[:-1])

    def _size(self, blocks: Ids) -> int:
        return len(blocks) * self._kind.layers * self._kind.block_bytes

    def _clear(self) -> None:
        """Forget all chunks, so that the next store moves its bytes."""
        send_lmcache_request(self._worker.mq_client, RequestType.CLEAR, []).result()

    def _timed(self, *transfers: tuple[str, list[int], Ids]) -> float:
        """Seconds that these take, begun together: "store" or "retrieve", prompt, blocks."""
        stores, waiting = set(), set()
        begun = time.perf_counter()
        for what, prompt, blocks in transfers:
            self._count += 1
            request = f"{what} {self._count}"
            op = LoadStoreOp(blocks.tolist(), token_ids=prompt, start=0, end=len(prompt))
            if what == "store":
                self._worker.submit_store_request(request, op, None)
                stores.add(request)
            else:
                self._worker.submit_retrieve_request(request, op, None)
            waiting.add(request)

        def ended() -> bool:
            for done in self._worker.get_finished(stores):
                waiting.difference_update(done or ())
            return not waiting

        # Sleep on the socket between looks, as an idle engine does.
        if not self._worker.mq_client.wait(ended, _DEADLINE_S):
            raise TimeoutError(f"{waiting} did not finish")
        seconds = time.perf_counter() - begun
        if self._worker.counters["stores_dropped"] or self._worker.get_block_ids_with_load_errors():
            raise RuntimeError("the depot dropped a store, or a retrieve failed")
        return seconds

    def _compare(self, source: Ids, target: Ids) -> None:
        for tensor in self._caches.values():
            bytes_ = self._gpu.read(tensor).reshape(self._blocks, -1)
            if not np.array_equal(bytes_[source], bytes_[target]):
                raise RuntimeError("what was retrieved is not what was stored")


def _register_often(scale: Scale, gpu: _Gpu, context: zmq.Context[Any]) -> list[Figure]:
    """Register and unregister, one worker at a time: what is in use at the end, beside what was after the first."""
    say(f"gpu: registering {scale.registrations} times")
    kind = _kinds(scale)[0]
    device: list[float] = []
    host: list[float] = []
    with gpu.tensors(kind, 2 * _CHUNK_TOKENS // kind.block_tokens) as caches, _serving(gpu, context, 1 / 16) as server:
        server.wait_populated(context)
        for _ in range(scale.registrations + 1):
            worker = LMCacheMPWorkerAdapter(server.url, context, kind.name, 1, 0, kind.block_tokens)
            worker.register_kv_caches(caches, [0] * len(caches))
            worker.shutdown()
            device.append(gpu.used_bytes() / 1e6)
            host.append(server.resident_bytes() / 1e6)
    # The host's allocator takes some rounds until it reuses what it has.
    settled = min(len(host) // 5, 10)
    return [
        at_most("gpu memory in use after 100 registrations", "MB", device[-1:], device[:1], 1, _SLACK_MB),
        at_most(
            "gpu server, resident after 100 registrations", "MB", host[-1:], host[settled : settled + 1], 1, _SLACK_MB
        ),
    ]


def _torch_has(gpu: _Gpu) -> bool:
    """Whether torch can use this GPU; the driver of a stand-in is none that torch knows."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available() and gpu.name == torch.cuda.get_device_name(0)


class _Gpu:
    """The first GPU: memory of it, and how fast one copy is."""

    def __init__(self, driver: Driver, peak_bytes: int) -> None:
        self._driver = driver
        there = driver.devices()
        if not there:
            raise DeviceError("there is no GPU")
        self._device = next(iter(there.values()))
        self._bytes = peak_bytes
        self.name = driver.name(self._device)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Its context is this thread's meanwhile."""
        call = self._driver.call
        context = self._driver.retain(self._device)
        with self._driver.current(context):
            flags = self._driver.cu.CUstream_flags.CU_STREAM_NON_BLOCKING
            self._streams = [int(call("cuStreamCreate", int(flags))) for _ in range(2)]
            self._memory = [int(call("cuMemAlloc", self._bytes)) for _ in range(2)]
            self._pinned = [int(call("cuMemHostAlloc", self._bytes, 0)) for _ in range(2)]
            try:
                yield
            finally:
                for stream in self._streams:
                    call("cuStreamDestroy", stream)
                for address in self._memory:
                    call("cuMemFree", address)
                for address in self._pinned:
                    call("cuMemFreeHost", address)
        self._driver.release(self._device)

    def peak(self, is_store: bool) -> float:
        """GB/s of one large copy of pinned memory."""
        begun = time.perf_counter()
        self._copy(is_store)
        self._wait(is_store)
        return self._bytes / (time.perf_counter() - begun) / 1e9

    def peak_both(self) -> float:
        """GB/s of two, one each way, at once."""
        begun = time.perf_counter()
        for is_store in (True, False):
            self._copy(is_store)
        for is_store in (True, False):
            self._wait(is_store)
        return 2 * self._bytes / (time.perf_counter() - begun) / 1e9

    def _copy(self, is_store: bool) -> None:
        device, pinned, stream = self._memory[is_store], self._pinned[is_store], self._streams[is_store]
        if is_store:
            self._driver.call("cuMemcpyDtoHAsync", pinned, device, self._bytes, stream)
        else:
            self._driver.call("cuMemcpyHtoDAsync", device, pinned, self._bytes, stream)

    def _wait(self, is_store: bool) -> None:
        self._driver.call("cuStreamSynchronize", self._streams[is_store])

    def used_bytes(self) -> int:
        """Of all processes together."""
        free, total = self._driver.call("cuMemGetInfo")
        return int(total) - int(free)

    @contextmanager
    def tensors(self, kind: _Kind, blocks: int) -> Iterator[dict[str, Any]]:
        """Layers full of random bytes, an allocation each, as tensors that the worker can share."""
        rng = np.random.default_rng(3)
        size = blocks * kind.block_bytes
        made: list[int] = []
        try:
            for _ in range(kind.layers):
                made.append(int(self._driver.call("cuMemAlloc", size)))
                random = rng.integers(0, 256, size, np.uint8)
                self._driver.call("cuMemcpyHtoD", made[-1], random.ctypes.data, size)
            yield {f"layers.{i}": _Tensor(address, (blocks, *kind.block)) for i, address in enumerate(made)}
        finally:
            for address in made:
                self._driver.call("cuMemFree", address)

    def read(self, tensor: _Tensor) -> npt.NDArray[np.uint8]:
        """All bytes of it."""
        data = np.empty(tensor.nbytes(), np.uint8)
        self._driver.call("cuMemcpyDtoH", data.ctypes.data, tensor.data_ptr(), tensor.nbytes())
        return data


class _Tensor:
    """What `kvdepot.devices.share` asks of a contiguous torch tensor of bf16 that fills its storage."""

    dtype = "torch.bfloat16"
    device = SimpleNamespace(type="cuda", index=0)

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self._address = address
        self.shape = shape

    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES

    def data_ptr(self) -> int:
        return self._address

    def element_size(self) -> int:
        return _ITEM_BYTES

    def storage_offset(self) -> int:
        return 0

    def stride(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))

    def untyped_storage(self) -> _Tensor:
        return self
