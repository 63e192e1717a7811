"""Every way kvdepot says that something failed.

    KVDepotError                    the root; `except KVDepotError` catches all of it
    |- ConfigError          config          a setting is unknown, of the wrong type or out of its range
    |- BadRequest           bad_request     an argument of a call is wrong; the message says which and why
    |  |- LayoutError       layout          KV tensors whose blocks cannot be described, or lie outside their memory
    |  `- UnknownRequest    unknown_request a request id nobody submitted a lookup for
    |- ProtocolError        protocol        bytes that are no message of ours, or too many of them
    |  `- VersionMismatch   version         client and server speak different protocol versions
    |- UnknownClient        unknown_client  the server has not met this client (it restarted, say)
    |- UnknownInstance      unknown_instance  no KV tensors are registered under this instance id
    |- Busy                 busy            a bounded queue is full; nothing was done
    |- Unavailable          unavailable     no server answers at this address, or it is gone
    |- DeadlineExceeded     deadline        no answer in time; also a TimeoutError
    |- ArenaError           arena           the shared memory cannot be had: in use, too large, not ours
    |- DeviceError          device          a GPU or its driver refuses: not there, too old, out of memory, failed
    |- TierError            tier            a tier as a whole cannot be had: not reachable, or it refuses us
    `- InternalError        internal        internal error; see the server log

A miss is a value (0 chunks, False), never an error. The code after the class name is what travels on the
wire; codes are stable, so a client of another version maps what it does not know to `KVDepotError`.
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
    """The root of everything kvdepot raises."""

    code: ClassVar[str] = "error"


class ConfigError(KVDepotError):
    """A setting is unknown, of the wrong type or out of its range."""

    code = "config"


class BadRequest(KVDepotError):
    """An argument of a call is wrong; the message says which and why."""

    code = "bad_request"


class LayoutError(BadRequest):
    """KV tensors whose blocks cannot be described, or that lie outside their memory."""

    code = "layout"


class UnknownRequest(BadRequest):
    """A request id nobody submitted a lookup for."""

    code = "unknown_request"


class ProtocolError(KVDepotError):
    """Bytes that are no message of ours, or too many of them."""

    code = "protocol"


class VersionMismatch(ProtocolError):
    """Client and server speak different protocol versions."""

    code = "version"


class UnknownClient(KVDepotError):
    """The server has not met this client; it says hello again by itself."""

    code = "unknown_client"


class UnknownInstance(KVDepotError):
    """No KV tensors are registered under this instance id."""

    code = "unknown_instance"


class Busy(KVDepotError):
    """A bounded queue is full; nothing was done."""

    code = "busy"


class Unavailable(KVDepotError):
    """No server answers at this address, or the one that did is gone."""

    code = "unavailable"


class DeadlineExceeded(KVDepotError, TimeoutError):
    """No answer in time."""

    code = "deadline"


class ArenaError(KVDepotError):
    """The shared memory cannot be had: in use, too large, not ours."""

    code = "arena"


class DeviceError(KVDepotError):
    """A GPU or its driver refuses: not there, too old, out of memory, or failed."""

    code = "device"


class TierError(KVDepotError):
    """A tier as a whole cannot be had: not reachable, or it refuses us."""

    code = "tier"


class InternalError(KVDepotError):
    """Internal error; see the server log."""

    code = "internal"


def _leaves(root: type[KVDepotError]) -> list[type[KVDepotError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _leaves(child))]


_BY_CODE = {leaf.code: leaf for leaf in _leaves(KVDepotError)}


def from_code(code: str, message: str) -> KVDepotError:
    """The error a wire code stands for; an unknown code becomes a plain `KVDepotError`."""
    return _BY_CODE.get(code, KVDepotError)(message)
