"""The depot's facts about its clients. Plain data on the deciding thread, shared by several files.

`core/depot.py` creates and removes clients, `core/pins.py` manages their sessions, `core/registrations.py` what they
register, and `core/transfers.py` their operations in progress. Lookups without an answer are listed in
core/lookups/lookups.py only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Protocol

from kvdepot.core.index.chunk import Chunk, Namespace
from kvdepot.protocol import wire
from kvdepot.protocol.handshake import Seal
from kvdepot.protocol.layout import BlockFormat

_UUID = re.compile(r"\b([0-9a-f]{8})-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")
_MOST_NAME = 80
"""Most characters of an engine's name."""


class Liveness(Protocol):
    """The part of a client's liveness file (shm.LivenessView) that the core uses."""

    @property
    def name(self) -> str: ...

    @property
    def secret(self) -> bytes:
        """The secret bytes that only processes of the client's user know."""

    def is_alive(self) -> bool: ...

    def has_left(self) -> bool:
        """Whether the client closed its connection; then it does not count as dead."""

    def close(self, remove: bool) -> None:
        """Close the liveness file. remove: also remove it from the file system."""


@dataclass(slots=True, eq=False)
class PinShare:
    """The share that the first `chunks` of a prompt have of the pin budget (core/lookups/budget.py).

    is_queued: its request waits in its engine's queue. chunk_bytes: bytes of one chunk without windows and states.
    marks: names of chunks, each with the bytes of the chunks since the mark before. brought: bytes that no other share
    had when this one was taken. is_taken: the budget counts it.
    """

    client: Client
    is_queued: bool
    chunks: int
    chunk_bytes: int
    marks: dict[bytes, int]
    brought: int = 0
    is_taken: bool = False


@dataclass(slots=True, eq=False)
class Session:
    """The pins of one request of one client, and the lookup that made them."""

    client: Client
    request: str
    model: str
    chunks: list[Chunk]
    parts: int  # parts that the pins protect: chunks times the KV cache groups that need them
    tokens: int  # tokens of the pinned prefix
    remaining: int  # keys still to be retrieved before the pins end
    readers: int = 1  # keys retrieved per part
    retrieved: int = 0  # keys retrieved successfully
    share: PinShare | None = None  # share of the pin budget until its first retrieve
    reports: bool = False  # its engine reports what it has saved
    number: bytes = b""  # number of the lookup's message
    answer: wire.Hit = wire.MISS
    withdrawals: int = 0  # the index's withdrawals at the answer


@dataclass(slots=True, eq=False)
class Instance:
    """One worker's registration of its tensors of one KV cache group.

    group, groups, chunk_tokens, topic, writer, fault: as registered; see wire.Register.
    """

    number: int
    layout: BlockFormat
    tenant: str = ""
    group: int = 0
    groups: list[wire.Group] = field(default_factory=list)
    chunk_tokens: int = 0
    topic: str = ""
    writer: str = ""
    fault: str = ""
    namespaces: dict[tuple[str, int, int, int], Namespace] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class CopyOperation:
    """One store, retrieve or comparison, from its request until its client has completed it."""

    client: Client
    number: bytes  # number of the message to answer
    instance: Instance
    request: wire.Copying
    chunks: list[tuple[Chunk, int]] = field(default_factory=list)  # reserved or held: chunk and rank
    positions: list[int] = field(default_factory=list)  # place of each chunk among those of the request; ascending
    summed: list[bool] = field(default_factory=list)  # of each chunk: whether the client computes its checksum
    results: list[bool] = field(default_factory=list)  # of a retrieve: one per key; of a store: one
    placement: wire.Placement | None = None  # the answer that says where the bytes are or belong


@dataclass(slots=True, eq=False)
class Client:
    """One connection that has passed the handshake."""

    identity: bytes
    liveness: Liveness
    tenant: str = ""
    user: str = ""  # the user whose key its connection has; empty: the server has no keys
    seal: Seal | None = None  # seals its messages; None: they are not sealed
    came: float = 0.0  # when it connected
    heard: float = 0.0  # when it last sent a request
    engine: str = ""  # the engine that it says it belongs to; see core/engines.py
    engine_called: str = ""  # the short name of its engine in the status, journal and log
    host: str = ""  # host of its process, as the client says
    pid: int = 0
    model: str = ""  # model of its last lookup or registration
    is_engine: bool = False  # has registered tensors or looked up a prompt, unlike commands, probes and web pages
    is_seen: bool = False  # core/engines.py knows that it belongs to an engine
    pins: int = 0  # parts of chunks that its sessions pin
    sessions: dict[str, Session] = field(default_factory=dict)
    instances: dict[int, Instance] = field(default_factory=dict)
    operations: dict[int, CopyOperation] = field(default_factory=dict)  # in progress, by the number of their request
    queued_chunks: int = 0  # chunks of these operations
    dead: bool = False

    def belongs_to(self, hello: wire.Hello | None) -> None:
        """Note what a client says about itself. In the short name of its engine, a UUID is cut to its first digits."""
        if hello is not None:
            self.engine, self.host, self.pid = hello.engine, hello.host, hello.pid
        self.engine_called = _UUID.sub(r"\1", self.engine)[:_MOST_NAME] or self.called

    @property
    def called(self) -> str:
        """The client's short name in the status, journal and log."""
        return self.identity.hex()[:8]
