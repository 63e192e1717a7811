from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvdepot
from tests.conftest import Depot

if importlib.util.find_spec("transformers") is None and not os.environ.get("CI"):
    collect_ignore_glob = ["test_*.py"]  # vLLM brings it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="module")
def depot() -> Iterator[Depot]:
    """One server for a module's tests, whose clients choose their chunks."""
    server = Depot(chunk_size="auto", arena_mib=256).wait_ready()
    yield server
    server.close()


@pytest.fixture
def library(depot: Depot) -> Iterator[kvdepot.Depot]:
    """A connection to the module's server."""
    with kvdepot.connect(depot.url) as connected:
        yield connected
