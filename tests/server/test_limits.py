"""Limits on everything that a client can make grow: refused with a named error, counted, and harmless to others."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvdepot.client import MessageQueueClient
from kvdepot.errors import KVDepotError
from kvdepot.protocol import wire
from tests.conftest import HANG_S, Depot, StartDepot, eventually
from tests.ports import free_port

ROOT_FOLDER = Path(__file__).parents[2]

pytestmark = pytest.mark.faults


def hashes(count: int, seed: int = 0) -> bytes:
    return b"".join(seed.to_bytes(16, "little") + i.to_bytes(16, "little") for i in range(count))


def lookup(names: bytes, request: str = "r", model: str = "m") -> wire.Lookup:
    return wire.Lookup(model, 1, 0, request, 1, names)


def counters(server: Depot) -> dict[str, int]:
    found: dict[str, int] = server.status()["counters"]
    return found


# -- descriptors

_COMING_AND_GOING = """
import sys, time, zmq
from kvdepot.protocol import wire
from kvdepot.client import MessageQueueClient
from kvdepot.errors import Busy, DeadlineExceeded, Unavailable
served = refused = 0
context = zmq.Context()
clients, futures = [], []
for _ in range(10):
    # Ten at a time: what a hundred do at once to a server that may open 64 files, SECURITY.md tells.
    clients += [MessageQueueClient(sys.argv[1], context) for _ in range(10)]
    futures += [client.ask(wire.Noop(), deadline_s=2.0) for client in clients[-10:]]
    clients[-1].wait(lambda: all([future.query() for future in futures[-10:]]), 0.1)
clients[-1].wait(lambda: all([future.query() for future in futures]), 10)
for future in futures:
    try:
        served += future.result(0.0) == "ok"
    except (Busy, Unavailable, DeadlineExceeded):
        refused += 1
print(served, refused, flush=True)
sys.stdin.readline()
for client in clients:
    client.close()
context.term()
"""


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_more_clients_than_open_files_allow_wait_until_others_have_left(start_depot: StartDepot, scheme: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    url = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else ""
    server = start_depot(arena_mib=8, url=url, files=64)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
    living = MessageQueueClient(server.url, server.context)
    assert living.ask(wire.Noop()).result(HANG_S) == "ok"
    for _ in range(2):
        crowd = subprocess.Popen(
            [sys.executable, "-c", _COMING_AND_GOING, server.url],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        with crowd:
            assert crowd.stdout is not None
            served, refused = map(int, crowd.stdout.readline().split())
            assert served + refused == 100
            eventually(lambda: living.ask(wire.GetStatus()).result(HANG_S)["counters"]["connections_refused"])
            assert server.process.poll() is None, server.logged()
            assert served > 0, (living.ask(wire.GetStatus()).result(HANG_S), server.logged())
            assert refused > 0
            assert living.ask(wire.Noop()).result(HANG_S) == "ok"
        assert crowd.returncode == 0

        def another_is_served() -> bool:
            client = MessageQueueClient(server.url, server.context)
            try:
                return client.ask(wire.Noop(), deadline_s=2.0).result(2.0) == "ok"
            except KVDepotError:
                return False
            finally:
                client.close()

        eventually(another_is_served)
        eventually(lambda: living.ask(wire.GetStatus()).result(HANG_S)["clients"] == 1)
    before = cpu_s(server.process.pid)
    living.wait(lambda: False, 2.0)
    assert cpu_s(server.process.pid) - before < 0.5, "an idle server spins"
    eventually(lambda: "open files allows" in server.logged())
    living.close()


# -- those who flood, and those who do not read

_FLOOD = """
import sys, types, zmq
from kvdepot.protocol import wire
from tests.protocol.raw import Raw
url, kind = sys.argv[1:]
socket = Raw(types.SimpleNamespace(url=url, context=zmq.Context())).hello()._socket
frames = {
    "lookups": wire.encode_request(1, wire.Lookup("flood", 1, 0, "r", 1, bytes(32))),
    "status": wire.encode_request(1, wire.GetStatus()),
    "garbage": bytes(8) + b"garbage",
    "reads nothing": wire.encode_request(1, wire.GetStatus()),
}
frame = frames[kind]
print(flush=True)
sent = 0
while True:
    try:
        socket.send(frame, zmq.NOBLOCK)
        sent += 1
    except zmq.Again:
        socket.poll(1000, zmq.POLLOUT if kind == "reads nothing" else zmq.POLLIN | zmq.POLLOUT)
    while kind != "reads nothing":
        try:
            socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            break
"""


def resident_mib(server: Depot) -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


@pytest.mark.parametrize("kind", ["lookups", "status", "garbage", "reads nothing"])
def test_a_flood_is_refused_while_others_are_answered_and_memory_stays(start_depot: StartDepot, kind: str) -> None:
    """The benchmark measures the effect on other clients' latency."""
    # A rate that a flood is beyond on any machine: the usual one a process that hardly runs may not reach.
    server = start_depot("--max-rate", "1000", arena_mib=8)
    client = MessageQueueClient(server.url, server.context)
    client.learn_chunk_size(HANG_S)
    resident = resident_mib(server)
    flood = subprocess.Popen(
        [sys.executable, "-c", _FLOOD, server.url, kind], stdout=subprocess.PIPE, text=True, cwd=ROOT_FOLDER
    )
    try:
        assert flood.stdout is not None
        assert flood.stdout.readline()
        eventually(lambda: counters(server).get("requests_refused", 0) > 0)
        for _ in range(500):
            assert client.ask(lookup(hashes(32), model="victim")).result(HANG_S)[0] == 0
            client.wait(lambda: False, 0.002)  # it is within its own rate
        assert flood.poll() is None
        assert resident_mib(server) - resident < 64
    finally:
        flood.kill()
        flood.wait()
        assert flood.stdout is not None
        flood.stdout.close()
    client.close()


def test_a_thousand_clients_with_ten_thousand_lookups_in_flight_are_all_answered(start_depot: StartDepot) -> None:
    server = start_depot(arena_mib=8)
    contexts = [zmq.Context() for _ in range(2)]
    for context in contexts:
        context.set(zmq.MAX_SOCKETS, 4096)  # a client has three
    clients = [MessageQueueClient(server.url, contexts[i % 2]) for i in range(1000)]
    try:
        welcomes = [client.ask(wire.ChunkSize(), deadline_s=60.0) for client in clients]
        for future in welcomes:
            assert future.result(HANG_S) == 256
        resident = resident_mib(server)
        server.process.send_signal(signal.SIGSTOP)  # so that all are in flight at once
        futures: list[Any] = [
            client.ask(lookup(hashes(8), f"r{i}"), deadline_s=60.0) for i in range(10) for client in clients
        ]
        server.process.send_signal(signal.SIGCONT)
        for future in futures:
            assert future.result(HANG_S)[0] == 0
        assert resident_mib(server) - resident < 128
        assert counters(server)["lookups"] == 10_000
    finally:
        for client in clients:
            client.close()
        for context in contexts:
            context.term()
