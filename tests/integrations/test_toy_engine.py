"""The example of an integration: it passes the conformance suite, and its script runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import kvdepot
from kvdepot.errors import Unavailable
from kvdepot.testing.integrations import Answered, EngineUnderTest, IntegrationConformance
from tests.programs import run

DEMO = Path(__file__).parents[2] / "demo"
sys.path.insert(0, str(DEMO))
import toy_engine  # noqa: E402

pytestmark = pytest.mark.faults


class _Engine:
    def __init__(self, url: str, weights: int) -> None:
        try:
            self._depot: kvdepot.Depot | None = kvdepot.connect(url)
        except Unavailable:
            self._depot = None  # as an engine that starts without its server
        self._engine = toy_engine.Engine(toy_engine.Model(weights), self._depot)

    def answer(self, prompts: Sequence[Sequence[int]]) -> list[Answered]:
        requests = self._engine.run([list(prompt) for prompt in prompts])
        return [
            Answered(each.answer, len(prompt) - each.loaded) for each, prompt in zip(requests, prompts, strict=True)
        ]

    def close(self) -> None:
        if self._depot is not None:
            self._depot.close()


class TestToyEngine(IntegrationConformance):
    def start_engine(self, url: str, weights: int) -> EngineUnderTest:
        return _Engine(url, weights)


def test_the_script_computes_less_the_second_time() -> None:
    lines = run(sys.executable, DEMO / "toy_engine.py").splitlines()
    first, second = (int(line.split()[1]) for line in lines if line.startswith("computed "))
    assert second < first // 3
