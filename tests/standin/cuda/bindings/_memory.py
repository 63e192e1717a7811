"""Device memory, host memory that is registered, and the addresses of both in this process.

Device memory lies in files; its addresses are those of the files' mappings plus a number that makes them none of the
processor's: whoever reads device memory without the driver dies, as on a real GPU.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuda.bindings._process import Process, Refused
from cuda.bindings._types import CUresult

BIAS = 1 << 50
"""Device addresses begin here: no processor's address is that high."""
BASE_OFFSET = 512
"""How far behind a page's start plain allocations begin: no more is promised of their alignment."""
GRANULE = 2 << 20
"""Of virtual memory."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value


def _map(size: int, fd: int, at: int = 0) -> int:
    flags = mmap.MAP_SHARED | (_MAP_FIXED if at else 0)
    address = _libc.mmap(at or None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address == _FAILED:
        raise Refused(CUresult.CUDA_ERROR_MAP_FAILED)
    return int(address)


def _reserve(size: int, at: int = 0) -> int:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | (_MAP_FIXED if at else 0)
    address = _libc.mmap(at or None, size, 0, flags, -1, 0)
    if address == _FAILED:
        raise Refused(CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    return int(address)


@dataclass(eq=False)
class Physical:
    """Memory of a GPU: a file that is open here, once for everything in this process that uses it."""

    name: str  # the same in every process
    device: int
    size: int
    fd: int
    path: Path | None = None  # where it is a plain allocation of this process
    handle_types: int = 0
    uses: int = 0


@dataclass(eq=False)
class Range:
    """Addresses `[start, start + size)` of one kind."""

    kind: str  # "alloc", "ipc", "virtual" (mapped), "host" (registered), "hostalloc"
    start: int
    size: int
    context: int  # 0: of all contexts of the process
    device: int
    physical: Physical | None = None
    handle: bytes = b""
    uses: int = 1
    access: bool = True
    generic: int = 0

    @property
    def end(self) -> int:
        return self.start + self.size

    def __str__(self) -> str:
        return f"{self.kind} memory {self.start:#x}..{self.end:#x}"


@dataclass(eq=False)
class Memory:
    """All ranges of this process."""

    process: Process
    ranges: list[Range] = field(default_factory=list)  # by start
    physicals: dict[str, Physical] = field(default_factory=dict)
    generics: dict[int, tuple[Physical, int]] = field(default_factory=dict)  # handle -> memory, holds
    reserved: dict[int, int] = field(default_factory=dict)
    number: int = 0

    # -- ranges

    def at(self, address: int) -> Range | None:
        """The range that an address lies in."""
        i = bisect.bisect_right(self.ranges, address, key=lambda found: found.start) - 1
        return self.ranges[i] if i >= 0 and address < self.ranges[i].end else None

    def overlapping(self, address: int, size: int) -> list[Range]:
        i = bisect.bisect_right(self.ranges, address, key=lambda found: found.start)
        first = i - 1 if i and self.ranges[i - 1].end > address else i
        found = []
        while first < len(self.ranges) and self.ranges[first].start < address + size:
            found.append(self.ranges[first])
            first += 1
        return found

    def add(self, made: Range) -> Range:
        bisect.insort(self.ranges, made, key=lambda found: found.start)
        self.process.held[made.kind] += 1
        self.process.write()
        return made

    def remove(self, gone: Range) -> None:
        self.ranges.remove(gone)
        self.process.held[gone.kind] -= 1

    def starting(self, address: int, *kinds: str) -> Range:
        """The range of one of these kinds that begins here. Raises Refused."""
        found = self.at(address)
        if found is None or found.start != address or found.kind not in kinds:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        return found

    def host_address(self, address: int, size: int, context: int, for_kernel: bool = False) -> tuple[int, bool]:
        """Where these bytes really are, and whether a GPU reaches them. Raises Refused for what one may not touch."""
        if size < 1:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        found = self.overlapping(address, size)
        if address >= BIAS:
            covered = address
            for part in found:  # virtual memory may go on in the next mapping
                if part.start > covered or (part is not found[0] and part.kind != "virtual") or not part.access:
                    raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
                if part.kind != "virtual" and part.context != context:
                    raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
                covered = part.end
            if covered < address + size:
                raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
            return address - BIAS, True
        if not found and not for_kernel:
            return address, False
        if len(found) != 1 or found[0].start > address or found[0].end < address + size:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)  # partly registered, or across two registrations
        return address, True

    # -- physical memory

    def _take(self, device: int, size: int) -> None:
        if self.process.used_bytes(device) + size > self.process.config["total_bytes"]:
            raise Refused(CUresult.CUDA_ERROR_OUT_OF_MEMORY)

    def _hold(self, physical: Physical) -> Physical:
        """Use memory here once more; it counts as long as anybody does."""
        known = self.physicals.setdefault(physical.name, physical)
        if known is not physical:
            os.close(physical.fd)
        known.uses += 1
        self.process.memory[known.name] = known.device, known.size
        return known

    def drop(self, physical: Physical) -> None:
        physical.uses -= 1
        if not physical.uses:
            del self.physicals[physical.name], self.process.memory[physical.name]
            os.close(physical.fd)

    def next(self) -> int:
        self.number += 1
        return self.number

    # -- plain allocations

    def allocate(self, device: int, size: int, context: int) -> Range:
        if size < 1:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        self._take(device, size)
        path = self.process.folder / f"{self.process.token}.{self.next()}.{device}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(fd, BASE_OFFSET + size)
        physical = self._hold(Physical(path.name, device, size, fd, path))
        start = _map(BASE_OFFSET + size, fd) + BASE_OFFSET + BIAS
        return self.add(Range("alloc", start, size, context, device, physical))

    def free(self, gone: Range) -> None:
        """A plain allocation, or another process's that was opened here."""
        assert gone.physical is not None
        self.remove(gone)
        _libc.munmap(gone.start - BIAS - BASE_OFFSET, BASE_OFFSET + gone.size)
        if gone.kind == "alloc" and gone.physical.path is not None:
            gone.physical.path.unlink(missing_ok=True)
        self.drop(gone.physical)
        self.process.write()

    def export(self, address: int) -> bytes:
        found = self.at(address)
        if found is None or found.kind != "alloc" or found.physical is None:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        return found.physical.name.encode().ljust(64, b"\0")

    def open(self, handle: bytes, device: int, context: int) -> Range:
        name = handle.rstrip(b"\0").decode("ascii", "replace")
        parts = name.split(".")
        path = self.process.folder / name
        if len(parts) != 3 or "/" in name or not path.exists():
            raise Refused(CUresult.CUDA_ERROR_INVALID_HANDLE)
        if parts[0] == self.process.token:
            raise Refused(CUresult.CUDA_ERROR_INVALID_CONTEXT)  # its own memory
        if int(parts[2]) != device:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        for known in self.ranges:
            if known.kind == "ipc" and known.handle == handle and known.context == context:
                known.uses += 1
                return known
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        size = os.fstat(fd).st_size - BASE_OFFSET
        physical = self._hold(Physical(name, device, size, fd))
        start = _map(BASE_OFFSET + size, physical.fd) + BASE_OFFSET + BIAS
        return self.add(Range("ipc", start, size, context, device, physical, handle))

    # -- virtual memory

    def create(self, device: int, size: int, handle_types: int) -> int:
        if size < 1 or size % GRANULE:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        self._take(device, size)
        fd = os.memfd_create(f"standin-{device}-{handle_types}", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return self._generic(Physical(f"virtual-{os.fstat(fd).st_ino}", device, size, fd, handle_types=handle_types))

    def _generic(self, physical: Physical) -> int:
        physical = self._hold(physical)
        handle = 0x1000 + self.next()
        self.generics[handle] = physical, 1
        self.process.held["generic"] += 1
        self.process.write()
        return handle

    def of(self, handle: int) -> Physical:
        if handle not in self.generics:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        return self.generics[handle][0]

    def retain(self, address: int) -> int:
        found = self.at(address)
        if found is None or found.kind != "virtual":
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        handle, physical = found.generic, found.physical
        assert physical is not None
        if handle in self.generics:
            self.generics[handle] = physical, self.generics[handle][1] + 1
            return handle
        physical.uses += 1
        self.generics[handle] = physical, 1
        self.process.held["generic"] += 1
        self.process.write()
        return handle

    def release(self, handle: int) -> None:
        physical = self.of(handle)
        holds = self.generics[handle][1] - 1
        if holds:
            self.generics[handle] = physical, holds
            return
        del self.generics[handle]
        self.process.held["generic"] -= 1
        self.drop(physical)
        self.process.write()

    def to_fd(self, handle: int) -> int:
        physical = self.of(handle)
        if not physical.handle_types & 1:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        return os.dup(physical.fd)

    def from_fd(self, fd: int) -> int:
        try:
            name = Path(f"/proc/self/fd/{fd}").readlink().name.split(" ")[0]
            stat = os.fstat(fd)
        except OSError:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE) from None
        kind = name.removeprefix("memfd:").split("-")
        if kind[0] != "standin" or len(kind) != 3:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        physical = Physical(
            f"virtual-{stat.st_ino}", int(kind[1]), stat.st_size, os.dup(fd), handle_types=int(kind[2])
        )  # fmt: skip
        return self._generic(physical)

    def reserve(self, size: int) -> int:
        if size < 1 or size % GRANULE:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        start = _reserve(size) + BIAS
        self.reserved[start] = size
        self.process.held["reserved"] += 1
        self.process.write()
        return start

    def unreserve(self, start: int, size: int) -> None:
        if self.reserved.get(start) != size or self.overlapping(start, size):
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        del self.reserved[start]
        self.process.held["reserved"] -= 1
        _libc.munmap(start - BIAS, size)
        self.process.write()

    def reservation(self, part: Range) -> tuple[int, int]:
        """The addresses that a range was taken from: of virtual memory all that were reserved with them."""
        for base, length in self.reserved.items():
            if part.kind == "virtual" and base <= part.start < base + length:
                return base, length
        return part.start, part.size

    def map(self, start: int, size: int, offset: int, handle: int) -> None:
        physical = self.of(handle)
        inside = any(base <= start and start + size <= base + length for base, length in self.reserved.items())
        if not inside or offset or size != physical.size or self.overlapping(start, size):
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        _map(size, physical.fd, start - BIAS)
        physical.uses += 1
        self.add(Range("virtual", start, size, 0, physical.device, physical, access=False, generic=handle))

    def allow(self, start: int, size: int, device: int) -> None:
        parts = self.overlapping(start, size)
        if not parts or parts[0].start != start or parts[-1].end != start + size:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        if any(part.kind != "virtual" or part.device != device for part in parts):
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        for part in parts:
            part.access = True

    def unmap(self, start: int, size: int) -> list[Range]:
        parts = [part for part in self.overlapping(start, size) if part.kind == "virtual"]
        if not parts or parts[0].start != start or parts[-1].end != start + size:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        for part in parts:
            self.remove(part)
            _reserve(part.size, part.start - BIAS)
            assert part.physical is not None
            self.drop(part.physical)
        self.process.write()
        return parts

    # -- the processor's memory

    def register(self, start: int, size: int, context: int, device: int) -> None:
        if not start or size < 1:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        if self.overlapping(start, size):
            raise Refused(CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
        self.add(Range("host", start, size, context, device))

    def unregister(self, start: int) -> None:
        found = self.at(start)
        if found is None or found.kind != "host" or found.start != start:
            raise Refused(CUresult.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
        self.remove(found)
        self.process.write()

    def allocate_host(self, size: int, context: int, device: int) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        start = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if start == _FAILED:
            raise Refused(CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        return self.add(Range("hostalloc", start, size, context, device)).start

    def free_host(self, start: int) -> None:
        found = self.starting(start, "hostalloc")
        self.remove(found)
        _libc.munmap(found.start, found.size)
        self.process.write()

    def leave_context(self, context: int) -> None:
        """A context ends, and with it everything that was made in it."""
        for part in [part for part in self.ranges if part.context == context]:
            if part.kind in ("alloc", "ipc"):
                self.free(part)
            elif part.kind == "hostalloc":
                self.free_host(part.start)
            else:
                self.remove(part)
        self.process.write()


def buffer_address(value: Any) -> int:
    """The address that an argument of the bindings' kind `Any` means: None, a number, or what has a buffer."""
    if value is None:
        return 0
    try:
        return int(value)
    except (TypeError, ValueError):
        pass
    try:
        view = memoryview(value)
    except TypeError:
        raise TypeError(
            f"Provided argument is of type {type(value)} but expected Type None, int or object with Buffer Protocol"
        ) from None
    import numpy as np

    return int(np.frombuffer(view, np.uint8).ctypes.data)
