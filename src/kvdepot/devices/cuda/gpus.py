"""The GPUs in use and their workers' tensors, in the server. Imported when the first worker registers from a GPU.

A GPU is in use from its first worker's registration until its last worker has left and none has come for `idle_s`
seconds: an engine that restarts finds the context and the arena's registration as they were. Then everything is
released. A GPU is released at once if only that can heal it, and nothing is used on a GPU that no worker registered
from.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from kvdepot.devices.cuda.copy_paths import CopyPaths
from kvdepot.devices.cuda.driver import Driver, DriverError, load
from kvdepot.devices.cuda.pins import PIECE_BYTES, Pins
from kvdepot.devices.cuda.plan import Planner
from kvdepot.devices.cuda.sharing import Opened, open_allocation
from kvdepot.errors import DeviceError
from kvdepot.memory.copier import CopyPiece, Mapped, Memory
from kvdepot.protocol.layout import Layout
from kvdepot.protocol.status import Device

log = logging.getLogger(__name__)

_TASK_BYTES = 64 << 20


class Gpu:
    """One GPU in use: its context and copy paths. Created by `Gpus`."""

    def __init__(self, driver: Driver, uuid: str, staging_bytes: int, dma_from_bytes: int) -> None:
        """Creates the context. Raises DeviceError, and then keeps nothing."""
        self.driver = driver
        self.uuid = uuid
        self.device = driver.device(uuid)
        self.name = driver.name(self.device)
        self.registrations = 0
        self.idle_since = math.inf  # time.monotonic() when the last worker left; inf while there are workers
        self.failure = ""  # the driver's error of the last copy
        self.has_served = False  # a worker's memory has been mapped
        self.leaks = False  # memory of a worker could not be unmapped, so only the end of the context frees it
        before = _used_bytes(uuid)
        self.context = driver.retain(self.device)
        after = _used_bytes(uuid)
        # Another process may have freed memory in the meantime.
        self.context_bytes = after - before if before is not None and after is not None and after >= before else None
        try:
            with driver.current(self.context):
                self.copy_paths = CopyPaths(driver, self.device, staging_bytes, dma_from_bytes)
        except BaseException:
            driver.release(self.device)
            raise

    def __repr__(self) -> str:
        return f"<Gpu {self.uuid} {self.name}, {self.registrations} registrations>"

    def is_reusable(self) -> bool:
        """Whether another worker can use this GPU as it is; not if only a new context heals it: copies fail or have no
        buffers. Waits for the GPU."""
        if self.failure or self.leaks or self.copy_paths.lacks_memory or not self.has_served:
            return False
        try:
            with self.driver.current(self.context):
                self.driver.call("cuCtxSynchronize")  # reports a broken context
        except DeviceError as exc:
            log.info("%r cannot be used again: %s", self, exc)
            return False
        return True

    def close(self) -> None:
        """Release everything on this GPU. No copy may be in progress."""
        try:
            with self.driver.current(self.context):
                self.copy_paths.close()
        except DeviceError as exc:
            log.error("could not release %r cleanly: %s", self, exc)
        try:
            self.driver.release(self.device)
        except DeviceError as exc:
            log.error("could not release the context of %r: %s", self, exc)


class DeviceTensors(Mapped):
    """A worker's paged KV tensors on a GPU."""

    task_bytes = _TASK_BYTES

    def __init__(self, gpus: Gpus, gpu: Gpu, layout: Layout) -> None:
        """Maps the tensors. Raises LayoutError or DeviceError, and then keeps nothing mapped."""
        self.layout = layout
        self._gpus = gpus
        self._gpu: Gpu | None = gpu
        self._opened: list[Opened] = []
        try:
            with gpu.driver.current(gpu.context):
                for mapping in layout.mappings:
                    self._opened.append(open_allocation(gpu.driver, mapping))
        except BaseException:
            self._unmap(gpu)
            raise
        self._planner = Planner(layout, [opened.address for opened in self._opened])

    def lane(self, is_store: bool) -> str:
        """One lane for each direction of the GPU's bus."""
        return f"{self.layout.device} {'out' if is_store else 'in'}"

    def move(self, memory: Memory, pieces: Sequence[CopyPiece], is_store: bool) -> None:
        gpu, pins = self._gpu, self._gpus.pins
        assert gpu is not None, "a copy for tensors that were closed"
        address = memory.bytes.ctypes.data
        plan = self._planner.plan("store" if is_store else "retrieve", pieces, address, PIECE_BYTES)
        try:
            with ExitStack() as held:
                held.enter_context(gpu.driver.current(gpu.context))
                pinned = held.enter_context(pins.used(plan))
                slot = held.enter_context(gpu.copy_paths.slot())
                gpu.copy_paths.run(plan.only(pinned), slot)
                gpu.copy_paths.run_unpinned(plan.only(~pinned), slot)
        except DeviceError as exc:
            gpu.failure = str(exc)
            raise
        gpu.failure = ""

    def close(self) -> None:
        gpu, self._gpu = self._gpu, None
        if gpu is not None:
            try:
                self._unmap(gpu)
            finally:
                self._gpus.leave(gpu)

    def _unmap(self, gpu: Gpu) -> None:
        with ExitStack() as held:
            try:
                held.enter_context(gpu.driver.current(gpu.context))
            except DeviceError as exc:  # the context is lost; close the allocations anyway, for the bookkeeping
                log.error("the context of %r is broken: %s", gpu, exc)
                gpu.leaks = True
            for opened in self._opened:
                try:
                    opened.close()
                except DeviceError as exc:
                    log.error("could not unmap an allocation on %r: %s", gpu, exc)
                    gpu.leaks = True
        self._opened.clear()


