"""What a request asks for its own chunks, as it is read from vLLM's own request objects."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.request import Request

from kvdepot.integrations.vllm.hints import Limits, read_hints


def request(
    params: object = None, actions: list[tuple[str, dict[str, Any]]] | None = None, version: str = "1",
    salt: str | None = None, beside: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """vLLM's request `r`, with this under `kvdepot` and these keys beside that, these actions and this cache salt."""
    told = {} if params is None else {"kvdepot": params, "do_remote_decode": False}
    given = {"kv_transfer_params": told | (beside or {})} if told or beside else None
    hints = None
    if actions is not None:
        listed = [KvHintAction(str(i), kind, version, payload) for i, (kind, payload) in enumerate(actions)]
        hints = KvHintsEnvelope("1", "m", listed)
    return Request(
        "r", list(range(600)), SamplingParams(max_tokens=4, extra_args=given), None, kv_hints=hints, cache_salt=salt
    )


def read(*arguments: Any, limits: tuple[int, int] = (1 << 31, 100), **options: Any) -> Any:
    return read_hints(request(*arguments, **options), Limits(*limits))


def accepted(*arguments: Any, **options: Any) -> Any:
    hints, reason = read(*arguments, **options)
    assert reason == ""
    return hints


def test_leases_are_named_after_the_session_or_the_request() -> None:
    assert accepted() == ((), (), None, None)
    assert accepted({}) == ((), (), None, None)
    assert accepted({"store": False}) == ((), (), 0, None)
    assert accepted({"retain_s": 600}).leases == (("retain", "r", 600, 50),)
    assert accepted({"retain_s": 9, "expire_s": 60, "priority": 70, "session": "agent-7"}).leases == (
        ("retain", "agent-7", 9, 70),
        ("expire", "agent-7/expire", 60, 70),
    )
    assert accepted({"load": False}) == ((), (), None, 0)
    assert accepted({"max_load_tokens": 700, "store": False}) == ((), (), 0, 700)
    assert accepted({"load": False, "max_load_tokens": 700}).most_loaded == 0
    assert accepted({"found": 7, "loaded": "x", "compared": None, "saved_s": [], "store": False}).most_stored == 0
    assert accepted({"release": True}).releases == ("r", "r/expire")
    assert accepted({"release": True, "session": "a", "store": False}) == ((), ("a", "a/expire"), 0, None)


def test_vllms_actions_equal_our_hints_and_unknown_actions_are_ignored() -> None:
    assert accepted(None, [("retain", {"retain_s": 5, "session": "a", "priority": 0})]).leases == (
        ("retain", "a", 5, 0),
    )
    assert accepted(None, [("pin", {}), ("promote", {"bytes": 1})]).leases == (("retain", "r", 1 << 31, 50),)
    hints = accepted({"store": False}, [("prefetch", {"retain_s": 5}), ("release", {"session": "old"})])
    assert hints == ((("prefetch", "r", 5, 50),), ("old", "old/expire"), 0, None)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (7, "expected `object`, got `int`"), ({"retain_s": 0}, "retain_s"),
        ({"retain_s": "600"}, "retain_s: expected `int | null`, got `str`"), ({"retain_s": 1 << 40}, "retain_s"),
        ({"expire_s": -1}, "expire_s"), ({"priority": 101, "retain_s": 1}, "priority"), ({"session": ""}, "session"),
        ({"session": "s" * 201}, "session"), ({"retain_s": 1, "session": "a/expire"}, "ends with /expire"),
        ({"release": True, "session": "a@0123456789abcdef"}, "requests with a cache salt"),
        ({"max_load_tokens": -1}, "max_load_tokens: expected `int` >= 0"),
        ({"max_load_tokens": "many"}, "max_load_tokens"), ({"retains": 600}, "object contains unknown field `retains`"),
        ({"release": True, "retain_s": 600}, "either `release`"),
    ],
)  # fmt: skip
def test_wrong_values_and_unknown_keys_are_refused_with_the_reason(params: object, said: str) -> None:
    hints, reason = read(params)
    assert hints == ((), (), None, None)
    assert said in reason and "kv_transfer_params.kvdepot" in reason


