"""Connections that are cut while the server lives and goes on: a small proxy on the loopback.

The simulation cuts, stalls and slows them down at any moment.
"""

from __future__ import annotations

import random
import selectors
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.conftest import HANG_S, Depot, StartDepot, eventually
from tests.faults.conftest import StartDriver, settled
from tests.ports import free_port

pytestmark = pytest.mark.faults


class Proxy:
    """Passes bytes between clients and one server; on a thread of its own, until `close`."""

    def __init__(self, port: int) -> None:
        self._server = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._cut = threading.Event()
        self._closing = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers: dict[socket.socket, socket.socket] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Reset every connection; new ones are taken. Returns when that has happened."""
        self._cut.set()
        eventually(lambda: not self._cut.is_set())

    def close(self) -> None:
        self._closing.set()
        self._thread.join(HANG_S)
        self._drop_all()
        self._listener.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._cut.is_set():
                self._drop_all()
                self._cut.clear()
            for key, _ in self._selector.select(0.005):
                assert isinstance(key.fileobj, socket.socket)
                self._take(key.fileobj)

    def _take(self, ready: socket.socket) -> None:
        if ready is self._listener:
            client, _ = self._listener.accept()
            server = socket.create_connection(self._server)
            for one, other in ((client, server), (server, client)):
                self._peers[one] = other
                self._selector.register(one, selectors.EVENT_READ)
            return
        if ready not in self._peers:
            return  # dropped with its peer a moment ago
        try:
            data = ready.recv(1 << 16)
            self._peers[ready].sendall(data)
        except OSError:
            data = b""
        if not data:
            self._drop(ready)

    def _drop(self, one: socket.socket) -> None:
        for each in (one, self._peers.pop(one)):
            self._peers.pop(each, None)
            self._selector.unregister(each)
            # A reset, not an orderly end.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            each.close()

    def _drop_all(self) -> None:
        while self._peers:
            self._drop(next(iter(self._peers)))


@pytest.fixture
def served(start_depot: StartDepot) -> Depot:
    return start_depot(arena_mib=24, chunk_size=64, url=f"tcp://127.0.0.1:{free_port()}")


@pytest.fixture
def proxy(served: Depot) -> Iterator[Proxy]:
    made = Proxy(int(served.url.rsplit(":", 1)[1]))
    yield made
    made.close()


def test_engines_whose_connections_are_cut_again_and_again_go_on_and_lose_nothing(
    served: Depot, proxy: Proxy, start_driver: StartDriver
) -> None:
    chance = random.Random(4)
    drivers = [start_driver(proxy.url, seed=seed, blocks=160, width=64) for seed in range(2)]
    for driver in drivers:
        driver.tell("start", families=60, running=8)
    for _ in range(15):
        time.sleep(chance.uniform(0.02, 0.3))  # the moment of the cut
        proxy.cut()
    for driver in drivers:
        driver.tell("stats")
        # Its registration is back; blocks of transfers are, once its client suspects that answers were lost.
        eventually(lambda driver=driver: driver.tell("stats").get("loaded_blocks", 0))
        stats = driver.tell("stop")
        print(stats)
        assert not stats["wrong"]
    assert settled(served)["instances"] == 2
    assert drivers[0].tell("hits", families=list(range(60)), chunks=6) > 0
    assert not drivers[0].tell("stats")["wrong"]
