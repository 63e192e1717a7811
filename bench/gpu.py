"""Stores and retrieves of KV in a GPU's memory, beside one large copy between it and pinned memory.

The time is that from `submit_*` until `get_finished` reports it, as an engine sees it, through a server process. The
lower bound is one copy of pinned memory in each direction, or one in each direction at once, measured right before its
pair. The tensors are allocated with the driver alone; torch is needed for the matrix products and the decoding steps
that copies must not slow down.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq
from common import Peer, Scale, Serve, say
from device import PINNED, Gpu, Kind
from peers import decode_bytes
from report import Figure, at_least, at_most

from kvdepot.adapters import LMCacheMPWorkerAdapter, LoadStoreOp, RequestType, send_lmcache_request
from kvdepot.devices.cuda.driver import load
from kvdepot.errors import DeviceError, KVDepotError
from kvdepot.protocol import wire

__all__ = ["run", "tensor_bytes"]

Ids = npt.NDArray[np.intp]

_CHUNK_TOKENS = 256
_DEADLINE_S = 60.0
_SLACK_MB = 8.0
"""Memory is allocated in pieces; what 100 registrations leave behind must be less than a few of these."""


def _kinds(scale: Scale) -> list[Kind]:
    """Layouts by what is adjacent in a block: 64, 16 and 72 KiB of a layer, and 2 MiB of all layers together."""
    return [
        Kind("Llama-8B", scale.layers, (2, 16, 8, 128), 16, 0.85, 0.75, is_beside=True),
        Kind("Llama-70B TP 4", scale.sharded_layers, (2, 16, 2, 128), 16, 0.7, 0.6, is_beside=True),
        Kind("MLA", scale.mla_layers, (64, 576), 64, 0.85, 0.75),
        Kind("cross-layer", 1, (scale.layers, 2, 16, 8, 128), 16, 0.95, 0.85),
    ]


def _blocks(scale: Scale, kind: Kind) -> int:
    """Blocks of the engine: twice those of the longest prompt."""
    return 2 * max(scale.copy_tokens) // kind.block_tokens


def tensor_bytes(scale: Scale) -> int:
    """Most bytes that are allocated on the GPU at once: tensors, buffers of the lower bound, and the process
    that decodes beside them.
    """
    largest = max(kind.layers * _blocks(scale, kind) * kind.block_bytes for kind in _kinds(scale))
    return largest + 2 * (scale.peak_mib << 20) + decode_bytes(scale.peer_width)


def run(scale: Scale, notes: list[str]) -> Iterator[Figure]:
    """All figures of the first GPU, as they are measured; without a GPU none, and a line that says so.

    A layout that fails costs only its own figures: the others are measured, then RuntimeError is raised.
    """
    try:
        gpu = Gpu(load(), scale.peak_mib << 20)
    except DeviceError as exc:
        say(f"gpu: left out: {exc}")
        return
    context: zmq.Context[Any] = zmq.Context()
    failed = []
    with gpu.opened():
        _note(notes, f"gpu: {gpu.name}; a floor is one copy of {scale.peak_mib} MiB of pinned memory ({PINNED[0]})")
        yield from _peaks(scale, gpu)
        for kind in _kinds(scale):
            try:
                yield from _measure(scale, gpu, kind, context, notes)
            except (KVDepotError, RuntimeError, OSError) as exc:
                failed.append(f"{kind.name}: {exc}")
                say(f"gpu: {failed[-1]}")
        yield from _register_often(scale, gpu, context)
    context.term()
    if failed:
        raise RuntimeError("; ".join(failed))


def _peaks(scale: Scale, gpu: Gpu) -> Iterator[Figure]:
    """Memory that is registered, as the arena is, beside memory that the driver has allocated."""
    for what, directions in (("store", (True,)), ("retrieve", (False,)), ("both at once", (True, False))):
        speeds: dict[str, list[float]] = {pinned: [] for pinned in PINNED}
        for number in range(-1, scale.copy_runs):
            for pinned, values in speeds.items():
                speed = gpu.peak(*directions, pinned=pinned)
                if number >= 0:
                    values.append(speed)
        allocated, registered = speeds.values()
        yield at_least(f"gpu peak of {PINNED[1]}, {what}", "GB/s", registered, allocated, 0.95)


def _measure(scale: Scale, gpu: Gpu, kind: Kind, context: zmq.Context[Any], notes: list[str]) -> Iterator[Figure]:
    """All figures of one layout."""
    say(f"gpu: {kind.name}, filling the engine's KV")
    blocks = _blocks(scale, kind)
    with gpu.tensors(kind, blocks) as caches, _serving(gpu, context, scale.copy_arena_gib) as server:
        worker = LMCacheMPWorkerAdapter(server.url, context, kind.name, 1, 0, kind.block_tokens)
        try:
            worker.register_kv_caches(caches, [0] * len(caches))
            server.wait_populated(context)
            engine = _Engine(scale, gpu, kind, blocks, caches, worker)
            engine.wait_pinned()
            say(f"gpu: {kind.name}, measuring")
            yield from engine.copies(notes)
            yield from engine.both_ways()
            if kind.is_beside:
                yield from engine.one_chunk()
                if reason := gpu.refuses_torch(scale.peer_device):
                    _note(notes, f"gpu: matrix products and decoding steps beside {kind.name} are left out: {reason}")
                else:
                    yield from engine.slowdown(notes)
                    yield from engine.steps(notes)
        finally:
            worker.shutdown()


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
        self, scale: Scale, gpu: Gpu, kind: Kind, blocks: int, caches: dict[str, Any], worker: LMCacheMPWorkerAdapter
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

    def copies(self, notes: list[str]) -> list[Figure]:
        """Each direction by itself, with shuffled blocks."""
        speeds: dict[tuple[str, int], list[float]] = {}
        peaks: dict[tuple[str, str], list[float]] = {}
        for number in range(-1, self._scale.copy_runs):  # the first warms everything up
            for tokens in self._scale.copy_tokens:
                source, target = self._shuffled(tokens, tokens)
                prompt = self._prompt(tokens)
                for what, blocks in (("store", source), ("retrieve", target)):
                    of_kind = {pinned: self._gpu.peak(what == "store", pinned=pinned) for pinned in PINNED}
                    seconds = self._timed((what, prompt, blocks))
                    if number >= 0:
                        speeds.setdefault((what, tokens), []).append(self._size(blocks) / seconds / 1e9)
                        for pinned, peak in of_kind.items():
                            peaks.setdefault((what, pinned), []).append(peak)
                if number < 0:
                    self._compare(source, target)
                self._clear()
        names = dict(zip(self._scale.copy_tokens, ("2k", "8k"), strict=True))
        shares = ", ".join(
            f"{what} {names[tokens]} {np.median(values) / np.median(peaks[what, PINNED[1]]):.2f}"
            for (what, tokens), values in speeds.items()
        )
        pieces = f"{self._kind.name}, pieces of {self._kind.block_bytes >> 10} KiB"
        _note(notes, f"gpu: {pieces}: of the peak of {PINNED[1]}: {shares}")
        return [
            at_least(
                f"gpu {what} {name} tokens, {self._kind.name}", "GB/s", speeds[what, tokens], peaks[what, PINNED[0]],
                self._kind.bar,
            )
            for what in ("store", "retrieve")
            for tokens, name in names.items()
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
                floor = self._gpu.peak(True, False)
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
        """Matrix products per second in another process, alternately with and without stores or retrieves."""
        say("gpu: matrix products beside stores")
        tokens = max(self._scale.copy_tokens)
        source, target = self._shuffled(tokens, tokens)
        seconds = self._scale.rate_seconds
        rates: dict[str, list[float]] = {"nothing": [], "stores": [], "retrieves": []}
        moved: dict[str, list[float]] = {"stores": [], "retrieves": []}
        products = self._peer("matmul")
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
            _note(
                notes,
                f"gpu: beside {beside} of {np.median(speeds):.1f} GB/s, {self._kind.name}, {share:.3f} of the matrix "
                "products a second",
            )
        return [
            at_least(
                f"gpu matrix products while {beside} run, {self._kind.name}", "1/s", rates[beside], rates["nothing"],
                0.95,
            )
            for beside in moved
        ]  # fmt: skip

    def steps(self, notes: list[str]) -> list[Figure]:
        """The time of a decoding step in another process, alternately alone and beside retrieves of 10 GB."""
        say("gpu: decoding steps beside retrieves")
        tokens = max(self._scale.copy_tokens)
        source, target = self._shuffled(tokens, tokens)
        prompt = self._prompt(tokens)
        self._timed(("store", prompt, source))
        alone: list[float] = []
        beside: list[float] = []
        load_s = []
        decoding = self._peer("decode")
        try:
            decoding.hear()
            for _ in range(2 * self._scale.rate_runs):
                decoding.tell("")
                begun, size = time.perf_counter(), 0
                while size < self._scale.load_bytes:
                    self._timed(("retrieve", prompt, target))
                    size += self._size(target)
                load_s.append(time.perf_counter() - begun)
                decoding.tell("")
                beside += decoding.hear()
                decoding.tell("")
                time.sleep(load_s[-1])
                decoding.tell("")
                alone += decoding.hear()
        finally:
            decoding.close()
        self._clear()
        gb = self._scale.load_bytes / 1e9
        _note(
            notes,
            f"gpu: {gb:g} GB of {self._kind.name} took {np.median(load_s):.3f} s beside decoding; {len(beside)} steps "
            f"beside it, {len(alone)} alone, longest {max(beside) * 1e3:.2f} and {max(alone) * 1e3:.2f} ms",
        )
        return [
            at_most(
                f"gpu decoding step beside a 10 GB load, {part}, {self._kind.name}", "ms",
                [float(np.percentile(beside, percent)) * 1e3], [float(np.percentile(alone, percent)) * 1e3], 1.1,
            )
            for part, percent in (("p50", 50), ("p99", 99))
        ]  # fmt: skip

    def _peer(self, kind: str) -> Peer:
        return Peer(kind, self._scale.peer_device, str(self._scale.peer_width))

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


def _note(notes: list[str], text: str) -> None:
    """Print a line at once, too, so that a time limit does not cost it."""
    notes.append(text)
    say(text)
