"""Names and headers of objects, against any bytes."""

from __future__ import annotations

import re
import string
from zlib import crc32

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.tiers.format import HEADER_BYTES, NO_SALT, Header, ShardFacts, model_prefix

FACTS = ShardFacts("tenant", "model", 2, 1, 16, 256, bytes(range(32)))
HEADER = Header(FACTS.digest, b"k" * 32, b"s" * 16, 1 << 20, 1 << 19, 77, 1_700_000_000, 3, b"n" * 12)

uint64 = st.integers(0, 2**64 - 1)
headers = st.builds(
    Header,
    facts=st.binary(min_size=32, max_size=32),
    key=st.binary(min_size=32, max_size=32),
    salt=st.binary(min_size=16, max_size=16),
    size=uint64,
    stored=uint64,
    checksum=uint64,
    born=uint64,
    coding=st.integers(0, 2**32 - 1),
    nonce=st.binary(min_size=12, max_size=12),
    stamp=st.binary(min_size=32, max_size=32),
)


@given(headers, st.text(max_size=3000))
def test_a_header_comes_back_as_it_was_whatever_is_in_it(header: Header, model: str) -> None:
    facts = msgspec.structs.replace(FACTS, model=model)
    packed = header.pack(facts)
    assert len(packed) == HEADER_BYTES
    assert Header.unpack(packed) == header
    assert Header.unpack(memoryview(packed + b"what follows")) == header


def test_a_header_of_an_earlier_version_has_no_stamp_however_long_its_text() -> None:
    for length in (10, 3000):
        text = b"t" * min(length, HEADER_BYTES - 148)
        crc = crc32(HEADER._pack(0, len(text)) + text.ljust(HEADER_BYTES - 148, b"\0"))
        packed = HEADER._pack(crc, len(text)) + text.ljust(HEADER_BYTES - 148, b"\0")
        assert Header.unpack(packed) == HEADER


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_a_header_with_one_bit_flipped_is_none(bit: int) -> None:
    packed = bytearray(HEADER.pack(FACTS))
    packed[bit // 8] ^= 1 << bit % 8
    assert Header.unpack(packed) is None


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": "other"}, {"model": "other"}, {"world_size": 4}, {"rank": 0}, {"blocks_in_chunk": 8},
        {"chunk_tokens": 128}, {"layout": b"o" * 32}, {"tenant": "tenantm", "model": "odel"},
    ],
)  # fmt: skip
def test_shards_that_differ_in_any_fact_have_other_names_and_headers(change: dict[str, object]) -> None:
    other = msgspec.structs.replace(FACTS, **change)
    assert other.digest != FACTS.digest
    assert other.name(NO_SALT, b"k" * 32) != FACTS.name(NO_SALT, b"k" * 32)
    assert HEADER.names(FACTS, b"s" * 16, b"k" * 32, 1 << 20)
    assert not HEADER.names(other, b"s" * 16, b"k" * 32, 1 << 20)


def test_names_are_short_and_of_characters_that_every_store_takes() -> None:
    name = msgspec.structs.replace(FACTS, model="m" * 4096, rank=0xFFFF).name(b"s" * 16, b"k" * 32)
    assert len(name) <= 160
    assert set(name) <= set("0123456789abcdef/.") <= set(string.hexdigits + "/.")
    assert re.fullmatch(r"[0-9a-f]{32}/[0-9a-f]{32}/[0-9a-f]{64}\.ffff", name)


def test_all_shards_of_a_tenants_model_share_the_beginning_of_their_names() -> None:
    other = msgspec.structs.replace(FACTS, rank=0, layout=b"o" * 32)
    assert FACTS.space.startswith(model_prefix("tenant", "model")) and other.space.startswith(FACTS.space[:16])
    assert model_prefix("tenantm", "odel") != model_prefix("tenant", "model")
