"""Requests that hold blocks, and requests before them in vLLM's queue: no engine stands still (by_hand.py).

H waits for an answer, L loads nearly all blocks, W is small: the shape of vLLM's issue 57841, a fifth of its size. vLLM
0.30 asks in the order of its queue, and stops at the first request that does not fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kvdepot.client.scheduler import Pending
from tests.conftest import Depot, eventually
from tests.vllm.by_hand import CHUNK, Engine, check, prompt
from tests.vllm.conftest import StartByHand
from tests.vllm.engines import nothing_is_held
from tests.vllm.late_connector import LateConnector

H, L, W = prompt(1, 10 * CHUNK + 9), prompt(2, 25 * CHUNK - 9), prompt(3, 20)
SHAPES: dict[str, dict[str, Any]] = {
    "full": {"blocks": 56}, "windows": {"blocks": 17, "window": 4 * CHUNK},
    "states": {"blocks": 32, "states": (CHUNK, CHUNK)},
}  # fmt: skip
shapes = pytest.mark.parametrize("shape", SHAPES)
in_turn = pytest.mark.parametrize("steps", [1, 2])
policies = pytest.mark.parametrize("policy", ["fcfs", "priority"])
BESIDE = {
    "kv_connector": "LateConnector", "kv_connector_module_path": "tests.vllm.late_connector", "kv_role": "kv_both",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time breaks a stall: the rules alone must prevent it. All loads are asynchronous."""
    monkeypatch.setattr("kvdepot.integrations.vllm.scheduler.PATIENCE_S", 1e9)
    monkeypatch.setattr("kvdepot.integrations.vllm.in_step._STEP_BYTES", 0)


@pytest.fixture
def start(start_by_hand: StartByHand) -> Callable[..., Engine]:
    """Start an engine with few blocks, for whose prompts another has stored."""

    def begin(*stored: list[int], **options: Any) -> Engine:
        alike = {name: value for name, value in options.items() if name in ("window", "states")}
        before = start_by_hand(**alike)
        for number, tokens in enumerate(stored):
            before.run(f"stored {number}", tokens)
        before.run("behind them", prompt(998, 20))
        eventually(lambda: not before.scheduler.connector._scheduler.holds.is_any_held)
        engine = start_by_hand(**options)
        engine.run("first", prompt(999, 20))
        LateConnector.late.clear()
        return engine

    return begin


def few_blocks(shape: str, steps: int = 1) -> dict[str, Any]:
    options = SHAPES[shape]  # for windows, vLLM wants more where two steps are under way
    return options | {"blocks": options["blocks"] + 5 * (steps - 1) * (shape == "windows")}


def half_of(engine: Engine) -> Any:
    connector = engine.scheduler.connector
    return getattr(connector, "_connectors", [connector])[0]._scheduler


def late(engine: Engine) -> set[str]:
    """The requests to whose lookups there is no answer, until they leave this set."""
    depot, names = half_of(engine)._depot, set[str]()
    wait = depot.wait_lookup
    depot.wait_lookup = lambda name, limit_s: Pending() if name in names else wait(name, limit_s)
    return names


def step_until(engine: Engine, condition: Callable[[], Any]) -> None:
    eventually(lambda: engine.step() or condition())


def is_loading(request: Any) -> bool:
    return str(request.status.name) == "WAITING_FOR_REMOTE_KVS"


@in_turn
@policies
@shapes
def test_a_late_answer_does_not_stand_before_a_load(
    shape: str, policy: str, steps: int, depot: Depot, start: Callable[..., Engine]
) -> None:
    engine = start(H, L, policy=policy, steps=steps, **few_blocks(shape, steps))
    names = late(engine)
    names.add("H")
    if policy == "fcfs":
        made = [engine.add("H", H), engine.add("L", L)]
        for _ in range(10):
            engine.step()
    else:
        made = [engine.add("L", L, priority=1)]
        step_until(engine, lambda: is_loading(made[0]))
        made.append(engine.add("H", H))
        engine.step()
    made.append(engine.add("W", W, priority=2))
    names.clear()
    engine.finish()
    for each in made:
        check(each)
    assert engine.worker.begun["L"] == [24 * CHUNK]
    assert engine.worker.begun["H"] == [10 * CHUNK]
    eventually(lambda: nothing_is_held(depot.status()))


@in_turn
@shapes
def test_another_connectors_late_answer_does_not_stand_before_a_load(
    shape: str, steps: int, start: Callable[..., Engine]
) -> None:
    engine = start(H, L, beside=[BESIDE], steps=steps, **few_blocks(shape, steps))
    LateConnector.late.add("H")
    made = [engine.add("H", H), engine.add("L", L)]
    step_until(engine, lambda: is_loading(made[1]))
    made.append(engine.add("W", W))
    LateConnector.late.clear()
    engine.finish()
    for each in made:
        check(each)
    assert engine.worker.begun["L"] == [24 * CHUNK]


@shapes
def test_no_load_takes_blocks_that_a_request_held_back_before_it_needs(
    shape: str, start: Callable[..., Engine]
) -> None:
    engine = start(H, L, **few_blocks(shape))
    names = late(engine)
    names.add("H")
    made = [engine.add("H", H), engine.add("L", L)]
    engine.wait_answer("L")
    for _ in range(10):
        engine.step()
        assert not is_loading(made[1]) and not made[1].num_computed_tokens
    names.clear()
    step_until(engine, lambda: is_loading(made[0]))
    assert not is_loading(made[1])
    engine.finish()
    assert (engine.worker.begun["H"], engine.worker.begun["L"]) == ([10 * CHUNK], [24 * CHUNK])


def counts(engine: Engine) -> Counter[str]:
    """What the scheduler's half counts from now on."""
    connector, found = engine.scheduler.connector, Counter[str]()
    take = connector.get_kv_connector_stats

    def taken() -> Any:
        stats = take()
        found.update({name: value for name, value in (stats.data if stats else {}).items() if isinstance(value, int)})
        return stats

    connector.get_kv_connector_stats = taken
    return found


@in_turn
def test_a_lookup_without_an_answer_is_given_up_once_the_engine_stands_still(
    steps: int, start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(H, steps=steps)
    names, found = late(engine), counts(engine)
    made = [engine.add("busy", W, says=20)]
    step_until(engine, lambda: "busy" in engine.worker.begun)
    monkeypatch.setattr("kvdepot.integrations.vllm.scheduler.PATIENCE_S", 0.0)
    names.update({"one", "two"})
    made += [engine.add("one", H), engine.add("two", prompt(4, 5 * CHUNK))]
    while "busy" in engine.scheduler.requests:
        engine.step()
        assert not found["stalls_broken"], "another request runs"
    engine.finish()
    for each in made:
        check(each)
    assert (engine.worker.begun["one"], engine.worker.begun["two"]) == ([0], [0])
    assert found["stalls_broken"] == 2
    assert len({each.created for each in caplog.records if "computed nothing while" in each.getMessage()}) == 1
    names.clear()
    assert engine.scheduler.reset_prefix_cache()
    assert engine.run("later", H) == 10 * CHUNK


@policies
def test_a_lookup_has_its_requests_place_in_vllms_queue(policy: str, start: Callable[..., Engine]) -> None:
    engine = start(policy=policy)
    asked = [engine.add(f"r{number}", W, priority=priority) for number, priority in enumerate((0, 3, -2, 2**40))]
    asked[1].num_preemptions = 1
    places = [half_of(engine)._passes.place(each) for each in asked]
    assert places == ([0, -1, 0, 0] if policy == "fcfs" else [0, 5, -4, 2**31 - 1])
