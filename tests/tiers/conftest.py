"""Tiers against the real thing take their time: they run with the faults. Their suite says what it compared."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.register_assert_rewrite("kvdepot.testing.tiers")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.faults)
