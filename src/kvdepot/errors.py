"""All errors that kvdepot raises.

    KVDepotError                    the root; `except KVDepotError` catches all of it
    |- ConfigError          config          a setting is unknown, has the wrong type or is out of range
    |- BadRequest           bad_request     an argument of a call is invalid; the message says which and why
    |  |- LayoutError       layout          KV tensors whose layout cannot be determined, or outside their memory
    |  `- UnknownRequest    unknown_request no lookup was submitted for this request id
    |- ProtocolError        protocol        bytes that are not a kvdepot message, or too many of them
    |  `- VersionMismatch   version         client and server speak different protocol versions
    |- UnknownClient        unknown_client  the server does not know this client, e.g. after a restart
    |- UnknownInstance      unknown_instance  no KV tensors are registered under this instance id
    |- Busy                 busy            a bounded queue is full; nothing was done
    |- Unavailable          unavailable     no server answers at this address, or it has gone
    |- DeadlineExceeded     deadline        no answer in time; also a TimeoutError
    |- ArenaError           arena           the shared memory is not available: in use, too large, or not an arena
    |- DeviceError          device          a GPU or its driver failed: missing, too old, out of memory, error
    |- TierError            tier            a whole tier is unavailable: not reachable, or access refused
    `- InternalError        internal        internal error; see the server log

A miss is a value (0 chunks, False), never an error. The code after the class name is sent on the
wire. Codes are stable; a client maps codes that it does not know to `KVDepotError`.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "ArenaError",
    "BadRequest",
    "Busy",
    "ConfigError",
    "DeadlineExceeded",
    "DeviceError",
    "InternalError",
    "KVDepotError",
    "LayoutError",
    "ProtocolError",
    "TierError",
    "Unavailable",
    "UnknownClient",
    "UnknownInstance",
    "UnknownRequest",
    "VersionMismatch",
    "from_code",
]


class KVDepotError(Exception):
    """The base class of all errors that kvdepot raises."""

    code: ClassVar[str] = "error"


class ConfigError(KVDepotError):
    """A setting is unknown, has the wrong type or is out of range."""

    code = "config"


class BadRequest(KVDepotError):
    """An argument of a call is invalid; the message says which and why."""

    code = "bad_request"


class LayoutError(BadRequest):
    """KV tensors whose layout cannot be determined, or that lie outside their memory."""

    code = "layout"


class UnknownRequest(BadRequest):
    """No lookup was submitted for this request id."""

    code = "unknown_request"


class ProtocolError(KVDepotError):
    """Bytes that are not a kvdepot message, or too many of them."""

    code = "protocol"


class VersionMismatch(ProtocolError):
    """Client and server speak different protocol versions."""

    code = "version"


class UnknownClient(KVDepotError):
    """The server does not know this client, which reconnects by itself."""

    code = "unknown_client"


class UnknownInstance(KVDepotError):
    """No KV tensors are registered under this instance id."""

    code = "unknown_instance"


class Busy(KVDepotError):
    """A bounded queue is full; nothing was done."""

    code = "busy"


class Unavailable(KVDepotError):
    """No server answers at this address, or the one that did has gone."""

    code = "unavailable"


class DeadlineExceeded(KVDepotError, TimeoutError):
    """No answer in time."""

    code = "deadline"


class ArenaError(KVDepotError):
    """The shared memory is not available: in use, too large, or not an arena."""

    code = "arena"


class DeviceError(KVDepotError):
    """A GPU or its driver failed: missing, too old, out of memory, or another error."""

    code = "device"


class TierError(KVDepotError):
    """A whole tier is unavailable: not reachable, or access refused."""

    code = "tier"


class InternalError(KVDepotError):
    """Internal error; see the server log."""

    code = "internal"


def _leaves(root: type[KVDepotError]) -> list[type[KVDepotError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _leaves(child))]


_BY_CODE = {leaf.code: leaf for leaf in _leaves(KVDepotError)}


def from_code(code: str, message: str) -> KVDepotError:
    """The error for a wire code; an unknown code gives a plain `KVDepotError`."""
    return _BY_CODE.get(code, KVDepotError)(message)
