"""The `kvdepot` command as a process that ends by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def kvdepot(*argv: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    return subprocess.run(
        [sys.executable, "-m", "kvdepot.cli", *map(str, argv)],
        capture_output=True, text=True, timeout=60, env={**os.environ, **environ}, check=False,
    )  # fmt: skip


def keygen(folder: Path, *clients: str, tenant: str = "") -> Path:
    made = kvdepot("keygen", folder, *clients, *(["--tenant", tenant] if tenant else []))
    assert made.returncode == 0, made.stderr
    return folder
