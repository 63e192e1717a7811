"""The `redis` tier: objects as values of a Redis or Valkey server, or a cluster of them, with redis-py.

    redis://[user:password@]host[:port][/db]?...    rediss:// the same over TLS
    redis+cluster://host:port[,host:port...]?...    rediss+cluster:// the same over TLS

redis-py connects, authenticates, pools connections and knows a cluster's slots (servers.py). The commands that carry KV
are packed and their replies read here, on its connections (exchange.py), for two reasons: a value is sent from the
buffers it lies in, and it is read in parts. One `GET` of 8 MiB makes the server build a reply of 8 MiB, and the client
a bytes object of the same size under the GIL; the same bytes as `GETRANGE`s of 1 MiB arrive at twice the speed. A
`WATCH` of the key comes before them, and an empty `MULTI`/`EXEC` after them says whether all parts are of one object.
The parts are not read within a transaction, where a server without free memory would refuse them.

Objects that Redis evicts or that expire are misses. A server that has no memory left and may not evict
(`maxmemory-policy noeviction`), or that stopped writing because it cannot save, refuses writes: they are answered
False and counted, and reads go on. Commands that a user needs: ping, info, watch, strlen, getrange, set, exists,
unlink, scan, multi, exec; cluster if there is one.

Known weaknesses: an object whose slot is moving between two nodes of a cluster is a miss meanwhile; one node that is
unavailable fails the calls that ask it; `forget` walks all keys of the database, also those of others.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
import redis
from msgspec import Meta
from redis import exceptions
from redis.exceptions import RedisError, ResponseError

from kvdepot.errors import ConfigError, TierError
from kvdepot.tiers import Blob, Tally, TierUsage, convert
from kvdepot.tiers.codec import fill
from kvdepot.tiers.redis import exchange
from kvdepot.tiers.redis.exchange import Reply, Request, checked, expect, request, says
from kvdepot.tiers.redis.servers import ClientArguments, Cluster, Single
from kvdepot.tiers.urls import credentials_of, redact, secrets_of, shown

LARGEST_BYTES = 512 << 20
_ELSEWHERE, _DOWN = (exceptions.AskError, exceptions.TryAgainError), exceptions.ClusterDownError
SCAN_KEYS = 2000
_PROBES = [f"probe-{number}" for number in range(64)]
"""Names whose keys lie in many slots, so that a cluster's node has only some of them."""


class RedisOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    """The tier at `url`. Connects at the first call. Raises ConfigError."""
    user, password, rest = credentials_of(url)
    scheme, _, place = rest.partition("://")
    name = shown(rest)
    own = convert(options, RedisOptions, name)
    cluster = scheme.endswith("+cluster")
    hosts, _, database = place.partition("/")
    nodes = [_node(text, name) for text in hosts.split(",")]
    if not cluster and len(nodes) > 1:
        raise ConfigError(f"tier {name}: several hosts need redis+cluster://")
    if database and cluster:
        raise ConfigError(f"tier {name}: a cluster has no databases")
    if database and not database.isdecimal():
        raise ConfigError(f"tier {name}: {database!r} is not a database number")
    settings: ClientArguments = {
        "username": user or None,
        "password": password or None,
        "socket_timeout": own.timeout_s,
        "socket_connect_timeout": own.timeout_s,
        "protocol": 2,  # with protocol 3, redis-py would accept push messages that extend timeouts
        "ssl": scheme.startswith("rediss"),
        "ssl_ca_certs": own.tls_ca or None,
        "ssl_certfile": own.tls_cert or None,
        "ssl_keyfile": own.tls_key or None,
    }
    if own.password_file:
        try:
            settings["password"] = Path(own.password_file).read_text(encoding="utf-8").strip()
        except OSError as exc:
            raise ConfigError(f"tier {name}: password_file {own.password_file}: {exc.strerror}") from exc
    files = [path for path in (own.tls_ca, own.tls_cert, own.tls_key) if path]
    if files and not settings["ssl"]:
        raise ConfigError(f"tier {name}: tls_ca, tls_cert and tls_key are for rediss:// and rediss+cluster://")
    for path in files:
        if not Path(path).is_file():
            raise ConfigError(f"tier {name}: {path} is not a file")
    servers = Cluster(nodes, settings) if cluster else Single(nodes[0], int(database or 0), settings)
    secrets = [secret for secret in (settings["password"], *secrets_of(url)) if secret]
    return RedisTier(name, servers, own, secrets)


