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
        ('{"name": "a", "retains": 1}', "object contains unknown field `retains`"),
        ('{"name": "a", "quota": {"floor": 1}}', "quota: object contains unknown field `floor`"),
        ('{"name": "a", "ttl_s": 61}', "ttl_s: expected `int` <= 60"),
        ('{"name": "a", "kind": "keep"}', "kind: invalid enum value 'keep'"),
        ('{"name": "a"', "not JSON (Input data was truncated)"),
    ],
)
def test_what_is_wrong_with_an_object_is_said_after_its_field(sent: str, said: str) -> None:
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(sent, type=Wanted)
    assert fault_of(caught.value) == said
