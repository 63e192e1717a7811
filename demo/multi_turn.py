"""Multi-turn chats with too little engine memory, with the depot and without: the second half of `make demo`.

Some clients hold several chats each and take their turns in rotation. An engine's own cache cannot hold all of them, so
without the depot most turns compute their chat again. Shows the time to first token of each turn, and whether the
answers are the same.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "bench"))

from common import transfer_config
from comparison.engine import Engine, write_model
from comparison.results import answers, percentile, turns
from comparison.workloads import Chats, Workload

CHATS = Chats(turns=(12, 12))
BLOCKS = 68
"""Of the engine's own cache, of 128 tokens each: half of what the chats have in the end."""
WITHOUT, WITH = "none", "kvdepot"
NAMES = {WITHOUT: "without a depot", WITH: "with kvdepot"}
_BAR = 28


@dataclass(frozen=True)
class Compared:
    """Of one run without the depot and one with it: seconds, prompt tokens computed, and each request."""

    runs: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def same_answers(self) -> bool:
        return answers(self.runs[WITHOUT]) == answers(self.runs[WITH])

    @property
    def reused(self) -> bool:
        return bool(self.runs[WITH]["computed"] < self.runs[WITHOUT]["computed"])


def measure(url: str, chats: Chats = CHATS, blocks: int = BLOCKS) -> Compared:
    """Serve the chats by an engine without the depot, then by one with the depot at `url`. Blocks."""
    compared = Compared()
    with tempfile.TemporaryDirectory(prefix="kvdepot-demo-") as name:
        model = write_model(Path(name))
        # A running server may know the chats of earlier demos: these are new.
        workload: Workload = Chats(**{**vars(chats), "seed": time.time_ns()}).requests()
        for key, config in ((WITHOUT, None), (WITH, transfer_config(url))):
            print(f"chats {NAMES[key]}", flush=True)
            with Engine(model, config, blocks) as engine:
                engine.prompt(time.time_ns() % 2**32, 2065, 1)  # an engine's first steps are slower
                compared.runs[key] = engine.serve(workload)
    return compared


def report(compared: Compared, chats: Chats = CHATS) -> bool:
    """Print a bar for each turn; returns whether all is as it should be."""
    print(
        f"\n{chats.chats} chats of {chats.turns[0]} turns, {chats.clients} clients: median time to first token by turn"
    )
    print("\n".join(bars(compared)))
    for key, run in compared.runs.items():
        first = [request["first_s"] for request in run["requests"]]
        print(
            f"{NAMES[key]:<16} TTFT median {percentile(first, 0.5) * 1e3:>5.0f} ms, p99 "
            f"{percentile(first, 0.99) * 1e3:>5.0f} ms, {len(first) / run['seconds']:>5.2f} requests/s, "
            f"{run['computed']:>7,} prompt tokens computed"
        )
    print(f"same answers: {'yes' if compared.same_answers else 'NO'}")
    return compared.same_answers and compared.reused


def bars(compared: Compared) -> list[str]:
    """A line for each turn: without the depot to the left, with it to the right, on one scale."""
    without, depot = (turns([compared.runs[key]]) for key in (WITHOUT, WITH))
    most = max(seconds for _, seconds, _ in [*without, *depot])
    lines = [f"turn  {NAMES[WITHOUT]:<{_BAR + 9}}  {NAMES[WITH]}"]
    for (turn, without_s, _), (_, with_s, _) in zip(without, depot, strict=True):
        left, right = (
            f"{'█' * max(1, round(seconds / most * _BAR))} {seconds * 1e3:.0f} ms" for seconds in (without_s, with_s)
        )
        lines.append(f"{turn + 1:>4}  {left:<{_BAR + 9}}  {right}")
    return lines
