"""CPU tensors: their storage moves into POSIX shared memory, in place. Called by the client; needs torch."""

from __future__ import annotations

import torch

from kvdepot.errors import LayoutError
from kvdepot.layout import TensorView
from kvdepot.shm import SHM

__all__ = ["share"]


def share(tensor: torch.Tensor, name: str) -> TensorView:
    """Put a tensor's storage into shared memory (once) and say where its elements lie.

    All tensors on the same storage move with it and stay valid. Blocks while the bytes are copied, about 3 s a GiB.
    torch removes the file when the process ends, `kill -9` included. Raises LayoutError for other devices.
    """
    if tensor.device.type != "cpu":
        raise LayoutError(f"{name or 'tensor'} is on {tensor.device}: only CPU tensors can be shared so far")
    storage = tensor.untyped_storage()
    try:
        _, file, size = storage._share_filename_cpu_()
    except RuntimeError as exc:
        raise LayoutError(f"{name or 'tensor'} cannot move into shared memory: {exc}") from exc
    mapping = file.decode().lstrip("/")
    # torch keeps a reference count in front of the bytes; how long that is, the file's length tells.
    header = (SHM / mapping).stat().st_size - size
    if header < 0:
        raise LayoutError(f"{name or 'tensor'}: torch made {mapping} shorter than its storage of {size} bytes")
    item = tensor.element_size()
    return TensorView(
        name=name,
        mapping=mapping,
        mapping_bytes=header + size,
        offset=header + tensor.storage_offset() * item,
        shape=tuple(tensor.shape),
        strides=tuple(stride * item for stride in tensor.stride()),
        item_bytes=item,
        dtype=str(tensor.dtype).removeprefix("torch."),
    )
