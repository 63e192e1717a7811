"""This process's membership in a Mooncake Store: its one client, and the rules for using that client safely.

Used by the tier, on any of its threads. Invariant: memory that the library may still write to is not given back. Faults
of the library (0.3.13), and the code here that handles each:

- joining and leaving keep the GIL, for a minute and a half if no master answers: see `_rehearse`;
- more than 2048 pieces in transit to one host hang for a minute, and then that host is lost forever: see `transfer`;
- a transfer that it gives up after 60 s may still be going on: see `_give_up`;
- a client that is closed during a call crashes the process: see `calling`;
- removed memory is free at once, even while it is being read: see `reserving`.
"""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from kvdepot.errors import ConfigError, TierError
from kvdepot.processes import code_command
from kvdepot.tiers.mooncake.library import MooncakeStore, library

SPANS_UNDER_WAY = 1024
"""Maximum pieces of memory in all calls together."""
STUCK_S = 50.0
"""Seconds after which the library gives up a transfer."""
LEAVE_S = 10.0
_REHEARSAL_S = 10.0
_LOST = -900
_REHEARSAL = """
import os, sys
from mooncake.store import MooncakeDistributedStore
host, metadata, protocol, device, master = sys.argv[1:]
os._exit(bool(MooncakeDistributedStore().setup(host, metadata, 0, 0, protocol, device, master)))
"""


class MooncakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    local_host: Annotated[
        str,
        Meta(description="this host's address for other hosts; default: the local address used to reach the master"),
    ] = ""
    protocol: Annotated[str, Meta(pattern=r"^(tcp|rdma)\Z", description="tcp or rdma")] = "tcp"
    device: Annotated[str, Meta(description="RDMA devices, separated by commas")] = ""
    segment_gib: Annotated[
        float,
        Meta(
            ge=0,
            le=65536,
            description="memory that this host adds to the pool, in GiB or as 512MiB; 0 = none, else 16MiB or more",
        ),
    ] = 1.0
    replicas: Annotated[int, Meta(ge=1, le=16, description="hosts that each new object is written to")] = 1
    buffer_mib: Annotated[
        int, Meta(ge=1, le=65536, description="staging memory for bytes outside the arena with rdma, in MiB or as 1GiB")
    ] = 64
    metadata: Annotated[str, Meta(description="the pool's metadata server")] = "P2PHANDSHAKE"


