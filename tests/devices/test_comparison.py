"""Comparisons of stored chunks with computed blocks: what rounding makes of them, and what faults do."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from msgspec.structs import replace

from kvdepot.devices.blocks import CopyPiece, Scratch
from kvdepot.devices.comparison import compare
from kvdepot.devices.host import HostBlocks
from kvdepot.errors import LayoutError
from kvdepot.memory.allocator import PAGE
from kvdepot.protocol.layout import Layout, TensorView, build_layout

LAYERS, BLOCKS, TOKENS, HEADS, DIM = 6, 8, 16, 2, 64
LIMIT = 4 * 2**-7 * math.sqrt(LAYERS)
"""The limit that an engine of as many layers asks for, in bfloat16."""
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


class Worker:
    """Paged KV [layers, blocks, heads, tokens, keys and values], whose blocks `ids` are compared."""

    def __init__(self, dtype: torch.dtype, tokens: int = TOKENS) -> None:
        draw = torch.Generator().manual_seed(0)
        values = torch.randn((LAYERS, BLOCKS, HEADS, tokens, 2, DIM), generator=draw)
        values[..., 0, :] *= 50  # keys are larger than values
        self.memory = values.flatten(4).to(dtype)
        self.layers = list(self.memory)
        bytes_ = self.memory.reshape(-1).view(torch.uint8).numpy()
        strides = tuple(each * dtype.itemsize for each in self.layers[0].stride())
        described = [
            TensorView(
                f"layer {i}", "memory", len(bytes_), i * layer.nbytes, tuple(layer.shape), strides, dtype.itemsize,
                str(dtype).removeprefix("torch."),
            )
            for i, layer in enumerate(self.layers)
        ]  # fmt: skip
        self.blocks = HostBlocks(build_layout(described, [0] * LAYERS), {"memory": bytes_})
        self.ids = np.array([5, 0, 3, 6], np.intp)

    def values(self, layer: int) -> torch.Tensor:
        """The keys and values of a layer, in another axis; a view."""
        return self.layers[layer].unflatten(3, (2, DIM))

    def compare(self, change: Callable[[Worker], object], has_experts: bool = False) -> list[float]:
        """Store the blocks as one chunk, in two extents, change them, and compare them with it."""
        size = self.blocks.layout.block_bytes * len(self.ids)
        piece = CopyPiece(((4 * PAGE, 24 * PAGE), (32 * PAGE, size)), self.ids)
        arena = Scratch(np.zeros(32 * PAGE + size, np.uint8))
        self.blocks.move(arena, [piece], is_store=True)
        before = arena.bytes.copy()
        change(self)
        (found,) = compare(self.blocks, arena, [piece], has_experts)
        assert np.array_equal(arena.bytes, before), "comparing changed the arena"
        return found


def rounded(worker: Worker) -> None:
    """The same numbers after other roundings, more of them in each layer, as other batch shapes give."""
    draw = torch.Generator().manual_seed(1)
    for number, layer in enumerate(worker.layers, 1):
        noise = torch.randn(layer.shape, generator=draw) * torch.finfo(layer.dtype).eps * math.sqrt(number)
        layer.copy_((layer.float() * (1 + noise)).to(layer.dtype))


def other_experts(worker: Worker) -> None:
    """One token in 16 took another expert from the third layer on."""
    for layer in worker.layers[2:]:
        layer[:, :, ::16] *= 0.5


FAULTS: dict[str, Callable[[Worker], object]] = {
    "other values": lambda worker: worker.values(3)[..., 1, :].mul_(1.5),
    "other keys": lambda worker: worker.values(3)[..., 0, :].copy_(worker.values(3)[..., 0, :].roll(1, -1)),
    "another layer": lambda worker: worker.layers[2].copy_(worker.layers[1]),
    "another prompt": lambda worker: [layer.copy_(layer.roll(1, 0)) for layer in worker.layers],
    "one block": lambda worker: worker.layers[4][3].copy_(worker.layers[4][2]),
    "an exponent": lambda worker: worker.layers[0][6, 0, 0, 0].fill_(2.0**60),
    "no number": lambda worker: worker.layers[0][6, 0, 0, 0].fill_(math.nan),
}


def ends_of_blocks(worker: Worker) -> None:
    worker.layers[4][:, 1, 4:] = worker.layers[4].roll(1, 0)[:, 1, 4:]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bytes_have_no_difference(dtype: torch.dtype) -> None:
    assert Worker(dtype).compare(lambda worker: None) == [0.0]


@pytest.mark.parametrize("change", [rounded, other_experts])
def test_honest_differences_are_within_the_limit(change: Callable[[Worker], object]) -> None:
    assert 0.0 < Worker(torch.bfloat16).compare(change)[0] < LIMIT


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_beyond_the_limit(fault: str) -> None:
    assert Worker(torch.bfloat16).compare(FAULTS[fault])[0] > LIMIT


def test_with_experts_what_has_nothing_in_common_differs_and_a_few_tokens_do_not() -> None:
    def apart(change: Callable[[Worker], object]) -> float:
        return Worker(torch.bfloat16).compare(change, has_experts=True)[0]

    for change in (rounded, other_experts):
        assert apart(change) < LIMIT
    assert 0.3 < apart(lambda worker: worker.layers[3].mul_(1.5)) < 0.4
    for fault in ("another layer", "another prompt", "one block", "an exponent", "no number"):
        assert apart(FAULTS[fault]) == math.inf
    assert apart(ends_of_blocks) == math.inf


def tiles_of(worker: Worker) -> npt.NDArray[np.float64]:
    """The numbers of the blocks that are compared, [layers, blocks, tiles, 64], of long rows one tile in five."""
    numbers: npt.NDArray[np.float64] = worker.memory[:, worker.ids].double().numpy()
    tiles = numbers.reshape(LAYERS, len(worker.ids), -1, 64)
    return tiles if tiles.shape[2] < 512 else tiles[:, :, ::5]


@pytest.mark.parametrize("has_experts", [False, True])
@pytest.mark.parametrize("tokens", [TOKENS, 136, 800], ids=["short rows", "long rows", "blocks of megabytes"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_numbers_are_those_of_the_definition(dtype: torch.dtype, tokens: int, has_experts: bool) -> None:
    def change(worker: Worker) -> None:
        noise = torch.randn(worker.memory.shape, generator=torch.Generator().manual_seed(2))
        amount = torch.linspace(0.01, 0.4, LAYERS * BLOCKS).reshape(LAYERS, BLOCKS, 1, 1, 1)
        worker.memory.copy_((worker.memory.float() * (1 + noise * amount)).to(dtype))
        worker.layers[1][6] = worker.layers[1][7].clone()

    worker = Worker(dtype, tokens)
    stored = tiles_of(worker)
    found = worker.compare(change, has_experts)
    computed = tiles_of(worker)
    norms = np.linalg.norm(computed, axis=3)
    least: npt.NDArray[np.float64] = 1e-3 * norms.mean(axis=(1, 2), keepdims=True)
    tiles = np.minimum(np.linalg.norm(stored - computed, axis=3) / np.maximum(norms, least), 2.0)
    expected = np.maximum(tiles.mean(axis=(1, 2)), tiles.mean(axis=2).max(axis=1) / 4)
    if has_experts:
        expected = np.quantile(tiles.reshape(LAYERS, -1), 0.1, axis=1)
        expected[1] = math.inf  # a block of another prompt
    assert found == pytest.approx([expected.max(), *expected], rel=1e-3)


def test_a_difference_in_the_last_block_of_megabytes_is_found() -> None:
    found = Worker(torch.bfloat16, 800).compare(lambda worker: worker.layers[4][6].mul_(1.5))
    assert found == pytest.approx([1 / 12, 0, 0, 0, 0, 1 / 12, 0], rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("power", [-100, -60, 60, 100])
def test_very_large_and_small_numbers_differ_as_others_do(dtype: torch.dtype, power: int) -> None:
    def run(power: int) -> list[float]:
        worker = Worker(dtype)
        worker.memory *= 2.0**power
        return worker.compare(rounded)

    assert run(power) == pytest.approx(run(0), rel=1e-3)


def test_numbers_beside_infinite_ones_in_the_same_places_are_compared() -> None:
    worker, plain = Worker(torch.bfloat16), Worker(torch.bfloat16)
    for each in (worker, plain):
        each.memory[:, :, 0, 0, :4] = 0
    worker.memory[:, :, 0, 0, :4] = math.inf
    found, expected = worker.compare(rounded), plain.compare(rounded)
    assert 0 < found[0] < LIMIT
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_value_that_no_rounding_explains_is_seen_in_a_tile_that_is_skipped(dtype: torch.dtype, sign: int) -> None:
    def change(worker: Worker) -> None:
        worker.layers[2][3, 1, 7, 100:101].copy_(torch.full((1,), sign * 400.0))

    worker = Worker(dtype, 136)
    worker.memory.copy_(worker.memory.float().clamp(-2, 2))
    found = worker.compare(change)
    assert [i for i, number in enumerate(found) if number == math.inf] == [0, 3]


def test_parts_of_unknown_types_have_no_number() -> None:
    worker = Worker(torch.float32)
    layout = worker.blocks.layout
    half = layout.segments[0].size // 2
    types = [("float32", half), ("int8", half), ("bfloat16", 6 * half), ("float16", 3 * half), ("float32", half)]
    worker.blocks.layout = replace(layout, numbers=types)
    found = worker.compare(FAULTS["other values"])
    assert len(found) == 9
    assert [i for i, number in enumerate(found) if math.isnan(number)] == [2]


def view(dtype: str, item_bytes: int, numbers: tuple[tuple[str, int], ...] = ()) -> TensorView:
    shape, strides = (BLOCKS, 64), (64 * item_bytes, item_bytes)
    return TensorView("layer", "file", 1 << 20, 0, shape, strides, item_bytes, dtype, numbers=numbers)


def test_a_layout_names_the_data_types_of_a_block() -> None:
    state = (("bfloat16", 24), ("float32", 40))
    assert build_layout([view("bfloat16 writer", 2)], [0]).numbers == [("bfloat16", 128)]
    assert build_layout([view("int8", 1, state)], [0]).numbers == [*state]
    layout: Layout = replace(build_layout([view("int8", 1)], [0]), numbers=[("int8", 63)])
    with pytest.raises(LayoutError, match="blocks of 64 bytes"):
        layout.check()
