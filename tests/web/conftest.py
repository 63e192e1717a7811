"""A server with HTTP, and requests to it over plain sockets, so that no HTTP library hides anything."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import HANG_S, Depot, StartDepot, eventually


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def value(self) -> Any:
        return json.loads(self.body)


class Web:
    """HTTP of one server."""

    def __init__(self, depot: Depot, host: str = "127.0.0.1") -> None:
        self.depot = depot
        self.host = host
        self.port = int(eventually(lambda: re.search(r"API: http://\S+:(\d+)", depot.logged()))[1])
        eventually(self.is_well)

    def is_well(self) -> bool:
        try:
            return self.get("/healthz").status == 200
        except (OSError, http.client.HTTPException):
            return False

    @property
    def token(self) -> str:
        return Path(self.depot.url.removeprefix("ipc://") + ".token").read_text().strip()

    def ask(
        self, method: str, path: str, body: Any = None, token: str = "", headers: Mapping[str, str] | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=HANG_S)
        try:
            said = {**({"Authorization": f"Bearer {token}"} if token else {}), **(headers or {})}
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, said)
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **options: Any) -> Answer:
        return self.ask("GET", path, **options)

    def change(self, path: str, body: Any) -> Answer:
        return self.ask("POST", path, body, self.token)

    def status(self) -> dict[str, Any]:
        """A status that the server made after this call; skips one that is already on its way to the web process."""
        called = time.time()
        value: dict[str, Any] = eventually(lambda: (now := self.latest())["wall_s"] >= called and now)
        return value

    def latest(self) -> dict[str, Any]:
        """The web process's status; waits until it has one."""
        value: dict[str, Any] = eventually(lambda: (now := self.get("/v1/status")).status == 200 and now.value)
        return value

    def child(self) -> int:
        """Pid of the web process; 0 if there is none."""
        for pid in children(self.depot.process.pid):
            with contextlib.suppress(OSError):  # gone meanwhile
                if b"kvdepot.web" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return 0


def connect(web: Web) -> socket.socket:
    made = socket.create_connection((web.host, web.port), timeout=40)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return made


def open_connections(web: Web) -> int:
    """The web process's open connections, according to the kernel."""
    place = f"/proc/{web.child()}"
    mine = set()
    for fd in os.listdir(f"{place}/fd"):  # noqa: PTH208 - names, not paths
        with contextlib.suppress(OSError):
            mine.add(os.readlink(f"{place}/fd/{fd}"))  # noqa: PTH115
    with open(f"{place}/net/tcp") as table:  # noqa: PTH123
        rows = [line.split() for line in table.readlines()[1:]]
    port = f":{web.port:04X}"
    return sum(row[1].endswith(port) and row[3] != "0A" and f"socket:[{row[9]}]" in mine for row in rows)


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            found += map(int, (task / "children").read_text().split())
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def samples(answer: Answer) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every number of `/metrics`, by name and labels."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            place = sample.name, tuple(sorted(sample.labels.items()))
            assert place not in found, f"{place} stands there twice"
            found[place] = sample.value
    return found


StartWeb = Callable[..., Web]


@pytest.fixture
def start_web(start_depot: StartDepot) -> StartWeb:
    """Start a server with HTTP at a free port."""

    def start(*flags: str, http: str = "127.0.0.1:0", host: str = "127.0.0.1", **options: Any) -> Web:
        return Web(start_depot("--http", http, *flags, **options), host)

    return start


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    """One server for those tests of a module that do not affect each other."""
    server = Depot("--http", "127.0.0.1:0").wait_ready()
    try:
        yield Web(server)
    finally:
        server.close()