class Membership:
    """A client of the library that has joined the pool."""

    def __init__(self, master: tuple[str, int], options: MooncakeOptions, registers: bool) -> None:
        """registers: whether the transport must know memory before it moves bytes there. Blocks for seconds. Raises
        TierError, or ConfigError."""
        self._master = master
        self._options = options
        self._registers = registers
        self._areas: list[tuple[int, int]] = []
        """(address, bytes) of registered memory."""
        self._state = threading.Condition()
        # All below is guarded by _state.
        self._calls = 0
        self._spans = 0
        self._closed = False
        self._stuck = False
        self._removals = 0
        self._reservations = 0
        self._generation = 0
        self._reads: Counter[int] = Counter()
        """Reads in progress, by the generation in which they began."""
        self.rejoined = 0
        self._store: MooncakeStore | None = self._join()

    @property
    def place(self) -> str:
        return f"{self._master[0]}:{self._master[1]}"

    # -- joining and leaving

    def _join(self) -> MooncakeStore:
        """A client that has joined. Raises TierError, or ConfigError for an address that is not this host's."""
        loaded = library()
        try:  # the library itself would go on trying
            with socket.create_connection(self._master, timeout=2.0) as probe:
                local = self._options.local_host or probe.getsockname()[0]
        except OSError as exc:
            raise TierError(f"no mooncake_master answers at {self.place}: {exc.strerror or exc}") from exc
        try:  # the library would not notice a bad address
            with socket.socket() as probe:
                probe.bind((local.rpartition(":")[0] or local, 0))
        except OSError as exc:
            raise ConfigError(f"tier mooncake: local_host={local} is not an address of this host") from exc
        protocol, segment_bytes = self._options.protocol, int(self._options.segment_gib * 2**30)
        last = protocol, self._options.device, self.place
        self._rehearse(local, self._options.metadata, *last)
        store: MooncakeStore = loaded.MooncakeDistributedStore()
        if code := store.setup(local, self._options.metadata, segment_bytes, 0, *last):
            raise TierError(
                f"Mooncake Store at {self.place} cannot be joined with {segment_bytes} bytes of memory "
                f"(code {code}; see standard error)"
            )
        for address, size in self._areas:
            _register(store, address, size)
        return store

    def _rehearse(self, *words: str) -> None:
        """Join in another process first, without memory for the pool: its GIL may be held for long. Raises
        TierError."""
        failed = f"Mooncake Store at {self.place} cannot be joined"
        try:
            done = subprocess.run(
                code_command(_REHEARSAL, *words), timeout=_REHEARSAL_S, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired as exc:
            raise TierError(f"{failed} within {_REHEARSAL_S:.0f} s") from exc
        if done.returncode:
            said = done.stderr.strip().splitlines()
            raise TierError(f"{failed}: {said[-1] if said else 'no reason given'}")

    def leave(self) -> None:
        """Take this host's segment out of the pool. Holds the GIL for up to a few seconds. Safe to call twice."""
        with self._state:
            self._closed = True
            # A call that hangs keeps its client.
            self._state.wait_for(lambda: self._calls == 0, LEAVE_S)
            if self._calls == 0 and self._store is not None:
                store, self._store = self._store, None
                store.close()

    # -- calls

    @contextmanager
    def calling(self) -> Iterator[MooncakeStore]:
        """The client, for one call. Joins again after a transfer got stuck. Raises TierError."""
        with self._state:
            self._state.wait_for(lambda: not self._stuck)
            if self._closed:
                raise TierError("the tier is closed")
            if self._store is None:
                self._store = self._join()
                self.rejoined += 1
            self._calls += 1
            store = self._store
        try:
            yield store
        finally:
            with self._state:
                self._calls -= 1
                if self._stuck:
                    self._give_up()
                self._state.notify_all()

    def _give_up(self) -> None:
        """Close a client that may still be moving bytes of a failed call, before that call returns. The last call in
        progress closes it; the others wait. The pool loses its segment."""
        if self._calls == 0:
            store, self._store = self._store, None
            assert store is not None, "stuck without a client"
            store.close()
            self._stuck = False
        else:
            self._state.wait_for(lambda: not self._stuck)

    def transfer(self, spans: int, move: Callable[[], list[int]]) -> list[int]:
        """Call `move`, which moves bytes in `spans` pieces of memory. Returns its codes. Raises TierError."""
        with self._state:
            self._state.wait_for(lambda: self._stuck or self._spans + spans <= SPANS_UNDER_WAY)
            if self._stuck:
                raise TierError(f"a transfer of Mooncake Store at {self.place} got stuck")
            self._spans += spans
        started = time.monotonic()
        try:
            return known(move())
        finally:
            with self._state:
                self._spans -= spans
                self._stuck |= time.monotonic() - started > STUCK_S
                self._state.notify_all()

    def register(self, memory: memoryview) -> None:
        """Register memory if the transport needs that, now and whenever this process joins again. Raises TierError."""
        if self._registers:
            area = address_of(memory), len(memory)
            with self.calling() as store:
                _register(store, *area)
            self._areas = [*self._areas, area]

    def unregister(self, memory: memoryview) -> None:
        """Undo `register`; ignores memory that is not registered. Raises TierError."""
        address = address_of(memory)
        if any(start == address for start, _ in self._areas):
            with self.calling() as store:
                store.unregister_buffer(address)
            self._areas = [area for area in self._areas if area[0] != address]

    def can_access(self, address: int, size: int) -> bool:
        """Whether the transport can move bytes from and to this memory."""
        is_known = any(start <= address and address + size <= start + length for start, length in self._areas)
        return is_known or not self._registers

    # -- reads and removals

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold this around calls that read memory of the pool."""
        with self._state:
            generation = self._generation
            self._reads[generation] += 1
        try:
            yield
        finally:
            with self._state:
                self._reads[generation] -= 1
                if not self._reads[generation]:
                    del self._reads[generation]
                self._state.notify_all()

    @contextmanager
    def reserving(self) -> Iterator[None]:
        """Hold this around calls that allocate memory of the pool.

        A removal frees memory that may still be being read. So nothing is allocated during a removal, nor until all
        reads have ended that began before the removal's end, which would get bytes of the new object.
        """
        with self._state:
            self._state.wait_for(lambda: not self._removals and not any(n < self._generation for n in self._reads))
            self._reservations += 1
        try:
            yield
        finally:
            with self._state:
                self._reservations -= 1
                self._state.notify_all()

    @contextmanager
    def removing(self) -> Iterator[None]:
        """Hold this around calls that free memory of the pool; see `reserving`."""
        with self._state:
            self._removals += 1
            self._state.wait_for(lambda: not self._reservations)
        try:
            yield
        finally:
            with self._state:
                self._removals -= 1
                self._generation += 1
                self._state.notify_all()


def address_of(buffer: memoryview) -> int:
    """The address of a buffer; any address for an empty one."""
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]) if len(buffer) else 0


def _register(store: MooncakeStore, address: int, size: int) -> None:
    if code := store.register_buffer(address, size):
        raise TierError(f"Mooncake cannot register {size} bytes of memory (code {code})")


def known(codes: list[int]) -> list[int]:
    """The codes of a batch. Raises TierError if they say that the master does not answer."""
    if lost := next((code for code in codes if code <= _LOST), 0):
        raise TierError(f"Mooncake Store's master does not answer (code {lost})")
    return codes
