"""The engine's KV tensors: where their bytes are, and how they move. One module per kind of memory.

Used in the engine's worker, which copies its own blocks; the server never sees a tensor. Nothing is moved or mapped:
tensors stay where the engine has allocated them.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from kvdepot.devices.blocks import BlockMemory, DeviceEvent
from kvdepot.devices.host import HostBlocks
from kvdepot.errors import LayoutError
from kvdepot.memory.extents import Bytes
from kvdepot.protocol.layout import Layout, TensorView

if TYPE_CHECKING:
    import torch

__all__ = ["BlockMemory", "describe", "open_blocks", "record_event"]


def describe(tensor: torch.Tensor, name: str) -> TensorView:
    """Where the elements of one layer's tensor are in its storage. Moves and maps nothing; never blocks.

    The storage's address names its mapping. Raises LayoutError if it is not a plain tensor in memory.
    """
    _check_plain(tensor, name)
    storage, item = tensor.untyped_storage(), tensor.element_size()
    return TensorView(
        name=name,
        mapping=_name(storage),
        mapping_bytes=storage.nbytes(),
        offset=tensor.storage_offset() * item,
        shape=tuple(tensor.shape),
        strides=tuple(stride * item for stride in tensor.stride()),
        item_bytes=item,
        dtype=str(tensor.dtype).removeprefix("torch."),
    )


def open_blocks(layout: Layout, tensors: Iterable[torch.Tensor]) -> BlockMemory:
    """The blocks of tensors that `layout` was made of, for copies to and from an arena. Keeps their storages alive.

    Blocks while staging memory is allocated on an accelerator. Raises LayoutError if the tensors are on several devices
    or are not those of the layout, DeviceError if the device has no memory for staging or cannot be used by torch.
    """
    storages = {_name(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    devices = {storage.device for storage in storages.values()}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices))) or "none"
        raise LayoutError(f"the layers of one KV cache group must be on one device, not on {names}")
    for mapping in layout.mappings:
        if mapping.name not in storages or storages[mapping.name].nbytes() != mapping.size:
            raise LayoutError(f"none of the tensors has its storage of {mapping.size} bytes at {mapping.name}")
    (device,) = devices
    if device.type == "cpu":
        return HostBlocks(layout, {each.name: _host_bytes(storages[each.name]) for each in layout.mappings})
    from kvdepot.devices.accelerator import AcceleratorBlocks

    return AcceleratorBlocks(layout, storages, device)


def record_event(device: torch.device | None) -> DeviceEvent | None:
    """An event behind all work that this thread has queued on its current stream of a device. None on the processor
    (None or "cpu"), where all work has ended. Never blocks."""
    if device is None or device.type == "cpu":
        return None
    import torch

    module = torch.get_device_module(device)
    event = module.Event()
    event.record(module.current_stream(device))
    return event  # type: ignore[no-any-return]


def _name(storage: torch.UntypedStorage) -> str:
    return f"{storage.data_ptr():x}"


def _host_bytes(storage: torch.UntypedStorage) -> Bytes:
    """The bytes of a storage. `Tensor.numpy` would forbid torch to resize it."""
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    memory.storage = storage  # the array keeps `memory`, and with it the storage
    return np.ctypeslib.as_array(memory)


def _check_plain(tensor: object, name: object) -> None:
    """Raise LayoutError unless a tensor's storage contains exactly its values; before it is accessed, which can kill
    the process."""
    torch = sys.modules.get("torch")  # until it has been imported, nothing is a torch.Tensor
    if not isinstance(name, str) or name != name.encode(errors="ignore").decode():
        raise LayoutError(f"a layer's name must be valid UTF-8 text, not {name!r:.80}")
    called = name or "tensor"
    if torch is None or not isinstance(tensor, torch.Tensor):
        kind = type(tensor)
        raise LayoutError(f"{called} is a {kind.__module__}.{kind.__qualname__}, not a torch.Tensor")
    if tensor.is_nested:
        what = "a nested tensor"  # it may have no shape
    elif tensor.layout is not torch.strided:
        what = f"of layout {tensor.layout}, shape {list(tensor.shape)}"
    elif type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        what = f"a {type(tensor).__qualname__}, which wraps other tensors"
    elif tensor.is_quantized:
        what = "quantized: its scales are stored elsewhere"
    elif tensor.is_conj() or tensor.is_neg():
        what = "a lazy conjugate or negative: resolve_conj() and resolve_neg() write it out"
    elif not tensor.numel():
        what = f"empty, shape {list(tensor.shape)}"
    elif tensor.device.type == "meta" or not tensor.untyped_storage().data_ptr():
        what = f"without memory, on {tensor.device}"
    else:
        return
    raise LayoutError(f"{called} is {what}: only strided tensors that store all their values can be cached")
