"""The `redis` tier: objects as values of a Redis or Valkey server, or a cluster of them, by redis-py.

    redis://[user:password@]host[:port][/db]?...    rediss:// the same over TLS
    redis+cluster://host:port[,host:port...]?...    rediss+cluster:// the same over TLS

redis-py connects, authenticates, pools and knows a cluster's slots. The commands that carry KV are packed and answered
here, on its connections, for two reasons: a value is sent from the pieces it lies in, and it is read in parts. One
`GET` of 8 MiB makes the server build a reply of 8 MiB and the client a bytes object of as much under the GIL; the same
bytes as `GETRANGE`s of 1 MiB within `MULTI`/`EXEC` (so that they are all of one object) arrive at twice the speed.

Objects that Redis evicts or that expire are gone, which is fine. A server that has no memory left and may not evict
(`maxmemory-policy noeviction`), or that stopped writing because it cannot save, refuses writes: they are answered
False and counted, and reads go on. Commands that a user needs: ping, info, strlen, getrange, set, exists, unlink, scan,
multi, exec; cluster where there is one.

Known weaknesses: an object whose slot is moving between two nodes of a cluster counts as missing meanwhile; one node of
a cluster that cannot be had fails the calls that ask it; `forget` walks all keys of the database, also those of others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
import redis
from msgspec import Meta
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.exceptions import (
    AskError,
    OutOfMemoryError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry

from kvdepot.errors import ConfigError, TierError
from kvdepot.tiers import Blob, Usage, convert
from kvdepot.tiers.pieces import fill
from kvdepot.tiers.urls import credentials_of, redact, secrets_of, shown

__all__ = ["RedisOptions", "RedisTier", "open"]

LARGEST_BYTES = 512 << 20
"""Redis' own limit of one value."""
PART_BYTES = 1 << 20
"""What one GETRANGE asks for."""
WINDOW_BYTES = 64 << 20
"""What may be asked for and not yet read on one connection: the server keeps it in its memory."""
SEND_BYTES = 4 << 20
"""Given to the socket at once; the timeout counts for each anew."""
SMALL_BYTES = 16 << 10
"""Pieces below this are joined: a copy costs less than a packet."""
SCAN_KEYS = 2000

Packed = list["bytes | memoryview"]


class RedisOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the URL that this tier has beside the common ones."""

    prefix: Annotated[str, Meta(max_length=64, description="prefix of every key")] = "kvdepot/"
    expire_s: Annotated[int, Meta(ge=0, description="seconds after which Redis drops an object; 0 = never")] = 0
    timeout_s: Annotated[
        float, Meta(gt=0, le=600, description="seconds without progress before the server counts as unreachable")
    ] = 3.0
    password_file: Annotated[str, Meta(description="file with the password, instead of one in the URL")] = ""
    tls_ca: Annotated[str, Meta(description="file with the CAs to trust (PEM); default: the system's")] = ""
    tls_cert: Annotated[str, Meta(description="file with a client certificate (PEM)")] = ""
    tls_key: Annotated[str, Meta(description="file with the certificate's key (PEM)")] = ""


def open(url: str, options: dict[str, str], threads: int) -> RedisTier:
    """The tier at `url`. Connects when first asked. Raises ConfigError that names what is wrong."""
    user, password, rest = credentials_of(url)
    scheme, _, place = rest.partition("://")
    name = shown(rest)
    own: RedisOptions = convert(options, RedisOptions, name)
    cluster = scheme.endswith("+cluster")
    hosts, _, database = place.partition("/")
    nodes = [_node(text, name) for text in hosts.split(",")]
    if not cluster and len(nodes) > 1:
        raise ConfigError(f"tier {name}: several hosts need redis+cluster://")
    if database and (cluster or not database.isdecimal()):
        raise ConfigError(f"tier {name}: {database!r} is no database" + " of a cluster" * cluster)
    settings: dict[str, Any] = {
        "username": user or None,
        "password": password or None,
        "socket_timeout": own.timeout_s,
        "socket_connect_timeout": own.timeout_s,
        "protocol": 2,  # nothing of 3 is needed, and with 3 redis-py listens to pushes that stretch timeouts
    }
    if own.password_file:
        try:
            settings["password"] = Path(own.password_file).read_text().strip()
        except OSError as exc:
            raise ConfigError(f"tier {name}: password_file {own.password_file}: {exc.strerror}") from exc
    tls = {"ssl_ca_certs": own.tls_ca, "ssl_certfile": own.tls_cert, "ssl_keyfile": own.tls_key}
    if scheme.startswith("rediss"):
        settings |= {"ssl": True} | {key: path for key, path in tls.items() if path}
    elif any(tls.values()):
        raise ConfigError(f"tier {name}: tls_ca, tls_cert and tls_key are for rediss:// and rediss+cluster://")
    for path in filter(None, tls.values()):
        if not Path(path).is_file():
            raise ConfigError(f"tier {name}: {path} is no file")
    servers = _Cluster(nodes, settings) if cluster else _Single(nodes[0], int(database or 0), settings)
    secrets = [secret for secret in (settings["password"], *secrets_of(url)) if secret]
    return RedisTier(name, servers, own, secrets)


def _node(text: str, name: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ConfigError(f"tier {name}: no host:port") from None  # which may be a password without its host
    if not host:
        raise ConfigError(f"tier {name}: there is no host")
    return host, port or 6379


@dataclass(frozen=True, slots=True)
class _Request:
    """Commands that are sent together, all about one key."""

    key: bytes
    packed: Packed
    replies: int
    weight: int = 0
    """Bytes of reply, at most."""


_Route = tuple[redis.ConnectionPool, Sequence[int]]


class RedisTier:
    """Objects as values. Threads: any; what they share is redis-py's pools and two counters under a lock."""

    def __init__(
        self, name: str, servers: _Single | _Cluster, options: RedisOptions, secrets: Sequence[str] = ()
    ) -> None:
        """name: without credentials. secrets: what no error may quote."""
        self._name = name
        self._servers = servers
        self._options = options
        self._secrets = secrets
        self._prefix = options.prefix.encode()
        self._closed = False
        self._lock = threading.Lock()
        self._counters = {"refused": 0, "spoilt": 0}

    def __repr__(self) -> str:
        counts = "".join(f", {name} {count}" for name, count in self._counters.items())
        return f"<RedisTier {self._name} {self._options.prefix!r}{counts}>"

    def attach(self, memory: Sequence[memoryview]) -> None:
        """Nothing: sockets read from and write to any memory."""

    def find(self, names: Sequence[str]) -> list[bool]:
        """One round trip; does not count as a use for Redis' eviction."""
        there = [False] * len(names)

        def answer(number: int, replies: list[Any]) -> None:
            there[number] = _good(replies[0]) == 1

        self._ask([_request(b"EXISTS", self._key(name)) for name in names], answer)
        return there

    def read(self, blobs: Sequence[Blob]) -> list[int]:
        """Replies are copied as they come in; meanwhile the server sends the next."""
        sizes = [-1] * len(blobs)

        def answer(number: int, replies: list[Any]) -> None:
            for reply in replies:  # where a command was refused, that error comes before EXEC's
                _good(reply)
            size, *parts = replies[-1]
            if _says(size, "WRONGTYPE") or size == 0:  # somebody else's key; none
                return
            blob = blobs[number]
            if fill(blob.buffers, parts) < min(_good(size), blob.size):
                raise TierError(f"{self._name}: an object of {size} bytes arrived incomplete")
            sizes[number] = size

        self._ask([_get(self._key(blob.name), blob.size) for blob in blobs], answer)
        return sizes

    def write(self, blobs: Sequence[Blob]) -> list[bool]:
        """One `SET` each, from the pieces. False: larger than Redis takes, or it is full."""
        kept = [False] * len(blobs)
        fitting = [number for number, blob in enumerate(blobs) if blob.size <= LARGEST_BYTES]

        def answer(number: int, replies: list[Any]) -> None:
            full = isinstance(replies[0], OutOfMemoryError) or _says(replies[0], "MISCONF")
            kept[fitting[number]] = not full and _good(replies[0]) == b"OK"

        self._ask([self._set(blobs[number]) for number in fitting], answer)
        self._count("refused", kept.count(False))
        return kept

    def remove(self, names: Sequence[str], spoilt: bool = False) -> None:
        """Spoilt ones are counted; none are kept aside."""
        answered: set[int] = set()

        def answer(number: int, replies: list[Any]) -> None:
            _good(replies[0])
            answered.add(number)

        self._ask([_request(b"UNLINK", self._key(name)) for name in names], answer)
        if len(answered) < len(names):
            raise TierError(f"{self._name}: {len(names) - len(answered)} objects are moving between nodes")
        self._count("spoilt", len(names) if spoilt else 0)

    def forget(self, salt: str, space: str) -> int:
        """Walks the keys of every primary and removes what it finds, some thousand at a time."""
        pattern = "".join(f"\\{c}" if c in "*?[]\\^-" else c for c in self._options.prefix) + f"{salt}*/{space}*"
        begins = [salt.encode(), space.encode()]

        def ours(key: Any) -> bool:
            parts = key[len(self._prefix) :].split(b"/")
            return len(parts) == 3 and all(part.startswith(text) for part, text in zip(parts, begins, strict=False))

        gone = 0
        with self._edge():
            for client in self._servers.clients():
                cursor = 0
                while True:
                    cursor, keys = client.scan(cursor, pattern, SCAN_KEYS)
                    pipe = client.pipeline(transaction=False)  # one key a command: a cluster takes no other
                    for key in keys:
                        if ours(key):
                            pipe.unlink(key)
                    gone += sum(_good(count) for count in pipe.execute(raise_on_error=False))
                    if cursor == 0:
                        break
        return gone

    def usage(self) -> Usage:
        """capacity_bytes: the servers' `maxmemory`. What is ours of what they hold cannot be told without a walk."""
        with self._edge():
            limits = [self._limit(client) for client in self._servers.clients()]
        return Usage(capacity_bytes=sum(limits) if all(limits) else None, counters=dict(self._counters))

    def close(self) -> None:
        """Idle connections end now, the others with the calls that use them."""
        self._closed = True
        self._servers.close()

    # -- beneath

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode()

    def _set(self, blob: Blob) -> _Request:
        key = self._key(blob.name)
        expiry = (b"EX", b"%d" % self._options.expire_s) if self._options.expire_s else ()
        head = b"*%d\r\n%b$%d\r\n" % (3 + len(expiry), _bulk(b"SET", key), blob.size)
        return _Request(key, [head, *blob.buffers, b"\r\n" + _bulk(*expiry)], 1)

    def _ask(self, requests: Sequence[_Request], answer: Callable[[int, list[Any]], None]) -> None:
        """Send each request to the server of its key; `answer` gets its number and its replies.

        What a server says is elsewhere is asked for there, once; what is elsewhere again nobody answers.
        """
        numbers: Sequence[int] = range(len(requests))
        with self._edge():
            for again in (False, True):
                moved: list[int] = []

                def sort(number: int, replies: list[Any], moved: list[int] = moved) -> None:
                    if any(isinstance(reply, (AskError, TryAgainError)) for reply in replies):
                        moved.append(number)
                    else:
                        answer(number, replies)

                for pool, theirs in self._servers.routes(requests, numbers, again):
                    _exchange(pool, [(number, requests[number]) for number in theirs], sort)
                if not moved:
                    return
                numbers = moved

    @contextmanager
    def _edge(self) -> Iterator[None]:
        """What redis-py raises is TierError from here on."""
        if self._closed:
            raise TierError(f"{self._name} is closed")
        try:
            yield
        except (RedisError, RedisClusterException, OSError) as exc:
            self._servers.failed()
            # A server that does not know AUTH quotes its arguments, cut off at some length.
            said = redact(str(exc).partition(", with args beginning with")[0], self._secrets)
            raise TierError(f"{self._name}: {type(exc).__name__}: {said}") from None
        finally:
            if self._closed:
                self._servers.close()

    def _limit(self, client: redis.Redis) -> int:
        try:
            client.ping()
        except ResponseError as exc:
            if not _says(exc, "MISCONF"):  # it refuses writes, as `write` tells; and PING, to be noticed
                raise
        try:
            return int(client.info("memory").get("maxmemory", 0))
        except ResponseError:  # this user may not ask, or the server has none
            return 0

    def _count(self, name: str, count: int) -> None:
        with self._lock:
            self._counters[name] += count


