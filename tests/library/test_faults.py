"""Servers and programs that die or stop in the middle of a copy that the program makes itself."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvdepot
from kvdepot.client import admin
from kvdepot.library import namespace
from kvdepot.protocol import wire
from tests.conftest import HANG_S, Depot, StartDepot, eventually, suspend
from tests.faults.test_connection import Proxy
from tests.library.conftest import Connect, StartProgram, at_rest
from tests.library.kv import COUNT, SMALL, TOKENS, check, open_namespace, put, random_kv, random_tokens
from tests.ports import free_port
from tests.server.process import kill

pytestmark = pytest.mark.faults

OPTIONS: dict[str, Any] = {"arena_mib": 16, "chunk_size": TOKENS}
Running = tuple[Depot, kvdepot.Depot, kvdepot.Namespace]


@pytest.fixture
def running(start_depot: StartDepot, connect: Connect) -> Running:
    """A server, a connection to it, and a namespace with the sequence of seed 1."""
    server = start_depot("--verify", "always", **OPTIONS)
    depot = connect(server)
    ns = open_namespace(depot, "1")
    assert put(ns, 1) == COUNT
    return server, depot, ns


def again(start_depot: StartDepot, depot: Depot) -> Depot:
    """Another server in the same place."""
    return start_depot("--verify", "always", url=depot.url, name=depot.name, **OPTIONS)


# -- programs


@pytest.mark.parametrize("at_copy", [1, 6])
def test_a_program_killed_in_the_middle_of_a_put_leaves_nothing_behind(
    running: Running, start_program: StartProgram, at_copy: int
) -> None:
    server, depot, ns = running
    before = at_rest(depot)
    program = start_program(server.url)
    program.pause("put", at_copy, seed=2, count=COUNT)
    during = depot.status()
    assert during.operations == 1 and during.reserved_shards == 6
    program.kill()
    eventually(lambda: depot.status().clients == 1)
    after = at_rest(depot)
    assert (after.chunks, after.instances) == (before.chunks, before.instances)
    eventually(lambda: depot.status().used_bytes == before.used_bytes)  # a dead client's places are reused later
    assert check(ns, 2) == 0
    assert put(ns, 2) == check(ns, 2) == check(ns, 1) == COUNT


def test_a_program_killed_in_the_middle_of_a_get_holds_nothing(running: Running, start_program: StartProgram) -> None:
    server, depot, ns = running
    before = at_rest(depot)
    program = start_program(server.url)
    program.pause("get", 3, seed=1, count=COUNT)
    assert depot.status().operations == 1 and depot.status().holds > 0
    program.kill()
    eventually(lambda: depot.status().clients == 1)
    after = at_rest(depot)
    assert (after.used_bytes, after.chunks) == (before.used_bytes, before.chunks)
    assert check(ns, 1) == COUNT
    assert ns.delete(random_tokens(COUNT, 1)) == 6
    assert depot.status().used_bytes == 0


def test_chunks_that_are_being_copied_are_not_evicted(
    start_depot: StartDepot, connect: Connect, start_program: StartProgram
) -> None:
    server = start_depot("--verify", "always", arena_mib=4, chunk_size=TOKENS)
    ns = open_namespace(connect(server), "1")
    assert put(ns, 1) == COUNT
    reader, writer = start_program(server.url), start_program(server.url)
    reader.pause("get", 3, seed=1, count=COUNT)
    writer.pause("put", 3, seed=2, count=COUNT)
    for seed in range(3, 600):
        put(ns, seed)
    assert check(ns, 3) == 0  # there was pressure
    assert reader.ask("resume") == [COUNT, True]
    assert writer.ask("resume") == COUNT
    assert check(ns, 2) == COUNT


def test_a_sequence_forgotten_during_a_get_is_not_served(running: Running, start_program: StartProgram) -> None:
    server, depot, ns = running
    program = start_program(server.url)
    program.pause("get", 3, seed=1, count=COUNT)
    with admin.connect(server.url) as client:
        forgetting = client.ask(wire.ForgetChunks())
        eventually(lambda: ns.contains(random_tokens(COUNT, 1)) == 0)
        assert program.ask("resume") == [0, True]
        assert forgetting.result(HANG_S)["removed"]["memory"] == 6
    assert at_rest(depot).used_bytes == 0
    assert put(ns, 1) == check(ns, 1) == COUNT


def test_a_sequence_forgotten_during_a_put_is_not_found(
    start_depot: StartDepot, connect: Connect, start_program: StartProgram
) -> None:
    server = start_depot("--verify", "always", **OPTIONS)
    depot = connect(server)
    ns = open_namespace(depot, "1")
    program = start_program(server.url)
    program.pause("put", 3, seed=1, count=COUNT)
    with admin.connect(server.url) as client:
        forgetting = client.ask(wire.ForgetChunks())
        eventually(lambda: isinstance(client.ask(wire.ChunkSize()).result(HANG_S), int))  # the server has read it
        assert program.ask("resume") == 0
        forgetting.result(HANG_S)
    assert check(ns, 1) == 0
    assert at_rest(depot).used_bytes == 0


def test_an_interrupted_wait_leaves_nothing_placed(running: Running) -> None:
    server, depot, ns = running
    suspend(server.process.pid)
    waiting, client = threading.Event(), depot._link._client
    wait = client.wait

    def waits(done: Callable[[], bool], timeout_s: float) -> bool:
        waiting.set()
        return wait(done, timeout_s)

    def interrupt() -> None:
        assert waiting.wait(HANG_S)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    client.wait = waits  # type: ignore[method-assign]
    thread = threading.Thread(target=interrupt)
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored by what a shell starts in the background
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            put(ns, 2)
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    server.process.send_signal(signal.SIGCONT)
    eventually(lambda: check(ns, 1) == COUNT and not depot.status().operations, 20)
    assert at_rest(depot).chunks == 6
    assert put(ns, 2) == check(ns, 2) == COUNT


def test_an_interrupted_copy_stores_nothing(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    _, depot, ns = running
    copyto, copies = np.copyto, iter(range(4))

    def interrupted(to: Any, source: Any) -> None:
        if next(copies, None) is None:
            raise KeyboardInterrupt
        copyto(to, source)

    for call in (lambda: put(ns, 2), lambda: ns.get(random_tokens(COUNT, 1))):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(namespace.np, "copyto", interrupted)
            call()
        assert at_rest(depot).chunks == 6
    assert check(ns, 2) == 0 and check(ns, 1) == COUNT
    assert put(ns, 2) == check(ns, 2) == COUNT


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_placement_after_its_call_gave_up_is_given_back(
    start_depot: StartDepot, connect: Connect, monkeypatch: pytest.MonkeyPatch, is_dropped: bool
) -> None:
    """is_dropped: the namespace is used no more."""
    server = start_depot("--verify", "always", **OPTIONS)
    depot = connect(server)
    ns, other = open_namespace(depot, "1"), open_namespace(depot, "2")
    assert put(ns, 1) == put(other, 1) == COUNT
    suspend(server.process.pid)
    monkeypatch.setattr(namespace, "ANSWER_S", 0.2)
    assert put(ns, 2) == 0
    monkeypatch.setattr(namespace, "ANSWER_S", HANG_S)
    server.process.send_signal(signal.SIGCONT)
    if is_dropped:
        del ns
    used = other if is_dropped else ns
    eventually(lambda: check(used, 1) == COUNT and not depot.status().operations, 20)
    assert at_rest(depot).chunks == 12


@pytest.mark.parametrize("do", ["put", "get"])
def test_a_connection_cut_before_the_placement_arrives_loses_nothing(
    start_depot: StartDepot, connect: Connect, do: str
) -> None:
    server = start_depot("--verify", "always", url=f"tcp://127.0.0.1:{free_port()}", **OPTIONS)
    proxy = Proxy(int(server.url.rsplit(":", 1)[1]))
    depot = connect(server)
    try:
        with kvdepot.connect(proxy.url) as cut_off:
            ns = open_namespace(cut_off, "1")
            assert put(ns, 1) == COUNT
            results: list[int] = []
            thread = threading.Thread(target=lambda: results.append(put(ns, 2) if do == "put" else check(ns, 1)))
            proxy.delay_s = 2.0  # the answer is cut off on its way
            thread.start()
            eventually(lambda: depot.status().operations)
            proxy.cut()
            proxy.delay_s = 0.0
            thread.join(HANG_S)
            assert results in ([0], [COUNT])
            other = open_namespace(depot, "1")
            assert check(other, 2) == (results[0] if do == "put" else 0)
            eventually(lambda: check(ns, 1) == COUNT and not depot.status().operations, 20)
            assert put(ns, 2) == check(ns, 2) == check(other, 2) == COUNT
    finally:
        proxy.close()


@pytest.mark.parametrize("do", ["put", "get"])
def test_a_connection_cut_after_the_copy_leaves_nothing_placed(
    start_depot: StartDepot, connect: Connect, monkeypatch: pytest.MonkeyPatch, do: str
) -> None:
    server = start_depot("--verify", "always", url=f"tcp://127.0.0.1:{free_port()}", **OPTIONS)
    proxy = Proxy(int(server.url.rsplit(":", 1)[1]))
    depot, copyto, stalled = connect(server), np.copyto, threading.Event()

    def stall(to: Any, source: Any) -> None:
        copyto(to, source)
        if not stalled.is_set():
            proxy.stall()
            stalled.set()

    try:
        with kvdepot.connect(proxy.url) as cut_off:
            ns = open_namespace(cut_off, "1")
            assert put(ns, 1) == COUNT
            results: list[int] = []
            thread = threading.Thread(target=lambda: results.append(put(ns, 2) if do == "put" else check(ns, 1)))
            with monkeypatch.context() as patch:
                patch.setattr(namespace.np, "copyto", stall)
                thread.start()
                assert stalled.wait(HANG_S)
                eventually(lambda: len(cut_off._link._client._connection) > 0)  # what ends the operation was sent
                proxy.cut()
                proxy.go_on()
                thread.join(HANG_S)
            other = open_namespace(depot, "1")
            if do == "put":
                assert results == [check(other, 2)]
            eventually(lambda: check(ns, 1) == COUNT and not depot.status().operations, 20)
            assert put(ns, 2) == check(ns, 2) == check(other, 2) == COUNT
    finally:
        proxy.close()


# -- servers


def test_a_server_killed_in_between_costs_misses_until_its_successor_has_all(
    running: Running, start_depot: StartDepot
) -> None:
    server, _, ns = running
    tokens, kv = random_tokens(COUNT, 1), random_kv(SMALL, COUNT, 1)
    assert put(ns, 2) == COUNT
    kill(server)
    assert put(ns, 3) == check(ns, 1) == ns.contains(tokens) == ns.delete(tokens) == ns.get_into(tokens, kv) == 0
    assert ns.lease(tokens, 60) == 0 and not ns.release(tokens)
    server = again(start_depot, server)
    eventually(lambda: check(ns, 1) == COUNT)
    assert check(ns, 2) == put(ns, 3) == check(ns, 3) == COUNT
    assert "empty" not in server.logged()


@pytest.mark.parametrize("do", ["put", "get"])
def test_a_server_killed_during_a_copy_is_succeeded_once_the_copy_has_ended(
    running: Running, start_depot: StartDepot, connect: Connect, start_program: StartProgram, do: str
) -> None:
    server, *_ = running
    program = start_program(server.url)
    program.pause(do, 3, seed=2 if do == "put" else 1, count=COUNT)
    kill(server)
    assert program.ask("resume") in (0, [0, True])
    server = again(start_depot, server)
    depot = connect(server)
    ns = open_namespace(depot, "1")
    assert check(ns, 1) == COUNT
    assert check(ns, 2) == 0
    assert at_rest(depot).chunks == 6
    eventually(lambda: program.ask("put", seed=2, count=COUNT) == COUNT)
    assert check(ns, 2) == COUNT


@pytest.mark.parametrize("do", ["put", "get"])
def test_a_program_stopped_in_a_copy_cannot_touch_the_next_servers_memory(
    running: Running, start_depot: StartDepot, connect: Connect, start_program: StartProgram, do: str
) -> None:
    server, *_ = running
    program = start_program(server.url)
    program.pause(do, 3, seed=2 if do == "put" else 1, count=COUNT)
    suspend(program.pid)
    kill(server)
    server = again(start_depot, server)
    assert "empty" not in server.logged()
    depot = connect(server)
    ns = open_namespace(depot, "1")
    assert check(ns, 1) == COUNT, "what it does not write is not lost"
    for seed in range(10, 30):
        assert put(ns, seed) == COUNT
    program.send("resume")
    os.kill(program.pid, signal.SIGCONT)
    assert program.answer() in (0, [0, True])
    assert at_rest(depot).chunks == 21 * 6
    for seed in (1, *range(10, 30)):
        assert check(ns, seed) == COUNT
    assert depot.status().counters["corrupt_chunks"] == 0
    eventually(lambda: program.ask("put", seed=2, count=COUNT) == COUNT)
    assert check(ns, 2) == COUNT


def test_a_program_killed_in_a_copy_lets_the_next_server_take_over(
    running: Running, start_depot: StartDepot, connect: Connect, start_program: StartProgram
) -> None:
    server, *_ = running
    program = start_program(server.url)
    program.pause("put", 3, seed=2, count=COUNT)
    kill(server)
    program.kill()
    server = again(start_depot, server)
    assert "empty" not in server.logged()
    ns = open_namespace(connect(server), "1")
    assert (check(ns, 1), check(ns, 2)) == (COUNT, 0)
