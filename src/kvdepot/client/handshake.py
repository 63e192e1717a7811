"""A client's side of the handshake: checks that a server belongs to our user, and seals messages.

Used by client/connection.py, which sends the messages. protocol/handshake.py describes the protocol and its threat
model. Invariant: nothing that a server says has an effect before it has proved that it can read its own arena.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvdepot.client.servers import Server, Watch
from kvdepot.errors import KVDepotError, Unavailable
from kvdepot.protocol import wire
from kvdepot.protocol.handshake import Offer, Seal

__all__ = ["Handshake"]


class Handshake:
    """Hello, Proof, Prove and Welcome with the server at one address; anew for each hello."""

    def __init__(
        self,
        url: str,
        liveness: str,
        secret: bytes,
        watch: Callable[[str, bytes], Watch],
        others_between: Callable[[], bool],
        engine: str,
    ) -> None:
        """The arguments are those of Connection."""
        self.proved: Server | None = None  # has proved itself, but has not welcomed us yet
        self._url = url
        self._liveness = liveness
        self._secret = secret
        self._open_watch = watch
        self._others_between = others_between
        self._engine = engine
        self._offer = Offer(liveness, secret, False)  # our last hello
        self._seals: list[Seal] = []  # the first seals what we send; replies may still carry the one before

    def hello(self) -> wire.Hello:
        """Begin a handshake: its first message."""
        self._offer = Offer(self._liveness, self._secret, self._others_between(), self._engine)
        return self._offer.hello

    def check(self, answer: object, incarnation: bytes) -> tuple[wire.Prove, Seal | None]:
        """Check the answer to our hello. Returns our own proof, and the seal to `use` once that is sent.

        incarnation: as the reply states it. Raises Unavailable for a server that does not prove itself, or whose arena
        cannot be opened.
        """
        self.close()
        try:
            proof = msgspec.convert(answer, wire.Proof)
            self.proved = Server(incarnation, self._open_watch(proof.arena, incarnation))
            return self._offer.accept(proof, incarnation, self.proved.watch.secret)
        except (Unavailable, msgspec.ValidationError) as exc:
            self.close()
            raise Unavailable(f"the process at {self._url} is not a kvdepot server of this user ({exc})") from exc
        except KVDepotError as exc:
            # Without the arena, nobody could tell whether a server that falls silent still touches blocks.
            raise Unavailable(f"the server's arena is not visible here ({exc}): do both share /dev/shm?") from exc

    def use(self, seal: Seal | None) -> None:
        """Our proof is sent: use this seal from now on. None: no seals."""
        self._seals = [seal, *self._seals[:1]] if seal is not None else []

    def finish(self) -> Server:
        """The server that has proved itself has welcomed us. Returns it."""
        server, self.proved = self.proved, None
        assert server is not None
        del self._seals[1:]
        return server

    @property
    def is_sealed(self) -> bool:
        """Whether replies must carry a seal."""
        return bool(self._seals) or self._offer.hello.sealed

    def seal(self, frame: bytes) -> bytes:
        """A frame with its seal, if messages are sealed."""
        return self._seals[0].close(frame) if self._seals else frame

    def open(self, frame: bytes) -> bytes | None:
        """A reply without its seal; None where the seal is missing or wrong."""
        return next((plain for seal in self._seals if (plain := seal.open(frame)) is not None), None)

    def close(self) -> None:
        """Forget a server that has proved itself but not welcomed us."""
        if self.proved is not None:
            self.proved.watch.close()
            self.proved = None
