"""A server that has been used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.client.engine import CHUNK, Engine
from tests.conftest import Depot


@pytest.fixture
def used(depot: Depot) -> Iterator[Engine]:
    """An engine that has stored two chunks, found one and got it back."""
    engine = Engine(depot)
    for number in (1, 2):
        engine.store([number] * CHUNK, [0, 1, 2, 3])
    assert engine.lookup([1] * CHUNK) == CHUNK
    assert engine.retrieve([1] * CHUNK, [4, 5, 6, 7]) == set()
    yield engine
    engine.close()
