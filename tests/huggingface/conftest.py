from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

import kvdepot
from tests.conftest import Depot

if importlib.util.find_spec("transformers") is None and not os.environ.get("CI"):
    collect_ignore_glob = ["test_*.py"]  # vLLM brings it


@pytest.fixture(scope="session", autouse=True)
def _multiply_fast() -> None:
    from tests import bfloat16

    bfloat16.multiply_in_32_bits()


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
