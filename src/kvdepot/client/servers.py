"""The server at a client's address: who it is, and the proof that it belongs to our user.

protocol/handshake.py describes the handshake and its threat model. Invariant: nothing that a server says has an effect
before it has proved that it can read its own arena.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvdepot.errors import KVDepotError, Unavailable
from kvdepot.protocol import wire
from kvdepot.protocol.handshake import Offer, Seal


class LifeWatch(Protocol):
    """Shows whether one run of a server is still alive (memory.arena_header.Watch). secret: the arena's."""

    secret: bytes

    def is_gone(self) -> bool: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Introduction:
    """A client's part in a handshake: name and secret of its liveness file, and its engine as in wire.Hello.
    others_between: called at each hello: whether another user's process could be between client and server."""

    liveness: str
    secret: bytes = b""
    engine: str = ""
    others_between: Callable[[], bool] = bool


@dataclass(slots=True)
class ServerRun:
    """A run of a server that has proved itself to us."""

    incarnation: bytes
    arena: str
    watch: LifeWatch


class Handshake:
    """Hello, Proof, Prove and Welcome with the server at one address; each hello begins another."""

    def __init__(self, url: str, introduction: Introduction, watch: Callable[[str, bytes], LifeWatch]) -> None:
        self.proved: ServerRun | None = None  # the server that has proved itself, but has not welcomed us yet
        self._url = url
        self._introduction = introduction
        self._open_watch = watch
        self._offer = Offer(introduction.liveness, introduction.secret, False)  # our last hello
        self._seals: list[Seal] = []  # the first seals what we send; replies may still carry the one before

    def hello(self) -> wire.Hello:
        ours = self._introduction
        self._offer = Offer(ours.liveness, ours.secret, ours.others_between(), ours.engine)
        return self._offer.hello

    def check(self, answer: object, incarnation: bytes) -> tuple[wire.Prove, Seal | None]:
        """Check the answer to our hello. Returns our own proof, and the seal to `use` once that is sent. incarnation:
        as the reply states it. Raises Unavailable for a server that does not prove itself, or whose arena cannot be
        opened."""
        self.close()
        try:
            proof = msgspec.convert(answer, wire.Proof)
            self.proved = ServerRun(incarnation, proof.arena, self._open_watch(proof.arena, incarnation))
            return self._offer.accept(proof, incarnation, self.proved.watch.secret)
        except (Unavailable, msgspec.ValidationError) as exc:
            self.close()
            raise Unavailable(f"the process at {self._url} is not a kvdepot server of this user ({exc})") from exc
        except KVDepotError as exc:
            # Without the arena, no client could copy, or know whether a server that falls silent still runs.
            raise Unavailable(
                f"the server's arena is not visible here ({exc}): server and clients must share its folder, which "
                "--arena-dir names for the server and KVDEPOT_ARENA_DIR for clients"
            ) from exc

    def use(self, seal: Seal | None) -> None:
        """Our proof is sent: use this seal from now on. None: no seals."""
        self._seals = [seal, *self._seals[:1]] if seal is not None else []

    def finish(self) -> ServerRun:
        """The server that has proved itself has welcomed us. Returns it."""
        server, self.proved = self.proved, None
        assert server is not None
        del self._seals[1:]
        return server

    @property
    def is_sealed(self) -> bool:
        return bool(self._seals) or self._offer.hello.sealed

    def seal(self, frame: bytes) -> bytes:
        return self._seals[0].close(frame) if self._seals else frame

    def open(self, frame: bytes) -> bytes | None:
        """A reply without its seal; None where the seal is missing or wrong."""
        return next((plain for seal in self._seals if (plain := seal.open(frame)) is not None), None)

    def close(self) -> None:
        if self.proved is not None:
            self.proved.watch.close()
            self.proved = None
