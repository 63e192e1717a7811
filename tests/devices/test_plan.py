"""Plans contain every byte of a chunk once, between its extent in the arena and its block. The oracle counts bytes."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdepot.devices.cuda.plan import CopyPlan, Planner
from kvdepot.memory.copier import CopyPiece
from kvdepot.protocol.layout import Layout, Mapping, Segment, TensorView, build_layout
from tests.devices.tensors import Model

DEVICE, HOST = 1 << 33, 1 << 34
ARENA = 20_000
EXTENT = 50


def a_layout(draw: random.Random) -> Layout:
    segments: list[Segment] = []
    num_blocks, offset = draw.randrange(1, 9), 0
    for _ in range(draw.randrange(1, 4)):
        size, parts, gap = draw.choice([1, 7, 64, 100]), draw.randrange(1, 3), draw.choice([0, 0, 3])
        stride = size * parts + gap
        segments += [Segment(0, offset + part * size, stride, size) for part in range(parts)]
        offset += num_blocks * stride
    return Layout([Mapping("m", offset)], segments, num_blocks, bytes(32))


def some_pieces(draw: random.Random, layout: Layout) -> list[CopyPiece]:
    free = [(start, EXTENT) for start in range(0, ARENA, 2 * EXTENT)]
    draw.shuffle(free)
    pieces = []
    for _ in range(draw.randrange(4)):
        count = draw.randrange(1, layout.num_blocks + 1)
        ids = draw.choice([draw.sample(range(layout.num_blocks), count), list(range(count))])
        need = count * layout.block_bytes
        extents = ((draw.randrange(ARENA - need), need),)
        if draw.random() < 0.5 and -(-need // EXTENT) <= len(free):
            extents = tuple(free.pop() for _ in range(-(-need // EXTENT)))
        pieces.append(CopyPiece(extents, np.array(ids, np.intp), draw.randrange(count)))
    return pieces


def wanted(layout: Layout, pieces: list[CopyPiece]) -> dict[int, list[int]]:
    """By place in the arena: the bytes of the device that belong there (several where pieces lie over each other)."""
    found: dict[int, list[int]] = defaultdict(list)
    for piece in pieces:
        places = [place for start, length in piece.extents for place in range(start, start + length)]
        done = 0
        for segment in layout.segments:
            for position, block in enumerate(piece.block_ids.tolist()):
                for byte in range(segment.size):
                    if position >= piece.skip:
                        found[places[done]].append(segment.offset + block * segment.stride + byte)
                    done += 1
    return {place: sorted(sources) for place, sources in found.items()}


def planned(plan: CopyPlan) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for device, host, size in zip(plan.device.tolist(), plan.host.tolist(), plan.sizes.tolist(), strict=True):
        for byte in range(size):
            found[host - HOST + byte].append(device - DEVICE + byte)
    return {place: sorted(sources) for place, sources in found.items()}


@given(st.integers(0, 1 << 32), st.sampled_from([64, 128, 1000, 1 << 40]))
@settings(max_examples=150, deadline=None)
def test_every_byte_of_every_piece_is_planned_once_and_no_copy_crosses_a_cut(seed: int, cut: int) -> None:
    draw = random.Random(seed)
    layout = a_layout(draw)
    layout.check()
    pieces = some_pieces(draw, layout)
    plan = Planner(layout, [DEVICE]).plan("store", pieces, HOST, cut)
    assert planned(plan) == wanted(layout, pieces)
    places = plan.host - np.uint64(HOST)
    first, last = places // np.uint64(cut), (places + plan.sizes - np.uint64(1)) // np.uint64(cut)
    assert (first == last).all() and (plan.sizes > 0).all()


@pytest.mark.parametrize(
    ("kind", "copies"),
    [("layers side by side", 1), ("layers of two sizes side by side", 1), ("layers behind each other", 8)],
)
def test_layers_that_lie_side_by_side_in_a_block_are_one_copy_a_block(kind: str, copies: int) -> None:
    model = Model().add(kind, 9, 16, 8, 64, "bfloat16")
    views = [
        TensorView(layer.name, "m", model.sizes[0], layer.offset, layer.shape, layer.strides, 2, layer.dtype)
        for layer in model.layers
    ]
    layout = build_layout(views, model.axes)
    apart = CopyPiece(((0, 3 * layout.block_bytes),), np.array([6, 2, 4], np.intp))
    plan = Planner(layout, [DEVICE]).plan("store", [apart], HOST, 1 << 30)
    assert len(plan) == 3 * copies and plan.sizes.tolist() == [layout.block_bytes // copies] * len(plan)
