"""Hints by which a request asks to keep, expire or remove its own chunks, or to store or load fewer; and its result.

Callers send hints in `kv_transfer_params` under the key `kvdepot`, or as actions of vLLM's `kv_hints`. Two keys beside
`kvdepot` are read, too, as llm-d sends them to several connectors. This module parses all; leases.py carries out what
concerns leases. Keys and actions of other names belong to others and are left alone.

Every sender of requests can send hints, so they are bounded (`Limits`), and a session belongs to the cache salt of
its requests: no request can end or replace the lease of a session of another salt.

What a request got from the depot comes back under the same key. vLLM puts what a connector returns for a finished
request into the `kv_transfer_params` of the request's output, and vLLM's server puts these into an answer that is not
streamed. Below MultiConnector, vLLM merges what several connectors return, and ends the engine if two of them return
one key. A proxy of separate prefill and decode engines sends the params that the prefill engine returns to the decode
engine, in place of the client's. So the hints and their bounds come back beside the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from kvdepot.client.reuse import Reuse
from kvdepot.errors import BadRequest
from kvdepot.protocol.keys import salt_tag
from kvdepot.protocol.leases import MOST_PRIORITY, NORMAL
from kvdepot.values import fault_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

KEY = "kvdepot"
_VERSION = "1"
"""`action_version` of the actions that we know."""
_MOST_NAME = 200
_EXPIRING = "/expire"
_SALT_HEX = 16
"""Hexadecimal digits of the salt's tag in a session's name: so many that nobody finds another salt with them."""
_SALTED = re.compile(rf"@[0-9a-f]{{{_SALT_HEX}}}")
"""The end of the names of sessions with a cache salt."""

_Seconds = Annotated[int, Meta(ge=1, le=1 << 31)]
_Priority = Annotated[int, Meta(ge=0, le=MOST_PRIORITY)]
_Tokens = Annotated[int, Meta(ge=0)]
_Session = Annotated[str, Meta(min_length=1, max_length=_MOST_NAME)]
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class _Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`kv_transfer_params["kvdepot"]`."""

    retain_s: _Seconds | None = None
    expire_s: _Seconds | None = None
    priority: _Priority = NORMAL
    session: _Session | None = None
    release: bool = False
    store: bool = True
    load: bool = True
    max_load_tokens: _Tokens | None = None
    # Results, which a proxy may send on with the hints: they ask for nothing.
    found: object = None
    loaded: object = None
    compared: object = None
    saved_s: object = None


class _Bounds(msgspec.Struct, frozen=True):
    """Keys of `kv_transfer_params` itself that several connectors read."""

    max_load_tokens: _Tokens | None = None
    max_offload_tokens: _Tokens | None = None


class _ReleaseAction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Payload of the action `release`."""

    session: _Session | None = None


class _PinAction(_ReleaseAction, frozen=True, kw_only=True):
    """Payload of the action `pin`: a lease without an end."""

    priority: _Priority = NORMAL


class _TimedAction(_PinAction, frozen=True, kw_only=True):
    """Payload of the actions `retain` and `prefetch`."""

    retain_s: _Seconds


_ACTIONS: Mapping[str, type[_ReleaseAction]] = {
    "retain": _TimedAction,
    "prefetch": _TimedAction,
    "pin": _PinAction,
    "release": _ReleaseAction,
}


class Hint(NamedTuple):
    """A lease of the request's chunks. kind: see protocol/leases.py. ttl_s: seconds; 0: no end."""

    kind: str
    name: str
    ttl_s: int
    priority: int


class Hints(NamedTuple):
    """All that a request asks for.

    leases: leases of its chunks, which begin when it has finished, or when it arrives if their kind is `prefetch`.
    releases: names of leases that end when it has finished; their chunks and the request's own are removed.
    most_stored: number of its first tokens that may be stored; None: all. most_loaded: number of its prompt's first
    tokens that may be loaded; None: all.
    """

    leases: tuple[Hint, ...] = ()
    releases: tuple[str, ...] = ()
    most_stored: int | None = None
    most_loaded: int | None = None

    @property
    def stores(self) -> bool:
        return self.most_stored != 0

    def stored(self, tokens: int) -> int:
        """The number of the request's first `tokens` tokens that may be stored."""
        return tokens if self.most_stored is None else min(tokens, self.most_stored)


NO_HINTS = Hints()
_TOLD = "_kvdepot_has_told"
"""Attribute of vLLM's request: whether one of our connectors has returned its result."""
ResponseParams: TypeAlias = dict[str, dict[str, object]]


class Limits(NamedTuple):
    """The longest lease that requests may ask for, in seconds (0: no leases), and the highest priority."""

    seconds: int
    priority: int

    def bound(self, lease: Hint) -> Hint:
        """The lease with its time and priority cut to the limits."""
        ttl_s = min(lease.ttl_s or self.seconds, self.seconds)
        return lease._replace(ttl_s=ttl_s, priority=min(lease.priority, self.priority))


