"""A client without our client code, which can send anything."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import zmq

from kvdepot import errors
from kvdepot.errors import KVDepotError
from kvdepot.memory.arena_header import Watch
from kvdepot.memory.shm import SHM, LivenessFile
from kvdepot.protocol import handshake, wire
from tests.conftest import HANG_S, Depot


class Raw:
    """A client that can send anything."""

    def __init__(self, depot: Depot) -> None:
        self._socket = depot.context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(depot.url)
        self._numbers = itertools.count(1)
        self.liveness = LivenessFile(SHM)
        self._sealed = handshake.is_open_to_all(depot.url)
        self._seals: list[handshake.Seal] = []  # of what we send; and an older one that may still be answered with
        self._boot = b""

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def receive(self, timeout_s: float = HANG_S) -> tuple[int, Any]:
        """Number and value (or error) of the next reply."""
        assert self._socket.poll(int(timeout_s * 1000)), "no reply"
        frames = self._socket.recv_multipart()
        assert len(frames) == 1
        plain = next((plain for seal in self._seals if (plain := seal.open(frames[0])) is not None), frames[0])
        number, self._boot, value = wire.decode_reply(plain)
        return number, value

    def ask_bytes(self, body: bytes) -> Any:
        """The answer to one request with this body; it must be the only one and carry our number."""
        number = next(self._numbers)
        frame = number.to_bytes(8, "little") + body
        return self._exchange(number, self._seals[0].close(frame) if self._seals else frame)

    def _exchange(self, number: int, frame: bytes) -> Any:
        self.send(frame)
        answered, value = self.receive()
        assert answered == number
        return value

    def ask(self, request: wire.Request) -> Any:
        return self.ask_bytes(wire.encode_request(0, request)[8:])

    def hello(self) -> Raw:
        value = self.introduce(self.liveness.name, self.liveness.secret)
        assert isinstance(value, list), value
        return self

    def introduce(self, liveness: str, secret: bytes) -> Any:
        """Complete the handshake with this liveness file; returns the welcome, or the error."""
        offer = handshake.Offer(liveness, secret, self._sealed)
        number = next(self._numbers)
        value = self._exchange(number, wire.encode_request(number, offer.hello))
        if not isinstance(value, list):
            return value
        proof = msgspec.convert(value, wire.Proof)
        watch = Watch(SHM, proof.arena, self._boot)
        prove, seal = offer.accept(proof, self._boot, watch.secret)
        watch.close()
        number = next(self._numbers)
        if seal is not None:
            self._seals.insert(0, seal)
        value = self._exchange(number, wire.encode_request(number, prove))
        if isinstance(value, KVDepotError) and seal is not None:
            self._seals.pop(0)
        return value

    def heard_nothing_more(self) -> bool:
        """Whether no reply but the one to a question asked now arrives."""
        value = self.ask(wire.Noop())
        return not isinstance(value, errors.ProtocolError) and not self._socket.poll(0)

    def close(self) -> None:
        self._socket.close()
        self.liveness.close()
