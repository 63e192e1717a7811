"""Connections of the tests of clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvdepot.adapters import MessageQueueClient
from tests.client.answers import Answering
from tests.conftest import Depot


@pytest.fixture
def client(depot: Depot) -> Iterator[MessageQueueClient]:
    connection = MessageQueueClient(depot.url, depot.context)
    yield connection
    connection.close()


@pytest.fixture
def peer() -> Answering:
    return Answering()
