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


_BY_CODE: dict[str, type[KVDepotError]] = {}


class KVDepotError(Exception):
    """The base class of all errors that kvdepot raises."""

    code: ClassVar[str] = "error"

    def __init_subclass__(cls, code: str = "") -> None:
        if code:  # else it has its parent's
            cls.code = code
            _BY_CODE[code] = cls


class ConfigError(KVDepotError, code="config"):
    """A setting is unknown, has the wrong type or is out of range."""


class BadRequest(KVDepotError, code="bad_request"):
    """An argument of a call is invalid; the message says which and why."""


class LayoutError(BadRequest, code="layout"):
    """KV tensors whose layout cannot be determined, or that lie outside their memory."""


class UnknownRequest(BadRequest, code="unknown_request"):
    """No lookup was submitted for this request id, or no store or retrieve was placed."""


class ProtocolError(KVDepotError, code="protocol"):
    """Bytes that are not a kvdepot message, or too many of them."""


class VersionMismatch(ProtocolError, code="version"):
    """Client and server speak different protocol versions."""


class UnknownClient(KVDepotError, code="unknown_client"):
    """The server does not know this client, which reconnects by itself."""


class UnknownInstance(KVDepotError, code="unknown_instance"):
    """No KV tensors are registered under this instance id."""


class Busy(KVDepotError, code="busy"):
    """A bounded queue is full; nothing was done."""


class Unavailable(KVDepotError, code="unavailable"):
    """No server answers at this address, or the one that did has gone."""


class DeadlineExceeded(KVDepotError, TimeoutError, code="deadline"):
    """No answer in time."""


class ArenaError(KVDepotError, code="arena"):
    """The shared memory is not available: in use, too large, or not an arena."""


class DeviceError(KVDepotError, code="device"):
    """A GPU or its driver failed: missing, too old, out of memory, or another error."""


class TierError(KVDepotError, code="tier"):
    """A whole tier is unavailable: not reachable, or access refused."""


class InternalError(KVDepotError, code="internal"):
    """Internal error; see the server log."""


def from_code(code: str, message: str) -> KVDepotError:
    """The error for a wire code; an unknown code gives a plain `KVDepotError`."""
    return _BY_CODE.get(code, KVDepotError)(message)