@pytest.mark.parametrize(
    ("action", "version", "said"),
    [
        (("retain", {}), "1", "retain_s"), (("pin", {"retain_s": 1}), "1", "retain_s"),
        (("pin", {}), "2", "version '2' is not '1'"), (("release", {"session": 7}), "1", "session"),
    ],
)  # fmt: skip
def test_a_wrong_action_is_refused_with_the_reason(action: Any, version: str, said: str) -> None:
    hints, reason = read(None, [action], version=version)
    assert hints == ((), (), None, None)
    assert said in reason and "kv_hints" in reason


def test_a_session_belongs_to_the_cache_salt_of_its_requests() -> None:
    names = []
    for salt in (None, "alice", "bob", "alice"):
        (lease,) = accepted({"retain_s": 9, "session": "agent"}, salt=salt).leases
        assert accepted({"release": True, "session": "agent"}, salt=salt).releases == (
            lease.name,
            f"{lease.name}/expire",
        )
        assert salt is None or salt not in lease.name
        names.append(lease.name)
    assert names[0] == "agent" and names[1] == names[3] and len(set(names)) == 3
    assert read({"release": True, "session": names[1]})[1], "whoever sees the name of a lease can end it"


def test_time_and_priority_are_cut_to_the_limits_and_without_time_only_store_is_left() -> None:
    long = {"retain_s": 1 << 31, "expire_s": 61, "priority": 100}
    within = (("retain", "r", 60, 50), ("expire", "r/expire", 60, 50))
    assert accepted(long, limits=(60, 50)).leases == within
    assert accepted(None, [("pin", {"priority": 7})], limits=(60, 50)).leases == (("retain", "r", 60, 7),)
    for params in (long, {"release": True}, {"retain_s": 1, "store": False}):
        hints, reason = read(params, limits=(0, 50))
        assert "max_hint_s is 0" in reason and hints == ((), (), 0 if "store" in params else None, None)
    assert accepted({"store": False}, limits=(0, 50)) == ((), (), 0, None)


def test_two_leases_of_one_session_are_refused() -> None:
    for actions in (
        [("pin", {}), ("retain", {"retain_s": 1})],
        [("pin", {"session": "a"}), ("release", {"session": "a"})],
    ):
        assert "one session" in read(None, actions)[1]
    assert "one session" in read({"retain_s": 1}, [("pin", {})])[1]


@pytest.mark.parametrize(
    ("ours", "load", "offload", "bounds"),
    [
        (None, 700, 300, (300, 700)), ({}, 700, None, (None, 700)), ({"max_load_tokens": 500}, 700, 1, (1, 500)),
        ({"max_load_tokens": 900}, 700, 1 << 62, (1 << 62, 700)), ({"load": False}, 700, 0, (0, 0)),
        ({"store": False}, None, 300, (0, None)),
    ],
)  # fmt: skip
def test_the_smaller_of_our_bounds_and_those_for_all_connectors_counts(
    ours: object, load: object, offload: object, bounds: tuple[int | None, int | None]
) -> None:
    hints = accepted(ours, beside={"max_load_tokens": load, "max_offload_tokens": offload, "remote_port": "x"})
    assert (hints.most_stored, hints.most_loaded) == bounds
    assert [hints.stored(tokens) for tokens in (0, 200)] == [0, 200 if bounds[0] is None else min(200, bounds[0])]


@pytest.mark.parametrize("wrong", [True, -1, 5.0, "5", [], {}, b"5", float("nan")])
@pytest.mark.parametrize("name", ["max_load_tokens", "max_offload_tokens"])
def test_bounds_of_a_wrong_type_are_refused_with_all_hints(name: str, wrong: object) -> None:
    for ours in (None, {"retain_s": 9}, {"store": False}):
        hints, reason = read(ours, beside={name: wrong})
        assert reason.startswith(f"kv_transfer_params: {name}: expected `int")
        assert hints == ((), (), 0 if ours == {"store": False} else None, None)


@pytest.mark.parametrize("store", [False, "false", 0, None])
def test_a_request_that_may_not_want_to_be_stored_is_not_even_if_the_rest_is_refused(store: object) -> None:
    hints, reason = read({"store": store, "unknown": 1})
    assert reason and hints == ((), (), 0, None)
