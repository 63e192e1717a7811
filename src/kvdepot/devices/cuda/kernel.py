"""Launches the copy kernel: thread blocks copy within the GPU, row by row of a table, for `staged` (copy_paths.py).

The GPU's context must be current in every call.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import subprocess
from typing import TYPE_CHECKING

import msgspec

from kvdepot.errors import DeviceError
from kvdepot.processes import code_command

if TYPE_CHECKING:
    from kvdepot.devices.cuda.driver import Driver

TILE_BYTES = 16 << 10
"""Largest copy of one row of the table."""

_COMPILER = "import sys; from kvdepot.devices.cuda.copy_rows import main; main(int(sys.argv[1]))"
_COMPILE_S = 20.0
"""Shorter than a worker waits for its registration."""
_PARAMETERS = 2
_SHARED_BYTES = 48 << 10


class Compiled(msgspec.Struct, frozen=True):
    """Machine code for one kind of GPU, and how to launch it."""

    name: str
    cubin: bytes
    threads: int
    parameters: int  # 8 bytes each; those behind ours are scratch memory, of which newer versions of Triton have more
    shared_bytes: int
    scratch_bytes: int
    blocks_per_cluster: int

    def refuse(self) -> None:
        """Raise DeviceError for a kernel that needs more than `launch` provides."""
        wants = []
        if self.scratch_bytes:
            wants.append(f"{self.scratch_bytes} bytes of scratch memory")
        if self.shared_bytes > _SHARED_BYTES:
            wants.append(f"{self.shared_bytes} bytes of shared memory")
        if self.blocks_per_cluster != 1:
            wants.append(f"clusters of {self.blocks_per_cluster} blocks")
        if self.parameters < _PARAMETERS:
            wants.append(f"{self.parameters} parameters")
        if wants:
            raise DeviceError(f"this Triton builds a copy kernel that needs {', '.join(wants)}: use Triton 3.4 to 3.9")


class CopyKernel:
    """The kernel, loaded into one GPU's context."""

    def __init__(self, driver: Driver, device: int) -> None:
        """Compile for this device (once per process and kind of GPU) and load. Blocks for a second or two. Raises
        DeviceError, and then keeps nothing, if Triton is missing or fails, or the driver refuses."""
        attribute = driver.cu.CUdevice_attribute
        major = driver.call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        minor = driver.call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
        self._driver = driver
        self._compiled = compiled(major * 10 + minor)
        self._module = driver.call("cuModuleLoadData", self._compiled.cubin)
        try:
            self._function = driver.call("cuModuleGetFunction", self._module, self._compiled.name.encode())
        except DeviceError:
            self.close()
            raise
        scratch = self._compiled.parameters - _PARAMETERS
        self._nulls = (0,) * scratch
        self._types = (ctypes.c_void_p, ctypes.c_int64) + (ctypes.c_void_p,) * scratch

    def launch(self, table: int, count: int, stream: int, programs: int) -> None:
        """Enqueue the copies on a stream, with at most `programs` thread blocks. Never blocks. Raises DeviceError.

        table: device address of int64[count, 3] = (destination, source, bytes), which must not change until the kernel
        has run. Addresses and bytes are multiples of 16, bytes at most TILE_BYTES; no row may write what another reads
        or writes.
        """
        if not count:
            return
        grid, block = (min(programs, count), 1, 1), (self._compiled.threads, 1, 1)
        parameters = ((table, count, *self._nulls), self._types)
        shared = self._compiled.shared_bytes
        self._driver.call("cuLaunchKernel", self._function, *grid, *block, shared, stream, parameters, 0)

    def close(self) -> None:
        """Unload the kernel; it must not be running. May be called twice."""
        if self._module is not None:
            module, self._module = self._module, None
            self._driver.call("cuModuleUnload", module)


@functools.cache
def compiled(arch: int) -> Compiled:
    """The kernel for GPUs of compute capability `arch` (90 is 9.0). Blocks for a second or two the first time.

    A separate process compiles it, so the server neither stops nor grows. After a DeviceError the next call retries.
    """
    if importlib.util.find_spec("triton") is None:
        raise DeviceError("the copy kernel needs Triton, which is not installed: pip install triton")
    command = code_command(_COMPILER, str(arch))
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMPILE_S, check=True)
        made = msgspec.json.decode(b"".join(done.stdout.splitlines()[-1:]), type=Compiled)
    except subprocess.CalledProcessError as exc:
        said = exc.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {exc.returncode}"]
        raise DeviceError(f"Triton cannot compile the copy kernel for sm_{arch}: {said[-1]}") from exc
    except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError) as exc:
        raise DeviceError(f"Triton cannot compile the copy kernel for sm_{arch}: {exc}") from exc
    made.refuse()
    return made
