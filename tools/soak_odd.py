"""Odd clients of the soak, one after the other until killed: garbage, strangers, floods, clients that vanish.

    python soak_odd.py URL SEED

soak.py starts and kills it. It prints the liveness files that it creates, one JSON line each. The server must refuse
all that it does, without any other effect.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from kvdepot.errors import KVDepotError
from kvdepot.keys import HASH_BYTES, ROOT
from kvdepot.memory.arena_header import Watch
from kvdepot.memory.shm import LivenessFile
from kvdepot.protocol import wire
from kvdepot.protocol.handshake import Offer
from kvdepot.protocol.layout import Layout, Mapping, Segment

MODELS = ("soak-token", "soak-hash")


class Odd:
    def __init__(self, url: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, self.random.choice((0, 50)))
        self.socket.setsockopt(zmq.SNDTIMEO, 200)
        self.socket.connect(url)
        self.liveness_files: list[LivenessFile] = []
        self.sent = 0

    def send(self, *frames: bytes) -> None:
        try:
            self.socket.send_multipart(frames)
        except zmq.Again:
            return  # it takes no more from us
        self.sent += 1

    def ask(self, request: wire.Request) -> None:
        self.send(wire.encode_request(self.sent, request))

    def hello(self) -> None:
        file = LivenessFile()
        print(json.dumps({"liveness_file": file.name}), flush=True)
        self.liveness_files.append(file)
        offer = Offer(file.name, file.secret, False)
        self.ask(offer.hello)
        deadline = time.monotonic() + 1.0
        while (left := deadline - time.monotonic()) > 0 and self.socket.poll(int(left * 1000) + 1):
            try:
                _, boot, value = wire.decode_reply(self.socket.recv())
                proof = msgspec.convert(value, wire.Proof)
                watch = Watch(proof.arena, boot)
                self.ask(offer.accept(proof, boot, watch.secret)[0])
                watch.close()
                return
            except (KVDepotError, msgspec.ValidationError):
                continue  # an answer to something else; or the server was killed

    def close(self) -> None:
        self.socket.close()
        self.context.term()
        for file in self.liveness_files:
            file.close()

    # -- what they do

    def garbage(self) -> None:
        for _ in range(50):
            frames = [self.random.randbytes(self.random.choice((0, 1, 7, 8, 9, 40, 4000))) for _ in range(3)]
            self.send(*frames[: self.random.randint(1, 3)])

    def broken_messages(self) -> None:
        """Real messages with bytes changed, cut or doubled."""
        self.hello()
        for _ in range(50):
            frame = bytearray(wire.encode_request(self.sent, self.any_request()))
            for _ in range(self.random.randint(1, 3)):
                frame[self.random.randrange(len(frame))] = self.random.randrange(256)
            self.send(bytes(frame[: self.random.randint(1, len(frame))] if self.random.random() < 0.3 else frame))

    def any_request(self) -> wire.Request:
        chunks = self.random.randint(0, 4)
        hashes = self.random.randbytes(chunks * HASH_BYTES)
        ids = b"".join(self.random.randrange(200).to_bytes(4, "little") for _ in range(chunks * 4))
        shards = wire.Shards("odd", self.random.choice(MODELS), 1, 0, ROOT, 0, hashes, ids)
        layout = Layout([Mapping("../x", 4096)], [Segment(0, 0, 64, 64)], 64, bytes(32))
        return self.random.choice(
            [
                wire.Store(1, 1, [shards]),
                wire.Retrieve(1, [shards]),
                wire.Lookup(self.random.choice(MODELS), 1, 0, "r1", 1, hashes),
                wire.EndSession("r1"),
                wire.Register(1, layout, "soak-token", 1, 0, 4),
                wire.Unregister(7),
                wire.Noop(),
                wire.Status(),
            ]
        )

    def stranger(self) -> None:
        """Sends requests without a hello, or with one that must be refused."""
        self.ask(wire.Hello(99, "x"))
        for name in ("../etc", "kvdepot-card-0", ""):
            self.ask(wire.Hello(wire.VERSION, name))
        for _ in range(10):
            self.ask(self.any_request())

    def long_names(self) -> None:
        self.hello()
        self.ask(wire.EndSession("x" * (1 << 20)))
        self.ask(wire.Lookup("m" * 5000, 1, 0, "r1", 1, bytes(32)))
        self.send(bytes(8) + self.random.randbytes(1 << 20))

    def deaf_flood(self) -> None:
        """Sends many requests and never reads."""
        self.socket.setsockopt(zmq.RCVHWM, 1)
        self.hello()
        for _ in range(2000):
            self.ask(wire.Status() if self.random.random() < 0.02 else wire.Noop())

    def vanish(self) -> None:
        """A process with pins and a registration dies."""
        self.hello()
        for i in range(200):
            self.ask(wire.Lookup(self.random.choice(MODELS), 1, 0, f"v{i}", 1, self.random.randbytes(HASH_BYTES)))
        time.sleep(self.random.random() * 0.05)
        os._exit(0)

    def come_and_go(self) -> None:
        for _ in range(5):
            self.hello()
        self.ask(wire.Noop())


def main() -> None:
    url, seed, *what = sys.argv[1:]
    kinds: dict[str, Callable[[Odd], None]] = {
        kind.__name__: kind
        for kind in (
            Odd.garbage, Odd.broken_messages, Odd.stranger, Odd.long_names, Odd.deaf_flood, Odd.vanish, Odd.come_and_go
        )
    }  # fmt: skip
    if what:
        odd = Odd(url, int(seed))
        kinds[what[0]](odd)
        odd.close()
        return
    choice = random.Random(int(seed))
    parent = os.getppid()
    while os.getppid() == parent:
        name = choice.choice(sorted(kinds))
        one = [sys.executable, __file__, url, str(choice.getrandbits(32)), name]
        if name == "vanish":
            subprocess.run(one, check=False)
        else:
            odd = Odd(url, choice.getrandbits(32))
            kinds[name](odd)
            odd.close()
        time.sleep(choice.random() * 0.5)


if __name__ == "__main__":
    main()
