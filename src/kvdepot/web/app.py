"""The endpoints of the HTTP API.

Requests that read are answered from poll.py's last result, except that for leases (`CachedLeases`); requests that
change something ask the server, on threads, a few at a time.
"""

from __future__ import annotations

import json
import os
import shlex
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from kvdepot.client import admin
from kvdepot.client.socket import Client
from kvdepot.client.transfer import LeaseTerms, PromptChunks
from kvdepot.config import default_url
from kvdepot.errors import BadRequest, Busy, TierError, Unavailable
from kvdepot.protocol import wire
from kvdepot.protocol.counters import losses
from kvdepot.protocol.curve import is_loopback
from kvdepot.protocol.figures import figures
from kvdepot.protocol.health import RECENT_S, Health, judge
from kvdepot.protocol.keys import salt_tag
from kvdepot.protocol.leases import MOST_PRIORITY, NORMAL, LeaseStatus
from kvdepot.protocol.metrics import BOUNDS_S
from kvdepot.protocol.quotas import GivenQuota, shown_tag
from kvdepot.protocol.status import DISTRIBUTIONS, Loss, Status
from kvdepot.web.child import Order
from kvdepot.web.dispatch import Dispatch, Encoded, get, post
from kvdepot.web.guard import App, Guard, Scope
from kvdepot.web.history import TimeSeries
from kvdepot.web.poll import Poll
from kvdepot.web.prometheus import StatusCollector

_MOST_CHANGES = 4
"""Changes at a time; each occupies a thread until the server has answered."""
_FRESH_S = 2.0
_MOST_WAITING = 8
"""HTTP requests that wait for an answer; each occupies a thread."""
_MEANINGS = {each.path: each.meaning for each in figures(Status) if each.kind != "counter"} | DISTRIBUTIONS


class StatusNow(Status, kw_only=True):
    """The server's status, and what the page needs beside it.

    turn: number of the poll. point: the latest point of `/v1/history`. trouble: the error of `/healthz`; empty if
    healthy. health: the same and all other problems, with what to do. losses: evictions, failures and refusals, as
    text. meanings: of the status's gauges, by field, and of its histograms, by name. bounds_s: upper bounds of the
    buckets of `latencies`. engine_flag: the option of vLLM that connects an engine of this host to this server.
    """

    turn: int
    point: dict[str, float]
    trouble: str
    health: Health
    losses: list[Loss]
    meanings: dict[str, str] = msgspec.field(default_factory=lambda: _MEANINGS)
    bounds_s: tuple[float, ...] = BOUNDS_S
    engine_flag: str = ""


class LiveStatus:
    """The status of the latest turn, encoded once for all readers, on the event loop."""

    def __init__(self, poll: Poll) -> None:
        self._poll = poll
        self._flag = engine_flag(poll.client.server_url)
        self._encoded = -1, b""  # the number of a turn, and its status as JSON

    def encoded(self) -> bytes:
        """The latest status as JSON. Raises Unavailable if it is too old."""
        number = self._poll.turn.number  # first: a status that is newer than its number is sent again with the next
        polled = self._poll.latest()
        if self._encoded[0] != number:
            status, trouble = polled.status, self._poll.trouble()
            dropped = self._poll.history.increase("dropped_chunks", RECENT_S)
            now = StatusNow(
                **msgspec.structs.asdict(status), turn=number, point=self._poll.history.latest(), trouble=trouble,
                health=judge(status, trouble, dropped), losses=losses(status), engine_flag=self._flag,
            )  # fmt: skip
            self._encoded = number, msgspec.json.encode(now)
        return self._encoded[1]


def engine_flag(url: str) -> str:
    """The option of vLLM that connects an engine to the server at `url`; the default one needs no url."""
    connector: dict[str, object] = {"kv_connector": "KVDepotConnector", "kv_role": "kv_both"}
    if url != default_url():
        connector["kv_connector_extra_config"] = {"kvdepot.url": url}
    return f"--kv-transfer-config {shlex.quote(json.dumps(connector, separators=(',', ':')))}"


class CachedLeases:
    """The server's latest list of leases; unlike the status, it makes this on request.

    Invariant: however many ask, the server gets one request at a time, and the next only `_FRESH_S` after an answer.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._waiting = threading.BoundedSemaphore(_MOST_WAITING)
        self._asking = threading.Lock()
        self._asked = 0.0
        self._leases: list[LeaseStatus] = []

    def get(self) -> list[LeaseStatus]:
        if not self._waiting.acquire(blocking=False):
            raise Busy(f"{_MOST_WAITING} requests for this list are waiting: retry later")
        try:
            with self._asking:
                if not self._asked or time.monotonic() - self._asked >= _FRESH_S:
                    asked, self._leases = time.monotonic(), admin.leases(self._client)
                    self._asked = asked
                return self._leases
        finally:
            self._waiting.release()


@dataclass(frozen=True, slots=True)
class ApiState:
    """The parts that endpoints use."""

    poll: Poll
    live: LiveStatus
    registry: CollectorRegistry
    leases: CachedLeases
    changes: threading.BoundedSemaphore = field(default_factory=lambda: threading.BoundedSemaphore(_MOST_CHANGES))


class Well(msgspec.Struct, frozen=True):
    """The server answers, and its loop lag is within bounds."""

    status: str
    lag_s: float


class ChunkCount(msgspec.Struct, frozen=True):
    """Chunks of the prompt's beginning that are in memory, or leased, so far; and chunks of the prompt."""

    chunks: int
    of_chunks: int


class PromptBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt, as either token ids or chunk hashes in hex, and its model, by name or a unique prefix."""

    tokens: Annotated[list[Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]], Meta(max_length=1 << 20)] = []
    hashes: Annotated[list[Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]], Meta(max_length=wire.MAX_CHUNKS)] = []
    model: Annotated[str, Meta(max_length=wire.MAX_REQUEST_ID)] = ""
    salt: Annotated[str, Meta(max_length=wire.MAX_REQUEST_ID)] = ""


class LeaseBody(PromptBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt, and a lease of its chunks: `ttl_s` 0: no end; `drops`: remove its chunks when it ends.

    `retain` and `prefetch` load the chunks from the tiers and keep them in memory; `expire` keeps nothing, and removes
    them when it ends. If leases exceed the tenant's budget, those of the lowest priority end first.
    """

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    ttl_s: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    kind: Literal["retain", "prefetch", "expire"] = "retain"
    priority: Annotated[int, Meta(ge=0, le=MOST_PRIORITY)] = NORMAL
    drops: bool = False


class ReleaseBody(PromptBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Either the name of a lease, whose chunks stay unless `drops`, or a prompt, whose first `keep` chunks stay."""

    name: Annotated[str, Meta(max_length=256)] = ""
    drops: bool = True
    keep: Annotated[int, Meta(ge=0, le=wire.MAX_CHUNKS)] = 0


class Released(msgspec.Struct, frozen=True):
    """The lease that was ended, or how many chunks of the prompt were removed."""

    name: str = ""
    removed_chunks: int | None = None


class QuotaBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tenant, or its requests with the cache salt `salt`, and the quota until the server ends; without one, it has
    none. See `tenants` of the status.
    """

    tenant: Annotated[str, Meta(max_length=64)] = ""
    salt: Annotated[str, Meta(max_length=wire.MAX_REQUEST_ID)] = ""
    quota: GivenQuota | None = None


class ForgetBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The chunks to forget: of models whose name begins with `model`, of requests with `salt`, of both, or all."""

    model: Annotated[str, Meta(max_length=wire.MAX_REQUEST_ID)] = ""
    salt: Annotated[str, Meta(max_length=wire.MAX_REQUEST_ID)] = ""
    all: bool = False

    def check(self) -> None:
        """Raises BadRequest if it names nothing, or too much."""
        if self.all and (self.model or self.salt):
            raise BadRequest("give either `all`, or `model` and `salt`")
        if not (self.model or self.salt or self.all):
            raise BadRequest("nothing to forget: give `model`, `salt` or `all`")


# -- reading


@get("/healthz")
async def healthz(state: ApiState) -> Well:
    """Health: whether the server answers, with its loop lag within bounds."""
    if trouble := state.poll.trouble():
        raise Unavailable(trouble)
    return Well("ok", state.poll.latest().lag_s)


@get("/readyz")
async def readyz(state: ApiState) -> Well:
    """Readiness: whether the server has answered recently."""
    return Well("ok", state.poll.latest().lag_s)


@get("/metrics")
async def metrics(state: ApiState, scope: Scope) -> Encoded:
    """Metrics for Prometheus."""
    accepted = b",".join(value for name, value in scope["headers"] if name == b"accept")
    encode, media_type = choose_encoder(accepted.decode("latin-1"))
    return Encoded(encode(state.registry), media_type)


@get("/v1/status")
async def status(state: ApiState) -> Encoded:
    """The server's latest status, at most a few seconds old."""
    return Encoded(state.live.encoded())


@get("/v1/history")
async def history(state: ApiState) -> TimeSeries:
    """Time series for charts: a point per second, and older ones every ten seconds."""
    return state.poll.history.series()


@get("/v1/leases")
def leases(state: ApiState) -> list[LeaseStatus]:
    """Leases: what they hold and until when; at most two seconds old."""
    return state.leases.get()


# -- changing


@contextmanager
def _change(state: ApiState) -> Iterator[None]:
    """Limit the number of changes at a time. Raises Busy."""
    if not state.changes.acquire(blocking=False):
        raise Busy(f"{_MOST_CHANGES} changes are in progress: wait until one has finished")
    try:
        yield
    finally:
        state.changes.release()


def _prompt(poll: Poll, data: PromptBody) -> PromptChunks:
    if bool(data.tokens) == bool(data.hashes):
        raise BadRequest("give either `tokens` or `hashes`")
    hashes = b"".join(map(bytes.fromhex, data.hashes))
    return admin.make_prompt(poll.client, data.tokens, hashes, data.model, data.salt)


@post("/v1/warm")
def warm(state: ApiState, data: PromptBody) -> ChunkCount:
    """Load a prompt's chunks from the tiers into memory."""
    with _change(state):
        prompt = _prompt(state.poll, data)
        return ChunkCount(admin.warm(state.poll.client, prompt), len(prompt))


@post("/v1/lease")
def lease(state: ApiState, data: LeaseBody) -> ChunkCount:
    """Begin a lease of a prompt's chunks, in place of one of the same name."""
    if data.kind == "expire" and not data.ttl_s:
        raise BadRequest("a lease of kind `expire` needs `ttl_s`, after which its chunks are removed")
    with _change(state):
        prompt = _prompt(state.poll, data)
        terms = LeaseTerms(data.kind, data.ttl_s, data.priority, data.drops)
        return ChunkCount(admin.lease(state.poll.client, data.name, prompt, terms), len(prompt))


@post("/v1/release")
def release(state: ApiState, data: ReleaseBody) -> Released:
    """End a lease and remove its chunks, or remove a prompt's: from its end to the first chunk that others use."""
    if bool(data.name) == bool(data.tokens or data.hashes):
        raise BadRequest("give either the `name` of a lease, or a prompt as `tokens` or `hashes`")
    if data.name and (data.model or data.salt or data.keep):
        raise BadRequest("`model`, `salt` and `keep` are for a prompt: give its `tokens` or `hashes`")
    if not (data.name or data.drops):
        raise BadRequest("`drops` is for a lease: give its `name`, or `keep` with a prompt")
    with _change(state):
        client = state.poll.client
        if data.name:
            admin.end_lease(client, data.name, drops=data.drops)
            return Released(data.name)
        return Released(removed_chunks=admin.drop(client, _prompt(state.poll, data), data.keep))


@post("/v1/forget/preview")
def preview(state: ApiState, data: ForgetBody) -> admin.Preview:
    """Count what `/v1/forget` would remove: chunks and bytes in memory, and the most that it could from each tier."""
    data.check()
    with _change(state):
        return admin.preview(state.poll.client, data.model, data.salt)


@post("/v1/forget")
def forget(state: ApiState, data: ForgetBody) -> dict[str, int]:
    """Remove chunks from memory and all tiers; returns how many from each. An error if some may remain."""
    data.check()
    with _change(state):
        forgot = admin.forget(state.poll.client, data.model, data.salt)
        if forgot.left:
            left = "; ".join(f"{place}: {why}" for place, why in forgot.left.items())
            done = "; ".join(f"{place}: {chunks} chunks" for place, chunks in forgot.removed.items())
            raise TierError(f"some chunks may remain: {left}; removed: {done}")
        return forgot.removed


@post("/v1/quota")
def quota(state: ApiState, data: QuotaBody) -> QuotaBody:
    """Give a tenant, or one cache salt of it, a quota until the server ends, or none; the answer has the salt's tag."""
    if not (data.tenant or data.salt):
        raise BadRequest("give `tenant`, `salt` or both")
    with _change(state):
        admin.set_quota(state.poll.client, data.tenant, data.quota, data.salt)
        return QuotaBody(data.tenant, shown_tag(salt_tag(data.salt)), data.quota)


# -- the page


_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
"""Media types by suffix; not the host's, which differ."""


def _read_page() -> dict[str, Encoded]:
    """Read all files of the page, which are few and small. Returns them by path."""
    folder, found = Path(__file__).with_name("page"), dict[str, Encoded]()
    for file in filter(Path.is_file, folder.rglob("*")):
        kind = _TYPES.get(file.suffix, "text/plain")
        charset = "; charset=utf-8" if kind.startswith("text/") else ""
        found[f"/{file.relative_to(folder)}"] = Encoded(file.read_bytes(), kind + charset)
    return {**found, "/": found["/index.html"]}


def make_app(poll: Poll, order: Order) -> App:
    """The application of the web process that `order` describes."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(poll))
    ProcessCollector(pid=os.getppid, registry=registry)  # the server's, whose child this process is
    pages = _read_page()
    is_local = is_loopback(f"tcp://{order.address}")
    guard = Guard(order.token, is_local, is_local and order.key is None, pages)
    endpoints = [healthz, readyz, metrics, status, history, leases, warm, lease, release, preview, forget, quota]
    return Dispatch(endpoints, pages, ApiState(poll, LiveStatus(poll), registry, CachedLeases(poll.client)), guard)
