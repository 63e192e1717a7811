"""Names in /dev/shm for tests of what lies there."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.conftest import SHM


@pytest.fixture
def name() -> Iterator[str]:
    """An unused name of an arena, whose file goes with the test."""
    name = f"kvdepot-test-{uuid.uuid4().hex[:12]}"
    yield name
    (SHM / name).unlink(missing_ok=True)
