"""The `kvdepot` command as a process, with pipes or on a terminal."""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.conftest import HANG_S

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")


def run(*words: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself, its output in pipes."""
    return subprocess.run(
        [sys.executable, "-m", "kvdepot.cli", *map(str, words)],
        capture_output=True, text=True, timeout=HANG_S, env={**_without_a_terminal(), **environ}, check=False,
    )  # fmt: skip


def _without_a_terminal() -> dict[str, str]:
    """The environment without COLUMNS and LINES, which readline sets when pytest imports it."""
    return {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}


def keygen(folder: Path, *clients: str, tenant: str = "") -> Path:
    made = run("keygen", folder, *clients, *(["--tenant", tenant] if tenant else []))
    assert made.returncode == 0, made.stderr
    return folder


def doctor(*words: str, **environ: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    done = run("doctor", "--json", *words, **environ)
    assert "Traceback" not in done.stderr
    found: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(done.stdout):
        assert finding["state"] in ("ok", "warn", "fail")
        assert finding["state"] == "ok" or finding["advice"], "what to do is said"
        found.setdefault(finding["what"], []).append(finding)
    return done.returncode, found


def heed_signals() -> None:
    """Undo what this process may have inherited: a shell's background jobs ignore SIGINT, and nohup's ignore SIGHUP."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Terminal:
    """A command on a terminal of its own: its output, and a keyboard."""

    def __init__(self, *words: str, columns: int = 80, lines: int = 24, **environ: str) -> None:
        self.outer, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = termios.tcgetattr(inner)
        self.raw = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end within a character
        known = {name: value for name, value in _without_a_terminal().items() if name != "NO_COLOR"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvdepot.cli", *words], stdin=inner, stdout=inner, stderr=inner,
            env={**known, "TERM": "xterm-256color", **environ}, start_new_session=True,
            preexec_fn=heed_signals,
        )  # fmt: skip
        self.inner = inner
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.outer, 65536)
            except OSError:  # its other end is closed
                return
            if not data:
                return
            self.raw += self._decoder.decode(data)

    @property
    def text(self) -> str:
        return CONTROL.sub("", self.raw)

    def press(self, keys: str) -> None:
        os.write(self.outer, keys.encode())

    def end(self) -> int:
        """Wait until it ends by itself; its exit code."""
        code = self.process.wait(HANG_S)
        os.close(self.inner)
        self._reader.join(HANG_S)
        os.close(self.outer)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(HANG_S)


def terminal(*words: str, **options: Any) -> closing[Terminal]:
    return closing(Terminal(*words, **options))
