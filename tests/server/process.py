"""Processes of `kvdepot serve` that are killed."""

from __future__ import annotations

from tests.conftest import HANG_S, Depot


def kill(depot: Depot) -> None:
    depot.process.kill()
    depot.process.wait(HANG_S)
