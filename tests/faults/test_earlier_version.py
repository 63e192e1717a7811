"""What an earlier version of kvdepot left on disk is served by this one.

`earlier_version/` was written by the server of commit 9af8e62 (tier format 1), which was killed with
SIGKILL after a `ToyEngine(url, width=4)` had stored three chunks of 64 tokens for each of the families 0 to 2. Whoever
changes a format adds files in the new one, and turns the test of these into one that they are refused with what to do.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartDepot
from tests.faults.conftest import StartDriver

pytestmark = pytest.mark.faults

LEFT = Path(__file__).parent / "earlier_version"
OPTIONS: dict[str, Any] = {"arena_mib": 1, "chunk_size": 64}


def test_objects_in_the_disk_tier_of_an_earlier_version_are_loaded(
    start_depot: StartDepot, start_driver: StartDriver, tmp_path: Path
) -> None:
    folder = tmp_path / "tier"
    with zipfile.ZipFile(LEFT / "disk.zip") as left:
        left.extractall(folder)
    depot = start_depot("--tiers", f"disk://{folder}?capacity_gib=1", **OPTIONS)
    driver = start_driver(depot.url, width=4)
    assert depot.status()["chunks"] == 0
    assert driver.tell("hits", families=[0, 1, 2], chunks=3) == 9
    assert driver.tell("hits", families=[3], chunks=3) == 0
    assert not driver.tell("stats")["wrong"]
