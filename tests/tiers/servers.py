"""The real servers behind shared tiers, each a process that a test may kill, stop and start again."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvdepot.errors import TierError
from kvdepot.testing.tiers import content, name_of
from kvdepot.tiers import Blob, Tier
from tests.conftest import HANG_S, ends, eventually, suspend
from tests.ports import free_port

BUCKET = "kvdepot-test"


def need(*, commands: Sequence[str] = (), modules: Sequence[str] = ()) -> None:
    """Skips the module where one of these is missing; under CI nothing may be missing."""
    missing = [name for name in commands if shutil.which(name) is None]
    missing += [name for name in modules if importlib.util.find_spec(name) is None]
    if missing and os.environ.get("CI"):
        pytest.fail(f"missing: {', '.join(missing)}", pytrace=False)
    if missing:
        pytest.skip(f"missing: {', '.join(missing)}", allow_module_level=True)


class Server:
    """A process that listens on `port`."""

    def __init__(self, command: Sequence[str], port: int, directory: Path) -> None:
        self.command = [*command]
        self.port = port
        self.directory = directory
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Run it, until it takes connections."""
        with (self.directory / f"{self.port}.log").open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, cwd=self.directory)
        eventually(self._listens)

    def _listens(self) -> bool:
        assert self.process is not None and self.process.poll() is None, self.logged()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False

    def logged(self) -> str:
        return (self.directory / f"{self.port}.log").read_text()[-4000:]

    def kill(self) -> None:
        """As -9 does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(HANG_S)
            self.process = None

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Not a word from it meanwhile; connections are taken by the kernel all the same."""
        assert self.process is not None
        suspend(self.process.pid)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


class RedisServer(Server):
    """`redis-server`, which saves nothing."""

    def __init__(self, directory: Path, *flags: str, tls: bool = False) -> None:
        port = free_port()
        where = ["--port", "0", "--tls-port", str(port)] if tls else ["--port", str(port)]
        command = ["redis-server", *where, "--bind", "127.0.0.1", "--save", "", "--dir", str(directory), *flags]
        super().__init__(command, port, directory)

    def cli(self, *words: str) -> str:
        """A command by `redis-cli`; what it answers."""
        command = ["redis-cli", "-p", str(self.port), "--no-auth-warning", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.strip()


def redis_cluster(directory: Path, nodes: int = 3) -> list[RedisServer]:
    """As many primaries, with all slots between them."""
    flags = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"]
    servers = []
    for _ in range(nodes):
        port = str(free_port())
        servers.append(RedisServer(directory, *flags, "--cluster-port", port, "--cluster-config-file", f"{port}.conf"))
    addresses = [f"127.0.0.1:{server.port}" for server in servers]
    create = ["redis-cli", "--cluster", "create", *addresses, "--cluster-yes"]
    made = subprocess.run(create, capture_output=True, text=True, timeout=HANG_S)
    assert made.returncode == 0, made.stdout + made.stderr
    for server in servers:
        eventually(lambda server=server: "cluster_state:ok" in server.cli("cluster", "info"))
    return servers


_MOTO = """
import sys, threading
from moto import server
answer, lock = server.DomainDispatcherApplication.__call__, threading.Lock()
def in_turn(*request):
    with lock:
        return answer(*request)
server.DomainDispatcherApplication.__call__ = in_turn
server.main(sys.argv[1:])
"""
"""Its objects are not safe for threads: a PUT or GET beside a DELETE of the same object was answered 500."""


class S3Server(Server):
    """moto's server: the S3 API on objects in its memory, none of which outlives it."""

    def __init__(self, directory: Path) -> None:
        port = free_port()
        super().__init__(
            [sys.executable, "-W", "ignore", "-c", _MOTO, "-H", "127.0.0.1", "-p", str(port)], port, directory
        )

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        super().start()
        self.make_bucket(BUCKET)

    def make_bucket(self, name: str) -> None:
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert answer.status == 200


class MooncakeMaster(Server):
    """`mooncake_master`, which knows where the objects of a pool are. The package is not imported for it (`needed`)."""

    def __init__(self, directory: Path, *flags: str) -> None:
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None and spec.origin is not None
        port, command = free_port(), Path(spec.origin).with_name("mooncake_master")
        own = [f"--rpc_port={port}", "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
        super().__init__([str(command), *own, f"--metrics_port={free_port()}", *flags], port, directory)

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}/"


def put(tier: Tier, number: int, data: bytes) -> bool:
    return tier.write([Blob(name_of(number), [memoryview(data)])])[0]


def get(tier: Tier, number: int, room: int = 1 << 16) -> bytes | None:
    area = bytearray(room)
    (size,) = tier.read([Blob(name_of(number), [memoryview(area)])])
    return None if size is None else bytes(area[:size])


def answered(call: Callable[[], Any]) -> Any:
    """What a call of a tier returns as soon as its store, which may be busy, answers."""
    answers: list[Any] = []

    def is_there() -> bool:
        with contextlib.suppress(TierError):
            answers.append(call())
        return bool(answers)

    eventually(is_there)
    return answers[0]


def assert_all_fail(tier: Tier, says: str) -> None:
    """Each call says in time that the store is unavailable."""
    names = [name_of(100 + n) for n in range(60)]  # of no test: a server that hangs writes them when it goes on
    for call in (
        tier.usage,
        lambda: tier.find(names),
        lambda: get(tier, 1),
        lambda: tier.write([Blob(name, [memoryview(bytes(100_000))]) for name in names]),
        lambda: tier.remove([name_of(1)]),
        lambda: tier.forget("", ""),
    ):
        with ends(), pytest.raises(TierError, match=says):
            call()


class StoreFaults:
    """A store whose server is killed, or hangs. Subclass it in a tier's test module, with a fixture `own`: a server of
    the test alone, which keeps nothing when it is killed."""

    killed: ClassVar[str]
    """What errors say without a server, as a regular expression."""
    hung: ClassVar[str]

    def open(self, own: Server) -> Tier:
        """The tier, with a timeout of a second."""
        raise NotImplementedError

    def test_a_killed_server_is_an_error_and_its_successor_is_found(self, own: Server) -> None:
        tier = self.open(own)
        blobs = [Blob(name_of(n), [memoryview(b"some")]) for n in range(40)]
        assert all(answered(lambda: tier.write(blobs)))  # on a busy machine, an answer may take more than a second
        for _ in range(2):
            own.kill()
            assert_all_fail(tier, self.killed)
            own.start()
            answered(tier.usage)
            assert answered(lambda: get(tier, 1)) is None
            assert all(answered(lambda: tier.write(blobs))) and answered(lambda: get(tier, 1)) == b"some"
        tier.close()

    def test_a_hung_server_is_an_error_in_time_and_used_again_when_it_goes_on(self, own: Server) -> None:
        tier = self.open(own)
        data = content(1, 8 << 20)
        assert answered(lambda: put(tier, 1, data))
        with own.stopped():
            assert_all_fail(tier, self.hung)
        # The server may have received the removal, and be busy with more that it was asked while it hung.
        assert answered(tier.usage) and answered(lambda: get(tier, 1, len(data))) in (data, None)
        assert answered(lambda: put(tier, 2, data)) and answered(lambda: get(tier, 2, len(data))) == data
        tier.close()
