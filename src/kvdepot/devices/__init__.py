"""Device memory: how the server maps an engine's KV tensors, and how their bytes move. One module per kind of device.

The client calls `share` and `finish`, the server uses `Devices`. Resources of a device (driver, context, pinned memory)
are acquired when the first worker registers from it, and kept for some time after the last one has left.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from kvdepot.devices.by_client import CopiedByClient
from kvdepot.devices.cpu import HostTensors
from kvdepot.devices.cuda import DMA_FROM_BYTES
from kvdepot.errors import LayoutError
from kvdepot.memory.copier import Mapped, Memory
from kvdepot.protocol.layout import BY_CLIENT, Layout, TensorView
from kvdepot.protocol.status import Device

if TYPE_CHECKING:
    import torch

    from kvdepot.devices.cuda.gpus import Gpus


def share(tensor: torch.Tensor, name: str) -> TensorView:
    """Make one layer's tensor visible to other processes of this host, and describe where its elements are.

    The process must keep the tensor's storage alive. Blocks. Raises LayoutError if it is not a plain tensor on a
    supported device, DeviceError if the device's driver refuses.
    """
    _check_plain(tensor, name)
    if tensor.device.type == "cpu":
        from kvdepot.devices import cpu

        return cpu.share(tensor, name)
    if tensor.device.type == "cuda":
        from kvdepot.devices.cuda import sharing

        return sharing.share(tensor, name)
    raise LayoutError(f"{name or 'tensor'} is on {tensor.device}: only CPU and CUDA tensors can be shared")


def _check_plain(tensor: object, name: object) -> None:
    """Raise LayoutError unless a tensor's storage contains exactly its values; before it is accessed, which can kill
    the process."""
    torch = sys.modules.get("torch")  # until it has been imported, nothing is a torch.Tensor
    if not isinstance(name, str) or name != name.encode(errors="ignore").decode():
        raise LayoutError(f"a layer's name must be valid UTF-8 text, not {name!r:.80}")
    called = name or "tensor"
    if torch is None or not isinstance(tensor, torch.Tensor):
        if hasattr(tensor, "untyped_storage"):
            return  # imitates a tensor, over memory that torch does not own
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
    else:
        return
    raise LayoutError(f"{called} is {what}: only strided tensors that store all their values can be shared")


def finish(device: str) -> None:
    """Wait until a device (as in layout.Mapping) has finished all work that this process has submitted so far; the
    CPU's is synchronous. Raises DeviceError."""
    if device:
        from kvdepot.devices.cuda import sharing

        sharing.finish(device)


class Devices:
    """Maps registered tensors in the server. Any thread."""

    def __init__(
        self,
        memory: Memory,
        staging_bytes: int,
        idle_s: float = 0.0,
        dma_from_bytes: int = DMA_FROM_BYTES,
        owner: tuple[str, bytes] = ("", b""),
    ) -> None:
        """memory: the arena. staging_bytes: GPU memory that the copy paths of one GPU may use for buffers. idle_s:
        seconds for which a GPU without workers is kept; call `release_idle` every second or so. dma_from_bytes: the
        size from which on copies are left to the copy engines. owner: name and boot id of the arena."""
        self._owner = owner
        self._memory = memory
        self._limits = staging_bytes, idle_s, dma_from_bytes
        self._lock = threading.Lock()
        self._gpus: Gpus | None = None

    def map(self, layout: Layout) -> Mapped:
        """Map the tensors of a layout. Blocks. Raises LayoutError or DeviceError, and then keeps nothing mapped."""
        if not layout.device:
            return HostTensors.open(layout)
        if layout.device == BY_CLIENT:
            return CopiedByClient(layout, self._owner)
        with self._lock:
            if self._gpus is None:
                from kvdepot.devices.cuda.gpus import Gpus

                self._gpus = Gpus(self._memory, *self._limits)
        return self._gpus.map(layout)

    def is_overdue(self, now: float) -> bool:
        """Whether `release_idle` has something to do at this time.monotonic(). Never blocks."""
        return self._gpus is not None and bool(self._gpus.overdue(now))

    def release_idle(self, now: float) -> None:
        """Release the GPUs that have been without workers for `idle_s`. Blocks."""
        if self._gpus is not None:
            self._gpus.release_idle(now)

    def status(self) -> list[Device]:
        """The GPUs in use, also those that are kept without workers. Never blocks."""
        return self._gpus.status() if self._gpus is not None else []

    def close(self) -> None:
        """Release everything; no copy may be in progress. May be called twice."""
        if self._gpus is not None:
            self._gpus.close()