class _Single:
    """One server."""

    def __init__(self, node: tuple[str, int], database: int, settings: dict[str, Any]) -> None:
        host, port = node
        once = Retry(NoBackoff(), 0)  # the breaker's business
        self._client = redis.Redis(host=host, port=port, db=database, retry=once, **settings)

    def routes(self, requests: Sequence[_Request], numbers: Sequence[int], again: bool) -> list[_Route]:
        """Where to ask for each of these numbers."""
        return [(self._client.connection_pool, numbers)]

    def clients(self) -> list[redis.Redis]:
        """All servers that hold keys."""
        return [self._client]

    def failed(self) -> None:
        """Nothing: the pool looks at each connection before it gives it away."""

    def close(self) -> None:
        self._client.connection_pool.disconnect(inuse_connections=False)


class _Cluster:
    """The primaries of a cluster. Who holds what is asked when first needed, and again after any failure."""

    def __init__(self, nodes: Sequence[tuple[str, int]], settings: dict[str, Any]) -> None:
        self._nodes = nodes
        self._settings = settings
        self._cluster: Any = None
        self._doubtful = False

    def _known(self, again: bool = False) -> Any:
        if self._cluster is None:
            node: Any = ClusterNode  # which has no types
            self._cluster = redis.RedisCluster(
                startup_nodes=[node(host, port) for host, port in self._nodes],
                require_full_coverage=False,
                retry=Retry(NoBackoff(), 0),
                **self._settings,
            )
        elif again or self._doubtful:
            self._cluster.nodes_manager.initialize()
        self._doubtful = False
        return self._cluster

    def routes(self, requests: Sequence[_Request], numbers: Sequence[int], again: bool) -> list[_Route]:
        cluster = self._known(again)
        found: dict[str, tuple[Any, list[int]]] = {}
        for number in numbers:
            node = cluster.get_node_from_key(requests[number].key)
            found.setdefault(node.name, (node, []))[1].append(number)
        return [(cluster.get_redis_connection(node).connection_pool, theirs) for node, theirs in found.values()]

    def clients(self) -> list[redis.Redis]:
        cluster = self._known()
        return [cluster.get_redis_connection(node) for node in cluster.get_primaries()]

    def failed(self) -> None:
        self._doubtful = True

    def close(self) -> None:
        if self._cluster is not None:
            for node in self._cluster.get_nodes():
                if node.redis_connection:
                    node.redis_connection.connection_pool.disconnect(inuse_connections=False)


