from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Depot, StartDepot
from tests.vllm import by_hand, drafters, engines
from tests.vllm.engines import Engine

StartByHand = Callable[..., by_hand.Engine]
StartEngine = Callable[..., Engine]
StartSteps = Callable[..., Any]
if importlib.util.find_spec("vllm") is None and not os.environ.get("CI"):
    collect_ignore_glob = ["test_*.py"]  # `make test` installs it, and CI must not skip its tests


@pytest.fixture(scope="module")
def vllm_depot() -> Iterator[Depot]:
    server = Depot(arena_mib=256).wait_ready()
    yield server
    server.close()


@pytest.fixture(scope="session", autouse=True)
def _inspect_models_here() -> None:
    """vLLM would import itself in another process to look at the class of each model."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {
        "gqa": engines.write_model(base / "gqa", engines.LLAMA), "mla": engines.write_model(base / "mla", engines.MLA),
        "experts": engines.write_model(base / "experts", engines.EXPERTS),
        "windows": engines.write_model(base / "windows", engines.WINDOWS),
        "states": engines.write_model(base / "states", engines.STATES),
    }  # fmt: skip


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


@pytest.fixture
def start_steps(models: dict[str, Path]) -> Iterator[StartSteps]:
    """Make a scheduler's connector to a server, whose steps the test makes; it is shut down with the test."""
    from tests.vllm.test_requests import Steps

    made: list[Steps] = []

    def start(url: str, **settings: object) -> Steps:
        made.append(Steps(url, models["gqa"], **settings))
        return made[-1]

    yield start
    for steps in 2 * made:  # which is safe twice
        steps.connector.shutdown()


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of few tokens, for which drafters are made."""
    return engines.write_model(tmp_path_factory.mktemp("target") / "target", drafters.TARGET)


@pytest.fixture(scope="module")
def process_groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with by_hand.process_groups(tmp_path_factory.mktemp("groups") / "file"):
        yield


@pytest.fixture
def depot(start_depot: StartDepot) -> Depot:
    return start_depot(arena_mib=64, chunk_size=by_hand.CHUNK)


@pytest.fixture
def start_by_hand(
    depot: Depot, target: Path, process_groups: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StartByHand]:
    """Start an engine of by_hand.py; the one before it ends."""
    started: list[by_hand.Engine] = []

    def begin(url: str = depot.url, **options: Any) -> by_hand.Engine:
        if started:
            started.pop().close()
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", options.pop("runner", "1"))
        monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)  # of which nothing here runs
        started.append(by_hand.Engine(url, target, **options))
        return started[-1]

    yield begin
    if started:
        started.pop().close()
