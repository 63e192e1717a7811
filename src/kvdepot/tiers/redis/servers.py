"""Which Redis server has which key: one server, or the primaries of a cluster. Any thread; blocks, raises redis-py's
errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, TypedDict

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.retry import Retry

from kvdepot.tiers.redis.exchange import Request

Route: TypeAlias = tuple[redis.ConnectionPool, Sequence[int]]
"""Connections to a server, and the numbers of the requests that go there."""


class ClientArguments(TypedDict):
    username: str | None
    password: str | None
    socket_timeout: float
    socket_connect_timeout: float
    protocol: int
    ssl: bool
    ssl_ca_certs: str | None
    ssl_certfile: str | None
    ssl_keyfile: str | None


class Single:
    def __init__(self, node: tuple[str, int], database: int, settings: ClientArguments) -> None:
        host, port = node
        once = Retry(NoBackoff(), 0)  # the circuit breaker decides about retries
        self._client = redis.Redis(host=host, port=port, db=database, retry=once, **settings)

    def routes(self, requests: Sequence[Request], numbers: Sequence[int]) -> list[Route]:
        return [(self._client.connection_pool, numbers)]

    def clients(self) -> list[redis.Redis]:
        return [self._client]

    def distrust(self) -> None:
        """Do nothing: the pool checks each connection before it hands it out."""

    def close(self) -> None:
        self._client.connection_pool.disconnect(inuse_connections=False)


class _Cluster(Protocol):
    """The methods used of redis-py's cluster, whose types it does not declare."""

    def get_node_from_key(self, key: bytes) -> ClusterNode: ...
    def get_redis_connection(self, node: ClusterNode) -> redis.Redis: ...
    def get_primaries(self) -> list[ClusterNode]: ...
    def get_nodes(self) -> list[ClusterNode]: ...


class Cluster:
    """The primaries of a cluster. Its slots are queried when they are first needed, and again after any failure."""

    def __init__(self, nodes: Sequence[tuple[str, int]], settings: ClientArguments) -> None:
        self._nodes = nodes
        self._settings = settings
        self._cluster: redis.RedisCluster | None = None
        self._doubtful = False

    def _known(self) -> _Cluster:
        if self._cluster is None:
            node: Callable[[str, int], ClusterNode] = ClusterNode
            self._cluster = redis.RedisCluster(
                startup_nodes=[node(host, port) for host, port in self._nodes],
                require_full_coverage=False,
                retry=Retry(NoBackoff(), 0),
                **self._settings,
            )
        elif self._doubtful:
            self._cluster.nodes_manager.initialize()
        self._doubtful = False
        return self._cluster

    def routes(self, requests: Sequence[Request], numbers: Sequence[int]) -> list[Route]:
        cluster = self._known()
        found: dict[str, tuple[ClusterNode, list[int]]] = {}
        for number in numbers:
            node = cluster.get_node_from_key(requests[number].key)
            found.setdefault(node.name, (node, []))[1].append(number)
        return [(cluster.get_redis_connection(node).connection_pool, theirs) for node, theirs in found.values()]

    def clients(self) -> list[redis.Redis]:
        cluster = self._known()
        return [cluster.get_redis_connection(node) for node in cluster.get_primaries()]

    def distrust(self) -> None:
        """Query the slots again before the next request: a call failed, or a key has moved."""
        self._doubtful = True

    def close(self) -> None:
        if self._cluster is not None:
            cluster: _Cluster = self._cluster
            for node in cluster.get_nodes():
                if node.redis_connection:
                    node.redis_connection.connection_pool.disconnect(inuse_connections=False)
