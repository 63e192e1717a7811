"""The disk tier passes the suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvdepot.testing.tiers import TierConformance
from kvdepot.tiers import Tier, parse
from tests.conftest import eventually


class TestDisk(TierConformance):
    def open_tier(self, place: Path) -> Tier:
        return self._open(place, 1 << 30)

    def open_bounded(self, place: Path, capacity_bytes: int) -> Tier | None:
        return self._open(place, capacity_bytes)

    def _open(self, place: Any, capacity_bytes: int) -> Tier:
        tier = parse(f"disk://{place}?capacity_gib={capacity_bytes / 2**30}").open()
        eventually(lambda: tier.usage().objects is not None)  # until it is counted, it takes nothing
        return tier
