"""Stores do not slow down who computes on the GPU: the bar is 5% of a saturating loop of bf16 matrix products."""

from __future__ import annotations

import os
import sys
import threading
import time
from statistics import median
from typing import Any

from tests.conftest import StartDepot
from tests.devices.engines import Engine, tokens_of

BAR = 1.05
SCALE = 256
ARENA_MIB = 4096
ROUNDS = 12
ROUND_S = 0.5


def products_per_s(torch: Any, a: Any, b: Any, out: Any, seconds: float) -> float:
    """How many matrix products the GPU does a second, kept busy for so long."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    deadline = time.monotonic() + seconds
    done = 0
    start.record()
    while time.monotonic() < deadline:
        for _ in range(8):
            torch.mm(a, b, out=out)
        done += 8
        if done % 64 == 0:
            torch.cuda.synchronize()  # no more than some dozen in the queue
    end.record()
    end.synchronize()
    return float(done / (start.elapsed_time(end) / 1e3))


def test_stores_slow_a_saturating_loop_of_matrix_products_by_5_percent_at_most(
    start_depot: StartDepot, torch_on_gpu: Any
) -> None:
    torch = torch_on_gpu
    depot = start_depot(arena_mib=ARENA_MIB)
    engine = Engine(depot.url, os.environ, scale=SCALE)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    running, ended, stored = threading.Event(), threading.Event(), [0]

    def store() -> None:
        number = 0
        while not ended.is_set():
            if not running.wait(0.1):
                continue
            number += 1
            stored[0] += engine.store(list(range(12)), tokens_of(number, 3))

    thread = threading.Thread(target=store)
    thread.start()
    try:
        products_per_s(torch, a, b, out, 2.0)  # clocks settle
        alone, beside = [], []
        for _ in range(ROUNDS):
            alone.append(products_per_s(torch, a, b, out, ROUND_S))
            before = stored[0]
            running.set()
            beside.append(products_per_s(torch, a, b, out, ROUND_S))
            running.clear()
            assert stored[0] > before, "nothing was stored meanwhile"
    finally:
        ended.set()
        thread.join()
        engine.process.close()
    slower = median(one / other for one, other in zip(alone, beside, strict=True))
    print(
        f"\n{median(alone):.0f} products a second alone, {median(beside):.0f} beside stores: {slower:.3f}",
        file=sys.stderr,
    )
    assert slower <= BAR
