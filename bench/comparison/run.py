"""One round of one system: fresh processes, all measurements, nothing left behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import say

from comparison.engine import Engine
from comparison.systems import System
from comparison.workloads import Chats, Documents, Workload

__all__ = ["FULL", "PARTS", "SMALL_BLOCKS", "TINY", "Scale", "Workloads", "run_round"]

PARTS = ("prompts", "chats", "documents")
_TAIL_TOKENS = 17
"""Beyond a chunk's end, so that every cache holds the same part of a prompt."""


@dataclass(frozen=True)
class Scale:
    """The amount of work. blocks: of the engine's own cache, of `block_tokens` tokens each. lengths: of single prompts,
    in tokens. gib: of the system's memory, which is enough for everything.
    """

    blocks: int = 68
    block_tokens: int = 128
    gib: int = 4
    lengths: tuple[int, ...] = (1024, 4096, 8192)
    loads: int = 5
    """Of each of them."""
    chats: Chats = Chats()  # noqa: RUF009 - frozen
    documents: Documents = Documents()  # noqa: RUF009 - frozen


FULL = Scale()
SMALL_BLOCKS = Scale(blocks=272, block_tokens=32)
TINY = Scale(
    gib=1, lengths=(256, 512), loads=2, chats=Chats(chats=4, turns=(2, 3), system_tokens=256),
    documents=Documents(documents=2, document_tokens=512, questions=2),
)  # fmt: skip


@dataclass(frozen=True)
class Workloads:
    """What is served, made once for all systems."""

    chats: Workload
    documents: Workload


def run_round(
    system: System, model: Path, scale: Scale, workloads: Workloads, parts: tuple[str, ...], number: int
) -> dict[str, Any]:
    """Start a system and an engine, measure, and stop both. parts: of PARTS. number: of the round, from 0. Blocks."""
    say(f"{system.name}: round {number + 1}")
    with (
        system.start(scale.gib, scale.block_tokens) as running,
        Engine(model, running.transfer, scale.blocks, scale.block_tokens) as engine,
    ):
        found: dict[str, Any] = {
            "start_s": running.start_s,
            "resident_bytes": running.resident_bytes,
            "engine_start_s": engine.start_s,
        }
        engine.prompt(0, 2048 + _TAIL_TOKENS, 1)  # an engine's first steps are slower
        if "prompts" in parts:
            found["prompts"] = {
                str(length): engine.prompt(1 + length, length + _TAIL_TOKENS, scale.loads) for length in scale.lengths
            }
        if "chats" in parts:
            found["chats"] = engine.serve(workloads.chats)
        if "documents" in parts:
            found["documents"] = engine.serve(workloads.documents)
    return found
