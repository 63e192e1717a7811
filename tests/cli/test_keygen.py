"""Keys that there is no room for."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import HANG_S

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from kvdepot.protocol.curve import read_client_key


@pytest.mark.faults
def test_keygen_on_a_full_disk_leaves_no_partial_key(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    for most_bytes in range(20, 400, 60):  # the server's key, a client's and the list of clients are each cut off
        done = subprocess.run(
            [sys.executable, "-B", "-m", "kvdepot.cli", "keygen", str(folder), "alice", "bob"],
            capture_output=True, text=True, timeout=HANG_S, check=False,
            preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (most_bytes, most_bytes)),
        )  # fmt: skip
        if done.returncode == 0:
            break
        assert re.fullmatch(r"kvdepot: .*: File too large\n", done.stderr)
        known = tomllib.loads((folder / "clients.toml").read_text()) if (folder / "clients.toml").exists() else {}
        assert {path.stem for path in folder.glob("*.key")} - {"server"} == set(known)
        assert all(path.stat().st_size for path in folder.iterdir())
        for client in known:  # those that could be made stay; another run takes the others
            (folder / f"{client}.key").unlink()
        (folder / "clients.toml").unlink(missing_ok=True)
    else:
        pytest.fail(done.stderr)
    assert most_bytes > 80, "it was cut off more than once"
    assert read_client_key(folder / "bob.key").server == read_client_key(folder / "alice.key").server
