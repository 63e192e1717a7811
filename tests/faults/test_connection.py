"""A connection that is cut, stalls or is slow, while the server lives and goes on: a small proxy on the loopback."""

from __future__ import annotations

import random
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator

import pytest

from tests.conftest import HANG_S, Depot, StartDepot, eventually
from tests.faults.conftest import StartDriver, settled
from tests.ports import free_port

pytestmark = pytest.mark.faults

STALE_S = 10.0
"""After so long a client suspects that an answer was lost (client/connection.py)."""
GREETING_BYTES = 64
"""What each end of a ZeroMQ connection says first."""


class Proxy:
    """Passes bytes between clients and one server; on a thread of its own, until `close`."""

    def __init__(self, port: int) -> None:
        self._server = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.delay_s = 0.0
        self._stall = False
        self._stalled = threading.Event()
        self.passed_bytes = 0
        self._cut = threading.Event()
        self._closing = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers: dict[socket.socket, socket.socket] = {}
        self._late: deque[tuple[float, socket.socket, bytes]] = deque()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Reset every connection; new ones are taken. Returns when that has happened."""
        self._cut.set()
        eventually(lambda: not self._cut.is_set())

    def stall(self) -> None:
        """Pass nothing any more; returns when that is so."""
        self._stall = True
        assert self._stalled.wait(HANG_S)

    def go_on(self) -> None:
        self._stall = False

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
            if self._stall:
                self._stalled.set()
                self._closing.wait(0.005)
                continue
            self._stalled.clear()
            for key, _ in self._selector.select(0.005):
                assert isinstance(key.fileobj, socket.socket)
                self._take(key.fileobj)
            while self._late and (self._late[0][0] <= time.monotonic()):
                _, target, data = self._late.popleft()
                self._pass(target, data)

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
        except OSError:
            data = b""
        if data:
            self._late.append((time.monotonic() + self.delay_s, self._peers[ready], data))
        else:
            self._drop(ready)

    def _pass(self, target: socket.socket, data: bytes) -> None:
        if target not in self._peers:
            return
        try:
            target.sendall(data)
            self.passed_bytes += len(data)
        except OSError:
            self._drop(target)

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
        self._late.clear()


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
        # Its registration is back; blocks of transfers whose answers were lost are, after STALE_S.
        eventually(lambda driver=driver: driver.tell("stats").get("loaded_blocks", 0))
        stats = driver.tell("stop")
        print(stats)
        assert not stats["wrong"]
    assert settled(served)["instances"] == 2
    assert drivers[0].tell("hits", families=list(range(60)), chunks=6) > 0
    assert not drivers[0].tell("stats")["wrong"]


def test_while_a_connection_stalls_lookups_answer_0_and_no_transfer_ends(
    served: Depot, proxy: Proxy, start_driver: StartDriver
) -> None:
    driver = start_driver(proxy.url, width=64)
    assert driver.tell("store", family=1, chunks=6) is True
    proxy.stall()
    begun = sorted([driver.tell("begin_store", family=2, chunks=6), driver.tell("begin_retrieve", family=1, chunks=6)])
    for family in (1, 2, 3):
        assert driver.tell("lookup", family=family, chunks=6) == 0
    assert driver.tell("under_way") == begun
    proxy.go_on()
    retrieve, store = begun
    assert driver.tell("end_retrieve", request_id=retrieve) == 0
    assert driver.tell("end_store", request_id=store) is True
    assert driver.tell("hits", families=[1, 2], chunks=6) == 12
    assert not driver.tell("stats")["wrong"]
    settled(served)


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "not noticed"])
def test_a_session_whose_end_was_cut_off_holds_no_pins_once_the_connection_is_back(
    served: Depot, proxy: Proxy, start_driver: StartDriver, noticed: bool
) -> None:
    """The engine tells it again at once where it has met the cut, and otherwise when its answer is overdue."""
    driver = start_driver(proxy.url, width=64)
    assert driver.tell("store", family=1, chunks=6) is True
    assert driver.tell("lookup", family=1, chunks=6, keep="request") == 6
    assert served.status()["sessions"] == 1
    proxy.stall()
    driver.tell("end_session", request_id="request")
    proxy.cut()
    before = proxy.passed_bytes
    if noticed:
        eventually(lambda: driver.tell("is_cut_off"))
    proxy.go_on()
    if not noticed:  # it asks for nothing until its two connections have been made anew
        eventually(lambda: proxy.passed_bytes > before + 2 * 2 * GREETING_BYTES)
    eventually(lambda: driver.tell("reaches_server"))
    assert driver.tell("hits", families=[1], chunks=6) == 6

    def has_ended() -> bool:
        reached = driver.tell("reaches_server")  # an engine that asks nothing finds nothing out
        status = served.status()
        return bool(reached and status["sessions"] == status["holds"] == 0)

    eventually(has_ended)
