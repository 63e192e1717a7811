"""Which engines the log and the journal name: one line when an engine comes, one when it is gone."""

from __future__ import annotations

import logging
import os

import pytest

from kvdepot.protocol import wire
from kvdepot.protocol.layout import chunk_format
from tests.core.test_connections import ask, harness
from tests.harness import Harness


@pytest.fixture
def server(caplog: pytest.LogCaptureFixture) -> Harness:
    caplog.set_level(logging.INFO)
    return harness()


def look_up(server: Harness, identity: bytes) -> None:
    ask(server, identity, wire.Lookup("llama", 1, 1, "r", 1, bytes(32)))


def leave(server: Harness, identity: bytes) -> None:
    """A client closes its connection."""
    server.liveness_files[identity].left = True
    server.die(identity)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_all_clients_of_one_engine_are_one_line_and_their_end_another(
    server: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    for identity in (b"scheduler", b"worker 0", b"worker 1"):
        server.hello(identity, engine="seven")
        look_up(server, identity)
        look_up(server, identity)
    assert lines(caplog) == ["engine seven connected: llama"]
    for identity in (b"worker 1", b"scheduler"):
        leave(server, identity)
    assert len(lines(caplog)) == 1
    leave(server, b"worker 0")
    assert lines(caplog)[1:] == ["engine seven is gone"]
    journal = [event.text for event in server.depot.report.events if event.kind == "engine"]
    assert sorted(journal) == sorted(lines(caplog))


def test_events_and_status_give_an_engine_the_same_short_name(server: Harness) -> None:
    uuid = "1b4e28ba-2fa1-41d2-883f-0016d3cca427"
    for identity, name in ((b"one", f"{uuid}_dp1"), (b"two", "node-7:4711"), (b"three", ""), (b"four", "x" * 256)):
        server.hello(identity, engine=name)
        look_up(server, identity)
    listed = {each.engine for each in server.depot.status().engines}
    assert listed == {"1b4e28ba_dp1", "node-7:4711", b"three".hex()[:8], "x" * 80}
    assert {event.text for event in server.depot.report.events if event.kind == "engine"} == {
        f"engine {name} connected: llama" for name in listed
    }
    assert {(each.host, each.pid) for each in server.depot.status().engines} == {(os.uname().nodename, os.getpid())}


def test_an_engine_of_which_a_process_died_has_died(server: Harness, caplog: pytest.LogCaptureFixture) -> None:
    for identity in (b"scheduler", b"worker"):
        server.hello(identity, engine="seven")
        look_up(server, identity)
    server.die(b"worker")
    leave(server, b"scheduler")
    assert lines(caplog)[1:] == ["engine seven died"]
    server.hello(b"again", engine="seven")
    look_up(server, b"again")
    leave(server, b"again")
    assert lines(caplog)[2:] == ["engine seven connected: llama", "engine seven is gone"]


def test_engines_of_two_users_are_two_whatever_their_name(server: Harness, caplog: pytest.LogCaptureFixture) -> None:
    for user in ("ann", "bob"):
        server.hello(user.encode(), user, engine="seven")
        look_up(server, user.encode())
    assert lines(caplog) == 2 * ["engine seven connected: llama"]


def test_an_engine_is_faulty_once_whatever_the_number_of_its_faulty_workers(server: Harness) -> None:
    faults = {b"worker 0": "block 3 came back different", b"worker 1": "x" * 1000, b"another": ""}
    for rank, (identity, fault) in enumerate(faults.items()):
        server.hello(identity, engine="seven" if identity.startswith(b"worker") else "eight")
        request = wire.Register(1, chunk_format(4096, "x"), "llama", 2, rank % 2, 1, fault=fault)
        assert ask(server, identity, request) is None
    status = server.depot.status()
    assert status.faulty_engines == 1
    assert sorted(each.fault[:27] for each in status.engines) == ["", "block 3 came back different", "x" * 27]
    assert max(len(each.fault) for each in status.engines) < 1000


def test_commands_and_probes_are_not_logged_as_engines(server: Harness, caplog: pytest.LogCaptureFixture) -> None:
    server.hello(b"probe", engine="seven")
    ask(server, b"probe", wire.GetStatus())
    ask(server, b"probe", wire.Lookup("llama", 1, 1, "warm", 0, bytes(32)))  # `kvdepot warm`
    ask(server, b"probe", wire.TakeLease("mine", "retain", "llama", 1, 1, bytes(32)))
    server.die(b"probe")
    assert lines(caplog) == []
    server.hello(b"engine", engine="seven")
    look_up(server, b"engine")
    assert lines(caplog) == ["engine seven connected: llama"]
