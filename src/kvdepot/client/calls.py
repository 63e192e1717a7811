"""Calls that integrations, the library and commands make alike: connecting, asking, and checking the answer."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import msgspec
import zmq

from kvdepot.client.socket import Client, MessagingFuture
from kvdepot.errors import ProtocolError
from kvdepot.protocol import wire
from kvdepot.protocol.curve import Key
from kvdepot.protocol.keys import HASH_BYTES

ANSWER_S = 30.0
T = TypeVar("T")


class OwnClient(Client):
    """A client with a ZeroMQ context of its own, which ends with it."""

    def __init__(self, url: str, key: str | Key = "", engine: str = "", arena_dir: str = "") -> None:
        """Arguments and errors: see Client. A name of an engine that is too long is cut."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            super().__init__(url, self._context, key=key, engine=engine[: wire.MAX_CLIENT_NAME], arena_dir=arena_dir)
        except BaseException:
            self._context.term()
            raise

    def close(self) -> None:
        super().close()
        self._context.term()


def ask(client: Client, request: wire.Request, kind: type[T], deadline_s: float = ANSWER_S) -> MessagingFuture[T]:
    """Send a message whose answer is of this type; an answer of another type is a ProtocolError. Never blocks."""
    return client.ask(request, partial(convert, request, kind), deadline_s)


def answer(client: Client, request: wire.Request, kind: type[T], timeout_s: float = ANSWER_S) -> T:
    """The server's answer, of this type. Blocks until then. Raises the server's error, or ProtocolError."""
    return ask(client, request, kind, timeout_s).result(timeout_s)


def convert(request: wire.Request, kind: type[T], value: object) -> T:
    """The answer to a message as a value of this type. Raises ProtocolError for an answer of another type."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as exc:
        raise ProtocolError(f"the answer to {type(request).__name__} is not of this version: {exc}") from exc


def read_hit(value: object, lookup: wire.Lookup) -> wire.Hit:
    """The answer to a lookup. Raises ProtocolError for an answer that is malformed, or names chunks that the lookup
    does not."""
    hit = convert(lookup, wire.Hit, value)
    most = len(lookup.hashes) // HASH_BYTES
    if hit.tail is not None:
        is_there = 0 <= hit.tail < len(lookup.tails)
        most = lookup.tails[hit.tail].chunks if is_there else -1
    if not 0 <= hit.chunks <= most or (hit.tail is not None and hit.chunks != most):
        raise ProtocolError(
            f"the server found {hit.chunks} chunks and tail {hit.tail} of {len(lookup.hashes) // HASH_BYTES} chunks "
            f"and {len(lookup.tails)} tails"
        )
    return hit
