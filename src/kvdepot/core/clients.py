"""What the depot knows of its clients. Plain data, shared by the files that decide.

Owned by the deciding thread. `core/depot.py` makes and drops clients, `core/sessions.py` their lookups and pins,
`core/registrations.py` their tensors; `core/transfers.py` counts what is under way for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from kvdepot.core.index.chunk import Chunk, Namespace
from kvdepot.core.tiering.lookup import TierLookup
from kvdepot.memory.copier import Mapped
from kvdepot.protocol import wire
from kvdepot.protocol.handshake import Seal
from kvdepot.protocol.layout import Layout

__all__ = ["Client", "Instance", "Lease", "NoLease", "PendingLookup", "Session"]


class Lease(Protocol):
    """What the core needs of a client's lease (shm.LeaseView)."""

    @property
    def name(self) -> str: ...

    @property
    def secret(self) -> bytes:
        """What only a client of this user can know."""

    @property
    def fence(self) -> int:
        """Stores with a ticket up to this are void."""

    def is_alive(self) -> bool: ...

    def has_left(self) -> bool:
        """Whether the client closed its connection, so that its end is no death."""

    def close(self, remove: bool) -> None:
        """Let go of it; with `remove`, take the file of a dead client away."""


class NoLease:
    """Of a client that is the depot itself."""

    name = ""
    secret = b""
    fence = 0

    def is_alive(self) -> bool:
        return True

    def has_left(self) -> bool:
        return False

    def close(self, remove: bool) -> None:
        pass


@dataclass(slots=True, eq=False)
class Session:
    """What one request of one client pins."""

    client: Client
    request: str
    model: str
    chunks: list[Chunk]
    matched: int  # chunks that are pinned by holding these
    remaining: int  # keys asked for until the pins go by themselves
    readers: int = 1  # keys that are retrieved per chunk
    retrieved: int = 0  # keys that were given


@dataclass(slots=True, eq=False)
class PendingLookup:
    """A lookup that looks behind memory."""

    asker: Client
    number: bytes
    owner: Client  # whose session it becomes: the asker, or the depot itself for what is pinned by name
    lookup: wire.Lookup
    first: int  # chunks that memory had
    ends: float = float("inf")  # of a pin by name: when
    tier_lookup: TierLookup | None = None
    given_up: bool = False  # nobody wants the pins any more

    @property
    def by_hand(self) -> bool:
        """Whether a person asks, not an engine: what is warmed or pinned by name is no lookup that hits or misses."""
        return self.owner is not self.asker or not self.lookup.readers


@dataclass(slots=True, eq=False)
class Instance:
    """One worker's registered tensors."""

    number: int
    layout: Layout
    tenant: str = ""
    mapped: Mapped | None = None
    namespaces: dict[tuple[str, int, int, int], Namespace] = field(default_factory=dict)
    copies: int = 0  # operations that touch the tensors
    closing: bool = False  # unregistered or replaced: unmapped once copies == 0


@dataclass(slots=True, eq=False)
class Client:
    """One connection that has said hello."""

    identity: bytes
    lease: Lease
    tenant: str = ""
    user: str = ""  # whose key its connection has; empty: the server has no keys
    seal: Seal | None = None  # of its messages, where they have one
    came: float = 0.0
    heard: float = 0.0  # when it last asked for something
    model: str = ""  # it last looked up or registered for
    is_engine: bool = False  # has registered tensors or looked a prompt up; commands, probes and pages have not
    pins: int = 0  # chunks that the sessions matched
    sessions: dict[str, Session] = field(default_factory=dict)
    pending: dict[str, PendingLookup] = field(default_factory=dict)  # lookups that await tiers, by request
    instances: dict[int, Instance] = field(default_factory=dict)
    closing: dict[int, list[Instance]] = field(default_factory=dict)  # by number: no more, but still mapped
    waiting: dict[int, list[bytes]] = field(default_factory=dict)  # requests to answer when these are unmapped
    queued: int = 0
    queued_chunks: int = 0
    dead: bool = False

    @property
    def called(self) -> str:
        """What status, journal and log call it."""
        return self.identity.hex()[:8]