def _node(text: str, name: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ConfigError(f"tier {name}: no host:port") from None  # the text may be a password without its host
    if not host:
        raise ConfigError(f"tier {name}: the host is missing")
    return host, port or 6379


class RedisTier:
    """Objects as values. Any thread: redis-py's pools are all that threads share."""

    def __init__(
        self, name: str, servers: Single | Cluster, options: RedisOptions, secrets: Sequence[str] = ()
    ) -> None:
        """name: without credentials. secrets: text that no error may contain."""
        self._name = name
        self._servers = servers
        self._options = options
        self._secrets = secrets
        self._prefix = options.prefix.encode()
        self._closed = False
        self._tally = Tally("refused")

    def attach(self, memory: Sequence[memoryview]) -> None:
        """Do nothing: sockets read from and write to any memory."""

    def find(self, names: Sequence[str]) -> list[bool]:
        """One round trip; does not count as a use for Redis' eviction."""
        there = [False] * len(names)
        with self._answers([request(b"EXISTS", self._key(name)) for name in names]) as answers:
            for index, (count,) in answers:
                there[index] = expect(count, int) == 1
        return there

    def read(self, blobs: Sequence[Blob]) -> list[int | None]:
        """Replies are copied as they arrive; meanwhile the server sends the next."""
        sizes: list[int | None] = [None] * len(blobs)
        with self._answers([exchange.get_request(self._key(blob.name), blob.size) for blob in blobs]) as answers:
            for index, (watched, length, *parts, _, unchanged) in answers:
                expect(watched, bytes)
                expect(unchanged, list)
                if says(length, "WRONGTYPE") or length == 0:  # a key of another program, or none
                    continue
                blob, size = blobs[index], expect(length, int)
                if fill(blob.buffers, (expect(part, bytes) for part in parts)) < min(size, blob.size):
                    raise TierError(f"{self._name}: an object of {size} bytes arrived incomplete")
                sizes[index] = size
        return sizes

    def write(self, blobs: Sequence[Blob]) -> list[bool]:
        """One `SET` each, from the buffers. False: larger than Redis accepts, or it is full."""
        kept = [False] * len(blobs)
        fitting = [index for index, blob in enumerate(blobs) if blob.size <= LARGEST_BYTES]
        chosen, expire_s = [blobs[index] for index in fitting], self._options.expire_s
        requests = [exchange.set_request(self._key(b.name), b.buffers, b.size, expire_s) for b in chosen]
        with self._answers(requests) as answers:
            for index, (reply,) in answers:
                is_full = isinstance(reply, exceptions.OutOfMemoryError) or says(reply, "MISCONF")
                kept[fitting[index]] = not is_full and expect(reply, bytes) == b"OK"
        self._tally("refused", kept.count(False))
        return kept

    def remove(self, names: Sequence[str]) -> None:
        with self._answers([request(b"UNLINK", self._key(name)) for name in names]) as answers:
            left = len(names) - sum(expect(count, int) >= 0 for _, (count,) in answers)
        if left:
            raise TierError(f"{self._name}: {left} objects are moving between nodes")

    def forget(self, salt: str, space: str) -> int:
        """Walks the keys of every primary and removes what matches, a few thousand at a time."""
        pattern = "".join(f"\\{c}" if c in "*?[]\\^-" else c for c in self._options.prefix) + f"{salt}*/{space}*"
        begins = [salt.encode(), space.encode()]

        def ours(key: bytes | str) -> bool:
            assert isinstance(key, bytes)  # only clients that decode get str
            parts = key[len(self._prefix) :].split(b"/")
            return len(parts) == 3 and all(part.startswith(text) for part, text in zip(parts, begins, strict=False))

        gone = 0
        with self._edge():
            for client in self._servers.clients():
                cursor = 0
                while True:
                    cursor, keys = client.scan(cursor, pattern, SCAN_KEYS)
                    pipe = client.pipeline(transaction=False)  # one key per command: a cluster accepts no others
                    for key in filter(ours, keys):
                        pipe.unlink(key)
                    gone += sum(expect(checked(count), int) for count in pipe.execute(raise_on_error=False))
                    if cursor == 0:
                        break
        return gone

    def usage(self) -> TierUsage:
        """capacity_bytes: the servers' `maxmemory`. Only a walk over all keys could count our objects. Raises TierError
        for a cluster's node that is used as a server alone."""
        self.find(_PROBES if isinstance(self._servers, Single) else ())
        with self._edge():
            limits = [self._limit(client) for client in self._servers.clients()]
        return TierUsage(capacity_bytes=sum(limits) if all(limits) else None, counters=self._tally.counts())

    def close(self) -> None:
        """Close idle connections now, and the others after the calls that use them."""
        self._closed = True
        self._servers.close()

    # -- internals

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode()

    @contextmanager
    def _answers(self, requests: Sequence[Request]) -> Iterator[Iterator[tuple[int, list[Reply]]]]:
        """Send requests; iterate over the index and the replies of each, as they arrive. Raises TierError."""
        with self._edge(), closing(self._ask(requests)) as answers:
            yield answers

    def _ask(self, requests: Sequence[Request]) -> Generator[tuple[int, list[Reply]]]:
        """Send each request to the server of its key. If a server says that the key is elsewhere, or that the object
        was replaced meanwhile, the request is sent once more; after that, it gets no answer. Raises TierError for a
        cluster's node that is used as a server alone."""
        indexes: Sequence[int] = range(len(requests))
        is_alone = isinstance(self._servers, Single)
        for _ in range(2):
            again: list[int] = []
            for pool, theirs in self._servers.routes(requests, indexes):
                with closing(exchange.exchange(pool, [(index, requests[index]) for index in theirs])) as answers:
                    for index, replies in answers:
                        is_elsewhere = any(isinstance(reply, _ELSEWHERE) for reply in replies)
                        if is_alone and (is_elsewhere or any(isinstance(reply, _DOWN) for reply in replies)):
                            raise TierError(
                                f"{self._name}: this server is a node of a cluster and has only some of the keys; "
                                "write redis+cluster:// (with TLS: rediss+cluster://) in the tier's URL"
                            )
                        if is_elsewhere or replies[-1] is None:  # None: EXEC's reply after a change
                            again.append(index)
                        else:
                            yield index, replies
            if not again:
                return
            self._servers.distrust()
            indexes = again

    @contextmanager
    def _edge(self) -> Iterator[None]:
        """Turns what redis-py raises into TierError."""
        if self._closed:
            raise TierError(f"{self._name} is closed")
        try:
            yield
        except (RedisError, exceptions.RedisClusterException, OSError) as exc:
            self._servers.distrust()
            said = str(exc)
            if type(exc) not in (redis.ConnectionError, redis.TimeoutError):  # the text of these is redis-py's own
                # A server that does not know AUTH quotes its arguments, cut off at some length.
                said = redact(said.partition(", with args beginning with")[0], self._secrets)
            raise TierError(f"{self._name}: {type(exc).__name__}: {said}") from None
        finally:
            if self._closed:
                self._servers.close()

    def _limit(self, client: redis.Redis) -> int:
        try:
            client.ping()
        except ResponseError as exc:
            if not says(exc, "MISCONF"):  # such a server refuses writes and PING, but still answers reads
                raise
        try:
            return int(client.info("memory").get("maxmemory", 0))
        except ResponseError:  # the user has no right to ask, or the server has no such command
            return 0
