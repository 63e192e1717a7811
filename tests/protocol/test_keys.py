"""The chain of chunk hashes: the same on every host, and different whenever the KV differs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.errors import BadRequest
from kvdepot.keys import HASH_BYTES, ROOT, ChunkChain, derive_root, engine_hash

TOKEN = st.integers(0, 2**32 - 1)
FEW = st.integers(0, 2)  # so small that prompts share heads by chance


def chunks_of(chain: ChunkChain) -> list[bytes]:
    return [bytes(chain.hashes[i : i + HASH_BYTES]) for i in range(0, len(chain.hashes), HASH_BYTES)]


def hashed(tokens: list[int], size: int, root: bytes = ROOT, extras: tuple[tuple[int, bytes], ...] = ()) -> list[bytes]:
    chain = ChunkChain(size, root)
    chain.extend(tokens, extras)
    return chunks_of(chain)


GOLDEN = {
    "root": "beea93ccd7914852bd887762d601174fe2d92e6299044438e990e067b7448e27",
    "first": "7f7cdcc14dd8aad8a915bad796b87fefe3ab3d7f7dd6745d3376c554b51b698c",
    "third": "86eb21d0a1cf4ec44a039f6326498d66180a0f5d93563214879da5b3cf766d69",
    "large ids": "902fdc044179bdc09e9a562adcba835109f437c15b587548d76a1cee85fbfdfc",
    "salted root": "db8b381e3757453d6e0b33bd6c03b545208ad4e317f7c0f21d6a141821a351c5",
    "salted": "962042bcf650f3fa8b34f35b83e609f6b367972397cbad5b84207af58585c262",
    "image": "dd111ac96c33fe13570c30bc53e89140670718937c60d04b95f010ee4fec0a6b",
    "engine": "6a49aa2bc3bf0a25a9fb7c1b9a4abba6cd148d9aeccf94463bb8481d11059cdc",
}

PROGRAM = """
from kvdepot.keys import ROOT, ChunkChain, derive_root, engine_hash

def last(tokens, size, root=ROOT, extras=()):
    chain = ChunkChain(size, root)
    chain.extend(tokens, extras)
    return bytes(chain.hashes[-32:])

salted = derive_root(("salt", "tenant-7"), ("lora", "sql"))
for name, value in {
    "root": ROOT,
    "first": last(list(range(256)), 256),
    "third": last(list(range(800)), 256),
    "large ids": last([0, 2**32 - 1, 2**31, 128_255], 2),
    "salted root": salted,
    "salted": last(list(range(256)), 256, salted),
    "image": last(list(range(16)), 16, ROOT, [(3, b"image hash")]),
    "engine": engine_hash(b"hash of the engine"),
}.items():
    print(name, value.hex(), sep="=")
