"""Commands and probes leave no line in the server's log: a scrape every few seconds would bury the others."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvdepot.client import MessageQueueClient
from kvdepot.protocol import wire
from tests.cli.command import heed_signals, run
from tests.client.engine import CHUNK, Engine, engine_with_a_chunk
from tests.conftest import HANG_S, Depot, eventually
from tests.web.conftest import Web

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    """A server with HTTP, at the log level that it has by default. The last test ends it."""
    with contextlib.closing(Depot("--http", "127.0.0.1:0")) as depot:
        yield Web(depot.wait_ready())


@pytest.fixture
def served(web: Web) -> Depot:
    return web.depot


Others = Callable[[], int]


@pytest.fixture
def others(served: Depot) -> Iterator[Others]:
    """How many clients are connected beside the web process and the one that asks this. Once there are none, the server
    has noticed the ends of commands."""
    client = MessageQueueClient(served.url, served.context)
    yield lambda: int(client.ask(wire.GetStatus()).result(HANG_S)["clients"]) - 2
    client.close()


@pytest.fixture
def engine(served: Depot) -> Iterator[Engine]:
    """An engine that has stored one chunk."""
    with engine_with_a_chunk(served) as engine:
        yield engine


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_command_that_a_signal_ends_is_no_client_that_died(served: Depot, others: Others, number: int) -> None:
    watching = subprocess.Popen(
        [sys.executable, "-m", "kvdepot.cli", "status", "--watch", "0.1", "--url", served.url], stdout=subprocess.PIPE,
        preexec_fn=heed_signals,
    )  # fmt: skip
    assert watching.stdout is not None and watching.stdout.readline()
    watching.send_signal(number)
    watching.communicate(timeout=HANG_S)
    assert watching.returncode == 130
    eventually(lambda: others() == 0)
    assert served.status()["counters"].get("clients_died", 0) == 0


def test_one_shot_commands_leave_no_line(served: Depot, others: Others, engine: Engine, tmp_path: Path) -> None:
    eventually(lambda: f"connected: {engine.model}" in served.logged())
    eventually(lambda: others() == 2)  # the engine's
    before = served.logged()
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps([1] * CHUNK))
    which = ("--tokens", prompt, "--model", engine.model)
    done = {
        words: run(*words, KVDEPOT_URL=served.url).returncode
        for words in [
            ("status",), ("status", "--http"), ("doctor",), ("quota",), ("inspect", *which), ("warm", *which),
            ("lease", "mine", *which, "--seconds", "60"), ("lease",), ("release", "mine", "--yes"),
            ("forget", "--model", engine.model, "--yes"),
        ]
    }  # fmt: skip
    assert {name for name, code in done.items() if code} <= {("doctor",)}  # may find something on this machine
    assert run("release", "unknown", KVDEPOT_URL=served.url).returncode == 1
    eventually(lambda: others() == 2)
    assert served.logged() == before


def test_probes_scrapes_and_bad_requests_leave_no_line(web: Web, served: Depot, others: Others) -> None:
    eventually(lambda: others() == 0)
    before = served.logged()
    for path in ("/healthz", "/readyz", "/metrics", "/v1/status", "/"):
        assert web.get(path).status == 200, path
    assert web.get("/no/such/page").status == 404
    assert web.ask("POST", "/v1/warm", b"{").status == 401
    assert web.change("/v1/warm", b"{").status == 400
    assert web.ask("DELETE", "/metrics", token=web.token).status == 405
    places = (socket.AF_INET, (web.host, web.port)), (socket.AF_UNIX, served.url.removeprefix("ipc://"))
    for address_family, place in places:
        with socket.socket(address_family) as scan:  # a port scan, and what is no request
            scan.connect(place)
        with socket.socket(address_family) as garbage:
            garbage.connect(place)
            garbage.sendall(b"\x16\x03\x01 no request\r\n\r\n")
            garbage.shutdown(socket.SHUT_WR)
            garbage.settimeout(HANG_S)
            while garbage.recv(4096):
                pass
    eventually(lambda: others() == 0)
    assert served.logged() == before
    assert served.stop() == 0
