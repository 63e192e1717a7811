"""Stores and retrieves of KV in a GPU's memory, beside one large copy between it and pinned memory. In one process.

The copies are those of an engine's worker (devices/accelerator.py), to and from an arena that is registered. Blocks are
shuffled, and chunks have 256 tokens. The floor is one copy of pinned memory in the same direction, right before each.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from common import Scale, say
from report import Figure, at_least

from kvdepot.devices import describe
from kvdepot.devices.accelerator import STAGING_BYTES, AcceleratorBlocks
from kvdepot.devices.blocks import CopyPiece
from kvdepot.memory.allocator import Allocator
from kvdepot.protocol.layout import build_layout

if TYPE_CHECKING:
    import torch

__all__ = ["run", "tensor_bytes"]

_CHUNK_TOKENS = 256
_ITEM_BYTES = 2  # bf16
_REGISTERING_S = 60.0


@dataclass(frozen=True)
class Kind:
    """An engine's layout of its KV: `layers` allocations of `[blocks, *block]` bf16. bars: at 2k and at 8k tokens."""

    name: str
    layers: int
    block: tuple[int, ...]
    block_tokens: int
    bars: tuple[float, float]

    @property
    def block_bytes(self) -> int:
        """Bytes of one layer."""
        return math.prod(self.block) * _ITEM_BYTES


class Arena:
    """Shared memory like that of a server's file, with all pages there."""

    def __init__(self, size: int) -> None:
        fd = os.memfd_create("kvdepot-bench")
        os.ftruncate(fd, size)
        self.bytes = np.frombuffer(mmap.mmap(fd, size), np.uint8)
        os.close(fd)
        self.bytes[:] = 1


def _kinds(scale: Scale) -> list[Kind]:
    """Layouts by what is adjacent in a block: 64, 16 and 72 KiB of a layer, and 2 MiB of all layers together."""
    return [
        Kind("Llama-8B", scale.layers, (2, 16, 8, 128), 16, (0.75, 0.9)),
        Kind("Llama-70B TP 4", scale.sharded_layers, (2, 16, 2, 128), 16, (0.75, 0.85)),
        Kind("MLA", scale.mla_layers, (64, 576), 64, (0.75, 0.9)),
        Kind("cross-layer", 1, (scale.layers, 2, 16, 8, 128), 16, (0.75, 0.9)),
    ]


def _chunk_bytes(kind: Kind) -> int:
    """Bytes of a chunk in the arena."""
    return Allocator.rounded(_CHUNK_TOKENS // kind.block_tokens * kind.layers * kind.block_bytes)


def tensor_bytes(scale: Scale) -> int:
    """Most bytes that are allocated on the GPU at once: twice the longest prompt, staging, and the floor's buffer."""
    chunks = 2 * max(scale.copy_tokens) // _CHUNK_TOKENS
    return chunks * max(map(_chunk_bytes, _kinds(scale))) + 3 * STAGING_BYTES + (scale.peak_mib << 20)


def run(scale: Scale, notes: list[str]) -> Iterator[Figure]:
    """All figures of the first GPU, as they are measured; without a GPU none, and a line that says so."""
    import torch

    device = torch.device(scale.gpu_device)
    if device.type == "cuda" and not torch.cuda.is_available():
        say("gpu: left out: torch finds no GPU")
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the processor"
    notes.append(f"gpu: {name}; a floor is one copy of {scale.peak_mib} MiB of pinned memory")
    peaks = Peaks(device, scale.peak_mib << 20)
    arena = Arena(max(_chunk_bytes(kind) for kind in _kinds(scale)) * max(scale.copy_tokens) // _CHUNK_TOKENS)
    for kind in _kinds(scale):
        say(f"gpu: {kind.name}")
        yield from _measure(scale, kind, device, arena, peaks, notes)


class Peaks:
    """The speed of one large copy in each direction."""

    def __init__(self, device: torch.device, size: int) -> None:
        import torch

        self._there = torch.zeros(size, dtype=torch.uint8, device=device)
        self._here = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
        self._synchronize = lambda: torch.get_device_module(device).synchronize(device)

    def measure(self, is_store: bool) -> float:
        """GB/s."""
        target, source = (self._here, self._there) if is_store else (self._there, self._here)
        self._synchronize()
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        self._synchronize()
        return len(target) / (time.perf_counter() - begun) / 1e9


def _measure(
    scale: Scale, kind: Kind, device: torch.device, arena: Arena, peaks: Peaks, notes: list[str]
) -> Iterator[Figure]:
    """All figures of one layout."""
    import torch

    count = 2 * max(scale.copy_tokens) // kind.block_tokens
    tensors = [
        torch.randint(0, 256, (count, kind.block_bytes), dtype=torch.uint8, device=device) for _ in range(kind.layers)
    ]
    layout = build_layout([describe(each, f"layers.{i}") for i, each in enumerate(tensors)], [0] * len(tensors))
    storages = {f"{each.untyped_storage().data_ptr():x}": each.untyped_storage() for each in tensors}
    blocks = AcceleratorBlocks(layout, storages, device)
    begun = time.perf_counter()
    if not blocks.follow(arena).wait(_REGISTERING_S):
        raise TimeoutError("the arena is not registered")
    notes.append(f"gpu: registering {len(arena.bytes) >> 20} MiB took {time.perf_counter() - begun:.2f} s")
    rng, speeds, floors = np.random.default_rng(3), {}, {}
    try:
        for number in range(-1, scale.copy_runs):  # the first warms everything up
            for tokens in scale.copy_tokens:
                ids = rng.permutation(count)[: 2 * tokens // kind.block_tokens].reshape(2, tokens // _CHUNK_TOKENS, -1)
                for is_store, chunks in ((True, ids[0]), (False, ids[1])):
                    size = _chunk_bytes(kind)
                    pieces = [CopyPiece(((i * size, size),), each) for i, each in enumerate(chunks)]
                    peak = peaks.measure(is_store)
                    begun = time.perf_counter()
                    blocks.move(arena, pieces, is_store)
                    seconds = time.perf_counter() - begun
                    if number >= 0:
                        moved = chunks.size * kind.layers * kind.block_bytes
                        speeds.setdefault((is_store, tokens), []).append(moved / seconds / 1e9)
                        floors.setdefault((is_store, tokens), []).append(peak)
                old, new = (torch.from_numpy(each.reshape(-1)).to(device) for each in ids)
                if not all(torch.equal(each[old], each[new]) for each in tensors):
                    raise RuntimeError(f"{kind.name}: what was loaded is not what was stored")
    finally:
        blocks.close()
    for is_store, what in ((True, "store"), (False, "retrieve")):
        for tokens, name, bar in zip(scale.copy_tokens, ("2k", "8k"), kind.bars, strict=True):
            key = is_store, tokens
            yield at_least(f"gpu {what} {name} tokens, {kind.name}", "GB/s", speeds[key], floors[key], bar)
