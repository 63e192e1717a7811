"""The copy kernel itself, and its compiler: `main`, which kernel.py runs in a process of its own.

Only that process imports this module: Triton takes a hundred MiB, and its import stops all threads of whoever does it
for as long as a library of that size takes to load. The one law: nothing here needs a GPU, a driver or torch, and
nothing is left on disk.
"""

from __future__ import annotations

import os
import re
import tempfile
from typing import Any

import msgspec
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvdepot.devices.cuda.kernel import TILE_BYTES, Compiled

__all__ = ["ROWS", "WARPS", "build", "copy_rows", "main"]

ROWS = 4
"""Rows that a program has under way at once: a read over the bus takes 1 to 2 us, whatever its size."""

WARPS = 8
"""4 rows of 16 KiB are 64 data registers a thread of 8 warps: half of a multiprocessor's registers, none spilled."""


def copy_rows(table: tl.tensor, count: tl.tensor, ROWS: tl.constexpr, TILE: tl.constexpr) -> None:
    """Copy each row of `table`, the address of int64[count, 3] = (destination, source, bytes).

    Of P programs, program p takes rows p, p + P, p + 2 * P, ..., ROWS of them at once: however few there are, they
    are spread over all programs. In the loop the rows' bytes are asked for first, then the next rows' entries, and
    only then does the first store wait for its bytes. The casts' hints make 128 bits of each access; nothing is read
    again soon, so nothing need stay in the caches.
    """
    programs = tl.num_programs(0).to(tl.int64)
    row = tl.program_id(0) + programs * tl.arange(0, ROWS)
    word = tl.arange(0, TILE // 8)[None, :]
    entry = table.to(tl.pointer_type(tl.int64)) + row * 3
    target = tl.load(entry, row < count, 0)
    source = tl.load(entry + 1, row < count, 0)
    words = tl.load(entry + 2, row < count, 0).to(tl.int32) >> 3
    for _ in range(tl.program_id(0), count, programs * ROWS):
        here = word < tl.multiple_of(words[:, None], [2, 2])
        at = tl.multiple_of(source.to(tl.pointer_type(tl.int64))[:, None], [16, 16])
        to = tl.multiple_of(target.to(tl.pointer_type(tl.int64))[:, None], [16, 16])
        data = tl.load(at + word, here, eviction_policy="evict_first")
        row += programs * ROWS
        entry += programs * ROWS * 3
        target = tl.load(entry, row < count, 0)
        source = tl.load(entry + 1, row < count, 0)
        words = tl.load(entry + 2, row < count, 0).to(tl.int32) >> 3
        tl.store(to + word, data, here, eviction_policy="evict_first")


def build(arch: int) -> Any:
    """Triton's CompiledKernel for GPUs of compute capability `arch` (90 is 9.0). Blocks for about a second."""
    source = ASTSource(
        fn=triton.jit(copy_rows),
        signature={"table": "i64", "count": "i64", "ROWS": "constexpr", "TILE": "constexpr"},
        constexprs={"ROWS": ROWS, "TILE": TILE_BYTES},
    )
    options = {"num_warps": WARPS, "enable_fp_fusion": False}  # the latter said, for Triton warns where it is not
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def main(arch: int) -> None:
    """Print what the launcher must know of the kernel, as the last line of stdout."""
    with tempfile.TemporaryDirectory(prefix="kvdepot-") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder  # the server's home may be read-only
        kernel = build(arch)
    facts = kernel.metadata
    entry = re.search(r"\.entry[^(]*\(([^)]*)\)", kernel.asm["ptx"])
    compiled = Compiled(
        name=facts.name,
        cubin=kernel.asm["cubin"],
        threads=32 * facts.num_warps,
        parameters=entry[1].count(".param") if entry else 0,
        shared_bytes=facts.shared,
        scratch_bytes=facts.global_scratch_size + getattr(facts, "profile_scratch_size", 0),
        blocks_per_cluster=facts.num_ctas,
    )
    print(msgspec.json.encode(compiled).decode(), flush=True)
