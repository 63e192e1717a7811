"""What tensors are described and opened, and what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvdepot.devices import describe, open_blocks, record_event
from kvdepot.devices.blocks import CopyPiece
from kvdepot.errors import LayoutError
from kvdepot.memory.allocator import PAGE
from kvdepot.protocol.layout import build_layout
from tests.devices.conformance import Memory


def test_a_tensor_stays_where_it_is_and_keeps_its_arrays() -> None:
    whole = torch.arange(2 * 8 * 16, dtype=torch.int16).view(2, 8, 16)
    array, address = whole.numpy(), whole.data_ptr()
    view = describe(whole[1, 2:], "a layer")
    assert view.mapping_bytes == whole.nbytes and view.offset == (128 + 32) * 2
    assert view.shape == (6, 16) and view.strides == (32, 2) and view.item_bytes == 2 and view.dtype == "int16"
    assert whole.data_ptr() == address and not whole.untyped_storage().is_shared()
    whole[0, 0, 0] = 99
    assert array[0, 0, 0] == 99


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: np.zeros((4, 4)), "a numpy.ndarray, not a torch.Tensor"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "a nested tensor"),
        (lambda: torch.zeros(4, 4).to_sparse(), "of layout torch.sparse_coo"),
        (lambda: torch.quantize_per_tensor(torch.zeros(4, 4), 0.1, 0, torch.quint8), "quantized"),
        (lambda: torch.zeros(4, 4, dtype=torch.complex64).conj(), "a lazy conjugate"),
        (lambda: torch.zeros(0, 4), "empty, shape"),
        (lambda: torch.zeros(4, 4, device="meta"), "without memory, on meta"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_does_not_store_its_values_is_refused(make: Callable[[], torch.Tensor], what: str) -> None:
    with pytest.raises(LayoutError, match=f"a layer is {what}"):
        describe(make(), "a layer")


def test_a_name_that_is_no_text_is_refused() -> None:
    for name in ("\udc80", 5):
        with pytest.raises(LayoutError, match="a layer's name must be valid UTF-8"):
            describe(torch.zeros(4, 4), name)  # type: ignore[arg-type]


def test_tensors_on_several_devices_or_of_another_layout_are_refused() -> None:
    tensor = torch.zeros(4, 4)
    layout = build_layout([describe(tensor, "a layer")], [0])
    for others, said in (
        ([tensor, torch.zeros(4, 4, device="meta")], "must be on one device, not on cpu, meta"),
        ([torch.zeros(4, 4)], "none of the tensors has its storage"),
        ([], "not on none"),
    ):
        with pytest.raises(LayoutError, match=said):
            open_blocks(layout, others)


def test_opened_blocks_keep_the_storage_alive_and_no_longer() -> None:
    tensor = torch.zeros(4, PAGE, dtype=torch.uint8)
    blocks = open_blocks(build_layout([describe(tensor, "a layer")], [0]), [tensor])
    view = tensor[2].numpy().copy()
    storage = weakref.ref(tensor.untyped_storage())
    del tensor
    arena = Memory(4)
    blocks.move(arena, [CopyPiece(((0, PAGE),), np.array([2]))], True)
    assert np.array_equal(arena.bytes[:PAGE], view) and storage() is not None
    del blocks
    gc.collect()
    assert storage() is None


def test_the_processor_needs_no_event() -> None:
    assert record_event(None) is None
    assert record_event(torch.device("cpu")) is None
