"""The handshake: client and server prove to each other that they belong to the same user.

Used by client/servers.py and core/connections.py. No I/O.

The threat: any user of a host can listen on, and connect to, an abstract unix socket (`ipc://@name`) or a free loopback
port. An impostor as the server could make an engine decode anything; an impostor as a client could read and write the
cache. TCP does not identify users, and ZeroMQ does not pass on the kernel's credentials of a unix socket's peer. The
file system does identify users, on every transport: a file of mode 0600 in memory is readable by its owner alone (and
by root, who can do anything). So each end keeps a secret in such a file, the server in its arena (new at each start),
the client in its liveness file. The server proves that it can read its arena, the client that it can read both:

    client                                     server
    Hello(version, name, nonce, sealed,   ->                                           name: of its liveness file
          engine, host, pid)
                                          <-   Proof(version, arena, nonce, mac)       mac: by the arena's secret
    opens the arena's file itself: a plain file of its own user that no other user can
    open, whose header has the boot id that answered, and whose lock is held
    Prove(mac)                            ->                                           mac: by both secrets
                                               opens the liveness file: of its own user, lock held
                                          <-   Welcome

Both MACs are keyed BLAKE3 over all of `_Terms`: the fresh nonces of both ends (no proof can be replayed), the boot id,
both names, and whether messages are sealed. No secret is ever sent. Before its second message the client has disclosed
only the names of its liveness file (which every user can list), engine and host, and its process id.

That alone would not stop a man in the middle who forwards the handshake to a real server and then forges answers, or
who takes over the address when the server ends, to which ZeroMQ reconnects by itself. So where one is possible, both
ends **seal** every further message with a counter and a keyed BLAKE3 MAC, under a key derived from both secrets and the
terms. A man in the middle is impossible on a unix socket in a folder that only the user (and root) can change, and with
CURVE, which authenticates each message itself. A server that all users can reach refuses clients that do not seal;
whether messages are sealed is part of the terms, so a man in the middle cannot change it.

    sealed request   [id: 8 bytes][0xc1][counter: 8 bytes][mac: 16 bytes][body]
    sealed reply     [id: 8 bytes][boot: 8 bytes][0xc1][counter: 8 bytes][mac: 16 bytes][body]

No msgpack value begins with 0xc1. The counter increases with each message in one direction, so no message can be
repeated or reordered. A man in the middle can still read hashes and counts, and delay or drop messages.

Rejected: CURVE keys made from the files. Clients would have to know which file before they have asked, and ZeroMQ keeps
keys across reconnects, so the keys could not change when a server restarts. Rejected: sealing everywhere. It takes
about a tenth of a small lookup's time, for nothing where the kernel already guards the socket.
"""

from __future__ import annotations

import enum
import os
from _operator import _compare_digest as compare_digest  # hmac's own; hmac brings OpenSSL into every engine

import msgspec
from blake3 import blake3

from kvdepot.errors import BadRequest, Unavailable
from kvdepot.protocol import wire

SECRET_BYTES = 32
_NONCE_BYTES = 16
_TAG_BYTES = 16
_MARK = b"\xc1"
_SEAL_BYTES = len(_MARK) + 8 + _TAG_BYTES


class _Terms(msgspec.Struct, array_like=True, frozen=True):
    """The terms that both ends must agree on; the nonces make them unique to one handshake."""

    version: int
    boot: bytes
    arena: str
    liveness: str
    client_nonce: bytes
    server_nonce: bytes
    sealed: bool


_encode = msgspec.msgpack.Encoder().encode


def _mac(secret: bytes, purpose: bytes, terms: _Terms) -> bytes:
    return blake3(purpose + b"\0" + _encode(terms), key=secret).digest()


def _session_key(arena_secret: bytes, liveness_secret: bytes, terms: _Terms) -> bytes:
    return blake3(b"session\0" + _encode([liveness_secret, terms]), key=arena_secret).digest()


