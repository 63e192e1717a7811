"""All errors that kvdepot raises; `except KVDepotError` catches all of them.

A miss is a value (0 chunks, False), never an error. The code after the class name is sent on the
wire. Codes are stable; a client maps codes that it does not know to `KVDepotError`.
"""

from __future__ import annotations

from typing import ClassVar

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
