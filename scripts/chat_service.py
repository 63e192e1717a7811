"""The figures of an ordinary chat service, for pictures in the documentation: a model, not a measurement.

One host serves two models with vLLM; its depot has 256 GiB of memory and a disk tier of 2 TiB. `statuses` gives what
such a server would report, second by second.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvdepot import __version__
from kvdepot.protocol.metrics import BOUNDS_S, Event, Latency
from kvdepot.protocol.status import Engine, Histogram, NamespaceStatus, Saved, Status, TierStatus, TokenCounts, Usage

GIB = 2**30
HOST = "gpu-node-7"
TIER = "disk:///var/cache/kvdepot"
CHUNK_TOKENS = 256


class _Model(NamedTuple):
    """part: of the tokens asked for. tokens_s: prefill speed of its engine."""

    name: str
    part: float
    token_bytes: int
    tokens_s: float


MODELS = (
    _Model("meta-llama/Llama-3.1-8B-Instruct", 0.62, 128 << 10, 11_000.0),
    _Model("Qwen/Qwen3-14B", 0.38, 160 << 10, 6_500.0),
)
_TOKEN_BYTES = sum(model.part * model.token_bytes for model in MODELS)
_TOKENS_S = 1 / sum(model.part / model.tokens_s for model in MODELS)

_MEMORY, _DISK = 256 * GIB, 2048 * GIB
_ASKED_S, _PROMPT = 4_800.0, 1_600.0
"""Prompt tokens per second that engines ask for, and per request."""
_REUSED, _FOUND = 0.706, 0.712
_SAVING = 0.58
"""The share of requests that load anything."""
_BEFORE_S = 3 * 86_400 + 5 * 3_600
"""Uptime at the first status."""
_IDLE_S = 1_380.0
"""How long memory holds a chunk that nobody uses."""


class _Sums:
    """What grows: of the time since the server's start."""

    def __init__(self, seconds: float) -> None:
        self.asked = _ASKED_S * seconds
        self.reused, self.found = (share * self.asked for share in (_REUSED, _FOUND))

    def add(self, asked: float, reused: float) -> None:
        self.asked += asked
        self.reused += asked * reused
        self.found += asked * (reused + _FOUND - _REUSED)


def statuses(end_s: float, seconds: int) -> Iterator[Status]:
    """One status per second, the last one at `end_s` (seconds since 1970)."""
    chance = random.Random(7)
    sums = _Sums(_BEFORE_S)
    for second in range(seconds):
        wave = math.sin(second / 540) + 0.35 * math.sin(second / 131)
        sums.add(
            max(_ASKED_S * (1 + 0.16 * wave + chance.gauss(0, 0.08)), 0.0),
            min(_REUSED + 0.02 * math.sin(second / 700 + 1) + chance.gauss(0, 0.012), 0.97),
        )
        yield _status(sums, end_s - seconds + 1 + second, _BEFORE_S + second)


def _status(sums: _Sums, wall_s: float, uptime_s: float) -> Status:
    requests = int(sums.asked / _PROMPT)
    saved_s = sums.reused / _TOKENS_S
    stored = int((sums.asked - sums.reused) * _TOKEN_BYTES)
    used = int(_MEMORY * (0.9985 + 0.0008 * math.sin(wall_s / 17)))
    chunk_bytes = _TOKEN_BYTES * CHUNK_TOKENS
    tokens = int(sums.asked), int(sums.found), int(sums.reused)
    return Status(
        version=__version__, boot="5c1f", pid=2_217, wall_s=wall_s, uptime_s=uptime_s, http="127.0.0.1:7077", host=HOST,
        chunk_size_tokens=CHUNK_TOKENS, capacity_bytes=_MEMORY, used_bytes=used, chunks=int(used / chunk_bytes),
        cached_tokens=int(used / _TOKEN_BYTES), reserved_shards=4, holds=15, operations=3, clients=6, sessions=11,
        instances=2, evicted_chunks=int((stored - used) / chunk_bytes), record_slots=1 << 16,
        record_slots_used=int(used / chunk_bytes), unrecorded_shards=0, engine_count=4, namespace_count=2,
        stored_bytes=stored, retrieved_bytes=int(sums.reused * _TOKEN_BYTES), holds_s=_IDLE_S,
        saved=Saved(tokens[2], saved_s), tokens=TokenCounts(*tokens),
        usage=[Usage("", *tokens)],
        latencies=[
            _latency("EndSession", requests, 0.00006), _latency("Lookup", requests, 0.0003),
            _latency("Retrieve", int(_SAVING * requests), 0.016), _latency("Store", requests, 0.011),
        ],
        histograms=_histograms(requests, sums, saved_s), counters=_counters(requests, sums),
        namespaces=[_namespace(model, used, tokens) for model in MODELS], engines=_engines(uptime_s),
        tiers=[_disk(stored, int(sums.found * 0.11 / CHUNK_TOKENS))], lease_count=1,
        leased_bytes=8 * CHUNK_TOKENS * MODELS[0].token_bytes, events=_events(wall_s - uptime_s),
    )  # fmt: skip