class Offer:
    """The client's side of one handshake."""

    def __init__(self, liveness: str, liveness_secret: bytes, is_sealed: bool, engine: str = "") -> None:
        self.hello = wire.Hello(
            wire.VERSION, liveness, os.urandom(_NONCE_BYTES), is_sealed, engine, os.uname().nodename, os.getpid()
        )
        self._liveness_secret = liveness_secret

    def accept(self, proof: wire.Proof, boot: bytes, arena_secret: bytes) -> tuple[wire.Prove, Seal | None]:
        """Check the server's proof; returns the client's, and the seal for further messages (None: they are not
        sealed).

        boot: the boot id, which the reply and the arena's header have. arena_secret: the secret in the arena's file.
        Raises Unavailable if the proof is wrong.
        """
        hello = self.hello
        terms = _Terms(hello.version, boot, proof.arena, hello.liveness, hello.nonce, proof.nonce, hello.sealed)
        if len(arena_secret) != SECRET_BYTES or not any(arena_secret):
            raise Unavailable("its arena has no secret")
        if not compare_digest(proof.mac, _mac(arena_secret, b"server", terms)):
            raise Unavailable("it cannot read that arena")
        key = _session_key(arena_secret, self._liveness_secret, terms)
        return wire.Prove(_mac(key, b"client", terms)), Seal(key, End.CLIENT) if hello.sealed else None


class Challenge:
    """The server's side of one handshake, from `Hello` to `Prove`."""

    def __init__(self, hello: wire.Hello, boot: bytes, arena: str, arena_secret: bytes) -> None:
        self.liveness = hello.liveness
        self.hello = hello
        self._secret = arena_secret
        nonce = os.urandom(_NONCE_BYTES)
        self._terms = terms = _Terms(hello.version, boot, arena, hello.liveness, hello.nonce, nonce, hello.sealed)
        self.proof = wire.Proof(wire.VERSION, arena, nonce, _mac(arena_secret, b"server", terms))

    def check(self, prove: wire.Prove, liveness_secret: bytes) -> Seal | None:
        """Check the client's proof; returns the seal for further messages (None: they are not sealed).

        Raises BadRequest if the client cannot read both files.
        """
        key = _session_key(self._secret, liveness_secret, self._terms)
        if not any(liveness_secret) or not compare_digest(prove.mac, _mac(key, b"client", self._terms)):
            raise BadRequest(
                f"this client has not proved that it knows the secret of liveness file {self.liveness[:64]}"
            )
        return Seal(key, End.SERVER) if self._terms.sealed else None


class End(enum.Enum):
    """The two ends of a connection, each with the number of bytes before the seal in the messages that it sends."""

    CLIENT = wire.ID_BYTES
    SERVER = wire.ID_BYTES + wire.BOOT_BYTES


class Seal:
    """Authenticates the messages of one connection, in both directions. Not thread-safe."""

    def __init__(self, key: bytes, end: End) -> None:
        other = End.CLIENT if end is End.SERVER else End.SERVER
        self._sends, self._takes = (blake3(each.name.lower().encode(), key=key).digest() for each in (end, other))
        self._out, self._in = end.value, other.value
        self._sent = self._taken = 0

    def close(self, frame: bytes) -> bytes:
        self._sent += 1
        counter = self._sent.to_bytes(8, "little")
        tag = blake3(counter + frame, key=self._sends).digest(_TAG_BYTES)
        return b"".join((frame[: self._out], _MARK, counter, tag, frame[self._out :]))

    def open(self, frame: bytes) -> bytes | None:
        """Return the frame without its seal; None if the seal is missing, wrong or not newer than the last."""
        at = self._in
        if not is_sealed(frame, at):
            return None
        counter, tag = frame[at + 1 : at + 9], frame[at + 9 : at + _SEAL_BYTES]
        number = int.from_bytes(counter, "little")
        plain = frame[:at] + frame[at + _SEAL_BYTES :]
        if number <= self._taken or not compare_digest(
            tag, blake3(counter + plain, key=self._takes).digest(_TAG_BYTES)
        ):
            return None
        self._taken = number
        return plain


def is_sealed(frame: bytes, head: int = wire.ID_BYTES) -> bool:
    """Whether a frame has a seal, valid or not. head: the bytes before the seal; the default is that of requests."""
    return frame[head : head + 1] == _MARK and len(frame) >= head + _SEAL_BYTES


def is_open_to_all(url: str) -> bool:
    """Whether every user of the host can connect to an endpoint, and listen on it while it is free."""
    return url.startswith(("tcp://", "ipc://@"))
