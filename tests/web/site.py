"""A small site that serves the page with a status chosen by the test; and realistic statuses."""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from kvdepot.metrics import BOUNDS_S, Event, Latency
from kvdepot.protocol.counters import losses
from kvdepot.protocol.health import judge
from kvdepot.protocol.leases import NORMAL
from kvdepot.protocol.quotas import Quota
from kvdepot.protocol.status import Histogram, TokenCounts, Usage
from kvdepot.status import Engine, NamespaceStatus, Saved, Status, TenantStatus, TierStatus
from kvdepot.web.app import StatusNow
from kvdepot.web.guard import HEADERS
from kvdepot.web.history import measure

PAGE = Path(__file__).parents[2] / "src/kvdepot/web/page"
CSP = dict(HEADERS)[b"content-security-policy"].decode()
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
GIB = 2**30


class Site:
    """Serves the page with a real server's security headers, and the current `status`, `history` and leases."""

    def __init__(self, port: int = 0) -> None:
        self.status: Status = example_status()
        self.history: dict[str, Any] = {"times_s": [], "series": {}}
        self.ticks = True  # whether time passes, and there is a new status again and again
        self.token = ""  # asked for when set
        self.trouble = ""  # why there is no status
        self.missing = ""  # a folder that is not there
        self.asked: list[str] = []
        self.events = 0  # statuses sent, to all pages
        self.leases: list[dict[str, Any]] = []
        self.changes: list[tuple[str, Any]] = []  # paths and bodies of POST
        self.answers: dict[str, Any] = {}  # to POST, by path
        self.needed = ""  # the token that POST needs
        self._began = time.time()
        site = self

        class Requests(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with contextlib.suppress(ConnectionError):  # a page that has gone
                    site._answer(self)

            def do_POST(self) -> None:
                site._change(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Requests)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _now(self, turn: int) -> StatusNow:
        since = time.time() - self._began if self.ticks else 0.0
        facts = msgspec.structs.asdict(self.status)
        facts |= {"wall_s": self.status.wall_s + since, "uptime_s": self.status.uptime_s + since}
        health = judge(self.status)
        point = measure(None, self.status, facts["wall_s"])
        flag = "--kv-transfer-config '{}'"
        return StatusNow(
            **facts, turn=turn, point=point, trouble="", health=health, losses=losses(self.status),
            engine_flag=flag,
        )  # fmt: skip

    def _answer_status(self) -> tuple[HTTPStatus, bytes]:
        self.events += 1
        if self.trouble:
            problem = {"code": "unavailable", "message": self.trouble}
            return HTTPStatus.SERVICE_UNAVAILABLE, msgspec.json.encode(problem)
        return HTTPStatus.OK, msgspec.json.encode(self._now(self.events))

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        self.asked.append(path)
        status, kind, body = HTTPStatus.OK, "application/json", b""
        if path.startswith("/v1/"):
            if self.token and request.headers["Authorization"] != f"Bearer {self.token}":
                status, body = HTTPStatus.UNAUTHORIZED, b'{"code": "not_allowed", "message": "no token"}'
            elif path == "/v1/status":
                status, body = self._answer_status()
            else:
                values = {"/v1/history": self.history, "/v1/leases": self.leases}
                body = msgspec.json.encode(values[path])
        else:
            file = PAGE / (path[1:] or "index.html")
            if file.is_file() and not (self.missing and path.startswith(self.missing)):
                kind, body = _TYPES[file.suffix], file.read_bytes()
            else:
                status = HTTPStatus.NOT_FOUND
        self._send(request, status, kind, body)

    def _change(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        status, answer = HTTPStatus.BAD_REQUEST, {"code": "bad_request", "message": "there is no such thing"}
        if self.needed and request.headers["Authorization"] != f"Bearer {self.needed}":
            status, answer = HTTPStatus.UNAUTHORIZED, {"code": "unauthorized", "message": "no token"}
        else:
            self.changes.append((request.path, msgspec.json.decode(body)))
            if request.path in self.answers:
                status, answer = HTTPStatus.OK, self.answers[request.path]
        self._send(request, status, "application/json", msgspec.json.encode(answer))

    def _send(self, request: BaseHTTPRequestHandler, status: HTTPStatus, kind: str, body: bytes) -> None:
        self._head(request, status, f"{kind}; charset=utf-8")
        request.wfile.write(body)

    def _head(self, request: BaseHTTPRequestHandler, status: HTTPStatus, kind: str) -> None:
        request.send_response(status)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Security-Policy", CSP)
        request.end_headers()


def empty_status(**changes: Any) -> Status:
    """A server that has just started."""
    return Status(
        version="0.1.0", boot="00", wall_s=time.time(), uptime_s=1.0, chunk_size_tokens=256,
        capacity_bytes=64 * GIB, used_bytes=0, chunks=0, reserved_shards=0, holds=0, evicted_chunks=0,
        record_slots=4096, record_slots_used=0, unrecorded_shards=0, operations=0, clients=0, sessions=0, instances=0,
        **changes,
    )  # fmt: skip


def a_lease(name: str, size: int, ends_s: float | None) -> dict[str, Any]:
    """A lease of kind retain that holds `size` bytes, as `GET /v1/leases` lists it."""
    return {"name": name, "tenant": "", "kind": "retain", "model": "toy", "priority": NORMAL, "chunks": 8,
            "bytes": size, "ends_s": ends_s}  # fmt: skip


def example_leases() -> list[dict[str, Any]]:
    """One without an end, and one that ends."""
    return [a_lease("system-prompt", int(1.2 * GIB), None), a_lease("handbook", int(4.7 * GIB), 5_400.0)]


def example_status(wall_s: float = 0.0) -> Status:
    """A server with two engines and two tiers after some days of work."""
    now = wall_s or time.time()
    return Status(
        version="0.1.0", boot="a1", pid=4711, wall_s=now, uptime_s=3 * 86400 + 4 * 3600 + 60, chunk_size_tokens=256,
        capacity_bytes=256 * GIB, used_bytes=int(241.3 * GIB), chunks=31_482, reserved_shards=2, holds=61,
        evicted_chunks=182_944, record_slots=65536, record_slots_used=31_482, unrecorded_shards=0, operations=3,
        clients=5, sessions=9, instances=3, engine_count=5, stored_bytes=1_680 * GIB, retrieved_bytes=5_911 * GIB,
        saved=Saved(tokens=198_734_336, prefill_s=41_220.0),
        tokens=TokenCounts(361_017_856, 251_990_463, 198_734_336),
        usage=[Usage("", 349_000_000, 246_000_000, 195_000_000), Usage("research", 12_017_856, 5_990_463, 3_734_336)],
        host="gpu-node-7", http="127.0.0.1:7077", cached_tokens=8_059_392, holds_s=2_562.0, leased_bytes=int(5.9 * GIB),
        histograms=[
            Histogram("hit_tokens", "tokens", [256.0, 1024.0, 4096.0, 16384.0], [4_000, 21_000, 31_000, 9_000, 200],
                      251_990_463.0),
            Histogram("eviction_age_seconds", "s", [60.0, 600.0, 3600.0, 86_400.0], [0, 2_944, 90_000, 90_000, 0],
                      4.1e9),
            Histogram("eviction_idle_seconds", "s", [60.0, 300.0, 1800.0, 3600.0, 86_400.0],
                      [100, 2_944, 60_000, 67_000, 52_900, 0], 6.2e8),
            Histogram("reuse_after_seconds", "s", [1.0, 60.0, 600.0, 3600.0],
                      [9_000, 300_000, 200_000, 9_000, 90], 9.1e7),
            Histogram("saved_seconds", "s", [0.1, 0.5, 1.0, 5.0], [3_000, 40_000, 19_000, 2_200, 10], 41_220.0),
        ],
        latencies=[
            _latency("EndSession", 88_000, 0.0001), _latency("Lookup", 91_422, 0.0004, errors=2),
            _latency("Retrieve", 64_210, 0.012, errors=1), _latency("Store", 51_877, 0.019),
        ],
        namespaces=[
            NamespaceStatus("", "meta-llama/Llama-3.3-70B", 2, 16, 19_244, int(150.4 * GIB), 2, 812_400, 611_300,
                            256, [], 208_000_000, 156_000_000, 131_000_000),
            NamespaceStatus("", "Qwen/Qwen3-32B", 1, 16, 9_610, int(75.1 * GIB), 1, 505_700, 322_010,
                            256, [], 129_000_000, 82_000_000, 64_000_000),
            NamespaceStatus("research", "mistralai/Mistral-Small-24B", 1, 8, 2_628, int(15.8 * GIB), 0, 92_126, 51_406,
                            256, [], 24_017_856, 13_000_000, 3_734_336),
        ],
        engines=[
            Engine("9f31c2aa", 273_600.0, 0.2, ["meta-llama/Llama-3.3-70B"], [], "", 6, 48, 0,
                   "9f31c2aa", "gpu-node-7", 5101),
            Engine("4b7d0e15", 273_598.0, 0.1, ["meta-llama/Llama-3.3-70B"], [0], "", 0, 0, 2,
                   "9f31c2aa", "gpu-node-7", 5102),
            Engine("c80a9d42", 273_598.0, 0.1, ["meta-llama/Llama-3.3-70B"], [1], "", 0, 0, 1,
                   "9f31c2aa", "gpu-node-7", 5103),
            Engine("17e5f6b9", 18_200.0, 0.8, ["Qwen/Qwen3-32B"], [], "", 3, 13, 0,
                   "17e5f6b9", "gpu-node-7", 5104),
            Engine("e2c4418d", 18_199.0, 640.0, ["Qwen/Qwen3-32B"], [0], "", 0, 0, 0,
                   "17e5f6b9", "gpu-node-7", 5105),
        ],
        lease_count=2,
        tenants=[
            TenantStatus("", int(225.5 * GIB), 28_854, Quota(), 10_012, 0),
            TenantStatus("research", int(15.8 * GIB), 2_628, Quota(8 * GIB, 16 * GIB, 2.0, 86_400), 3_411, 12),
        ],
        tiers=[
            TierStatus("disk", "through", "up", 201_882, int(1.43 * 1024 * GIB), 2048 * GIB, 3 * 2**20, 2,
                       {"saved_chunks": 214_001, "loaded_chunks": 9_120, "dropped_chunks": 311, "late": 4}, "", None, 3,
                       [Histogram("load_seconds", "s", [0.001, 0.01, 0.1], [20, 9_000, 100, 0], 41.0),
                        Histogram("save_seconds", "s", [0.001, 0.01, 0.1], [0, 200_000, 14_001, 0], 1_200.0),
                        Histogram("load_bytes_per_second", "bytes/s", [1e8, 1e9, 1e10], [10, 1_000, 8_110, 0], 1e13)]),
            TierStatus("s3", "on_evict", "up", 640_113, int(4.8 * 1024 * GIB), None, 0, 0,
                       {"saved_chunks": 181_000, "loaded_chunks": 2_311, "failures": 12, "breaker_openings": 1},
                       "503 SlowDown", 84.0),
        ],
        counters={
            "lookups": 91_422, "lookup_chunks": 1_410_226, "hit_chunks": 984_716, "tier_hit_chunks": 11_431,
            "stored_chunks": 214_426, "evicted_chunks": 182_944, "dropped_chunks": 12, "expired_chunks": 840,
            "clients_died": 1,
        },
        events=[
            Event(now - 84_000, "clients_died", "engine 71c0e0d1 died; what it held is free"),
            Event(now - 40_110, "tier", "s3: circuit breaker open"),
            Event(now - 40_050, "tier", "s3 is up"),
            Event(now - 18_200, "engine", "engine 17e5f6b9 came: Qwen/Qwen3-32B"),
            Event(now - 3_320, "dropped_chunks", "chunks not stored, for want of room: 12"),
            Event(now - 95, "pin", "handbook is kept: 4.7 GiB for 2 h"),
        ],
    )  # fmt: skip


def _latency(request: str, count: int, middle_s: float, errors: int = 0) -> Latency:
    buckets = [0] * (len(BOUNDS_S) + 1)
    weights = [math.exp(-((math.log(bound / middle_s)) ** 2) / 0.9) for bound in BOUNDS_S]
    for i, weight in enumerate(weights):
        buckets[i] = int(count * weight / sum(weights))
    return Latency(request, sum(buckets), errors, sum(buckets) * middle_s * 1.2, buckets)


def example_history(now: float, seconds: int = 900) -> dict[str, Any]:
    """The last quarter of an hour of `example_status`, as in the server's history."""
    chance = random.Random(6)
    wave = [math.sin(i / 90) + 0.4 * math.sin(i / 23) for i in range(seconds)]
    last = example_status(now)

    def noisy(middle: float, swing: float, noise: float) -> list[float]:
        return [max(middle + swing * w + chance.gauss(0, noise), 0.0) for w in wave]

    def rising(end: float, rates: list[float]) -> list[float]:
        """A counter that ends at `end` and rises at these rates per second."""
        return list(accumulate(rates, initial=end - sum(rates)))[1:]

    asked = noisy(5_000, 700, 200)
    lookups, retrieves = noisy(0.00042, 0.0001, 0.00003), noisy(0.013, 0.003, 0.0008)
    return {
        "times_s": [now - seconds + 1 + i for i in range(seconds)],
        "series": {
            "boot": [float(int(last.boot, 16))] * seconds,
            "asked_tokens": rising(last.tokens.asked, asked),
            "found_tokens": rising(last.tokens.found, [0.76 * each for each in asked]),
            "reused_tokens": rising(last.tokens.reused, [0.613 * each for each in asked]),
            "saved_requests": rising(64_210, [0.4] * seconds),
            "saved_prefill_seconds": rising(last.saved.prefill_s, noisy(0.26, 0.08, 0.01)),
            "stored_bytes": rising(last.stored_bytes, noisy(1.9e9, 0.8e9, 0.12e9)),
            "retrieved_bytes": rising(last.retrieved_bytes, noisy(6.3e9, 2.2e9, 0.3e9)),
            "memory_used_bytes": [min(232 + i / 85, 241.3) * GIB for i in range(seconds)],
            "tier_bytes.disk": [(1459 + i / 160) * GIB for i in range(seconds)],
            "tier_bytes.s3": [(4912 + i / 300) * GIB for i in range(seconds)],
            "evicted_chunks": rising(182_944, noisy(21, 11, 2)),
            "dropped_chunks": rising(12, [2.0 if 300 < i < 306 else 0.0 for i in range(seconds)]),
            "expired_chunks": [840.0] * seconds,
            "lookup_p50_s": lookups,
            "lookup_p99_s": [v * 4.2 for v in lookups],
            "retrieve_p50_s": retrieves,
            "retrieve_p99_s": [v * 3.1 for v in retrieves],
        },
    }
