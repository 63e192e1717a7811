"""Hello: how client and server prove to each other that both belong to one user, before either believes the other.

Used by client/connection.py (client) and server/loop.py. No sockets and no files here, only the computation.

The threat. Every user of a host can listen at an abstract unix socket (`ipc://@name`) or a free loopback port, and can
connect to one. A server that is believed tells an engine what is in its cache, so an impostor could make it decode
anything; a client that is believed can read and write what is cached. TCP names no user, and ZeroMQ does not pass on
what the kernel knows of a unix socket's peer. What tells users apart on every transport is the file system: a file of
mode 0600 in /dev/shm is read by its owner alone (and by root, who can do everything anyway). So each end has a secret
in such a file, the server in its arena (new each time it starts), the client in its lease, and proves that it can read:

    client                                     server
    Hello(version, lease, nonce, sealed)   ->
                                          <-   Proof(version, arena, nonce, mac)       mac: by the arena's secret
    opens the arena's file itself: a plain file of its own user that nobody else may
    open, whose header has the boot id that answered, and whose lock is held
    Prove(mac)                            ->                                           mac: by both secrets
                                               opens the lease: of its own user, lock held
                                          <-   Welcome

Both macs are keyed BLAKE3 over all of `_Terms`: the fresh nonces of both ends (no proof can be replayed), the boot id,
both names, and whether messages are sealed. No secret is ever sent. Before its second message the client has told
nobody anything but the name of its lease, which every user can list.

That alone would not stop a program in between that passes the hello on to a real server and then makes up answers, or
one that takes the address over when the server ends, to which ZeroMQ reconnects by itself. So where others could stand
in between, both ends **seal** every further message: a counter, and a keyed BLAKE3 mac under a key derived from both
secrets and the terms. That is everywhere but at a unix socket in a folder that only the user (and root) can change, and
on connections with CURVE, which authenticates each message itself. A server that all users can reach refuses clients
that do not seal; and whether messages are sealed is part of the terms, so nobody in between can change that.

    sealed request   [id: 8 bytes][0xc1][counter: 8 bytes][mac: 16 bytes][body]
    sealed reply     [id: 8 bytes][boot: 8 bytes][0xc1][counter: 8 bytes][mac: 16 bytes][body]

0xc1 begins no msgpack value. The counter rises with each message of one direction, so none can be repeated or
reordered. What is left to somebody in between is to read hashes and counts, and to delay or drop messages.

Rejected: CURVE keys made from the files (clients would have to know which file before they have asked, and ZeroMQ keeps
keys across reconnects, so they could not change when a server restarts); sealing everywhere (about a tenth of a small
lookup's time, for nothing where the kernel already guards the socket).
"""

from __future__ import annotations

import os
from _operator import _compare_digest as compare_digest  # hmac's own; hmac brings OpenSSL into every engine

import msgspec
from blake3 import blake3

from kvdepot.errors import BadRequest, Unavailable
from kvdepot.protocol import wire

__all__ = ["SECRET_BYTES", "Challenge", "Offer", "Seal", "is_open_to_all", "is_sealed"]

SECRET_BYTES = 32
"""Of an arena's secret."""
_NONCE_BYTES = 16
_TAG_BYTES = 16
_MARK = b"\xc1"
_SEAL_BYTES = len(_MARK) + 8 + _TAG_BYTES
_REQUEST_HEAD = wire.ID_BYTES
_REPLY_HEAD = wire.ID_BYTES + wire.BOOT_BYTES


class _Terms(msgspec.Struct, array_like=True, frozen=True):
    """What both ends must agree on, and what no other hello has in common with this one."""

    version: int
    boot: bytes
    arena: str
    lease: str
    client_nonce: bytes
    server_nonce: bytes
    sealed: bool


_encode = msgspec.msgpack.Encoder().encode


def _mac(secret: bytes, purpose: bytes, terms: _Terms) -> bytes:
    return blake3(purpose + b"\0" + _encode(terms), key=secret).digest()


