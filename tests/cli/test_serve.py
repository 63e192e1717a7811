"""`kvdepot serve` and `kvdepot config`: messages about settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvdepot import cli
from tests.cli.command import run
from tests.conftest import HANG_S, Depot, StartDepot, eventually
from tests.programs import missing

# -- serve


@pytest.mark.faults
@pytest.mark.parametrize(
    "tier",
    [
        "disk:///1/kv/1?capacty_gib=1", "disk:///kv?colour=kv", "disk:///{folder}/kv?capacity_gib=many",
        "redis://localhost/x", "disk://kv",
    ],
)  # fmt: skip
def test_serve_refuses_a_wrong_tier_url_and_names_it_once(tier: str, tmp_path: Path) -> None:
    """Also where the value of an unknown option, which may be a secret and is not told, occurs in the path."""
    done = run("serve", "--url", f"ipc://{tmp_path}/s", "--http", "off", "--tiers", tier.format(folder=tmp_path))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvdepot: tier ") and line.count(tier.format(folder=tmp_path).partition("?")[0]) == 1


@pytest.mark.faults
def test_serve_and_config_warn_of_stray_variables_and_odd_chunk_sizes(
    start_depot: StartDepot, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVDEPOT_ARENA_GB", "1")
    depot = start_depot(chunk_size=100)
    told = "environment variable KVDEPOT_ARENA_GB is not a setting; did you mean KVDEPOT_ARENA_GIB?"
    eventually(lambda: told in depot.logged())
    eventually(lambda: "chunk size 100 is not a multiple of 16" in depot.logged())
    assert cli.main(["config", "--chunk-size", "100", "--json"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["settings"]["chunk_size"]["value"] == 100
    assert [line.startswith("kvdepot: ") for line in said.err.splitlines()] == [True, True]


NO_TEMPORARY_FOLDER = """
mount -t tmpfs tmpfs /dev/shm && for folder in /tmp /var/tmp; do
    mount --bind $folder $folder && mount -o remount,bind,ro $folder || exit 99
done || exit 99
cd /tmp
for command in config status doctor "serve --arena-gib 0.01 --http off --idle-exit 0.1"; do
    "$@" $command 2>&1 || true
done
"""


@pytest.mark.faults
def test_without_a_folder_for_temporary_files_the_arenas_folder_is_used() -> None:
    ended = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", NO_TEMPORARY_FOLDER, "sh", sys.executable, "-m",
         "kvdepot.cli"],
        capture_output=True, text=True, timeout=HANG_S, env={"PATH": os.environ["PATH"], "COLUMNS": "200"},
    )  # fmt: skip
    if ended.returncode == 99 or "unshare:" in ended.stderr:
        missing(f"the right to mount a file system ({ended.stderr})")
    url = f"ipc:///dev/shm/kvdepot-{os.geteuid()}/depot.sock"
    assert "Traceback" not in ended.stdout
    assert f"serving at {url}: " in ended.stdout and ended.stdout.count(url) > 3


def test_a_server_whose_settings_are_usual_warns_of_nothing(depot: Depot) -> None:
    assert "WARNING" not in depot.logged()
