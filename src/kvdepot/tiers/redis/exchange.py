"""Commands and replies on one connection of redis-py, many at a time. Blocks; any thread, each with its connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from redis import ConnectionPool
from redis.exceptions import InvalidResponse, ResponseError

PART_BYTES = 1 << 20
WINDOW_BYTES = 64 << 20
"""Bytes requested and not yet read on one connection: the server keeps them in its memory."""
SEND_BYTES = 4 << 20
"""Bytes passed to the socket at once; the timeout restarts with each such part."""
SMALL_BYTES = 16 << 10
"""Pieces below this are joined: a copy costs less than a packet."""

Packed: TypeAlias = "list[bytes | memoryview]"
Reply: TypeAlias = "int | bytes | list[Reply] | ResponseError | None"
"""The error of a single command is a value, too."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Request:
    """Commands that are sent together, all about one key."""

    key: bytes
    packed: Packed
    replies: int
    weight: int = 0


class _Connection(Protocol):
    """The methods used of redis-py's connections, whose types it does not declare."""

    def send_packed_command(self, command: Packed) -> object: ...
    def read_response(self) -> object: ...
    def disconnect(self) -> object: ...


def request(*words: bytes) -> Request:
    """One command; the second word is its key."""
    return Request(words[1], [_pack(*words)], 1)


def get_request(key: bytes, room: int) -> Request:
    """An object's size, and its first `room` bytes. The last reply, that of EXEC, is None if it was replaced between
    two of these commands."""
    starts = range(0, room, PART_BYTES)
    parts = [_pack(b"GETRANGE", key, b"%d" % at, b"%d" % (min(at + PART_BYTES, room) - 1)) for at in starts]
    words = [_pack(b"WATCH", key), _pack(b"STRLEN", key), *parts, _pack(b"MULTI"), _pack(b"EXEC")]
    return Request(key, [b"".join(words)], len(words), room)


def set_request(key: bytes, buffers: Sequence[memoryview], size: int, expire_s: int) -> Request:
    """Store an object from its buffers, of `size` bytes in all. expire_s: 0: never."""
    expiry = (b"EX", b"%d" % expire_s) if expire_s else ()
    head = b"*%d\r\n%b$%d\r\n" % (3 + len(expiry), _bulk(b"SET", key), size)
    return Request(key, [head, *buffers, b"\r\n" + _bulk(*expiry)], 1)


def _pack(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + _bulk(*words)


def _bulk(*words: bytes) -> bytes:
    return b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def says(reply: Reply, code: str) -> bool:
    return isinstance(reply, ResponseError) and str(reply).startswith(code)


def expect(reply: Reply, kind: type[_T]) -> _T:
    """The reply, which must have this type. Raises the reply if it is an error, or RedisError for another type."""
    if isinstance(reply, ResponseError):
        raise reply
    if not isinstance(reply, kind):
        raise InvalidResponse(f"{type(reply).__name__} instead of {kind.__name__}")
    return reply


def checked(value: object) -> Reply:
    """The value that redis-py has read, as a reply. Raises RedisError if it is something else."""
    if isinstance(value, list):
        return [checked(item) for item in value]
    if value is None or isinstance(value, int | bytes | ResponseError):
        return value
    raise InvalidResponse(f"a reply of type {type(value).__name__}")


def exchange(pool: ConnectionPool, requests: Sequence[tuple[int, Request]]) -> Generator[tuple[int, list[Reply]]]:
    """Send (number, request) on one connection, with at most WINDOW_BYTES unread; yields (number, replies), in order.
    Close the generator after use. Raises RedisError or OSError."""
    connection: _Connection = (taken := pool.get_connection())
    complete = False
    try:
        unsent: Packed = []
        waiting: deque[tuple[int, Request]] = deque()
        weight = 0

        def next_answer() -> tuple[int, list[Reply]]:
            connection.send_packed_command(list(sendable(unsent)))
            unsent.clear()
            index, oldest = waiting.popleft()
            return index, [_reply(connection) for _ in range(oldest.replies)]

        for index, each in requests:
            while waiting and weight + each.weight > WINDOW_BYTES:
                weight -= waiting[0][1].weight
                yield next_answer()
            unsent += each.packed
            waiting.append((index, each))
            weight += each.weight
        while waiting:
            yield next_answer()
        complete = True
    finally:
        if not complete:
            connection.disconnect()  # the next call would take the remaining replies for its own
        pool.release(taken)


def _reply(connection: _Connection) -> Reply:
    try:
        return checked(connection.read_response())
    except ResponseError as exc:
        return exc


def sendable(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The same bytes in pieces of a good size: small ones joined, large ones cut."""
    small: Packed = []
    size = 0
    for piece in pieces:
        if len(piece) < SMALL_BYTES:
            small.append(piece)
            size += len(piece)
            if size < SMALL_BYTES:
                continue
        if small:
            yield b"".join(small)
            small, size = [], 0
        if len(piece) >= SMALL_BYTES:
            view = memoryview(piece)
            yield from (view[start : start + SEND_BYTES] for start in range(0, len(view), SEND_BYTES))
    if small:
        yield b"".join(small)
