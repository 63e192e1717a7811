"""What a request asks for its own chunks, as it is read from vLLM's own request objects."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's imports, in this process


def request(params: object = None, actions: list[tuple[str, dict[str, Any]]] | None = None, version: str = "1") -> Any:
    """vLLM's request `r`, with this under `kvdepot` and these actions."""
    from vllm import SamplingParams
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
    from vllm.v1.request import Request

    given = {"kv_transfer_params": {"kvdepot": params, "do_remote_decode": False}} if params is not None else None
    hints = None
    if actions is not None:
        listed = [KvHintAction(str(i), kind, version, payload) for i, (kind, payload) in enumerate(actions)]
        hints = KvHintsEnvelope("1", "m", listed)
    return Request("r", list(range(600)), SamplingParams(max_tokens=4, extra_args=given), None, kv_hints=hints)


def read(*arguments: Any, **options: Any) -> Any:
    from kvdepot.integrations.vllm.hints import read_hints

    return read_hints(request(*arguments, **options))


def accepted(*arguments: Any) -> Any:
    hints, reason = read(*arguments)
    assert reason == ""
    return hints


def test_what_a_request_asks_for_is_named_after_its_session_or_itself() -> None:
    assert accepted() == ((), (), True)
    assert accepted({}) == ((), (), True)
    assert accepted({"store": False}) == ((), (), False)
    assert accepted({"retain_s": 600}).leases == (("retain", "r", 600, 50),)
    assert accepted({"retain_s": 9, "expire_s": 60, "priority": 70, "session": "agent-7"}).leases == (
        ("retain", "agent-7", 9, 70),
        ("expire", "agent-7/expire", 60, 70),
    )
    assert accepted({"release": True}).releases == ("r", "r/expire")
    assert accepted({"release": True, "session": "a", "store": False}) == ((), ("a", "a/expire"), False)


def test_actions_of_vllms_hints_say_the_same_and_those_of_others_are_left_alone() -> None:
    assert accepted(None, [("retain", {"retain_s": 5, "session": "a", "priority": 0})]).leases == (
        ("retain", "a", 5, 0),
    )
    assert accepted(None, [("pin", {}), ("promote", {"bytes": 1})]).leases == (("retain", "r", 0, 50),)
    hints = accepted({"store": False}, [("prefetch", {"retain_s": 5}), ("release", {"session": "old"})])
    assert hints == ((("prefetch", "r", 5, 50),), ("old", "old/expire"), False)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (7, "Expected `object`"),
        ({"retain_s": 0}, "retain_s"),
        ({"retain_s": "600"}, "retain_s"),
        ({"retain_s": 1 << 40}, "retain_s"),
        ({"expire_s": -1}, "expire_s"),
        ({"priority": 101, "retain_s": 1}, "priority"),
        ({"session": ""}, "session"),
        ({"session": "s" * 201}, "session"),
        ({"retain_s": 1, "session": "a/expire"}, "ends with /expire"),
        ({"retain": 600}, "retain"),
        ({"release": True, "retain_s": 600}, "either `release`"),
    ],
)
def test_wrong_values_and_unknown_keys_are_refused_with_the_reason(params: object, said: str) -> None:
    hints, reason = read(params)
    assert hints == ((), (), True)
    assert said in reason and "kv_transfer_params.kvdepot" in reason


@pytest.mark.parametrize(
    ("action", "version", "said"),
    [
        (("retain", {}), "1", "retain_s"),
        (("pin", {"retain_s": 1}), "1", "retain_s"),
        (("pin", {}), "2", "version '2' is not '1'"),
        (("release", {"session": 7}), "1", "session"),
    ],
)
def test_a_wrong_action_is_refused_with_the_reason(action: Any, version: str, said: str) -> None:
    hints, reason = read(None, [action], version=version)
    assert hints == ((), (), True)
    assert said in reason and "kv_hints" in reason


def test_two_leases_of_one_session_are_refused() -> None:
    for actions in (
        [("pin", {}), ("retain", {"retain_s": 1})],
        [("pin", {"session": "a"}), ("release", {"session": "a"})],
    ):
        assert "one session" in read(None, actions)[1]
    assert "one session" in read({"retain_s": 1}, [("pin", {})])[1]


@pytest.mark.parametrize("store", [False, "false", 0, None])
def test_a_request_that_may_not_want_to_be_stored_is_not_even_if_the_rest_is_refused(store: object) -> None:
    hints, reason = read({"store": store, "unknown": 1})
    assert reason and hints == ((), (), False)
