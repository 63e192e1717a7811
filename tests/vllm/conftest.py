from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Depot
from tests.vllm import engines
from tests.vllm.engines import Engine

StartEngine = Callable[..., Engine]
if importlib.util.find_spec("vllm") is None and not os.environ.get("CI"):
    collect_ignore_glob = ["test_*.py"]  # `make test` installs it, and CI must not skip its tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="module")
def vllm_depot() -> Iterator[Depot]:
    server = Depot(arena_mib=256).wait_ready()
    yield server
    server.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {
        "gqa": engines.write_model(base / "gqa", engines.LLAMA),
        "mla": engines.write_model(base / "mla", engines.MLA),
        "windows": engines.write_model(base / "windows", engines.WINDOWS),
        "mistral": engines.write_model(base / "mistral", engines.MISTRAL),
        "states": engines.write_model(base / "states", engines.STATES),
    }


@pytest.fixture
def start_engine() -> Iterator[StartEngine]:
    """Start engines that end with the test."""
    started: list[Engine] = []

    def start(*arguments: Any, **options: Any) -> Engine:
        engine = Engine(*arguments, **options)
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.close()
