"""Another process that keeps a GPU busy, as an engine does, while `kvdepot calibrate --busy` measures the copy paths.

It has its own context, because kernels of two processes share a GPU by time slices. Its kernels copy within the GPU on
all multiprocessors. `main` is that process; it ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import subprocess
import sys
import time

import numpy as np

from kvdepot.devices.cuda.driver import Driver, load
from kvdepot.devices.cuda.kernel import TILE_BYTES, CopyKernel
from kvdepot.errors import DeviceError
from kvdepot.processes import code_command

_CODE = "import sys; from kvdepot.devices.cuda.occupant import main; main(sys.argv[1], int(sys.argv[2]))"
_START_S = 60.0
_END_S = 5.0
_POLL_S = 0.02
_ROWS = 4096
"""Tiles that one kernel copies: 64 MiB, which no GPU's cache holds."""
_BATCH_S = 0.001
_MOST_KERNELS = 64
_PROGRAMS = 2
"""Thread blocks for each multiprocessor: as many as fit."""


class Occupant:
    """A process that keeps one GPU busy until `close`."""

    def __init__(self, uuid: str) -> None:
        """Start it, and wait until its kernels run. Raises DeviceError."""
        fd = os.memfd_create("kvdepot-occupant")
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            self._counter = np.frombuffer(mmap.mmap(fd, mmap.PAGESIZE), np.int64)
            self._process = subprocess.Popen(
                code_command(_CODE, uuid, str(fd)),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[fd],
                start_new_session=True,  # an interrupt reaches this process alone, which ends it
            )
        finally:
            os.close(fd)
        deadline = time.monotonic() + _START_S
        try:
            while not self.count():
                if time.monotonic() > deadline:
                    raise DeviceError(f"the process that keeps {uuid} busy has not started within {_START_S:.0f} s")
                time.sleep(_POLL_S)
        except BaseException:
            self.close()
            raise

    def count(self) -> int:
        """The number of batches of its kernels that have ended. Raises DeviceError if the process has ended."""
        if self._process.poll() is not None:
            assert self._process.stderr is not None
            lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
            why = lines[-1] if lines else f"exit code {self._process.returncode}"
            raise DeviceError(f"the process that keeps the GPU busy has ended: {why}")
        return int(self._counter[0])

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # it waits for a GPU that does not answer
            self._process.kill()
            self._process.wait()
        self._process.stderr.close()


def main(uuid: str, fd: int) -> None:
    """Keep a GPU busy until standard input ends; count batches of kernels in the first 8 bytes of a file."""
    try:
        driver = load()
        device = driver.device(uuid)
        with driver.current(driver.retain(device)):
            _occupy(driver, device, np.frombuffer(mmap.mmap(fd, mmap.PAGESIZE), np.int64))
        driver.release(device)
    except DeviceError as exc:
        sys.exit(str(exc))


def _occupy(driver: Driver, device: int, counter: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    kernel = CopyKernel(driver, device)
    size = _ROWS * TILE_BYTES
    memory = int(driver.call("cuMemAlloc", 2 * size))
    rows = memory + np.arange(_ROWS, dtype=np.int64) * TILE_BYTES
    table = np.stack([rows + size, rows, np.full_like(rows, TILE_BYTES)], axis=1)
    there = int(driver.call("cuMemAlloc", table.nbytes))
    driver.call("cuMemcpyHtoD", there, table.ctypes.data, table.nbytes)
    multiprocessors = driver.cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    programs = _PROGRAMS * driver.call("cuDeviceGetAttribute", multiprocessors, device)
    flags = int(driver.cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
    streams = [int(driver.call("cuStreamCreate", flags)) for _ in range(2)]
    try:
        count = 1
        for _ in range(2):  # the first launch loads the kernel
            begun = time.perf_counter()
            kernel.launch(there, _ROWS, streams[0], programs)
            driver.call("cuStreamSynchronize", streams[0])
            count = max(1, min(_MOST_KERNELS, int(_BATCH_S / (time.perf_counter() - begun))))
        while not select.select([sys.stdin], [], [], 0)[0]:
            for stream in streams:  # while one is waited for, the other has work
                driver.call("cuStreamSynchronize", stream)
                for _ in range(count):
                    kernel.launch(there, _ROWS, stream, programs)
                counter[0] += 1
    finally:
        for stream in streams:
            driver.call("cuStreamSynchronize", stream)
            driver.call("cuStreamDestroy", stream)
        driver.call("cuMemFree", there)
        driver.call("cuMemFree", memory)
        kernel.close()
