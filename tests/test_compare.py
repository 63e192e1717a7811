"""What `make compare` is made of: the requests, and the figures of rounds whose answers differ."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture
def workloads(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("comparison.workloads")


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("comparison.results")


def test_a_workload_follows_from_its_seed(workloads: ModuleType) -> None:
    for kind in (workloads.Chats, workloads.Documents):
        assert kind(seed=3).requests() == kind(seed=3).requests() != kind(seed=4).requests()


def one_round(factor: float, answer: int = 5) -> dict[str, Any]:
    """As run.py measures it; factor: of all times."""
    requests = [
        {
            "name": f"{turn}", "chat": "a", "turn": turn, "prompt": 100, "first_s": factor * (turn + 1), "whole_s": 9.0,
            "answer": [answer], "cached": 0,
        }
        for turn in range(3)
    ]  # fmt: skip
    return {
        "start_s": factor,
        "resident_bytes": 100 << 20,
        "engine_start_s": 8.0,
        "prompts": {
            "1024": {
                "cold_s": 1.0, "settled_s": 0.5, "own_s": 0.01, "cache_s": [0.02 * factor, 0.04 * factor],
                "cached": [1024, 768], "lookup_s": [0.001, 0.003],
            }
        },
        "chats": {"seconds": 3 * factor, "computed": 250, "requests": requests},
    }  # fmt: skip


def without_cache() -> dict[str, Any]:
    found = one_round(4)
    for figure in ("cache_s", "cached", "lookup_s"):
        del found["prompts"]["1024"][figure]
    return {**found, "start_s": None, "resident_bytes": None}


def test_one_round_with_other_answers_is_told(results: ModuleType) -> None:
    same = results.summary({"none": [without_cache()], "kvdepot": [one_round(1)]}, "none")
    other = results.summary({"none": [without_cache()], "kvdepot": [one_round(1), one_round(1, answer=6)]}, "none")
    assert same["kvdepot"]["chats"]["same_answers"] == 3
    assert other["kvdepot"]["chats"]["same_answers"] == 0
