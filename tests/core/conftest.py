"""Fixtures of the tests of depots with tiers."""

from __future__ import annotations

import pytest

from tests.tiers.faulty import MemoryTier


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()