def read_hints(request: Request, limits: Limits) -> tuple[Hints, str]:
    """A request's hints, within the limits, and why they are refused; empty if they are not. Raises nothing.

    One hint has an effect even if the hints are refused: if `store` is there and is not true, nothing is stored.
    """
    params = request.kv_transfer_params if isinstance(request.kv_transfer_params, dict) else {}
    given, bounds = params.get(KEY), {name: params[name] for name in _Bounds.__struct_fields__ if name in params}
    envelope = getattr(request, "kv_hints", None)  # since vLLM 0.31
    hints = NO_HINTS
    try:
        if given is not None:
            hints = _of_params(_convert(given, _Params, f"kv_transfer_params.{KEY}"), request)
        hints = _bounded(hints, _convert(bounds, _Bounds, "kv_transfer_params"))
        if envelope is not None:
            hints = _with_actions(hints, envelope.actions, request)
        if not limits.seconds and (hints.leases or hints.releases):
            raise BadRequest("requests may neither keep nor remove chunks here (the server's max_hint_s is 0)")
    except BadRequest as exc:
        is_private = isinstance(given, dict) and given.get("store", True) is not True
        return Hints(most_stored=0 if is_private else None), str(exc)
    return hints._replace(leases=tuple(map(limits.bound, hints.leases))), ""


def _convert(value: object, kind: type[_Struct], what: str) -> _Struct:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as exc:
        raise BadRequest(f"{what}: {fault_of(exc)}") from exc


def _of_params(params: _Params, request: Request) -> Hints:
    name = _name(params.session, request, f"kv_transfer_params.{KEY}")
    leases = []
    if params.retain_s is not None:
        leases.append(Hint("retain", name, params.retain_s, params.priority))
    if params.expire_s is not None:
        leases.append(Hint("expire", _expiring(name), params.expire_s, params.priority))
    if params.release and leases:
        raise BadRequest(f"kv_transfer_params.{KEY}: give either `release`, or `retain_s` and `expire_s`")
    releases = (name, _expiring(name)) if params.release else ()
    return Hints(tuple(leases), releases, None if params.store else 0, params.max_load_tokens if params.load else 0)


def _bounded(hints: Hints, bounds: _Bounds) -> Hints:
    """The hints with the smaller of their own bounds and `bounds`."""
    stored = [most for most in (hints.most_stored, bounds.max_offload_tokens) if most is not None]
    loaded = [most for most in (hints.most_loaded, bounds.max_load_tokens) if most is not None]
    return hints._replace(most_stored=min(stored, default=None), most_loaded=min(loaded, default=None))


def _with_actions(hints: Hints, actions: Iterable[Any], request: Request) -> Hints:
    """`hints`, and the hints of known actions. actions: KvHintAction of vLLM 0.31 and later."""
    leases, releases = list(hints.leases), list(hints.releases)
    for action in actions:
        kind, what = action.action_type, f"kv_hints, action {action.action_type}"
        if kind not in _ACTIONS:
            continue
        if action.action_version != _VERSION:
            raise BadRequest(f"{what}: version {action.action_version!r:.40} is not {_VERSION!r}")
        given = _convert(action.payload, _ACTIONS[kind], what)
        name = _name(given.session, request, what)
        match given:
            case _TimedAction():
                leases.append(Hint(kind, name, given.retain_s, given.priority))
            case _PinAction():
                leases.append(Hint("retain", name, 0, given.priority))
            case _:
                releases += [name, _expiring(name)]
    names = [lease.name for lease in leases] + releases
    if len(set(names)) < len(names):
        raise BadRequest("kv_hints: two hints for one session; give each its own `session`")
    return hints._replace(leases=tuple(leases), releases=tuple(releases))


def _name(session: str | None, request: Request, what: str) -> str:
    """The name of the lease: one per session and cache salt, which its next request replaces. Raises BadRequest."""
    name = request.request_id[:_MOST_NAME] if session is None else session
    if name.endswith(_EXPIRING):
        raise BadRequest(f"{what}: session {name!r} ends with {_EXPIRING}, as leases of the kind expire do")
    if _SALTED.fullmatch(name[-_SALT_HEX - 1 :]):
        raise BadRequest(f"{what}: session {name!r} ends as the names of leases of requests with a cache salt do")
    return f"{name}@{salt_tag(request.cache_salt).hex()[:_SALT_HEX]}" if request.cache_salt else name


def _expiring(name: str) -> str:
    """The name of a session's lease of the kind `expire`, which exists beside the lease that retains."""
    return name + _EXPIRING


def response_params(request: Request, reuse: Reuse | None, read: Hints) -> ResponseParams | None:
    """The params of a finished request's output. None: the request was never scheduled with an answer of the depot, or
    another connector of ours, for another server, has returned its own params. read: the request's hints."""
    if reuse is None or hasattr(request, _TOLD):
        return None
    setattr(request, _TOLD, True)
    params = request.kv_transfer_params if isinstance(request.kv_transfer_params, dict) else {}
    hints: dict[str, object] = dict(params[KEY]) if isinstance(params.get(KEY), dict) else {}
    if "max_load_tokens" in params and read.most_loaded is not None:
        hints["max_load_tokens"] = read.most_loaded
    if read.most_stored == 0:
        hints["store"] = False
    return {KEY: {**hints, **msgspec.structs.asdict(reuse)}}
