"""The HTTP endpoints. OpenAPI is generated from the types in this module.

__main__.py creates the application; uvicorn runs it on the web process's event loop. Requests that read are answered
from poll.py's last result, except those for prefixes (prefixes.py); requests that change something ask the server, on
threads, a few at a time. Every error has the form `{"code", "message"}`, with a code of errors.py; one table has the
HTTP status of each code.
"""

from __future__ import annotations

import logging
import mimetypes
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from typing import Annotated, Any, Literal

import msgspec
from litestar import Litestar, MediaType, Request, Response, get, post
from litestar.datastructures import State
from litestar.exceptions import HTTPException, ValidationException
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme
from litestar.params import FromPath, JSONBody, Parameter
from msgspec import Meta
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from kvdepot import __version__
from kvdepot.client import admin
from kvdepot.errors import BadRequest, Busy, InternalError, KVDepotError, TierError, Unavailable
from kvdepot.protocol import wire
from kvdepot.protocol.curve import is_loopback
from kvdepot.protocol.keys import salt_tag
from kvdepot.protocol.leases import MOST_PRIORITY, NORMAL, Receipt, Sum
from kvdepot.protocol.metrics import Event
from kvdepot.protocol.prefixes import MOST_PREFIXES, Prefix
from kvdepot.protocol.quotas import Quota, shown_tag
from kvdepot.protocol.status import Engine, NamespaceStatus, TierStatus
from kvdepot.web.fleet import Fleet, FleetNow
from kvdepot.web.guard import App, Guard, Problem
from kvdepot.web.history import Figures
from kvdepot.web.poll import Poll
from kvdepot.web.prefixes import Prefixes
from kvdepot.web.prometheus import StatusCollector
from kvdepot.web.turns import Short, StatusNow, Turns

__all__ = ["HTTP_STATUS", "make_app"]

log = logging.getLogger(__name__)

HTTP_STATUS = {
    "bad_request": 400,
    "layout": 400,
    "config": 400,
    "protocol": 400,
    "unknown_request": 404,
    "unknown_instance": 404,
    "busy": 429,
    "unavailable": 503,
    "unknown_client": 503,
    "deadline": 504,
    "tier": 502,
    "version": 502,
    "error": 500,
    "internal": 500,
    "arena": 500,
    "device": 500,
}
"""HTTP status by code of errors.py."""
_CODES = {400: "bad_request", 401: "unauthorized", 403: "forbidden", 404: "not_found", 405: "method", 413: "too_large"}
"""Codes of errors that come from the HTTP layer, not from errors.py."""
_MOST_BODY = 8 << 20
_MOST_CHANGES = 4
"""Changes at a time; each occupies a thread until the server has answered."""
_SECURED: list[dict[str, list[str]]] = [{"token": []}]


class Well(msgspec.Struct, frozen=True):
    """The server answers, and its loop lag is within bounds."""

    status: str
    lag_s: float


class Pinned(msgspec.Struct, frozen=True):
    """Chunks of the prompt's prefix that are in memory, or pinned, and chunks of the prompt."""

    chunks: int
    of_chunks: int


class Unpinned(msgspec.Struct, frozen=True):
    """The pin that was ended."""

    name: str


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt, and its model, by name or a unique prefix. The prompt: exactly one of token ids, chunk hashes in hex,
    and `prefix`, the hash of its last chunk, as `/v1/prefixes` lists it, if memory has all of it."""

    tokens: Annotated[list[Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]], Meta(max_length=1 << 20)] = []
    hashes: Annotated[list[Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]], Meta(max_length=wire.MAX_CHUNKS)] = []
    prefix: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    model: Annotated[str, Meta(max_length=wire.MAX_REQUEST_ID)] = ""
    salt: Annotated[str, Meta(max_length=wire.MAX_REQUEST_ID)] = ""


class PinRequest(Prompt, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt, the name of the pin, and its duration in seconds; 0: no end."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    ttl_s: Annotated[int, Meta(ge=0, le=1 << 31)] = 0


class UnpinRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name of a pin."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]


class LeaseRequest(PinRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt, and a lease of its chunks: `ttl_s` 0: no end; `drops`: remove its chunks when it ends.

    `retain` and `prefetch` load the chunks from the tiers and keep them in memory; `expire` keeps nothing, and removes
    them when it ends. If leases exceed the tenant's budget, those of the lowest priority end first.
    """

    kind: Literal["retain", "prefetch", "expire"] = "retain"
    priority: Annotated[int, Meta(ge=0, le=MOST_PRIORITY)] = NORMAL
    drops: bool = False


