"""Whatever arrives, the server answers or counts it, and keeps serving others. Tested with a bare socket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvdepot import errors
from kvdepot.keys import ROOT
from kvdepot.protocol import wire
from kvdepot.protocol.layout import BlockFormat
from tests.conftest import Depot
from tests.protocol.raw import Raw

FORMAT = BlockFormat(bytes(32), 64)
MIB = 1 << 20

many = settings(
    deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture
def raw(depot: Depot) -> Iterator[Raw]:
    client = Raw(depot)
    yield client
    client.close()


@pytest.fixture
def known(raw: Raw) -> Raw:
    return raw.hello()


@pytest.fixture(autouse=True)
def _serves_others(depot: Depot) -> Iterator[None]:
    """After every test, a regular client is served by the same process."""
    yield
    if depot.process.poll() is not None:
        pytest.fail(f"the server ended:\n{depot.logged()}")
    other = Raw(depot).hello()
    assert other.ask(wire.Noop()) == "ok"
    other.close()
    assert "Traceback" not in depot.logged()


def bad_messages(depot: Depot) -> int:
    count: int = depot.status()["counters"].get("bad_messages", 0)
    return count


# -- bytes that are no message


@many
@given(body=st.binary(max_size=200))
def test_arbitrary_bytes_get_exactly_one_reply_with_their_number(raw: Raw, body: bytes) -> None:
    value = raw.ask_bytes(body)
    assert isinstance(value, errors.ProtocolError | errors.UnknownClient | errors.BadRequest), value


@many
@given(
    body=st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=12,
    ).map(msgspec.msgpack.encode)
)
def test_any_msgpack_that_is_no_message_gets_a_protocol_error(raw: Raw, body: bytes) -> None:
    assert type(raw.ask_bytes(body)) is errors.ProtocolError


def test_deeply_nested_bytes_are_no_message(depot: Depot, known: Raw) -> None:
    assert isinstance(known.ask_bytes(b"\x91" * 100_000), errors.ProtocolError)
    assert isinstance(known.ask_bytes(b"\x92\xa5Hello" + b"\x91" * 100_000), errors.ProtocolError)
    before = bad_messages(depot)
    known.ask_bytes(b"\xc1")
    assert bad_messages(depot) == before + 1


@pytest.mark.parametrize("length", [0, 7])
def test_a_frame_too_short_for_a_number_is_answered_under_number_zero(known: Raw, length: int) -> None:
    known.send(b"\x07" * length)
    number, value = known.receive()
    assert number == 0
    assert isinstance(value, errors.ProtocolError)
    assert known.heard_nothing_more()


def test_every_truncation_of_a_message_gets_a_protocol_error(known: Raw) -> None:
    whole = wire.encode_request(0, wire.Store(1, [wire.Shards("r", "m", 1, 0, b"", 0, bytes(64), 2)]))[8:]
    for length in range(len(whole)):
        assert type(known.ask_bytes(whole[:length])) is errors.ProtocolError
    assert type(known.ask_bytes(whole)) is errors.UnknownInstance


# -- frames


def test_a_message_far_longer_than_the_limit_ends_at_most_its_own_connection(depot: Depot, raw: Raw) -> None:
    raw.hello()
    raw.send(bytes(16 * MIB + 1))
    other = Raw(depot).hello()
    assert other.ask(wire.Noop()) == "ok"
    other.close()


# -- lookups, stores and retrieves


_KEYS = [bytes([n]) * 32 for n in range(6)]
_any_int = st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 2**32, 2**64 - 1])
_small = st.integers(0, 3)
_hashes = st.lists(st.sampled_from(_KEYS), max_size=4).map(b"".join) | st.binary(max_size=70)
_text = st.sampled_from(["", "a", "b", "x" * 5000])
_shards = st.builds(
    wire.Shards,
    request=_text,
    model=_text,
    world_size=st.integers(1, 2) | _any_int,
    rank=st.integers(0, 1) | _any_int,
    parent=st.sampled_from([b"", ROOT, *_KEYS, b"short"]),
    depth=_small | _any_int,
    hashes=_hashes,
    blocks=_small | _any_int,
)
_groups = st.builds(
    wire.Group,
    _small | _any_int,
    _small | _any_int,
    st.just(FORMAT.block_bytes) | _any_int,
    st.binary(min_size=32, max_size=32) | st.binary(max_size=3),
)
_formats = st.just(FORMAT) | st.builds(
    BlockFormat, st.binary(min_size=32, max_size=32) | st.binary(max_size=3), st.just(FORMAT.block_bytes) | _any_int
)
_requests: st.SearchStrategy[wire.Request] = st.one_of(
    st.builds(wire.Lookup, _text, st.integers(1, 2) | _any_int, _small | _any_int, _text, _small, _hashes),
    st.builds(wire.Store, _small, st.lists(_shards, max_size=3)),
    st.builds(wire.Retrieve, _small, st.lists(_shards, max_size=3)),
    st.builds(wire.Compare, _small, st.lists(_shards, max_size=3), st.floats(), st.booleans(), st.booleans()),
    st.builds(
        wire.Complete,
        _small | _any_int,
        st.binary(max_size=wire.BOOT_BYTES),
        st.booleans(),
        st.lists(_any_int, max_size=3),
        st.lists(st.lists(st.floats(), max_size=3), max_size=3),
    ),
    st.builds(wire.Register, _small, _formats, _text, _small | _any_int, _small | _any_int, _small | _any_int),
    st.builds(
        wire.Register,
        _small,
        _formats,
        st.just("m"),
        st.just(1),
        st.just(0),
        st.just(1),
        _small | _any_int,
        _small | _any_int,
        st.lists(_groups, max_size=3),
        fault=_text,
    ),
    st.builds(wire.Unregister, _small | _any_int),
    st.builds(wire.EndSession, _text),
    st.builds(wire.Hello, st.sampled_from([wire.VERSION, 0]), _text, st.binary(max_size=20), st.booleans()),
    st.builds(wire.Prove, st.binary(max_size=40)),
    st.just(wire.Clear()),
    st.builds(wire.Count, _text, st.just(b"")),
    st.builds(wire.Inspect, _text, st.binary(max_size=64)),
    st.builds(wire.Why, _text),
    st.builds(wire.Describe, st.binary(max_size=40), st.binary(max_size=80), st.binary(max_size=80), _small | _any_int),
)


# Nothing is shrunk: where an answer is missing, every step of that costs a deadline.
@settings(many, max_examples=60, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_any_sequence_of_messages_is_answered_one_by_one_and_leaves_nothing_held(
    depot: Depot, data: st.DataObject
) -> None:
    client = Raw(depot).hello()
    try:
        assert client.ask(wire.Register(1, FORMAT)) is None
        sent = data.draw(st.lists(_requests, max_size=12))
        for number, request in enumerate(sent, 1000):  # all at once, so that they overlap
            client.send(wire.encode_request(number, request))
        answers = dict(client.receive() for _ in sent)
        assert sorted(answers) == list(range(1000, 1000 + len(sent)))
        assert not [value for value in answers.values() if isinstance(value, errors.InternalError)], (sent, answers)
        for placed in [value for value in answers.values() if isinstance(value, wire.Placement)]:
            assert type(client.ask(wire.Complete(placed.operation, placed.boot, copied=False))) in (bool, list)
        for request in ("", "a", "b"):
            assert client.ask(wire.EndSession(request)) is None
        status = client.ask(wire.GetStatus())
        assert (status["reserved_shards"], status["holds"], status["operations"]) == (0, 0, 0)
        for instance in range(4):
            assert client.ask(wire.Unregister(instance)) is None
    finally:
        client.close()


# -- the messages themselves


@st.composite
def _damaged(draw: st.DrawFn, frames: st.SearchStrategy[bytes]) -> bytes:
    """A message of which some bytes are wrong, or the end is missing; or bytes that were none."""
    frame = bytearray(draw(frames | st.binary(max_size=60)))
    for place, byte in draw(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), max_size=3)):
        frame[place : place + 1] = bytes([byte])
    return bytes(frame[: draw(st.none() | st.integers(0, len(frame)))])


@settings(many, max_examples=500)
@given(_damaged(_requests.map(lambda request: wire.encode_request(7, request))))
def test_any_bytes_are_a_request_that_encodes_to_itself_or_a_protocol_error(frame: bytes) -> None:
    number, request = wire.decode_request(frame)
    assert number == (frame[: wire.ID_BYTES] if len(frame) >= wire.ID_BYTES else bytes(wire.ID_BYTES))
    if not isinstance(request, errors.ProtocolError):
        again = wire.encode_request(int.from_bytes(number, "little"), request)
        same_number, same = wire.decode_request(again)
        assert same_number == number and type(same) is type(request) and not isinstance(same, errors.ProtocolError)
        assert wire.encode_request(int.from_bytes(number, "little"), same) == again


_PLACES = st.builds(
    wire.Place, st.lists(st.tuples(_small, _any_int), max_size=2).map(tuple), st.booleans(), st.integers(0, 2**64 - 1)
)
_PLACEMENTS = st.builds(
    wire.Placement,
    st.integers(1, 2**63),
    _text,
    st.binary(min_size=wire.BOOT_BYTES, max_size=wire.BOOT_BYTES),
    st.lists(_small, max_size=3),
    st.lists(_PLACES, max_size=3),
)
_ANSWERS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.lists(st.booleans())
_ERRORS = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.KVDepotError)]


@settings(many, max_examples=500)
@given(_damaged(_ANSWERS.map(lambda value: wire.encode_answer(bytes(8), b"bootboot", value))))
def test_any_bytes_are_a_reply_that_names_its_request_and_server_or_none(frame: bytes) -> None:
    with suppress(errors.ProtocolError):
        number, boot, _ = wire.decode_reply(frame)
        assert frame.startswith(number.to_bytes(wire.ID_BYTES, "little") + boot)


@given(_ANSWERS | _PLACEMENTS)
def test_an_answer_survives_the_way_back(value: Any) -> None:
    frame = wire.encode_answer((7).to_bytes(8, "little"), b"bootboot", value)
    assert wire.decode_reply(frame) == (7, b"bootboot", value)


def test_an_error_survives_the_way_back_with_its_class_and_words_but_long_ones() -> None:
    head = bytes(wire.ID_BYTES), bytes(wire.BOOT_BYTES)
    for error in _ERRORS:
        value = wire.decode_reply(wire.encode_failure(*head, error("what was wrong: ü")))[2]
        assert type(value) is error and str(value) == "what was wrong: ü"
    value = wire.decode_reply(b"".join(head) + msgspec.msgpack.encode(["Failure", "not_invented_yet", "words"]))[2]
    assert type(value) is errors.KVDepotError and str(value) == "words"
    value = wire.decode_reply(wire.encode_failure(*head, errors.BadRequest("x" * 2000)))[2]
    assert str(value) == "x" * wire.MAX_ERROR
