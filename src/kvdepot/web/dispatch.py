"""Operations of the HTTP API: which function answers a method of a path, with what types.

An operation is a function whose annotations say all. Coroutine functions run on the event loop and others on threads.
Every error has the form `{"code", "message"}`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec

from kvdepot.errors import BadRequest, InternalError, KVDepotError
from kvdepot.values import fault_of
from kvdepot.web.guard import HEADERS, Gone, Guard, Problem, Receive, Refused, RequestBody, Scope, Send

log = logging.getLogger(__name__)

_CODES = {
    400: "bad_request layout config protocol", 404: "unknown_request unknown_instance", 429: "busy",
    500: "error internal arena device", 502: "tier version", 503: "unavailable unknown_client", 504: "deadline",
}  # fmt: skip
HTTP_STATUS = {code: status for status, codes in _CODES.items() for code in codes.split()}
_THREADS = 40
_JSON = "application/json"


@dataclass(frozen=True)
class Encoded:
    """An answer that is encoded already."""

    body: bytes
    media_type: str = _JSON


class Endpoint:
    """One method of one path. A POST takes a body in JSON, of the type that its function names."""

    def __init__(self, method: str, path: str, run: Callable[..., Any]) -> None:
        self.method, self.path, self.run = method, path, run
        hints = get_type_hints(run, include_extras=True)
        self.takes_scope = hints.pop("scope", None) is not None
        del hints["return"], hints["state"]
        given: Any = next(iter(hints.values()), None)
        # Made once, at import: msgspec crashes if two threads are the first to decode a type at the same time.
        self._decoder = msgspec.json.Decoder(given) if given else None

    async def run_on(self, state: object, scope: Scope, body: RequestBody, threads: ThreadPoolExecutor) -> Encoded:
        """The encoded answer. Raises KVDepotError, Refused or Gone."""
        data = await body.read() if self._decoder else b""

        def arguments() -> list[object]:
            given = [_parse(self._decoder, data)] if self._decoder else []
            return [state, *given, *([scope] if self.takes_scope else [])]

        if inspect.iscoroutinefunction(self.run):
            answer = await self.run(*arguments())
        else:
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(threads, lambda: self.run(*arguments()))
        return answer if isinstance(answer, Encoded) else Encoded(msgspec.json.encode(answer))


def _parse(decoder: msgspec.json.Decoder[object], body: bytes) -> object:
    try:
        return decoder.decode(body)
    except RecursionError as exc:
        raise BadRequest("the body is nested too deeply") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadRequest(f"the body: {fault_of(exc)}") from exc


def get(path: str) -> Callable[[Callable[..., Any]], Endpoint]:
    """Make a function the operation that answers GET."""
    return lambda run: Endpoint("GET", path, run)


def post(path: str) -> Callable[[Callable[..., Any]], Endpoint]:
    """Make a function the operation that answers POST, with a body in JSON."""
    return lambda run: Endpoint("POST", path, run)


class Dispatch:
    """Answers each request by the endpoint of its method and path, or by a file."""

    def __init__(
        self, endpoints: Iterable[Endpoint], files: Mapping[str, Encoded], state: object, guard: Guard
    ) -> None:
        """files: by path. state: passed to each endpoint."""
        self._guard = guard
        self._endpoints: dict[str, dict[str, Endpoint]] = {}
        for endpoint in endpoints:
            self._endpoints.setdefault(endpoint.path, {})[endpoint.method] = endpoint
        self._files = files
        self._state = state
        self._threads = ThreadPoolExecutor(_THREADS, "kvdepot-http")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body, status, headers = RequestBody(scope, receive), 200, {"connection": "close"}
        try:
            self._guard.check(scope)
            headers.clear()  # the connection ends with a request that the guard refuses
            answer = await self._answer(scope, body)
        except Gone:
            return
        except Exception as exc:  # noqa: BLE001 - answered, and logged if it is not the client's
            status, problem, more = _refusal(exc)
            headers |= more
            answer = Encoded(msgspec.json.encode(problem))
        if body.is_left:
            headers["connection"] = "close"
        headers |= {"content-type": answer.media_type, "content-length": str(len(answer.body))}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": [*encoded, *HEADERS]})
        await send({"type": "http.response.body", "body": answer.body, "more_body": True})
        await body.discard()
        await send({"type": "http.response.body", "body": b""})

    async def _answer(self, scope: Scope, body: RequestBody) -> Encoded:
        path = scope["path"]
        method = "GET" if scope["method"] == "HEAD" else scope["method"]  # uvicorn omits the body
        methods: dict[str, Any] = {"GET": self._files[path]} if path in self._files else self._endpoints.get(path, {})
        if not methods:
            raise Refused(404, "not_found", "no such path; docs/http.md lists them")
        if method not in methods:
            allowed = ", ".join(methods)
            raise Refused(405, "method", f"{path} answers {allowed}, not {method}", allow=allowed)
        found = methods[method]
        return await found.run_on(self._state, scope, body, self._threads) if isinstance(found, Endpoint) else found


def _refusal(exc: Exception) -> tuple[int, Problem, dict[str, str]]:
    if isinstance(exc, Refused):
        return exc.status, exc.problem, dict(exc.headers)
    if isinstance(exc, KVDepotError):
        status = HTTP_STATUS.get(exc.code, 500)
        return status, Problem(exc.code, str(exc)), {"retry-after": "1"} if status in (429, 503) else {}
    log.error("an HTTP handler failed", exc_info=exc)
    return 500, Problem(InternalError.code, "internal error; see the server log"), {}