class ReleaseRequest(Prompt, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Either the name of a lease, or a prompt, whose first `keep` chunks stay."""

    name: Annotated[str, Meta(max_length=256)] = ""
    keep: Annotated[int, Meta(ge=0, le=wire.MAX_CHUNKS)] = 0


class Leased(msgspec.Struct, frozen=True):
    """Chunks of the prompt that the lease has so far, and chunks of the prompt."""

    chunks: int
    of_chunks: int


class Released(msgspec.Struct, frozen=True):
    """The lease that was ended (its chunks are being removed), or how many chunks of the prompt were removed."""

    name: str = ""
    removed_chunks: int | None = None


class LeasesNow(msgspec.Struct, frozen=True):
    """Leases with their receipts, at most 100, and sums by tenant and kind since the server's start."""

    leases: list[Receipt]
    sums: list[Sum]


class Share(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A quota; caps and `ttl_s`: 0 means none."""

    floor_bytes: Annotated[int, Meta(ge=0)] = 0
    cap_bytes: Annotated[int, Meta(ge=0)] = 0
    weight: float = 1.0
    ttl_s: Annotated[int, Meta(ge=0)] = 0
    disk_floor_bytes: Annotated[int, Meta(ge=0)] = 0
    disk_cap_bytes: Annotated[int, Meta(ge=0)] = 0


class QuotaRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tenant, or its requests with the cache salt `salt`, and the quota until the server ends; without one, it has
    none. See `tenants` of the status.
    """

    tenant: Annotated[str, Meta(max_length=64)] = ""
    salt: Annotated[str, Meta(max_length=wire.MAX_REQUEST_ID)] = ""
    quota: Share | None = None


class QuotaSet(msgspec.Struct, frozen=True):
    """A quota that was set. salt: as the status shows it; empty: the tenant's own."""

    tenant: str
    salt: str
    quota: Share | None


class ForgetRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to forget: chunks of models whose name begins with `model`, of requests with `salt`, of both, or all."""

    model: Annotated[str, Meta(max_length=wire.MAX_REQUEST_ID)] = ""
    salt: Annotated[str, Meta(max_length=wire.MAX_REQUEST_ID)] = ""
    all: bool = False


def _says(*statuses: int) -> dict[int, ResponseSpec]:
    """The errors that an operation may return."""
    return {
        status: ResponseSpec(Problem, generate_examples=False, description="A stable error code, and a message.")
        for status in (403, *statuses)
    }


_READ = _says(401, 503)
_CHANGE = _says(400, 401, 404, 413, 429, 500, 502, 503, 504)


def _poll(state: State) -> Poll:
    poll: Poll = state.poll
    return poll


# -- reading

_After = Annotated[
    int | None,
    Parameter(ge=0, description="The `turn` of the last status seen; waits for the next one, a few seconds at most."),
]


@get("/healthz", responses=_says(503), sync_to_thread=False)
def healthz(state: State) -> Well:
    """Health: whether the server answers, with its loop lag within bounds."""
    poll = _poll(state)
    if trouble := poll.trouble():
        raise Unavailable(trouble)
    return Well("ok", poll.latest().lag_s)


@get("/readyz", responses=_says(503), sync_to_thread=False)
def readyz(state: State) -> Well:
    """Readiness: whether the server has answered recently."""
    return Well("ok", _poll(state).latest().lag_s)


@get("/metrics", include_in_schema=False, sync_to_thread=False)
def metrics(state: State, request: Request[object, object, State]) -> Response[bytes]:
    """Metrics for Prometheus."""
    encode, kind = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(state.registry), headers={"content-type": kind})


@get("/v1/status", responses=_says(400, 401, 503))
async def status(state: State, request: Request[object, object, State], after: _After = None) -> StatusNow:
    """The server's latest status, at most a few seconds old; with `after`, the next one after that turn."""
    turns: Turns = state.turns
    if after is not None:
        await turns.wait(after, request.scope["state"]["connection"])
    return turns.now()


@get("/v1/history", responses=_READ, sync_to_thread=False)
def history(state: State) -> Figures:
    """Time series for charts: a point per second, and older ones every ten seconds."""
    return _poll(state).history.figures()


@get("/v1/namespaces", responses=_READ, sync_to_thread=False)
def namespaces(state: State) -> list[NamespaceStatus]:
    """Distinct models, shapes and layouts, largest first."""
    return _poll(state).latest().status.namespaces


@get("/v1/engines", responses=_READ, sync_to_thread=False)
def engines(state: State) -> list[Engine]:
    """Connected schedulers and workers."""
    return _poll(state).latest().status.engines


@get("/v1/tiers", responses=_READ, sync_to_thread=False)
def tiers(state: State) -> list[TierStatus]:
    """Storage tiers behind memory, nearest first."""
    return _poll(state).latest().status.tiers


@get("/v1/leases", responses=_READ, sync_to_thread=False)
def leases(state: State) -> LeasesNow:
    """Leases: what they hold, what they cost, and what they saved."""
    now = _poll(state).latest().status
    return LeasesNow(now.leases, now.lease_sums)


_Most = Annotated[int, Parameter(ge=1, le=MOST_PREFIXES, description="How many to list.")]
_Model = Annotated[
    str, Parameter(max_length=wire.MAX_REQUEST_ID, description="Only models whose name begins with this.")
]
_Sort = Annotated[
    Literal["hits", "bytes", "tokens", "idle"],
    Parameter(description="What to sort by, the highest first; `idle`: seconds since a lookup found some of it."),
]


@get("/v1/prefixes", responses=_says(400, 401, 429, 500, 503, 504), sync_to_thread=True)
def prefixes(state: State, most: _Most = 20, model: _Model = "", sort: _Sort = "hits") -> list[Prefix]:
    """Prompts in memory, as families of those that begin with the same chunk; at most two seconds old."""
    known: Prefixes = state.prefixes
    return known.get(model, sort, most)


@get("/v1/events", responses=_READ, sync_to_thread=False)
def events(state: State) -> list[Event]:
    """Recent events, oldest first."""
    return _poll(state).latest().status.events


@get("/v1/fleet", responses=_READ, sync_to_thread=True)
def fleet(state: State) -> FleetNow:
    """This depot and those of the setting `fleet`: state, load and sums, some seconds old at most."""
    everyone: Fleet = state.fleet
    return everyone.now(state.turns.judged)


@get("/v1/config", responses=_says(401), sync_to_thread=False)
def config(state: State) -> dict[str, Any]:
    """The server's settings; secrets are masked."""
    settings: dict[str, Any] = state.settings
    return settings


# -- changing


@contextmanager
def _change(state: State) -> Iterator[None]:
    """Limit the number of changes at a time. Raises Busy."""
    changes: threading.BoundedSemaphore = state.changes
    if not changes.acquire(blocking=False):
        raise Busy(f"{_MOST_CHANGES} changes are in progress: wait until one has finished")
    try:
        yield
    finally:
        changes.release()


def _prompt(poll: Poll, data: Prompt) -> admin.Prompt:
    if sum(map(bool, (data.tokens, data.hashes, data.prefix))) != 1:
        raise BadRequest("give exactly one of `tokens`, `hashes` and `prefix`")
    hashes = b"".join(map(bytes.fromhex, data.hashes))
    return admin.make_prompt(
        poll.client, data.tokens, hashes, data.model, data.salt, end=bytes.fromhex(data.prefix or "")
    )


@post("/v1/warm", status_code=200, responses=_CHANGE, security=_SECURED, sync_to_thread=True)
def warm(state: State, data: JSONBody[Prompt]) -> Pinned:
    """Load a prompt's chunks from the tiers into memory."""
    with _change(state):
        prompt = _prompt(_poll(state), data)
        return Pinned(admin.warm(_poll(state).client, prompt), len(prompt))


@post("/v1/pin", status_code=200, responses=_CHANGE, security=_SECURED, sync_to_thread=True)
def pin(state: State, data: JSONBody[PinRequest]) -> Pinned:
    """Pin a prompt's chunks in memory under a name, loading them from the tiers if needed."""
    with _change(state):
        prompt = _prompt(_poll(state), data)
        return Pinned(admin.pin(_poll(state).client, data.name, prompt, data.ttl_s), len(prompt))


@post("/v1/unpin", status_code=200, responses=_CHANGE, security=_SECURED, sync_to_thread=True)
def unpin(state: State, data: JSONBody[UnpinRequest]) -> Unpinned:
    """End a pin."""
    with _change(state):
        admin.unpin(_poll(state).client, data.name)
        return Unpinned(data.name)


@post("/v1/lease", status_code=200, responses=_CHANGE, security=_SECURED, sync_to_thread=True)
def lease(state: State, data: JSONBody[LeaseRequest]) -> Leased:
    """Begin a lease of a prompt's chunks, in place of one of the same name."""
    if data.kind == "expire" and not data.ttl_s:
        raise BadRequest("a lease of kind `expire` needs `ttl_s`, after which its chunks are removed")
    with _change(state):
        client = _poll(state).client
        prompt = _prompt(_poll(state), data)
        leased = admin.lease(client, data.name, prompt, data.kind, data.ttl_s, data.priority, data.drops)
        return Leased(leased, len(prompt))


@post("/v1/release", status_code=200, responses=_CHANGE, security=_SECURED, sync_to_thread=True)
def release(state: State, data: JSONBody[ReleaseRequest]) -> Released:
    """End a lease and remove its chunks, or remove a prompt's: from its end to the first chunk that others use."""
    if bool(data.name) == bool(data.tokens or data.hashes or data.prefix):
        raise BadRequest("give either the `name` of a lease, or a prompt as `tokens`, `hashes` or `prefix`")
    with _change(state):
        client = _poll(state).client
        if data.name:
            admin.end_lease(client, data.name, drops=True)
            return Released(data.name)
        return Released(removed_chunks=admin.drop(client, _prompt(_poll(state), data), data.keep))


def _refuse_odd(data: ForgetRequest) -> None:
    """Raises BadRequest."""
    if data.all and (data.model or data.salt):
        raise BadRequest("give either `all`, or `model` and `salt`")
    if not (data.model or data.salt or data.all):
        raise BadRequest("nothing to forget: give `model`, `salt` or `all`")


@post("/v1/forget/preview", status_code=200, responses=_CHANGE, security=_SECURED, sync_to_thread=True)
def preview(state: State, data: JSONBody[ForgetRequest]) -> admin.Preview:
    """What `/v1/forget` would remove: chunks and bytes in memory, and the most that it could from each tier."""
    _refuse_odd(data)
    with _change(state):
        return admin.preview(_poll(state).client, data.model, data.salt)


@post("/v1/forget", status_code=200, responses=_CHANGE, security=_SECURED, sync_to_thread=True)
def forget(state: State, data: JSONBody[ForgetRequest]) -> dict[str, int]:
    """Remove chunks from memory and all tiers; returns how many from each. An error if some may remain."""
    _refuse_odd(data)
    with _change(state):
        said = admin.forget(_poll(state).client, data.model, data.salt)
        if left := admin.not_forgotten(said):
            done = "; ".join(f"{place}: {what} chunks" for place, what in said.items() if isinstance(what, int))
            raise TierError(f"some chunks may remain: {'; '.join(left)}; removed: {done}")
        return said


@post("/v1/quota", status_code=200, responses=_CHANGE, security=_SECURED, sync_to_thread=True)
def quota(state: State, data: JSONBody[QuotaRequest]) -> QuotaSet:
    """Give a tenant, or one cache salt of it, a quota until the server ends, or none; returns it."""
    if not (data.tenant or data.salt):
        raise BadRequest("give `tenant`, `salt` or both")
    share = data.quota
    with _change(state):
        asked = None if share is None else Quota(**msgspec.structs.asdict(share))
        admin.set_quota(_poll(state).client, data.tenant, asked, data.salt)
        return QuotaSet(data.tenant, shown_tag(salt_tag(data.salt)), share)


# -- the page


def _read_page() -> dict[str, tuple[bytes, str]]:
    """Read all files of the page, which are few and small. Returns path: bytes and media type."""
    found: dict[str, tuple[bytes, str]] = {}
    todo = [("/", resources.files("kvdepot.web") / "page")]
    while todo:
        path, folder = todo.pop()
        if not folder.is_dir():
            continue
        for entry in folder.iterdir():
            if entry.is_dir():
                todo.append((f"{path}{entry.name}/", entry))
            elif not entry.name.endswith((".py", ".pyc")):
                kind = mimetypes.guess_type(entry.name)[0] or "application/octet-stream"
                if kind in ("text/javascript", "application/javascript"):
                    kind = "text/javascript"  # the host's table may have either
                charset = "; charset=utf-8" if kind.startswith("text/") else ""
                found[path + entry.name] = entry.read_bytes(), kind + charset
    if "/index.html" in found:
        found["/"] = found["/index.html"]
    return found


@get("/", include_in_schema=False, sync_to_thread=False)
def front(state: State) -> Response[bytes]:
    """The page."""
    return _file(state.page, "/")


@get("/{path:path}", include_in_schema=False, sync_to_thread=False)
def page(state: State, path: FromPath[str]) -> Response[bytes]:
    """A file of the page."""
    return _file(state.page, path)


def _file(pages: Mapping[str, tuple[bytes, str]], path: str) -> Response[bytes]:
    if path not in pages:
        raise HTTPException("not found", status_code=404)
    body, kind = pages[path]
    return Response(body, headers={"content-type": kind})


# -- errors


def _answer_error(_: Request[object, object, State], exc: Exception) -> Response[Problem]:
    match exc:
        case KVDepotError():
            status_code, problem = HTTP_STATUS.get(exc.code, 500), Problem(exc.code, str(exc))
        case HTTPException():
            status_code = exc.status_code
            problem = Problem(_CODES.get(status_code, "http"), _sentence(exc))
            if status_code >= 500:
                problem = Problem(InternalError.code, problem.message)
        case _:
            log.error("an HTTP handler failed", exc_info=exc)
            status_code, problem = 500, Problem(InternalError.code, "internal error; see the server log")
    headers = {"retry-after": "1"} if status_code in (429, 503) else {}
    if status_code == 413:
        headers["connection"] = "close"  # otherwise the rest of the body would still be read
    if status_code == 405 and isinstance(exc, HTTPException) and exc.headers:
        headers |= {name: value for name, value in exc.headers.items() if name.lower() == "allow"}
    return Response(problem, status_code=status_code, media_type="application/json", headers=headers)


def _sentence(exc: HTTPException) -> str:
    if isinstance(exc, ValidationException) and isinstance(exc.extra, list):
        errors = [part for part in exc.extra if isinstance(part, dict)]
        parts = [f"{part.get('key', 'the body')}: {part.get('message')}" for part in errors]
        return "; ".join(parts) or str(exc.detail)
    return str(exc.detail)


def make_app(poll: Poll, turns: Turns, settings: dict[str, Any], address: str, token: str) -> App:
    """The application. settings: shown to clients, without secrets. address: HOST:PORT that we listen at."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(poll))
    ProcessCollector(pid=os.getppid, registry=registry)  # the server's, whose child this process is
    pages = _read_page()
    app = Litestar(
        [
            healthz, readyz, metrics, status, history, namespaces, engines, tiers, leases, prefixes, events, fleet,
            config, warm, pin, unpin, lease, release, preview, forget, quota, front, page,
        ],
        exception_handlers={Exception: _answer_error, HTTPException: _answer_error, KVDepotError: _answer_error},
        logging_config=None,
        debug=False,
        openapi_config=OpenAPIConfig(
            title="kvdepot",
            version=__version__,
            description="Status, metrics and manual operations of a kvdepot server.",
            use_handler_docstrings=True,
            path="/schema",
            render_plugins=[JsonRenderPlugin(path="/openapi.json", media_type=MediaType.JSON)],
            components=Components(security_schemes={"token": SecurityScheme(type="http", scheme="bearer")}),
        ),
        request_max_body_size=_MOST_BODY,
        state=State(
            {
                "poll": poll,
                "turns": turns,
                # The token that the server made for itself is for nobody else.
                "fleet": Fleet(settings["fleet"], token if settings["http_token_file"] else ""),
                "prefixes": Prefixes(poll.client),
                "settings": settings,
                "registry": registry,
                "page": pages,
                "changes": threading.BoundedSemaphore(_MOST_CHANGES),
            },
            deep_copy=False,
        ),
    )  # fmt: skip
    is_local = is_loopback(f"tcp://{address}")
    return Guard(Short(app, turns), token, is_local, is_local and not settings["keys"], pages)
