"""`kvdepot serve`: how soon it answers, and how much memory it holds beside its arena. All settings as they come."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import zmq
from common import Scale, Serve, say
from report import Figure, at_most, below

__all__ = ["run"]

_IMPORTS = "import zmq, msgspec, numpy"


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """Time to the first answer and resident memory, beside a process that only imports."""
    say("serve: from launch to the first answer")
    context: zmq.Context[Any] = zmq.Context()
    starts, sizes, import_times, import_sizes = [], [], [], []
    for number in range(-1, scale.start_runs):  # the first reads files from the disk
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", _IMPORTS], check=True)
        imported_s = time.perf_counter() - begun
        server = Serve()
        try:
            answered_s = server.wait_first_answer(context)
            resident = server.resident_bytes()
        finally:
            server.close()
        if number >= 0:
            starts.append(answered_s * 1000)
            import_times.append(imported_s * 1000)
            sizes.append(resident / 1e6)
            import_sizes.append(_import_bytes() / 1e6)
    context.term()
    return [
        at_most("kvdepot serve, launch to first answer", "ms", starts, import_times, 4),
        below("kvdepot serve, resident without the arena", "MB", sizes, import_sizes, 120),
    ]


def _import_bytes() -> int:
    """Resident memory of a process that has done the imports."""
    child = subprocess.Popen(
        [sys.executable, "-c", f"{_IMPORTS}; print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdout.readline()
        for line in Path(f"/proc/{child.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Rss:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("no Rss in smaps_rollup")
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
