"""Commands and probes leave no line in the server's log: a scrape every few seconds would bury the others."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import run
from tests.client.engine import CHUNK
from tests.conftest import Depot, StartDepot, eventually
from tests.server.process import kill

pytestmark = pytest.mark.faults


@pytest.fixture
def served(start_depot: StartDepot) -> Depot:
    """A server with HTTP, at the log level that it has by default."""
    depot = start_depot("--http", "127.0.0.1:0")
    eventually(lambda: "web page" in depot.logged())
    return depot


def address(depot: Depot) -> tuple[str, int]:
    (found,) = re.findall(r"http://([\d.]+):(\d+)", depot.logged())
    return found[0], int(found[1])


def ask(depot: Depot, method: str, path: str, body: str = "", token: str = "") -> int:
    connection = http.client.HTTPConnection(*address(depot), timeout=60)
    try:
        connection.request(method, path, body, {"Authorization": f"Bearer {token}"} if token else {})
        return connection.getresponse().status
    finally:
        connection.close()


def all_are_gone(depot: Depot) -> bool:
    """Whether nobody but the web process and this question is connected; the log has then told of all others."""
    return depot.status()["clients"] == 2


def test_one_shot_commands_leave_no_line(served: Depot, tmp_path: Path) -> None:
    before = served.logged()
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps([1] * CHUNK))
    which = ("--tokens", prompt, "--model", "m")
    done = {
        words[0]: run(*words, KVDEPOT_URL=served.url).returncode
        for words in [
            ("status",), ("doctor",), ("token",), ("open", "--print"), ("quota",), ("leases",), ("warm", *which),
            ("lease", "mine", *which, "--seconds", "60"), ("release", "mine"), ("pin", "two", *which), ("unpin", "two"),
            ("forget", "--model", "m", "--yes"), ("check",),
        ]
    }  # fmt: skip
    assert done["status"] == done["warm"] == done["lease"] == done["pin"] == done["forget"] == 0, done
    assert run("release", "unknown", KVDEPOT_URL=served.url).returncode == 1
    eventually(lambda: all_are_gone(served))
    assert served.logged() == before


def test_a_command_that_is_killed_leaves_no_line(served: Depot) -> None:
    before = served.logged()
    top = subprocess.Popen(
        [sys.executable, "-m", "kvdepot.cli", "top", "--url", served.url],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        eventually(lambda: served.status()["clients"] > 2 or top.poll() is not None)
    finally:
        kill(top)
    eventually(lambda: all_are_gone(served))
    assert served.logged() == before


def test_probes_scrapes_and_bad_requests_leave_no_line(served: Depot) -> None:
    before = served.logged()
    for path in ("/healthz", "/readyz", "/metrics", "/v1/status", "/"):
        assert ask(served, "GET", path) == 200, path
    assert ask(served, "GET", "/no/such/page") == 404
    assert ask(served, "POST", "/v1/warm", "{") == 401
    token = run("token", KVDEPOT_URL=served.url).stdout.strip()
    assert ask(served, "POST", "/v1/warm", "{", token) == 400
    assert ask(served, "DELETE", "/metrics") == 405
    for address_family, place in ((socket.AF_INET, address(served)), (socket.AF_UNIX, served.url[len("ipc://") :])):
        with socket.socket(address_family) as scan:  # a port scan, and what is no request
            scan.connect(place)
        with socket.socket(address_family) as garbage:
            garbage.connect(place)
            garbage.sendall(b"\x16\x03\x01 no request\r\n\r\n")
            garbage.shutdown(socket.SHUT_WR)
            garbage.settimeout(60)
            while garbage.recv(4096):
                pass
    eventually(lambda: all_are_gone(served))
    assert served.logged() == before
    assert served.stop() == 0
