"""What vLLM's response says that a request got from the depot, step by step (by_hand.py).

Real engines say it in test_telemetry.py, and below MultiConnector in test_beside.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.conftest import Depot, StartDepot
from tests.vllm.by_hand import CHUNK, Engine, prompt
from tests.vllm.conftest import StartByHand

TOKENS = 3 * CHUNK + 9
HAD = 3 * CHUNK
in_turn = pytest.mark.parametrize("steps", [1, 2])
"""Whether steps are built ahead."""
ways = pytest.mark.parametrize("bytes_in_step", [0, 1 << 20], ids=["loaded before", "loaded in the step"])


def told(engine: Engine, name: str, tokens: list[int], **options: Any) -> Any:
    """What the response to a request says."""
    engine.add(name, tokens, **options)
    engine.finish()
    return engine.told.pop(name)


def result(found: int = 0, loaded: int = 0, compared: int = 0) -> dict[str, object]:
    """The speed of prefill is unknown here, whose steps are small."""
    return {"found": found, "loaded": loaded, "compared": compared, "saved_s": 0.0}


@in_turn
@ways
def test_a_response_says_what_the_depot_had_and_what_was_loaded(
    bytes_in_step: int, steps: int, start_by_hand: StartByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdepot.integrations.vllm.in_step._STEP_BYTES", bytes_in_step)
    tokens = prompt(1, TOKENS)
    engine = start_by_hand(steps=steps)
    assert told(engine, "computed", tokens) == {"kvdepot": result()}
    assert told(engine, "own cache", tokens) == {"kvdepot": result()}
    engine = start_by_hand(steps=steps)
    assert told(engine, "loaded", tokens) == {"kvdepot": result(HAD, HAD)}
    assert told(engine, "partly", [*tokens, *prompt(2, CHUNK)]) == {"kvdepot": result()}


@ways
def test_a_response_says_what_was_computed_to_be_compared(
    bytes_in_step: int, start_by_hand: StartByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdepot.integrations.vllm.in_step._STEP_BYTES", bytes_in_step)
    earned = {"kvdepot.trust": "earned", "runner": "0"}
    tokens = prompt(3, TOKENS)
    start_by_hand(writer="b B", **earned).run("stored", tokens)
    engine = start_by_hand(writer="a A", **earned)
    engine.run("first", prompt(999, 20))
    assert told(engine, "proves", tokens) == {"kvdepot": result(HAD, HAD - CHUNK, CHUNK)}


def test_hints_come_back_and_a_result_that_is_sent_on_is_no_hint(start_by_hand: StartByHand) -> None:
    tokens, hints = prompt(4, TOKENS), {"kvdepot": {"load": False, "priority": 7}, "remote_host": "a"}
    start_by_hand().run("stored", tokens)
    engine = start_by_hand()
    said = told(engine, "first engine", tokens, hints=hints)
    assert said == {"kvdepot": {"load": False, "priority": 7, **result()}}
    engine = start_by_hand()
    assert told(engine, "second engine", tokens, hints=said) == said
    assert told(start_by_hand(), "refused", tokens, hints={"kvdepot": 7}) == {"kvdepot": result(HAD, HAD)}


@pytest.mark.parametrize("window", [0, 2 * CHUNK])
def test_bounds_for_all_connectors_limit_what_is_stored_and_loaded(window: int, start_by_hand: StartByHand) -> None:
    tokens = prompt(8, 6 * CHUNK + 9)
    engine = start_by_hand(window=window, **{"kvdepot.save_decode": "on"})
    assert told(engine, "stored", tokens, says=2 * CHUNK, hints={"max_offload_tokens": 5 * CHUNK + 1}) is not None
    engine = start_by_hand(window=window)
    for most, loaded in ((0, 0), (5 * CHUNK - 1, 0 if window else 4 * CHUNK), (5 * CHUNK, 5 * CHUNK)):
        hints = {"max_load_tokens": most, "max_offload_tokens": 0}
        said = told(engine, f"at most {most}", tokens, hints=hints)["kvdepot"]
        assert (said["loaded"], said["max_load_tokens"], said["store"]) == (loaded, most, False), "for another engine"
        assert engine.scheduler.reset_prefix_cache()
    assert told(engine, "all", tokens) == {"kvdepot": result(5 * CHUNK, 5 * CHUNK)}


def test_nothing_is_said_of_requests_that_never_met_the_depot(start_by_hand: StartByHand) -> None:
    engine = start_by_hand()
    assert told(engine, "no text: \ud800", prompt(5, TOKENS)) is None
    never_scheduled = engine.add("aborted", prompt(6, TOKENS))
    assert engine.scheduler.connector.request_finished(never_scheduled, []) == (False, None)
    engine.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    engine.finish()


def test_the_first_of_two_depots_below_multi_connector_is_told(
    depot: Depot, start_depot: StartDepot, start_by_hand: StartByHand
) -> None:
    other = start_depot(arena_mib=64, chunk_size=CHUNK)
    second = {
        "kv_connector": "KVDepotConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"kvdepot.url": other.url, "kvdepot.required": True},
    }  # fmt: skip
    tokens = prompt(7, TOKENS)
    start_by_hand().run("stored in the first", tokens)
    engine = start_by_hand(beside=[second])
    assert told(engine, "both", tokens) == {"kvdepot": result(HAD, HAD)}
