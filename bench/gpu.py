"""Stores and retrieves of KV in a GPU's memory, beside one large copy between it and pinned memory.

The time is that from `submit_*` until `get_finished` reports it, as an engine sees it, through a server process. The
lower bound is one copy of pinned memory in each direction, or one in each direction at once, measured right before its
pair. The tensors are allocated with the driver alone; torch is needed for the matrix products that stores must not slow
down.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq
from common import Peer, Scale, Serve, say
from device import Gpu, Kind
from report import Figure, at_least, at_most

from kvdepot.adapters import LMCacheMPWorkerAdapter, LoadStoreOp, RequestType, send_lmcache_request
from kvdepot.devices.cuda.driver import load
from kvdepot.errors import DeviceError
from kvdepot.protocol import wire

__all__ = ["run", "tensor_bytes"]

Ids = npt.NDArray[np.intp]

_CHUNK_TOKENS = 256
_DEADLINE_S = 60.0
_SLACK_MB = 8.0
"""Memory is allocated in pieces; what 100 registrations leave behind must be less than a few of these."""


def _kinds(scale: Scale) -> list[Kind]:
    return [
        Kind("Llama-8B", scale.layers, (2, 16, 8, 128), 16, 0.85, 0.75),
        Kind("cross-layer", 1, (scale.layers, 2, 16, 8, 128), 16, 0.95),
        Kind("MLA", scale.mla_layers, (64, 576), 64, 0.85),
    ]


def _blocks(scale: Scale, kind: Kind) -> int:
    """Blocks of the engine: twice those of the longest prompt."""
    return 2 * max(scale.copy_tokens) // kind.block_tokens


def tensor_bytes(scale: Scale) -> int:
    """Most bytes that are allocated on the GPU at once: tensors, and the buffers of the lower bound."""
    largest = max(kind.layers * _blocks(scale, kind) * kind.block_bytes for kind in _kinds(scale))
    return largest + 2 * (scale.peak_mib << 20)


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """All figures of the first GPU; without a GPU none, and a line that says so."""
    try:
        gpu = Gpu(load(), scale.peak_mib << 20)
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


def _measure(scale: Scale, gpu: Gpu, kind: Kind, context: zmq.Context[Any], notes: list[str]) -> list[Figure]:
    """All figures of one layout."""
    say(f"gpu: {kind.name}, filling the engine's KV")
    blocks = _blocks(scale, kind)
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
def _serving(gpu: Gpu, context: zmq.Context[Any], arena_gib: float) -> Iterator[Serve]:
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
        gpu: Gpu,
        kind: Kind,
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
        """Wait until the arena is registered with the driver, which happens once and is not measured."""
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
        """Each direction by itself, with shuffled blocks."""
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
        """A store and a retrieve of another prompt at once; the bytes of both directions together."""
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
        """The overhead of a short retrieve."""
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
        """Matrix products per second in another process, alternately with and without stores."""
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

    # -- steps

    def _prompt(self, tokens: int) -> list[int]:
        prompt: list[int] = self._rng.integers(0, 1 << 17, tokens).tolist()
        return prompt

    def _shuffled(self, *tokens: int) -> list[Ids]:
        """Distinct blocks for this number of tokens each."""
        ids = self._rng.permutation(self._blocks)
        edges = np.cumsum([count // self._kind.block_tokens for count in tokens])
        return np.split(ids[: edges[-1]], edges[:-1])

    def _size(self, blocks: Ids) -> int:
        return len(blocks) * self._kind.layers * self._kind.block_bytes

    def _clear(self) -> None:
        """Forget all chunks, so that the next store moves its bytes."""
        send_lmcache_request(self._worker.mq_client, RequestType.CLEAR, []).result()

    def _timed(self, *transfers: tuple[str, list[int], Ids]) -> float:
        """Seconds for these operations, started together: "store" or "retrieve", prompt, blocks."""
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

        # Sleep on the socket between polls, like an idle engine.
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


def _register_often(scale: Scale, gpu: Gpu, context: zmq.Context[Any]) -> list[Figure]:
    """Register and unregister, one worker at a time: memory in use at the end, beside that after some rounds."""
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
    # The driver loads its parts, and the host's allocator reuses its memory, only after some rounds.
    settled = min(len(host) // 5, 10)
    return [
        at_most(
            "gpu memory in use after 100 registrations", "MB", device[-1:], device[settled : settled + 1], 1, _SLACK_MB
        ),
        at_most(
            "gpu server, resident after 100 registrations", "MB", host[-1:], host[settled : settled + 1], 1, _SLACK_MB
        ),
    ]


def _torch_has(gpu: Gpu) -> bool:
    """Whether torch can use this GPU; it cannot use the fake driver of the tests."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available() and gpu.name == torch.cuda.get_device_name(0)