class Gpus:
    """The GPUs in use. Any thread."""

    def __init__(self, memory: Memory, staging_bytes: int, idle_s: float, dma_from_bytes: int) -> None:
        self._driver = load()
        self._dma_from_bytes = dma_from_bytes
        self._staging_bytes = staging_bytes
        self._idle_s = idle_s
        self.pins = Pins(self._driver, memory)
        self._change = threading.Condition()  # guards the next two
        self._gpus: dict[str, Gpu] = {}
        self._turning: set[str] = set()  # GPUs being entered or left by some thread, which takes seconds

    def map(self, layout: Layout) -> DeviceTensors:
        """Map registered tensors. Blocks; for a GPU's first tensors also to create its context."""
        gpu = self._join(layout.device)
        try:
            mapped = DeviceTensors(self, gpu, layout)
        except BaseException:
            self.leave(gpu)
            raise
        gpu.has_served = True
        return mapped

    def _join(self, uuid: str) -> Gpu:
        """Add a registration. Meanwhile other threads can enter and leave other GPUs."""
        with self._change:
            self._change.wait_for(lambda: uuid not in self._turning)
            gpu = self._gpus.get(uuid)
            if gpu is not None and gpu.registrations:
                gpu.registrations += 1
                return gpu
            self._turning.add(uuid)
        try:
            if gpu is not None and not gpu.is_reusable():
                self._release([gpu])
                gpu = None
            if gpu is None:
                gpu = self._enter(uuid)
            with self._change:
                gpu.registrations, gpu.idle_since = 1, math.inf
                self.pins.attach(gpu.context)
                self._gpus[uuid] = gpu
        finally:
            self._turned(uuid)
        return gpu

    def _turned(self, uuid: str) -> None:
        with self._change:
            self._turning.discard(uuid)
            self._change.notify_all()

    def _enter(self, uuid: str) -> Gpu:
        try:
            gpu = Gpu(self._driver, uuid, self._staging_bytes, self._dma_from_bytes)
        except DriverError as exc:
            if exc.result != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            raise DeviceError(
                f"{exc}: {uuid} has no memory left for the server, which needs about 1 GiB; give the engine less "
                "(vLLM: --gpu-memory-utilization)"
            ) from exc
        chosen = "; ".join(
            f"{direction}s use {', '.join(f'{path} from {size} bytes on' if size else path for size, path in steps)}"
            for direction, steps in gpu.copy_paths.choice.items()
        )
        log.info("%s %s is in use: %s", gpu.name, uuid, chosen)
        if gpu.copy_paths.without:
            log.warning("small copies to %s will be slow: %s", uuid, gpu.copy_paths.without)
        return gpu

    def leave(self, gpu: Gpu) -> None:
        """Remove a registration. After the last one the GPU is kept for `idle_s`, or released if it is not reusable."""
        with self._change:
            gpu.registrations -= 1
            if gpu.registrations:
                return
            self._turning.add(gpu.uuid)
        try:
            if self._idle_s and gpu.is_reusable():
                gpu.idle_since = time.monotonic()
            else:
                self._release([gpu])
        finally:
            self._turned(gpu.uuid)

    def overdue(self, now: float) -> list[Gpu]:
        """The GPUs that have been without workers for `idle_s`. Never blocks."""
        return [gpu for gpu in tuple(self._gpus.values()) if now - gpu.idle_since >= self._idle_s]

    def release_idle(self, now: float) -> None:
        """Release the GPUs that are overdue, one by one. Blocks."""
        while True:
            with self._change:
                gpu = next((gpu for gpu in self.overdue(now) if gpu.uuid not in self._turning), None)
                if gpu is None:
                    return
                self._turning.add(gpu.uuid)  # until `_turned`, no worker can join it
            try:
                self._release([gpu])
            finally:
                self._turned(gpu.uuid)

    def _release(self, gone: Sequence[Gpu]) -> None:
        """Release everything on these GPUs, and pass the arena's registrations on to one that stays."""
        with self._change:
            for gpu in gone:
                del self._gpus[gpu.uuid]
            other = next((gpu for gpu in self._gpus.values() if gpu.registrations), None)
            for gpu in gone:
                self.pins.pass_on(gpu.context, other.context if other is not None else None)
        for gpu in gone:
            self.pins.give_up(gpu.context)
            gpu.close()
            self.pins.resume()
            log.info("%s %s is no longer in use", gpu.name, gpu.uuid)

    def status(self) -> list[Device]:
        """The GPUs in use. Never blocks."""
        return [
            Device(
                uuid=gpu.uuid,
                name=gpu.name,
                registrations=gpu.registrations,
                context_bytes=gpu.context_bytes,
                staging_bytes=gpu.copy_paths.device_bytes,
                copy_paths={str(direction): steps for direction, steps in gpu.copy_paths.choice.items()},
                pinned_bytes=self.pins.pinned_bytes,
                failure=gpu.failure,
            )
            for gpu in tuple(self._gpus.values())
        ]

    def close(self) -> None:
        """Release everything. No copy may be in progress. May be called twice."""
        self._release(list(self._gpus.values()))


def _used_bytes(uuid: str) -> int | None:
    """Bytes of a GPU's memory that are in use, by all processes; None if nvidia-ml-py is missing, or NVML fails."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            memory: Any = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid))
            return int(memory.used)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as exc:
        log.info("NVML does not report the memory in use on %s: %s", uuid, exc)
        return None