def _session_key(arena_secret: bytes, lease_secret: bytes, terms: _Terms) -> bytes:
    return blake3(b"session\0" + _encode([lease_secret, terms]), key=arena_secret).digest()


class Offer:
    """The client's side of one hello."""

    def __init__(self, lease: str, lease_secret: bytes, is_sealed: bool) -> None:
        self.hello = wire.Hello(wire.VERSION, lease, os.urandom(_NONCE_BYTES), is_sealed)
        self._lease_secret = lease_secret

    def accept(self, proof: wire.Proof, boot: bytes, arena_secret: bytes) -> tuple[wire.Prove, Seal | None]:
        """Our own proof, and what seals from now on. Raises Unavailable where the server's proof is none.

        boot: what the reply said, and the arena's header says. arena_secret: from the arena's file.
        """
        hello = self.hello
        terms = _Terms(hello.version, boot, proof.arena, hello.lease, hello.nonce, proof.nonce, hello.sealed)
        if len(arena_secret) != SECRET_BYTES or not any(arena_secret):
            raise Unavailable("its arena has no secret")
        if not compare_digest(proof.mac, _mac(arena_secret, b"server", terms)):
            raise Unavailable("it cannot read that arena")
        key = _session_key(arena_secret, self._lease_secret, terms)
        return wire.Prove(_mac(key, b"client", terms)), Seal(key, is_server=False) if hello.sealed else None


class Challenge:
    """The server's side of one hello, from Hello to Prove."""

    def __init__(self, hello: wire.Hello, boot: bytes, arena: str, arena_secret: bytes) -> None:
        self.lease = hello.lease
        self._secret = arena_secret
        nonce = os.urandom(_NONCE_BYTES)
        self._terms = terms = _Terms(hello.version, boot, arena, hello.lease, hello.nonce, nonce, hello.sealed)
        self.proof = wire.Proof(wire.VERSION, arena, nonce, _mac(arena_secret, b"server", terms))

    def check(self, prove: wire.Prove, lease_secret: bytes) -> Seal | None:
        """What seals from now on, if anything. Raises BadRequest where the client cannot read both files."""
        key = _session_key(self._secret, lease_secret, self._terms)
        if not any(lease_secret) or not compare_digest(prove.mac, _mac(key, b"client", self._terms)):
            raise BadRequest(f"this client has not proved that it knows the secret of lease {self.lease[:64]}")
        return Seal(key, is_server=True) if self._terms.sealed else None


class Seal:
    """Authenticates one connection's messages: what this end sends, and what it takes. Not thread-safe."""

    def __init__(self, key: bytes, is_server: bool) -> None:
        of_client, of_server = (blake3(end, key=key).digest() for end in (b"client", b"server"))
        self._sends, self._takes = (of_server, of_client) if is_server else (of_client, of_server)
        self._out, self._in = (_REPLY_HEAD, _REQUEST_HEAD) if is_server else (_REQUEST_HEAD, _REPLY_HEAD)
        self._sent = self._taken = 0

    def __repr__(self) -> str:
        return f"<Seal {self._sent} sent, {self._taken} taken>"

    def close(self, frame: bytes) -> bytes:
        """A frame with its seal."""
        self._sent += 1
        counter = self._sent.to_bytes(8, "little")
        tag = blake3(counter + frame, key=self._sends).digest(_TAG_BYTES)
        return b"".join((frame[: self._out], _MARK, counter, tag, frame[self._out :]))

    def open(self, frame: bytes) -> bytes | None:
        """The frame without its seal; None where that is missing, wrong or not newer than the last."""
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


def is_sealed(frame: bytes, head: int = _REQUEST_HEAD) -> bool:
    """Whether a request (with another head: a reply) carries a seal, right or wrong."""
    return frame[head : head + 1] == _MARK and len(frame) >= head + _SEAL_BYTES


def is_open_to_all(url: str) -> bool:
    """Whether every user of the host can connect to an endpoint, or listen there while nobody else does."""
    return url.startswith(("tcp://", "ipc://@"))
