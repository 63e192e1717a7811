"""Runs the copy kernel in Triton's interpreter: `TRITON_INTERPRET=1 python interpreted.py FILE`, asked line by line.

A line is JSON: [programs, [[destination, source, bytes], ...], guard], places as offsets in the file, which is mapped
here and there. Behind the table's last row stand rows that must not be read: they would write to the guard.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import triton

from kvdepot.devices.cuda.copy_rows import ROWS, copy_rows
from kvdepot.devices.cuda.kernel import TILE_BYTES


def main(path: str) -> None:
    memory = np.memmap(path, np.uint8, "r+")
    kernel = triton.jit(copy_rows)
    for line in sys.stdin:
        programs, rows, guard = json.loads(line)
        beyond = [[guard, 0, TILE_BYTES]] * (2 * ROWS * programs)
        table = np.array(rows + beyond, np.int64) + np.array([memory.ctypes.data, memory.ctypes.data, 0])
        kernel[(programs,)](table.ctypes.data, len(rows), ROWS=ROWS, TILE=TILE_BYTES)
        print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
