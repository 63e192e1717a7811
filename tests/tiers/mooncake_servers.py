"""Real parts of a Mooncake Store: a master, and hosts that give memory to the pool."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

import pytest

from tests.conftest import eventually
from tests.ports import free_port

__all__ = ["Host", "Master", "needed"]


def program() -> Path:
    """`mooncake_master`. The package is not imported for it (see `needed`)."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "mooncake_master"


def needed() -> None:
    """Skip where Mooncake is not installed; fail where it has to be (CI)."""
    # Not in this process: the library reads its settings when it is loaded, and the tier makes them.
    tried = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True)
    if tried.returncode:
        reason = f"Mooncake is not here: {tried.stderr.strip().rpartition(chr(10))[2]}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


class _Process:
    """What a test does to one of either kind."""

    process: subprocess.Popen[Any]
    log: IO[str]

    def logged(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def stop(self) -> None:
        """SIGSTOP: it hangs, and its connections stay open."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9. Safe twice."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self.log.close()


class Master(_Process):
    """A `mooncake_master` process."""

    def __init__(self, port: int = 0, flags: tuple[str, ...] = ()) -> None:
        self.port = port or free_port()
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            [
                str(program()), f"--rpc_port={self.port}", "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1",
                f"--metrics_port={free_port()}", *flags,
            ],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
        )  # fmt: skip

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}/"

    def _listens(self) -> bool:
        assert self.process.poll() is None, f"mooncake_master ended:\n{self.logged()}"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def wait_ready(self) -> Master:
        """Until it accepts connections."""
        eventually(self._listens)
        return self


class Host(_Process):
    """Another host of the pool, as a process of its own: a tier that does what lines on its stdin say.

    `write NUMBER SIZE` and `read NUMBER SIZE` of the objects of kvdepot.testing.tiers; `begin NUMBER SIZE` writes one
    and does not end. The answer is a line.
    """

    def __init__(self, url: str, segment_mib: int = 512) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        options = ["local_host=127.0.0.1", f"segment_gib={segment_mib / 1024}"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.tiers.mooncake_servers", url, *options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
        )  # fmt: skip

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        assert answer, f"the host ended:\n{self.logged()}"
        return answer

    def wait_ready(self) -> Host:
        assert self.ask("hello") == "hello"
        return self

    def kill(self) -> None:
        super().kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            if not pipe.closed:
                pipe.close()


def serve(url: str, options: dict[str, str]) -> None:
    """What a Host's process does."""
    from kvdepot.testing.tiers import content, name_of
    from kvdepot.tiers import Blob, parse
    from kvdepot.tiers.mooncake import PREFIX

    query = "&".join(f"{name}={value}" for name, value in options.items())
    tier = parse(f"{url}?{query}").open()
    memory = bytearray(64 << 20)
    tier.attach([memoryview(memory)])
    for line in sys.stdin:
        command, *numbers = line.split()
        answer = command
        if command in ("write", "read"):
            number, size = map(int, numbers)
            target = memoryview(memory)[:size]
            if command == "write":
                target[:] = content(number, size)
                answer = str(tier.write([Blob(name_of(number), [target])])[0])
            else:
                target[:] = bytes(size)
                found = tier.read([Blob(name_of(number), [target])])[0]
                answer = "missing" if found < 0 else "right" if target == content(number, size) else "wrong"
        elif command == "begin":
            number, size = map(int, numbers)
            answer = str(tier._pool._store.batch_put_session_start([PREFIX + name_of(number)], [size])[0])
        print(answer, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], dict(option.split("=", 1) for option in sys.argv[2:]))
