"""Worker processes with tensors on a GPU that are registered with a server, and the expected bytes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tests.conftest import HANG_S, Depot, eventually
from tests.devices.tensors import Bytes, Model
from tests.devices.worker import WorkerProcess

BLOCK = 64
"""Tokens per block; a chunk has four blocks."""
CHUNK = 256
BLOCKS = 24


class Engine:
    """A worker process; it ends with `process.close`."""

    def __init__(
        self, url: str, environment: Mapping[str, str], gpu: int = 0, how: str = "one", name: str = "model",
        seed: int = 0, scale: int = 1,
    ) -> None:  # fmt: skip
        """scale: how many times as large its blocks are."""
        self.model = Model().add("keys and values apart", BLOCKS, 4 * scale, 2, 64, "bfloat16")
        self.model.add("mla", BLOCKS, 4 * scale, 1, 100, "float8_e4m3fn")
        self.process = WorkerProcess(environment, gpu, how)
        self.draw = np.random.default_rng(seed)
        self.truth: list[Bytes] = []
        self.number = 0
        assert self.process.call("connect", url, name, self.model, BLOCK) == CHUNK // BLOCK
        self.fill()

    @property
    def pid(self) -> int:
        return self.process.process.pid

    def fill(self) -> None:
        self.truth = [self.draw.integers(0, 256, size, np.uint8) for size in self.model.sizes]
        self.process.write(self.truth)

    def begin(self, ids: list[int], tokens: list[int], is_store: bool) -> str:
        self.number += 1
        self.process.call("begin", f"r{self.number}", ids, tokens, is_store)
        return f"r{self.number}"

    def end(self, request: str) -> tuple[bool, list[int]]:
        ended: tuple[bool, list[int]] = self.process.call("end", request, HANG_S)
        return ended

    def store(self, ids: list[int], tokens: list[int]) -> bool:
        return self.end(self.begin(ids, tokens, True))[0]

    def retrieve(self, ids: list[int], tokens: list[int]) -> list[int]:
        """Blocks that failed."""
        return self.end(self.begin(ids, tokens, False))[1]

    def wrong(self, expected: list[Bytes]) -> list[int]:
        """Bytes of each storage that are not as expected."""
        return [int((a != b).sum()) for a, b in zip(self.process.read(), expected, strict=True)]

    def round_trip(self, source: list[int], target: list[int], tokens: list[int]) -> None:
        """Store blocks, overwrite all memory, and load them into other blocks; nothing else may change."""
        assert self.store(source, tokens)
        self.comes_back(self.truth, source, target, tokens)

    def comes_back(self, stored: list[Bytes], source: list[int], target: list[int], tokens: list[int]) -> None:
        self.fill()
        assert self.retrieve(target, tokens) == []
        self.model.move(stored, self.truth, dict(zip(source, target, strict=True)))
        assert self.wrong(self.truth) == [0, 0]


def tokens_of(seed: int, chunks: int) -> list[int]:
    return [seed] * (chunks * CHUNK)


def settled(depot: Depot, **expected: int) -> None:
    """The server holds nothing for anyone; or for as many as expected."""
    nothing = {"instances": 0, "sessions": 0, "operations": 0, "reserved_shards": 0, "holds": 0} | expected
    eventually(lambda: nothing.items() <= depot.status().items())


def round_trips_at_once(engines: list[Engine], rounds: int) -> None:
    """Each engine stores and retrieves on a thread of its own; what one of them finds wrong fails the test."""

    def work(engine: Engine, seed: int) -> None:
        draw = random.Random(seed)
        for number in range(rounds):
            order = draw.sample(range(BLOCKS), 24)
            engine.round_trip(order[:12], order[12:], tokens_of(1000 * seed + number, 3))

    with ThreadPoolExecutor(len(engines)) as pool:
        for done in [pool.submit(work, engine, i + 1) for i, engine in enumerate(engines)]:
            done.result()