def _exchange(
    pool: redis.ConnectionPool, requests: Sequence[tuple[int, _Request]], receive: Callable[[int, list[Any]], None]
) -> None:
    """Send and receive on one connection, in order, with as much under way as WINDOW_BYTES allow."""
    connection: Any = pool.get_connection()
    complete = False
    try:
        unsent: Packed = []
        waiting: deque[tuple[int, _Request]] = deque()
        weight = 0

        def settle() -> None:
            connection.send_packed_command(list(_sendable(unsent)))
            unsent.clear()
            number, request = waiting.popleft()
            receive(number, [_reply(connection) for _ in range(request.replies)])

        for number, request in requests:
            while waiting and weight + request.weight > WINDOW_BYTES:
                weight -= waiting[0][1].weight
                settle()
            unsent += request.packed
            waiting.append((number, request))
            weight += request.weight
        while waiting:
            settle()
        complete = True
    finally:
        if not complete:
            connection.disconnect()  # what it still brings would be taken for the next call's replies
        pool.release(connection)


def _reply(connection: Any) -> Any:
    """Values; errors of one command as values, too."""
    try:
        return connection.read_response()
    except ResponseError as exc:
        return exc


def _sendable(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
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


def _pack(*words: bytes) -> bytes:
    """One command."""
    return b"*%d\r\n" % len(words) + _bulk(*words)


def _bulk(*words: bytes) -> bytes:
    return b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def _request(*words: bytes) -> _Request:
    return _Request(words[1], [_pack(*words)], 1)


def _get(key: bytes, room: int) -> _Request:
    """Its size, and its bytes as far as there is room, all at one moment."""
    starts = range(0, room, PART_BYTES)
    parts = [_pack(b"GETRANGE", key, b"%d" % at, b"%d" % (min(at + PART_BYTES, room) - 1)) for at in starts]
    packed = b"".join([_pack(b"MULTI"), _pack(b"STRLEN", key), *parts, _pack(b"EXEC")])
    return _Request(key, [packed], 3 + len(starts), room)


def _says(reply: Any, code: str) -> bool:
    return isinstance(reply, ResponseError) and str(reply).startswith(code)


def _good(reply: Any) -> Any:
    """The reply; an error that is not about one object is raised."""
    if isinstance(reply, ResponseError):
        raise reply
    return reply
