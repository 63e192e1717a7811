"""Sentences about values that somebody has sent."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from kvdepot.values import fault_of


class Share(msgspec.Struct, forbid_unknown_fields=True):
    floor_bytes: int


class Wanted(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=3)]
    ttl_s: Annotated[int, Meta(ge=0, le=60)] | None = 0
    kind: Literal["retain", "expire"] = "retain"
    tokens: list[Annotated[int, Meta(ge=0)]] = []
    drop: bool = False
    quota: Share | None = None


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (
            '{"name": "a", "retains": 1}',
            "unknown field 'retains'; the fields are name, ttl_s, kind, tokens, drop, quota",
        ),
        ('{"name": "a", "ttl": 1}', "unknown field 'ttl'; did you mean ttl_s?"),
        ('{"name": "a", "quota": {"floor": 1}}', "quota: unknown field 'floor'; did you mean floor_bytes?"),
        ('{"name": "a", "quota": {}}', "quota: the field 'floor_bytes' is missing"),
        ("{}", "the field 'name' is missing"),
        ("[1]", "must be an object, not a list"),
        ('{"name": 1}', "name: must be text, not a whole number"),
        ('{"name": "a", "ttl_s": "1"}', "ttl_s: must be a whole number or null, not text"),
        ('{"name": "a", "ttl_s": 61}', "ttl_s: must be at most 60"),
        ('{"name": ""}', "name: must have at least 1 character"),
        ('{"name": "abcd"}', "name: must have at most 3 characters"),
        ('{"name": "a", "kind": "keep"}', "kind: 'keep' is not one of retain, expire"),
        ('{"name": "a", "tokens": [1, -1]}', "tokens[1]: must be at least 0"),
        ('{"name": "a", "drop": "yes"}', "drop: must be true or false, not text"),
        ("name=a", "not JSON (invalid character (byte 4))"),
        ('{"name": "a"', "not JSON (input data was truncated)"),
    ],
)
def test_what_is_wrong_with_an_object_is_told_in_words(sent: str, said: str) -> None:
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(sent, type=Wanted)
    assert fault_of(caught.value, Wanted) == said
