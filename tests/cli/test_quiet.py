"""Commands and probes leave no line in the server's log: a scrape every few seconds would bury the others."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
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
from tests.conftest import HANG_S, Depot, StartDepot, eventually

pytestmark = pytest.mark.faults


@pytest.fixture
def served(start_depot: StartDepot) -> Depot:
    """A server with HTTP, at the log level that it has by default."""
    depot = start_depot("--http", "127.0.0.1:0")
    eventually(lambda: "web page" in depot.logged())
    eventually(lambda: is_well(depot))  # the web process has connected, too
    return depot


def address(depot: Depot) -> tuple[str, int]:
    (found,) = re.findall(r"http://([\d.]+):(\d+)", depot.logged())
    return found[0], int(found[1])


def ask(depot: Depot, method: str, path: str, body: str = "", token: str = "") -> int:
    connection = http.client.HTTPConnection(*address(depot), timeout=HANG_S)
    try:
        connection.request(method, path, body, {"Authorization": f"Bearer {token}"} if token else {})
        return connection.getresponse().status
    finally:
        connection.close()


def is_well(depot: Depot) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        return ask(depot, "GET", "/readyz") == 200
    return False


Others = Callable[[], int]


@pytest.fixture
def others(served: Depot) -> Iterator[Others]:
    """How many clients are connected beside the web process and the one that asks this. Once there are none, the server
    has noticed the ends of commands."""
    client = MessageQueueClient(served.url, served.context)
    yield lambda: int(client.ask(wire.Status()).result(HANG_S)["clients"]) - 2
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
            ("status",), ("status", "--http"), ("doctor",), ("quota",), ("ls",), ("warm", *which),
            ("lease", "mine", *which, "--seconds", "60"), ("lease",), ("release", "mine", "--yes"),
            ("forget", "--model", engine.model, "--yes"),
        ]
    }  # fmt: skip
    assert {name for name, code in done.items() if code} <= {("doctor",)}  # may find something on this machine
    assert run("release", "unknown", KVDEPOT_URL=served.url).returncode == 1
    eventually(lambda: others() == 2)
    assert served.logged() == before


def test_probes_scrapes_and_bad_requests_leave_no_line(served: Depot, others: Others) -> None:
    eventually(lambda: others() == 0)
    before = served.logged()
    for path in ("/healthz", "/readyz", "/metrics", "/v1/status", "/"):
        assert ask(served, "GET", path) == 200, path
    assert ask(served, "GET", "/no/such/page") == 404
    assert ask(served, "POST", "/v1/warm", "{") == 401
    token = json.loads(run("status", "--http", "--json", KVDEPOT_URL=served.url).stdout)["token"]
    assert ask(served, "POST", "/v1/warm", "{", token) == 400
    assert ask(served, "DELETE", "/metrics", "", token) == 405
    for address_family, place in ((socket.AF_INET, address(served)), (socket.AF_UNIX, served.url[len("ipc://") :])):
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