"""


@pytest.mark.parametrize("seed", ["0", "4242"])
def test_hashes_are_the_same_in_every_process_and_on_every_host(seed: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert dict(line.split("=") for line in ran.stdout.splitlines()) == GOLDEN


def test_parents_and_slices_are_the_hashes_of_the_chunks_they_name() -> None:
    chain = ChunkChain(4, derive_root(("salt", "a")))
    chain.extend(range(16))
    each = chunks_of(chain)
    assert [chain.parent(i) for i in range(5)] == [derive_root(("salt", "a")), *each]
    assert chain.slice(1, 3) == each[1] + each[2]
    assert chain.slice(2, 2) == b""


PARTS = st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), max_size=3)


@given(PARTS, PARTS)
def test_no_two_lists_of_parts_share_a_root(one: list[tuple[str, str]], two: list[tuple[str, str]]) -> None:
    assert (derive_root(*one) == derive_root(*two)) == (one == two)
    assert (derive_root(*one) == ROOT) == (not one)


def test_a_prompt_whose_tokens_spell_a_salt_does_not_reach_the_root_of_that_salt() -> None:
    def as_tokens(text: str) -> list[int]:
        return [len(text), 0, int.from_bytes(text.encode(), "little")]

    prompt = [*as_tokens("salt"), *as_tokens("vip1")]
    assert derive_root(("salt", "vip1")) not in hashed(prompt, 3)


def test_the_position_order_and_content_of_extras_all_count() -> None:
    tokens = list(range(8))
    ways: list[tuple[tuple[int, bytes], ...]] = [
        (),
        ((0, b""),),
        ((0, b"ab"),),
        ((1, b"ab"),),
        ((0, b"a"), (0, b"b")),
        ((0, b"b"), (0, b"a")),
        ((0, b"a"), (1, b"b")),
        ((0, b"ba"),),
    ]
    assert len({hashed(tokens, 8, ROOT, extras)[0] for extras in ways}) == len(ways)


def test_a_hash_of_the_engine_is_never_one_of_a_chain() -> None:
    first = hashed([1, 2], 2)[0]
    assert engine_hash(first) != first
    assert engine_hash(b"") != engine_hash(b"\0") != engine_hash(b"\0\0")
    text = b"".join(token.to_bytes(4, "little") for token in (1, 2))
    assert engine_hash(text) != first
    assert len(engine_hash(b"any length")) == HASH_BYTES


BAD = [-1, 2**32, 1.5, "7", None, b"7", [7], 2**70]


@pytest.mark.parametrize("bad", BAD, ids=repr)
@pytest.mark.parametrize("position", [0, 3, 4])
def test_what_is_no_token_id_is_a_bad_request_and_spoils_no_chain(bad: object, position: int) -> None:
    chain = ChunkChain(2)
    for known in ([], [1, 2, 3, 4]):
        chain.extend(known)
        tokens: list[object] = [1, 2, 3, 4, 5, 6]
        tokens[position] = bad
        with pytest.raises(BadRequest):
            chain.extend(tokens)  # type: ignore[arg-type]
        chain.extend([1, 2, 3, 4, 5, 6])
        assert chunks_of(chain) == ahead_by_hand([1, 2, 3, 4, 5, 6], 2, 0)


def ahead(tokens: list[int], size: int, lookahead: int, extras: tuple[tuple[int, bytes], ...] = ()) -> list[bytes]:
    chain = ChunkChain(size, ROOT, lookahead)
    chain.extend(tokens, extras)
    assert chain.covered == (len(chain) * size + lookahead if len(chain) else 0)
    return chunks_of(chain)


def ahead_by_hand(tokens: list[int], size: int, lookahead: int) -> list[bytes]:
    found, parent = [], ROOT
    for first in range(0, len(tokens), size):
        covered = tokens[first : first + size + lookahead]
        if len(covered) == size + lookahead:
            parent = blake3(parent + b"".join(token.to_bytes(4, "little") for token in covered)).digest()
            found.append(parent)
    return found


@given(st.lists(TOKEN, min_size=1, max_size=40), st.integers(1, 5), st.integers(0, 6), st.data())
def test_a_changed_token_changes_the_chunks_that_depend_on_it_and_all_behind(
    tokens: list[int], size: int, lookahead: int, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, len(tokens) - 1))
    other = list(tokens)
    other[position] = (other[position] + data.draw(st.integers(1, 2**32 - 1))) % 2**32
    one, two = ahead(tokens, size, lookahead), ahead(other, size, lookahead)
    same = [a == b for a, b in zip(one, two, strict=True)]
    assert same == [(i + 1) * size + lookahead <= position for i in range(len(one))]


@given(
    st.lists(st.lists(FEW, max_size=14), max_size=8),
    st.integers(1, 4),
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(0, 14), st.binary(max_size=2)), max_size=3),
)
def test_a_chain_that_is_given_any_prompts_in_turn_never_remembers_a_wrong_one(
    prompts: list[list[int]], size: int, lookahead: int, extras: list[tuple[int, bytes]]
) -> None:
    extras.sort(key=lambda extra: extra[0])
    chain = ChunkChain(size, ROOT, lookahead)
    for prompt in prompts:
        chain.extend(prompt, extras)
        fresh = ahead(prompt, size, lookahead, tuple(extras))
        assert extras or fresh == ahead_by_hand(prompt, size, lookahead)
        assert chunks_of(chain)[: len(fresh)] == fresh


def test_an_extra_in_the_lookahead_changes_the_chunk_before_it() -> None:
    tokens = list(range(33))
    plain, image = ahead(tokens, 8, 1), ahead(tokens, 8, 1, ((16, b"image"),))
    assert [a == b for a, b in zip(plain, image, strict=True)] == [True, False, False, False]
    image = ahead(tokens, 8, 1, ((17, b"image"),))
    assert [a == b for a, b in zip(plain, image, strict=True)] == [True, True, False, False]


def test_a_tail_is_named_by_its_tokens_and_all_before_and_is_no_chunk_of_them() -> None:
    def keys(tokens: list[int], extras: list[tuple[int, bytes]], size: int = 4) -> list[bytes]:
        chain = ChunkChain(size)
        chain.extend(tokens, extras)
        return [chain.tail(tokens, end, extras) for end in range(len(tokens))]

    tokens = [*range(10)]
    plain = keys(tokens, [])
    whole = ChunkChain(4)
    whole.extend(tokens)
    two = ChunkChain(2)
    two.extend(tokens)
    every = [*plain, whole.slice(0, 1), whole.slice(1, 2), *(two.slice(i, i + 1) for i in range(len(two)))]
    assert len({*every}) == len(every)
    assert keys([*range(9), 99], []) == plain, "a tail does not depend on what follows it"
    changed = keys([*range(5), 99, *range(6, 10)], [])
    assert [one == other for one, other in zip(plain, changed, strict=True)] == [True] * 6 + [False] * 4
    image = keys(tokens, [(5, b"image")])
    assert [one == other for one, other in zip(plain, image, strict=True)] == [True] * 6 + [False] * 4
    assert keys(tokens, [(5, b"other")])[6:] != image[6:] and keys(tokens, [(4, b"image")])[6] != image[6]