def _counts(total: int, middle: float, spread: float, bounds: Sequence[float] = BOUNDS_S) -> list[int]:
    """How many of `total` values about `middle` are in which bucket: a log-normal distribution."""
    below = [0.5 * (1 + math.erf(math.log(bound / middle) / (spread * math.sqrt(2)))) for bound in bounds]
    return [int(total * (high - low)) for low, high in zip([0.0, *below], [*below, 1.0], strict=True)]


def _latency(request: str, count: int, middle_s: float) -> Latency:
    buckets = _counts(count, middle_s, 0.5)
    return Latency(request, sum(buckets), 0, sum(buckets) * middle_s * 1.13, buckets)


def _histogram(name: str, unit: str, total: int, middle: float, spread: float, bounds: Sequence[float]) -> Histogram:
    return Histogram(name, unit, list(bounds), _counts(total, middle, spread, bounds), total * middle * 1.2)


def _histograms(requests: int, sums: _Sums, saved_s: float) -> list[Histogram]:
    saving, seconds = int(_SAVING * requests), (60.0, 300.0, 1_800.0, 3_600.0, 14_400.0, 86_400.0)
    saved = Histogram("saved_seconds", "s", list(BOUNDS_S), _counts(saving, 0.24, 0.7), saved_s)
    return [
        _histogram("hit_tokens", "tokens", saving, 1_800.0, 0.8, (256.0, 1_024.0, 4_096.0, 16_384.0)),
        _histogram("eviction_age_seconds", "s", int(sums.asked / 60_000), 2_900.0, 0.6, seconds),
        _histogram("eviction_idle_seconds", "s", int(sums.asked / 60_000), _IDLE_S, 0.5, seconds),
        _histogram("reuse_after_seconds", "s", requests, 75.0, 1.2, seconds),
        saved,
    ]


def _counters(requests: int, sums: _Sums) -> dict[str, int]:
    chunks = int(sums.asked / CHUNK_TOKENS)
    return {
        "lookups": requests, "lookup_chunks": chunks, "hit_chunks": int(sums.found / CHUNK_TOKENS),
        "tier_hit_chunks": int(sums.found * 0.11 / CHUNK_TOKENS), "stored_chunks": int(chunks * (1 - _REUSED)),
        "retrieved_chunks": int(sums.reused / CHUNK_TOKENS),
    }  # fmt: skip


def _namespace(model: _Model, used: int, tokens: tuple[int, int, int]) -> NamespaceStatus:
    held = int(used * model.part * model.token_bytes / _TOKEN_BYTES)
    asked, found, reused = (int(count * model.part) for count in tokens)
    return NamespaceStatus(
        "", model.name, 1, CHUNK_TOKENS // 16, held // (model.token_bytes * CHUNK_TOKENS), held, 1,
        asked // CHUNK_TOKENS, found // CHUNK_TOKENS, CHUNK_TOKENS, [], asked, found, reused,
    )  # fmt: skip


def _engines(uptime_s: float) -> list[Engine]:
    llama, qwen = MODELS[0].name, MODELS[1].name
    return [
        Engine("9f31c2aa", uptime_s - 60, 0.1, [llama], [], "", 7, 138, 0),
        Engine("4b7d0e15", uptime_s - 61, 0.2, [llama], [0], "", 0, 0, 2),
        Engine("17e5f6b9", uptime_s - 95, 0.3, [qwen], [], "", 4, 74, 0),
        Engine("e2c4418d", uptime_s - 96, 0.2, [qwen], [0], "", 0, 0, 1),
    ]


def _disk(stored: int, loaded: int) -> TierStatus:
    chunk_bytes = _TOKEN_BYTES * CHUNK_TOKENS
    saved = int((stored - _MEMORY) / chunk_bytes)
    held = int(1_742.6 * GIB)
    speeds = (1e8, 5e8, 1e9, 2e9, 4e9, 8e9)
    calls = [
        Histogram("load_seconds", "s", list(BOUNDS_S), _counts(loaded, 0.017, 0.45), loaded * 0.019),
        Histogram("save_seconds", "s", list(BOUNDS_S), _counts(saved, 0.029, 0.4), saved * 0.032),
        Histogram(
            "load_bytes_per_second", "bytes/s", list(speeds), _counts(loaded, 2.4e9, 0.4, speeds), loaded * 2.4e9
        ),
        Histogram("save_bytes_per_second", "bytes/s", list(speeds), _counts(saved, 1.3e9, 0.4, speeds), saved * 1.3e9),
    ]
    counters = {"saved_chunks": saved, "loaded_chunks": loaded}
    return TierStatus(
        TIER, "on_evict", "up", int(held / chunk_bytes), held, _DISK, 0, 1, counters, loads=1, histograms=calls,
        free_bytes=900 * GIB,
    )  # fmt: skip


def _events(began: float) -> list[Event]:
    return [
        Event(began, "start", f"kvdepot {__version__} started"),
        Event(began + 60, "engine", f"engine 9f31c2aa connected: {MODELS[0].name}"),
        Event(began + 95, "engine", f"engine 17e5f6b9 connected: {MODELS[1].name}"),
    ]
