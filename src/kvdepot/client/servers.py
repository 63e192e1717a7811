"""Which runs of a server may still touch a client's blocks: the current one, and former ones that are not gone.

Used by client/connection.py. A server that hangs, or whose address another server took over, may still carry out the
copies that it was sent. Invariant: a former server is forgotten only once it is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Server", "Servers", "Watch"]


class Watch(Protocol):
    """Tells whether one run of a server is still alive (memory.arena_header.Watch).

    secret: the arena's, which only its own user can read.
    """

    secret: bytes

    def is_gone(self) -> bool: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Server:
    """A run of a server that has proved itself to us."""

    incarnation: bytes
    watch: Watch
    gone_at: float | None = None  # when its process was first seen to be gone
    copies: list[int] = field(default_factory=list)  # sent to it, and unanswered when its successor welcomed us


class Servers:
    """The server that serves us, and former ones that are not gone."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.current: Server | None = None
        self.linger_s = 0.0  # how long after its process's end a server may touch blocks: its GPUs may
        self._clock = clock
        self._former: list[Server] = []

    def __repr__(self) -> str:
        return f"<Servers current {self.current is not None}, {len(self._former)} former>"

    def is_gone(self, server: Server) -> bool:
        """Whether a server can no longer touch a block, not even through its GPUs."""
        if server.gone_at is None and server.watch.is_gone():
            server.gone_at = self._clock()
        return server.gone_at is not None and self._clock() - server.gone_at >= self.linger_s

    def may_touch_blocks(self) -> bool:
        """Whether any server may still touch a block."""
        if self.current is not None and not self.is_gone(self.current):
            return True
        return bool(self._former)

    def may_run(self) -> bool:
        """Whether the process of any server may still run."""
        return bool(self._former) or (self.current is not None and not self.current.watch.is_gone())

    def succeed(self, server: Server, copies: list[int]) -> None:
        """A server has welcomed us. copies: numbers of copies that its predecessor was sent and has not answered."""
        before, self.current = self.current, server
        if before is None:
            return
        if before.incarnation == server.incarnation or self.is_gone(before):
            before.watch.close()
        else:
            before.copies = copies
            self._former.append(before)

    def held_copies(self) -> set[int]:
        """Numbers of copies that former servers may still carry out."""
        return {number for server in self._former for number in server.copies}

    def release_copies(self) -> list[int]:
        """Forget former servers that are gone. Returns the numbers of the copies that they held."""
        gone = [server for server in self._former if self.is_gone(server)]
        for server in gone:
            self._former.remove(server)
            server.watch.close()
        return [number for server in gone for number in server.copies]

    def forget_current(self) -> None:
        if self.current is not None:
            self.current.watch.close()
            self.current = None

    def close(self) -> None:
        """Forget all servers."""
        self.forget_current()
        for server in self._former:
            server.watch.close()
        self._former.clear()
