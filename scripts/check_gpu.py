"""What `make test-gpu` and `make bench-gpu` need and this machine lacks; runs before they begin.

    python scripts/check_gpu.py tests|bench [--tiny]

Prints a line for each thing that is missing, and then exits with 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import mmap
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "zmq": "pyzmq", "msgspec": "msgspec", "blake3": "blake3", "numpy": "numpy", "torch": "torch", "pytest": "pytest",
}  # fmt: skip
"""Modules without which nothing runs, and their packages."""
GIB = 1 << 30
CONTEXT_BYTES = GIB
"""The context of the process, and what torch's allocator keeps."""


def need_of_bench(is_tiny: bool) -> int:
    """Bytes on the GPU."""
    sys.path.insert(0, str(ROOT / "bench"))
    import gpu
    from common import TINY, Scale

    return gpu.tensor_bytes(TINY if is_tiny else Scale())


def missing_of_gpu(tensor_bytes: int) -> Iterator[str]:
    """What is wrong with torch or the first GPU."""
    import torch

    if not torch.cuda.is_available():
        yield f"torch {torch.__version__} finds no GPU: install one for CUDA or ROCm, and let the process see the GPU"
        return
    free, total = torch.cuda.mem_get_info(0)
    if free < (needed := tensor_bytes + CONTEXT_BYTES):
        yield (
            f"{torch.cuda.get_device_name(0)} has {free / GIB:.2f} of {total / GIB:.2f} GiB free, and "
            f"{needed / GIB:.2f} GiB are needed: stop what else uses it"
        )
    yield from refusal_of_pinning()


def refusal_of_pinning() -> Iterator[str]:
    """Register as much shared memory with the driver as a worker registers at once."""
    import numpy as np
    import torch

    from kvdepot.devices.registration import PIECE_BYTES, Registration

    arena = np.frombuffer(mmap.mmap(-1, PIECE_BYTES), np.uint8)  # shared, like a file in /dev/shm
    registration = Registration(arena, torch.device("cuda", 0))
    registration.ended.wait()
    if not registration.registered_bytes:
        most, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        allowed = "unlimited" if most == resource.RLIM_INFINITY else f"{most >> 10} KiB"
        yield (
            f"the driver does not pin {PIECE_BYTES >> 20} MiB of shared memory; `ulimit -l` is {allowed}, and a "
            "container may need --ulimit memlock=-1"
        )
    registration.stop()
    registration.join()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="check_gpu.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["tests", "bench"])
    parser.add_argument("--tiny", action="store_true", help="of the benchmark with --tiny")
    args = parser.parse_args(argv)
    sys.path.insert(0, str(ROOT))
    missing = [
        f"the package {package} is not installed for {sys.executable}"
        for module, package in PACKAGES.items()
        if importlib.util.find_spec(module) is None and (module, args.what) != ("pytest", "bench")
    ]
    if not missing:
        missing = list(missing_of_gpu(need_of_bench(args.tiny) if args.what == "bench" else GIB))
    for line in missing:
        print(f"missing: {line}")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
