"""How an engine's KV memory becomes visible to the server, and its bytes move: one module a kind of device.

`share` and `finish` are the client's end, `Devices` is the server's. The one law: nothing above knows which device it
is, and what a device needs (a driver, a context, pinned memory) is taken when the first worker registers from it.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from kvdepot.devices.cpu import HostTensors
from kvdepot.errors import LayoutError
from kvdepot.memory.copier import Mapped, Memory
from kvdepot.protocol.layout import Layout, TensorView
from kvdepot.protocol.status import Device

if TYPE_CHECKING:
    import torch

    from kvdepot.devices.cuda.gpus import Gpus

__all__ = ["Devices", "finish", "share"]


def share(tensor: torch.Tensor, name: str) -> TensorView:
    """Make one layer's tensor visible to another process of this host, and say where its elements lie.

    The process must keep the tensor's storage alive. Blocks. Raises LayoutError for what is no plain tensor on a device
    that can be shared, DeviceError where the device's driver refuses.
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
    """Raise LayoutError unless the bytes of a tensor's storage are its values, and all of them.

    Asked before the storage is touched: of some tensors that hold none, touching it kills the process.
    """
    torch = sys.modules.get("torch")  # until it has been imported, nothing is a torch.Tensor
    if not isinstance(name, str) or name != name.encode(errors="ignore").decode():
        raise LayoutError(f"a layer's name must be valid UTF-8 text, not {name!r:.80}")
    called = name or "tensor"
    if torch is None or not isinstance(tensor, torch.Tensor):
        if hasattr(tensor, "untyped_storage"):
            return  # made to look like a tensor, over memory that torch does not have
        kind = type(tensor)
        raise LayoutError(f"{called} is a {kind.__module__}.{kind.__qualname__}, not a torch.Tensor")
    if tensor.is_nested:
        what = "a nested tensor"  # which may have no shape
    elif tensor.layout is not torch.strided:
        what = f"of layout {tensor.layout}, shape {list(tensor.shape)}"
    elif type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        what = f"a {type(tensor).__qualname__}, which wraps other tensors"
    elif tensor.is_quantized:
        what = "quantized: its scales lie outside its bytes"
    elif tensor.is_conj() or tensor.is_neg():
        what = "a lazy conjugate or negative: resolve_conj() and resolve_neg() write it out"
    elif not tensor.numel():
        what = f"empty, shape {list(tensor.shape)}"
    else:
        return
    raise LayoutError(f"{called} is {what}: only strided tensors that store all their values can be shared")


def finish(device: str) -> None:
    """Wait until a device (as in layout.Mapping) has done what this process asked of it so far. Raises DeviceError.

    Blocks. The processor has: what computes on it returns when it is done.
    """
    if device:
        from kvdepot.devices.cuda import order

        order.finish(device)


class Devices:
    """The server's end: maps registered tensors, whatever memory they are in. Any thread."""

    def __init__(self, memory: Memory, staging_bytes: int) -> None:
        """memory: the arena. staging_bytes: device memory that a GPU's copies may take for themselves."""
        self._memory = memory
        self._staging_bytes = staging_bytes
        self._lock = threading.Lock()
        self._gpus: Gpus | None = None

    def map(self, layout: Layout) -> Mapped:
        """Blocks while memory is mapped. Raises LayoutError or DeviceError with nothing kept."""
        if not layout.device:
            return HostTensors.open(layout)
        with self._lock:
            if self._gpus is None:
                from kvdepot.devices.cuda.gpus import Gpus

                self._gpus = Gpus(self._memory, self._staging_bytes)
        return self._gpus.map(layout)

    def status(self) -> list[Device]:
        """Each GPU that is in use. Never blocks."""
        return self._gpus.status() if self._gpus is not None else []

    def close(self) -> None:
        """Give back what is left; no copy may be under way. Safe twice."""
        if self._gpus is not None:
            self._gpus.close()
