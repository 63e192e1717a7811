"""Processes of `kvdepot serve` that exit or are killed."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.conftest import HANG_S, Depot


def run_serve(*flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A `kvdepot serve` that is expected to exit by itself."""
    return subprocess.run(
        [sys.executable, "-m", "kvdepot.cli", "serve", *flags],
        capture_output=True, text=True, timeout=120, env={**os.environ, **environ}, check=False,
    )  # fmt: skip


def kill(depot: Depot) -> None:
    depot.process.kill()
    depot.process.wait(HANG_S)
