"""The copy kernel, and `main`, which compiles it; kernel.py runs that in a separate process.

Only that process imports this module, because Triton takes a hundred MiB, and importing it blocks all threads until its
library is loaded. It needs no GPU, driver or torch, and leaves nothing on disk.
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

ROWS = 4
"""Rows that a program copies at once, to hide the latency of a read over the bus: 1 to 2 us for any size."""

WARPS = 8
"""With 8 warps, 4 rows of 16 KiB take 64 registers per thread: half of a multiprocessor's, without spilling."""


def copy_rows(table: tl.tensor, count: tl.tensor, ROWS: tl.constexpr, TILE: tl.constexpr) -> None:
    """Copy each row of `table`, the address of int64[count, 3] = (destination, source, bytes).

    Of P programs, program p copies rows p, p + P, p + 2 * P, ..., ROWS of them at once, so even few rows are spread
    over all programs. The loop loads the rows' bytes first, then the next rows' entries, and only then the first store
    waits for its bytes. The hints on the casts make each access 128 bits wide. Nothing is read again soon, so it is
    evicted from the caches first.
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
    """Compile for compute capability `arch` (90 is 9.0); returns Triton's CompiledKernel. Blocks for about a second."""
    source = ASTSource(
        fn=triton.jit(copy_rows),
        signature={"table": "i64", "count": "i64", "ROWS": "constexpr", "TILE": "constexpr"},
        constexprs={"ROWS": ROWS, "TILE": TILE_BYTES},
    )
    options = {"num_warps": WARPS, "enable_fp_fusion": False}  # Triton warns if the latter is not given
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def main(arch: int) -> None:
    """Compile the kernel and print a `Compiled` as JSON, as the last line of stdout."""
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
