"""One pass of the copy kernel and of the copy engines in both directions, for compute-sanitizer to watch.

Run as `python -m tests.gpu.one_pass`. Exits with 1 where a byte is wrong, with 77 where there is no kernel.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np

from kvdepot.devices.cuda.copy_paths import CopyPaths
from kvdepot.devices.cuda.driver import load
from kvdepot.devices.cuda.plan import DIRECTIONS, CopyPlan

COUNT = 300
SIZES = (16, 48, 1024, 4096, 16384, 40960)
STAGING = 4 << 20


def main() -> int:
    driver = load()
    context = driver.retain(0)
    driver.call("cuCtxPushCurrent", context)
    draw = np.random.default_rng(1)
    sizes = draw.choice(SIZES, COUNT).astype(np.uint64)
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    device = int(driver.call("cuMemAlloc", total))
    host = int(driver.call("cuMemHostAlloc", total, 0))
    seen = np.frombuffer((ctypes.c_ubyte * total).from_address(host), np.uint8)
    order = draw.permutation(COUNT)  # blocks lie anywhere on the device
    there = np.empty(COUNT, np.uint64)
    there[order] = np.concatenate(([0], np.cumsum(sizes[order])[:-1])).astype(np.uint64)
    places = np.uint64(device) + there, np.uint64(host) + ends - sizes, sizes
    store, retrieve = (CopyPlan(direction, *places) for direction in DIRECTIONS)
    paths = CopyPaths(driver, 0, STAGING, 0)
    if paths.without:
        print(paths.without, file=sys.stderr)
        return 77
    wrong = 0
    for path in ("staged", "dma"):
        data = draw.integers(0, 256, total, np.uint8)
        seen[:] = data
        paths.choice = {direction: [(0, path)] for direction in DIRECTIONS}
        with paths.slot() as slot:
            paths.run(retrieve, slot)
            seen[:] = 0
            paths.run(store, slot)
        wrong += int((seen != data).sum())
    paths.close()
    driver.call("cuMemFreeHost", host)
    driver.call("cuMemFree", device)
    driver.call("cuCtxPopCurrent")
    driver.release(0)
    print(f"{wrong} bytes are wrong", file=sys.stderr)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
