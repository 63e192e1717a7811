"""Another host of a Mooncake pool: a process with a tier that gives memory to the pool.

    python -m tests.tiers.mooncake_servers URL [OPTION=VALUE...]

It does what lines on its stdin say, and answers each with a line: `read NUMBER SIZE` reads an object of
kvdepot.testing.tiers, `begin NUMBER SIZE` writes one and does not end.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile

from tests.conftest import HANG_S, suspend

__all__ = ["Host"]


class Host:
    """The process, which takes commands once it has joined the pool."""

    def __init__(self, url: str, segment_mib: int = 512) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        options = ["local_host=127.0.0.1", f"segment_gib={segment_mib / 1024}"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.tiers.mooncake_servers", url, *options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        assert self.ask("hello") == "hello"

    def ask(self, line: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if not answer:
            self._log.seek(0)
            raise AssertionError(f"the host ended:\n{self._log.read()}")
        return answer

    def stop(self) -> None:
        """SIGSTOP: it hangs, and its connections stay open."""
        suspend(self._process.pid)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9. Safe twice."""
        self._process.kill()
        self._process.communicate(timeout=HANG_S)

    def close(self) -> None:
        self.kill()
        self._log.close()


def serve(url: str, options: list[str]) -> None:
    """What a Host's process does."""
    from kvdepot.testing.tiers import content, name_of
    from kvdepot.tiers import Blob, parse
    from kvdepot.tiers.mooncake import PREFIX

    tier = parse(f"{url}?{'&'.join(options)}").open()
    memory = memoryview(bytearray(64 << 20))
    tier.attach([memory])
    for line in sys.stdin:
        answer, *numbers = line.split()
        if numbers:
            number, size = map(int, numbers)
            if answer == "begin":
                answer = str(tier._pool._store.batch_put_session_start([PREFIX + name_of(number)], [size])[0])
            else:
                found = tier.read([Blob(name_of(number), [memory[:size]])])[0]
                answer = "missing" if found is None else "right" if memory[:size] == content(number, size) else "wrong"
        print(answer, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
