"""Layouts, compared with an oracle that asks numpy for the address of every element."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdepot.errors import LayoutError
from kvdepot.protocol.layout import (
    MAX_BLOCK_BYTES,
    MAX_SEGMENTS,
    BlockFormat,
    Layout,
    Mapping,
    Segment,
    TensorView,
    build_layout,
    chunk_format,
    find_block_axes,
)

DTYPES = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4}


def dense(name: str, shape: tuple[int, ...], dtype: str = "bfloat16", mapping: str = "", offset: int = 0) -> TensorView:
    """A contiguous tensor, in a mapping of its own unless one is named."""
    return strided(name, shape, tuple(range(len(shape))), (0,) * len(shape), dtype, mapping, offset)


def strided(
    name: str,
    shape: tuple[int, ...],
    order: tuple[int, ...],
    padding: tuple[int, ...],
    dtype: str = "bfloat16",
    mapping: str = "",
    offset: int = 0,
) -> TensorView:
    """`shape` as seen; in memory axis `order[0]` lies outermost, and axis i has `padding[i]` unused items behind it."""
    item = DTYPES[dtype]
    strides = [0] * len(shape)
    step = item
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis] + padding[axis]
    return TensorView(name, mapping or name, offset + step, offset, shape, tuple(strides), item, dtype)


def element_addresses(view: TensorView) -> np.ndarray:
    """Where each element begins, by numpy."""
    base = np.arange(view.mapping_bytes, dtype=np.int64)
    assert view.item_bytes * math.prod(view.shape) <= view.mapping_bytes
    strides = tuple(stride * 8 for stride in view.strides)
    return np.lib.stride_tricks.as_strided(base[view.offset :], view.shape, strides)


Item = tuple[str, tuple[int, ...], int]  # layer, element within a block, byte within the element


def block_contents(views: list[TensorView], axes: list[int], block: int) -> dict[tuple[str, int], Item]:
    """Every byte of a block: (mapping, address) -> what it is."""
    found: dict[tuple[str, int], Item] = {}
    for view, axis in zip(views, axes, strict=True):
        inner = element_addresses(view).take(block, axis)
        for index in np.ndindex(inner.shape):
            for byte in range(view.item_bytes):
                place = (view.mapping, int(inner[index]) + byte)
                assert place not in found, "the test's tensors overlap"
                found[place] = (view.name, index, byte)
    return found


def chunk_contents(layout: Layout, views: list[TensorView], axes: list[int], blocks: list[int]) -> list[object]:
    """The meaning of each byte of a chunk of these blocks, by the layout; a wrong address is a KeyError."""
    contents = {block: block_contents(views, axes, block) for block in blocks}
    found: list[object] = []
    for segment in layout.segments:
        for number, block in enumerate(blocks):
            first = segment.offset + block * segment.stride
            mapping = layout.mappings[segment.mapping].name
            found += [(number, contents[block][mapping, first + byte]) for byte in range(segment.size)]
    return found


def assert_describes(layout: Layout, views: list[TensorView], axes: list[int]) -> None:
    """The layout covers every byte of every block once, and no other, in the same order for all blocks."""
    size = sum(
        view.item_bytes * math.prod(view.shape) // view.shape[axis] for view, axis in zip(views, axes, strict=True)
    )
    assert layout.block_bytes == size
    assert layout.num_blocks == views[0].shape[axes[0]]
    orders = [chunk_contents(layout, views, axes, [block]) for block in range(layout.num_blocks)]
    assert all(order == orders[0] for order in orders)
    assert len(set(orders[0])) == len(orders[0]) == size


@dataclass
class Tensors:
    views: list[TensorView]
    axes: list[int]

    def build(self) -> Layout:
        return build_layout(self.views, self.axes)


@st.composite
def tensors(draw: st.DrawFn, num_blocks: int | None = None) -> Tensors:
    """One to three layers of any rank, dtype, order of axes in memory, padding; some side by side in one mapping."""
    count = num_blocks or draw(st.integers(1, 4))
    views: list[TensorView] = []
    axes: list[int] = []
    for number in range(draw(st.integers(1, 3))):
        inner = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        axis = draw(st.integers(0, len(inner)))
        shape = (*inner[:axis], count, *inner[axis:])
        order = tuple(draw(st.permutations(range(len(shape)))))
        padding = tuple(draw(st.sampled_from([0, 0, 0, 1])) for _ in shape)
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        mapping, offset = f"m{number}", draw(st.sampled_from([0, 64, 68]))
        if views and draw(st.booleans()):
            mapping, offset = views[-1].mapping, views[-1].mapping_bytes
        views.append(strided(f"layer{number}", shape, order, padding, dtype, mapping, offset))
        views = [v._replace(mapping_bytes=views[-1].mapping_bytes) if v.mapping == mapping else v for v in views]
        axes.append(axis)
    return Tensors(views, axes)


# -- segments


@given(tensors())
@settings(max_examples=150, deadline=None)
def test_segments_are_every_byte_of_every_block_once_in_one_order(given: Tensors) -> None:
    layout = given.build()
    layout.check()
    assert_describes(layout, given.views, given.axes)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_layers_side_by_side_are_one_segment_in_whatever_order_they_are_given(order: tuple[int, ...]) -> None:
    """vLLM names the layers of a model whose pages differ in size in another order than it lays them out."""
    places = {0: (0, 32), 1: (32, 16), 2: (48, 48)}  # offset and bytes of each layer in a block of 96 bytes
    views = [
        TensorView(f"l{i}", "all", 4 * 96, places[i][0], (4, places[i][1] // 2), (96, 2), 2, "bfloat16") for i in order
    ]
    layout = build_layout(views, [0, 0, 0])
    assert layout.segments == [Segment(0, 0, 96, 96)]
    assert_describes(layout, views, [0, 0, 0])


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((4, 8), (8, 2)),
        ((4, 8), (0, 2)),
        ((4, 8), (-16, 2)),
        ((4, 8), (16, 0)),
        ((4, 2, 4), (16, 4, 2)),
        ((4, 3, 2, 20), (1000, 100, 150, 2)),  # with (1000, 50, 150, 2), values would lie in another order
    ],
    ids=["blocks overlap", "blocks are one", "backwards", "items are one", "rows overlap", "rows interleave"],
)
def test_tensors_whose_blocks_overlap_or_run_backwards_are_refused(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    with pytest.raises(LayoutError):
        build_layout([TensorView("l", "m", 4096, 1024, shape, strides, 2, "bfloat16")], [0])


def test_tensors_in_too_many_pieces_are_refused() -> None:
    scattered = strided("l", (2, MAX_SEGMENTS + 1, 1), (1, 0, 2), (0, 0, 0))
    with pytest.raises(LayoutError, match="l"):
        build_layout([scattered], [0])


@pytest.mark.parametrize(
    ("layers", "axes", "why"),
    [([], [], "0 KV tensors"), ([(4, 8)], [0, 0], "2 block axes"), ([(4, 8), (5, 8)], [0, 0], r"\[4, 5\]")],
)
def test_layers_that_do_not_go_together_are_refused(layers: list[tuple[int, ...]], axes: list[int], why: str) -> None:
    with pytest.raises(LayoutError, match=why):
        build_layout([dense(f"l{i}", shape) for i, shape in enumerate(layers)], axes)
    with pytest.raises(LayoutError):
        find_block_axes([])


@pytest.mark.parametrize("axis", [-1, 3, 7, None, "0"])
def test_an_axis_that_the_tensor_does_not_have_is_refused(axis: int) -> None:
    with pytest.raises(LayoutError, match=r"l: .* is not an axis of shape \[4, 8, 2\]"):
        build_layout([dense("l", (4, 8, 2))], [axis])


# -- the block axis from shapes


@pytest.mark.parametrize(
    ("shapes", "block_tokens", "axes"),
    [
        ([(10, 16, 8, 64)], 0, [0]),
        ([(10, 2, 16, 8, 64)], 0, [0]),
        ([(2, 10, 16, 8, 64)], 0, [1]),
        ([(2, 10, 16, 8, 64)], 16, [1]),
        ([(10, 16, 576)], 16, [0]),
        ([(2, 10, 16, 8, 64), (10, 16, 576)], 16, [1, 0]),
        ([(10, 4096)], 0, [0]),
        ([(10, 2, 8, 16, 64)], 16, [0]),  # heads before tokens
        ([(10, 8, 16, 64)], 16, [0]),
        ([(10, 16, 32, 16)], 16, [0]),  # as many tokens as each of many heads has items
        ([(2, 10, 8, 16, 64)], 16, [1]),
    ],
)
def test_the_block_axis_is_told_from_plain_shapes(
    shapes: list[tuple[int, ...]], block_tokens: int, axes: list[int]
) -> None:
    views = [dense(f"l{i}", shape) for i, shape in enumerate(shapes)]
    assert find_block_axes(views, block_tokens) == axes


@pytest.mark.parametrize(
    ("shapes", "block_tokens"),
    [
        ([(2, 2, 16, 8, 64)], 16),  # K/V and two blocks, either way round
        ([(2, 16, 64)], 16),  # two MLA blocks, or K and V of sixteen
        ([(2, 16, 64)], 0),
        ([(2, 16, 8, 64)], 16),  # two blocks of sixteen tokens, or K and V of sixteen blocks
        ([(10, 16, 8), (11, 16, 8)], 16),
        ([(2, 10, 16, 8, 64), (9, 16, 576)], 16),
        ([(8,)], 0),
        ([(4, 2, 100, 16, 8, 64)], 16),  # all layers in one tensor, whose blocks are the third axis
        ([(4, 2, 100, 16, 8, 64)], 0),
        ([(2, 4, 100, 16, 8, 64)], 16),
        ([(4, 2, 96, 16, 512)], 16),
        ([(2, 4, 100, 16, 512)], 16),
        ([(4, 96, 16, 8, 64)], 16),
        ([(4, 96, 16, 576)], 16),
    ],
    ids=str,
)
def test_shapes_that_can_be_read_two_ways_or_none_are_refused_and_shown(
    shapes: list[tuple[int, ...]], block_tokens: int
) -> None:
    views = [dense(f"layer.{i}", shape) for i, shape in enumerate(shapes)]
    with pytest.raises(LayoutError) as raised:
        find_block_axes(views, block_tokens)
    for view in views:
        assert f"{view.name} {list(view.shape)}" in str(raised.value)
    assert "block_axes" in str(raised.value)


# -- fingerprints


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_layouts_with_one_fingerprint_agree_on_every_byte_of_a_chunk(data: st.DataObject) -> None:
    shape = (3, *data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=3)))
    layouts = []
    for _ in range(2):
        order = tuple(data.draw(st.permutations(range(len(shape)))))
        padding = tuple(data.draw(st.sampled_from([0, 1])) for _ in shape)
        views = [strided(name, shape, order, padding, "float8_e4m3fn") for name in "ab"]
        layouts.append((build_layout(views, [0, 0]), views))
    one, two = ((layout, chunk_contents(layout, views, [0, 0], [2, 0])) for layout, views in layouts)
    assert one[0].fingerprint != two[0].fingerprint or one[1] == two[1]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_layers_side_by_side_with_one_fingerprint_agree_on_every_byte(data: st.DataObject) -> None:
    """Each layer in any place of a block, with or without a gap behind it, as one run or as two."""
    sizes, layouts = data.draw(st.tuples(*[st.sampled_from([2, 2, 4])] * 3)), []
    for _ in range(2):
        heads, offset, views = data.draw(st.sampled_from([0, 0, 32])), 0, {}
        for number in data.draw(st.permutations(range(3))):
            shape = (3, 2, sizes[number] // 2)
            strides = (64, heads or shape[2], 1)
            views[number] = TensorView(f"l{number}", "all", 256, offset, shape, strides, 1, "float8_e4m3fn")
            offset += (shape[2] if heads else sizes[number]) + data.draw(st.sampled_from([0, 0, 1]))
        given = [views[number] for number in range(3)]
        layouts.append((build_layout(given, [0, 0, 0]), given))
    for layout, given in layouts:
        assert_describes(layout, given, [0, 0, 0])
    one, two = (chunk_contents(layout, given, [0, 0, 0], [2, 0]) for layout, given in layouts)
    assert (layouts[0][0].fingerprint == layouts[1][0].fingerprint) == (one == two)


def test_where_the_memory_lies_is_no_part_of_a_fingerprint() -> None:
    here = build_layout([dense("l", (4, 8), mapping="here")], [0])
    there = build_layout([dense("l", (4, 8), mapping="there", offset=640)], [0])
    assert here.fingerprint == there.fingerprint
    assert len(here.fingerprint) == 32


def test_whatever_changes_the_meaning_of_a_byte_changes_the_fingerprint() -> None:
    plain = (0, 1, 2, 3)
    views = {
        "base": ([strided("l", (4, 6, 2, 8), plain, (0, 0, 0, 0))], [0]),
        "dtype": ([strided("l", (4, 6, 2, 8), plain, (0, 0, 0, 0), "float32")], [0]),
        "name": ([strided("m", (4, 6, 2, 8), plain, (0, 0, 0, 0))], [0]),
        "shape": ([strided("l", (4, 2, 6, 8), plain, (0, 0, 0, 0))], [0]),
        "flat": ([strided("l", (4, 6, 16), (0, 1, 2), (0, 0, 0))], [0]),
        "order": ([strided("l", (4, 6, 2, 8), (0, 2, 1, 3), (0, 0, 0, 0))], [0]),
        "axis outside": ([strided("l", (4, 6, 2, 8), (2, 0, 1, 3), (0, 0, 0, 0))], [0]),
        "two layers": ([dense("l", (4, 6, 2, 8)), dense("m", (4, 6, 2, 8))], [0, 0]),
        "other way round": ([dense("m", (4, 6, 2, 8)), dense("l", (4, 6, 2, 8))], [0, 0]),
        "tokens": ([strided("l", (4, 3, 2, 8), plain, (0, 0, 0, 0))], [0]),
    }
    prints = {name: build_layout(*given).fingerprint for name, given in views.items()}
    same = [pair for pair in itertools.combinations(prints, 2) if prints[pair[0]] == prints[pair[1]]]
    assert not same


# -- what a server is told


@pytest.mark.parametrize(
    "given",
    [BlockFormat(b"f" * 31, 1), BlockFormat(b"", 1)]
    + [BlockFormat(b"f" * 32, size) for size in (0, -1, MAX_BLOCK_BYTES + 1)],
)
def test_a_format_that_no_worker_registers_is_refused(given: BlockFormat) -> None:
    with pytest.raises(LayoutError):
        given.check()
    BlockFormat(b"f" * 32, MAX_BLOCK_BYTES).check()


def test_a_chunk_copied_whole_is_one_block_whose_fingerprint_has_its_meaning() -> None:
    one = chunk_format(640, "float16 2x8")
    one.check()
    assert one.block_bytes == 640 and one == chunk_format(640, "float16 2x8")
    assert one.fingerprint != chunk_format(640, "bfloat16 2x8").fingerprint


# -- what a worker checks


@given(st.integers(-5, 60), st.integers(-5, 30), st.integers(-5, 30), st.integers(-1, 6), st.integers(0, 120))
@settings(max_examples=300)
def test_a_layout_is_accepted_exactly_when_its_blocks_are_apart_and_inside(
    offset: int, stride: int, size: int, num_blocks: int, mapping_bytes: int
) -> None:
    layout = Layout([Mapping("m", mapping_bytes)], [Segment(0, offset, stride, size)], num_blocks, bytes(32))
    spots = [spot for b in range(num_blocks) for spot in range(offset + b * stride, offset + b * stride + size)]
    rising = num_blocks == 1 or stride > 0
    good = bool(spots) and rising and len(set(spots)) == len(spots) and min(spots) >= 0 and max(spots) < mapping_bytes
    try:
        layout.check()
        accepted = True
    except LayoutError:
        accepted = False
    if num_blocks == 1 and stride < size:
        assert not accepted or good  # the stride of a single block says nothing; refusing it is allowed
    else:
        assert accepted == good
