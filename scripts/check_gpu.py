"""What `make test-gpu` and `make bench-gpu` need and this machine lacks; runs before they begin.

    python scripts/check_gpu.py tests|bench [--tiny]

Prints a line for each thing that is missing, and then exits with 1. Lines that begin with "note:" name what is skipped
or may disturb the results.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import mmap
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"zmq": "pyzmq", "msgspec": "msgspec", "blake3": "blake3", "numpy": "numpy", "pytest": "pytest"}
"""Modules without which nothing runs, and their packages; the driver's module says what it needs itself."""
OPTIONAL = {
    "torch": "what needs its tensors or matrix products is skipped",
    "triton": "the copy path staged is skipped",
    "xxhash": "checksums are skipped",
    "pynvml": "the size of contexts is unknown (nvidia-ml-py)",
}
CONTEXTS_BYTES = 4 << 30
"""Contexts of the processes that run at once, several hundred MiB each, and torch's matrices."""
GIB = 1 << 30


class Need(NamedTuple):
    """Bytes of the largest arena in /dev/shm, and of the largest tensors on the GPU."""

    arena_bytes: int
    tensor_bytes: int


def need_of_tests() -> Need:
    from tests.gpu import test_processes, test_sharing

    return Need(test_processes.ARENA_MIB << 20, test_sharing.LARGEST)


def need_of_bench(is_tiny: bool) -> Need:
    sys.path.insert(0, str(ROOT / "bench"))
    import gpu
    from common import TINY, Scale

    scale = TINY if is_tiny else Scale()
    return Need(int(scale.copy_arena_gib * GIB), gpu.tensor_bytes(scale))


def short_of_memory(need: Need) -> Iterator[str]:
    """The bounds of shared memory that are too low for the arenas."""
    from kvdepot.memory.room import limits

    for limit in limits():
        if limit.free < need.arena_bytes:
            yield (
                f"{limit.what} has {limit.free / GIB:.2f} GiB free, and an arena needs {need.arena_bytes / GIB:.2f} "
                f"GiB: {limit.advice}"
            )


def short_of_gpu(need: Need) -> Iterator[str]:
    """What is wrong with the bindings, the driver or the first GPU."""
    from kvdepot.devices.cuda.driver import load
    from kvdepot.errors import DeviceError

    try:
        driver = load()
        found = driver.devices()
        if not found:
            raise DeviceError("the driver has no GPU for this process")
        uuid, device = next(iter(found.items()))
        if count := other_processes(uuid):
            print(f"note: {count} other processes use the GPU: tests that measure its memory may fail")
        with contextlib.ExitStack() as end:
            context = driver.retain(device)
            end.callback(driver.release, device)
            end.enter_context(driver.current(context))
            free, total = driver.call("cuMemGetInfo")
            needed = need.tensor_bytes + CONTEXTS_BYTES
            if free < needed:
                yield (
                    f"{driver.name(device)} has {free / GIB:.2f} of {total / GIB:.2f} GiB free, and {needed / GIB:.2f} "
                    "GiB are needed: stop what else uses it"
                )
            yield from refusal_of_pinning(driver)
    except DeviceError as exc:
        yield str(exc)


def refusal_of_pinning(driver: Any) -> Iterator[str]:
    """Register as much shared memory with the driver as a server registers at once."""
    import numpy as np

    from kvdepot.devices.cuda.pins import PIECE_BYTES
    from kvdepot.errors import DeviceError

    memory = np.frombuffer(mmap.mmap(-1, PIECE_BYTES), np.uint8)  # shared, like a file in /dev/shm
    flags = driver.cu.CU_MEMHOSTREGISTER_PORTABLE | driver.cu.CU_MEMHOSTREGISTER_DEVICEMAP
    try:
        driver.call("cuMemHostRegister", memory.ctypes.data, PIECE_BYTES, flags)
    except DeviceError as exc:
        most, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        allowed = "unlimited" if most == resource.RLIM_INFINITY else f"{most >> 10} KiB"
        yield (
            f"the driver does not pin {PIECE_BYTES >> 20} MiB of shared memory: {exc}; `ulimit -l` is {allowed}, and a "
            "container may need --ulimit memlock=-1"
        )
    else:
        driver.call("cuMemHostUnregister", memory.ctypes.data)


def other_processes(uuid: str) -> int:
    """How many processes use a GPU, before this one does; 0 if NVML does not say."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return len(pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByUUID(uuid)))
    except Exception:  # noqa: BLE001 - only a note depends on it
        return 0


def skipped(what: str) -> Iterator[str]:
    """What will not run, and why."""
    for module, consequence in OPTIONAL.items():
        if importlib.util.find_spec(module) is None:
            yield f"{module} is not installed: {consequence}"
    if what == "tests":
        from tests.gpu.test_sanitizer import sanitizer

        if not sanitizer():
            yield "compute-sanitizer is not installed: its tests are skipped"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="check_gpu.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["tests", "bench"])
    parser.add_argument("--tiny", action="store_true", help="of the benchmark with --tiny")
    args = parser.parse_args(argv)
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("KVDEPOT_HTTP", "off")
    missing = [
        f"the package {package} is not installed for {sys.executable}"
        for module, package in PACKAGES.items()
        if importlib.util.find_spec(module) is None and (module, args.what) != ("pytest", "bench")
    ]
    if not missing:
        need = need_of_tests() if args.what == "tests" else need_of_bench(args.tiny)
        for note in skipped(args.what):
            print(f"note: {note}")
        missing = [*short_of_memory(need), *short_of_gpu(need)]
    for line in missing:
        print(f"missing: {line}")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
