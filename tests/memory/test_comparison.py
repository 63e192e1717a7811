"""Comparisons of stored chunks with computed blocks: what rounding makes of them, and what faults do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from kvdepot.devices import share
from kvdepot.devices.cpu import HostTensors
from kvdepot.errors import LayoutError
from kvdepot.memory.allocator import PAGE
from kvdepot.memory.comparison import compare, compare_with_experts
from kvdepot.memory.copier import Copy, CopyPiece, copy
from kvdepot.protocol.layout import Layout, TensorView, build_layout
from tests.devices.conformance import arena_of

LAYERS, BLOCKS, TOKENS, HEADS, DIM = 6, 8, 16, 2, 64
LIMIT = 4 * 2**-7 * math.sqrt(LAYERS)
"""The limit that an engine of as many layers asks for, in bfloat16."""


class Worker:
    """Paged KV [blocks, heads, tokens, keys and values] by layer; chunk 0 is stored, from the blocks `ids`."""

    def __init__(self, dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(0)
        shape = BLOCKS, HEADS, TOKENS, 2, DIM
        self.layers = []
        for _ in range(LAYERS):
            values = torch.randn(shape, generator=draw)
            values[..., 0, :] *= 50  # keys are larger than values
            self.layers.append(values.flatten(3).to(dtype))
        views = [share(layer, f"layer {i}") for i, layer in enumerate(self.layers)]
        self.layout = build_layout(views, [0] * LAYERS)
        self.ids = np.array([5, 0, 3, 6], np.intp)
        self.extents = ((4 * PAGE, 64 * PAGE), (80 * PAGE, 400 * PAGE))

    def values(self, layer: int) -> torch.Tensor:
        """The keys and values of a layer, in another axis; a view."""
        return self.layers[layer].unflatten(3, (2, DIM))


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


def other_values(worker: Worker) -> None:
    worker.values(3)[..., 1, :] *= 1.5


def other_keys(worker: Worker) -> None:
    worker.values(3)[..., 0, :] = worker.values(3)[..., 0, :].roll(1, -1)


def another_layer(worker: Worker) -> None:
    worker.layers[2].copy_(worker.layers[1])


def another_prompt(worker: Worker) -> None:
    for layer in worker.layers:
        layer.copy_(layer.roll(1, 0))


def one_block(worker: Worker) -> None:
    worker.layers[4][3] = worker.layers[4][2]


def ends_of_blocks(worker: Worker) -> None:
    worker.layers[4][:, 1, 4:] = worker.layers[4].roll(1, 0)[:, 1, 4:]


def exponent(worker: Worker) -> None:
    worker.layers[0][6, 0, 0, 0] = 2.0**60


def no_number(worker: Worker) -> None:
    worker.layers[0][6, 0, 0, 0] = math.nan


@pytest.fixture
def compared() -> Iterator[Callable[..., float]]:
    """Store the chunk of a worker, change its blocks, and compare them."""
    opened: list[HostTensors] = []

    def run(dtype: torch.dtype, change: Callable[[Worker], None], compare: Callable[..., Any] = compare) -> float:
        worker = Worker(dtype)
        mapped = HostTensors.open(worker.layout)
        opened.append(mapped)
        with arena_of(500) as arena:
            piece = CopyPiece(worker.extents, worker.ids)
            assert copy(arena, Copy(None, True, mapped, [piece]))
            before = arena.bytes.copy()
            change(worker)
            found = compare(arena, Copy(None, True, mapped, [piece]))
            assert found is not None
            assert np.array_equal(arena.bytes, before), "comparing changed the arena"
        return found[0][0]

    yield run
    for mapped in opened:
        mapped.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_same_bytes_have_no_difference(compared: Callable[..., float], dtype: torch.dtype) -> None:
    assert compared(dtype, lambda worker: None) == 0.0


@pytest.mark.parametrize("change", [rounded, other_experts])
def test_honest_differences_are_within_the_limit(
    compared: Callable[..., float], change: Callable[[Worker], None]
) -> None:
    assert 0.0 < compared(torch.bfloat16, change) < LIMIT


@pytest.mark.parametrize(
    "change", [other_values, other_keys, another_layer, another_prompt, one_block, exponent, no_number]
)
def test_faults_are_beyond_the_limit(compared: Callable[..., float], change: Callable[[Worker], None]) -> None:
    assert compared(torch.bfloat16, change) > LIMIT


def test_with_experts_what_has_nothing_in_common_differs_and_a_few_tokens_do_not(
    compared: Callable[..., float],
) -> None:
    for change in (rounded, other_experts):
        assert compared(torch.bfloat16, change, compare_with_experts) < LIMIT
    assert 0.3 < compared(torch.bfloat16, lambda worker: worker.layers[3].mul_(1.5), compare_with_experts) < 0.4
    for change in (another_layer, another_prompt, one_block, ends_of_blocks, exponent, no_number):
        assert compared(torch.bfloat16, change, compare_with_experts) == math.inf


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_8_bit_floats_are_numbers(compared: Callable[..., float], dtype: torch.dtype) -> None:
    def halve(worker: Worker) -> None:
        for layer in worker.layers:
            layer.copy_((layer.float() / 2).to(dtype))

    assert 0.4 < compared(dtype, halve) < 1.1  # 0.5 / 1 or 1 / 1, by which of both is computed


def test_a_raised_fence_ends_a_comparison() -> None:
    worker = Worker(torch.float32)
    mapped = HostTensors.open(worker.layout)
    with arena_of(500) as arena:
        piece = CopyPiece(worker.extents, worker.ids)
        assert compare(arena, Copy(None, True, mapped, [piece], fence=lambda: 7, ticket=7)) is None
    mapped.close()


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
