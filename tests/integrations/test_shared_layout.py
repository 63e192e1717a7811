"""The format of shared chunks: found in an engine's blocks, told in a name, and read from it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvdepot.errors import ConfigError
from kvdepot.integrations.shared_layout import BlockFormat, find_format, find_shared, shared_name

LAYERS, HEADS, TOKENS, DIMS = 3, 2, 8, 4
VALUES = 2 * HEADS * TOKENS * DIMS
Place = Callable[[int, int, int, int], int]


def by_tokens(part: int, token: int, head: int, dim: int) -> int:
    return ((token * HEADS + head) * 2 + part) * DIMS + dim


def by_heads(part: int, token: int, head: int, dim: int) -> int:
    return ((part * HEADS + head) * TOKENS + token) * DIMS + dim


def packed(part: int, token: int, head: int, dim: int) -> int:
    """Keys of two dims of four tokens lie together, values of two tokens of all dims."""
    start = (head * 2 + part) * TOKENS * DIMS
    if part:
        return start + token // 2 * 2 * DIMS + dim * 2 + token % 2
    return start + (token // 4 * (DIMS // 2) + dim // 2) * 8 + token % 4 * 2 + dim % 2


def swizzled(part: int, token: int, head: int, dim: int) -> int:
    return by_heads(part, token, head, dim ^ (token % DIMS))


def places(place: Place) -> Any:
    shape = 2, TOKENS, HEADS, DIMS
    return np.array([place(*each) for each in itertools.product(*map(range, shape))]).reshape(shape)


def found(place: Place, segment: int = VALUES) -> BlockFormat:
    return find_format("float32", places(place), [VALUES * layer for layer in range(LAYERS)], segment)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize(
    ("place", "segment"),
    [(by_tokens, VALUES), (by_heads, VALUES), (packed, VALUES), (by_heads, VALUES // 2), (by_tokens, LAYERS * VALUES)],
)
def test_each_value_of_a_chunk_is_found_where_the_engine_has_put_it(place: Place, segment: int, blocks: int) -> None:
    format = found(place, segment)
    assert format.geometry == ("float32", LAYERS, HEADS, DIMS)
    assert (format.block_tokens, format.block_values) == (TOKENS, LAYERS * VALUES)
    plain = np.random.default_rng(1).permutation(blocks * LAYERS * VALUES).astype(np.uint32)
    plain = plain.reshape(LAYERS, 2, HEADS, blocks * TOKENS, DIMS)
    memory = np.zeros((blocks, LAYERS * VALUES), np.uint32)  # of the engine
    for layer, part, head, token, dim in np.ndindex(plain.shape):
        at = layer * VALUES + place(part, token % TOKENS, head, dim)
        memory[token // TOKENS, at] = plain[layer, part, head, token, dim]
    chunk = np.concatenate([memory[:, at : at + segment].reshape(-1) for at in range(0, LAYERS * VALUES, segment)])
    views = list(format.views(chunk, blocks))
    assert len(views) == 2 * LAYERS
    for view, (layer, part) in zip(views, np.ndindex(LAYERS, 2), strict=True):
        assert np.array_equal(view, plain[layer, part].reshape(view.shape))
    copied = np.zeros_like(chunk)
    for view, (layer, part) in zip(format.views(copied, blocks), np.ndindex(LAYERS, 2), strict=True):
        view[:] = plain[layer, part].reshape(view.shape)
    assert np.array_equal(copied, chunk)


def test_an_order_that_falls_into_no_loops_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not fall into loops over heads, tokens and dimensions"):
        found(swizzled)
    with pytest.raises(ConfigError, match="does not fall into nested loops"):
        found(lambda part, token, head, dim: by_heads(part, [0, 2, 1, 3, 4, 5, 6, 7][token], head, dim))
    with pytest.raises(ConfigError, match="not filled by keys and values alone"):
        found(lambda *each: 2 * by_heads(*each))
    with pytest.raises(ConfigError, match="not filled by keys and values alone"):
        found(by_tokens, segment=VALUES // 3)


def test_a_name_says_the_format_to_those_who_know_the_shared_name() -> None:
    own, model = found(packed), shared_name("llama", ["any facts"])
    name = own.name(model)
    others = [found(by_heads).name(shared_name("llama-2", [])), model, "llama", "share:llama [1]@kv-" + "0" * 32]
    assert list(find_shared([name, *others], "llama")) == [(name, own)]
    assert own.fingerprint != found(by_heads).fingerprint
    assert shared_name("llama", ["other facts"]) != model


@pytest.mark.parametrize(
    "change",
    [{"segment": 0}, {"segment": VALUES - 1}, {"layers": ((LAYERS, 2 * VALUES),)}, {"layers": ((-3, VALUES),)}],
    ids=str,
)
def test_a_format_that_reaches_out_of_the_block_is_ignored(change: dict[str, Any]) -> None:
    own = found(by_heads)
    wrong = own._replace(**change)
    assert not wrong.is_sound()
    assert list(find_shared([wrong.name(shared_name("llama", []))], "llama")) == []


@pytest.mark.parametrize("name", ["", "two words", "a@b", "x" * 65, 'quote"'])
def test_names_that_a_wire_name_could_not_hold_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="share_as is"):
        shared_name(name, [])


def test_blocks_that_take_too_long_to_describe_are_refused() -> None:
    with pytest.raises(ConfigError, match="too many words"):
        found(packed).name(shared_name("x" * 64, []).replace("x", "xxx"))
