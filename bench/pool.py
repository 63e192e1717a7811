"""The mooncake tier beside the bare client of Mooncake Store, with one object per call and the same number of threads.

It is not called mooncake.py, because that would be imported instead of the library. The pool's memory belongs to
another process, so every byte crosses TCP. The bare client calls `put_from` and `get_into` with one piece of memory, in
a loop; the tier moves a header and three pieces of KV in registered memory. The four measurements alternate.
"""

from __future__ import annotations

import importlib.util
import itertools
import mmap
import os
import random
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from common import Scale, say
from report import Figure, at_least

from kvdepot.processes import code_command
from kvdepot.tiers import Blob, Tier, parse

__all__ = ["run"]

MIB = 1 << 20
SIZES = (1, 8, 32)
THREADS = 2
_ROUND_MIB = 64
"""Bytes that each thread moves in one measurement."""
_READY_S = 30.0
_BAR = 0.8
_MEMBER = """
import sys
from kvdepot.tiers import parse
tier = parse(sys.argv[1]).open()
print("ready", flush=True)
sys.stdin.read()
tier.close()
"""


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """Figures for reading and writing objects of each size."""
    if importlib.util.find_spec("mooncake") is None:
        notes.append("mooncake: left out, mooncake-transfer-engine-non-cuda is missing")
        return []
    figures: list[Figure] = []
    with _pool() as port:
        tier = parse(f"mooncake://127.0.0.1:{port}/?segment_gib=0&local_host=127.0.0.1").open()
        from mooncake.store import MooncakeDistributedStore  # its settings are made by `open`

        bare = MooncakeDistributedStore()
        if bare.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", f"127.0.0.1:{port}"):
            raise RuntimeError("the bare client cannot join the pool")
        memory = memoryview(mmap.mmap(-1, 2 * THREADS * max(SIZES) * MIB))
        memory[:] = random.Random(1).randbytes(MIB) * (len(memory) // MIB)
        tier.attach([memory])
        address = int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
        if bare.register_buffer(address, len(memory)):  # as its documentation wants it
            raise RuntimeError("the bare client cannot register memory")
        try:
            for mib in SIZES:
                say(f"mooncake: objects of {mib} MiB")
                figures += _measure(scale, tier, bare, memory, mib)
            notes.append(f"mooncake: {tier.usage().counters['staged_bytes']} bytes were copied on this side")
        finally:
            tier.close()
            bare.close()
    return figures


def _measure(scale: Scale, tier: Tier, bare: Any, memory: memoryview, mib: int) -> list[Figure]:
    size = mib * MIB * scale.blocks // Scale.blocks
    count = max(2, _ROUND_MIB // mib)
    address = int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])

    def names(who: str, thread: int) -> list[str]:
        return [f"{who * 32}/{thread:032x}/{number:x}.0" for number in range(count)]

    def pieces(start: int) -> list[memoryview]:
        cuts = [0, 1024, size // 4, size // 2, size]
        return [memory[start + one : start + two] for one, two in itertools.pairwise(cuts)]

    def ours_write(thread: int) -> None:
        for name in names("a", thread):
            _must(tier.write([Blob(name, pieces(2 * thread * size))]) == [True])

    def ours_read(thread: int) -> None:
        for name in names("a", thread):
            _must(tier.read([Blob(name, pieces((2 * thread + 1) * size))]) == [size])

    def bare_write(thread: int) -> None:
        for name in names("b", thread):
            _must(bare.put_from(name, address + 2 * thread * size, size) == 0)

    def bare_read(thread: int) -> None:
        for name in names("b", thread):
            _must(bare.get_into(name, address + (2 * thread + 1) * size, size) == size)

    gained: dict[str, list[float]] = {"write": [], "read": [], "bare write": [], "bare read": []}
    for number in range(-1, scale.copy_runs):  # the first warms everything up
        turns: list[tuple[str, Callable[[int], None]]] = [
            ("write", ours_write), ("bare write", bare_write), ("read", ours_read), ("bare read", bare_read)
        ]  # fmt: skip
        if number % 2:
            turns = [turns[1], turns[0], turns[3], turns[2]]
        for what, task in turns:
            seconds = _together(task)
            if number >= 0:
                gained[what].append(THREADS * count * size / seconds / 1e9)
        everything = [name for who in "ab" for thread in range(THREADS) for name in names(who, thread)]
        tier.remove([name for name in everything if name[0] == "a"])
        bare.batch_remove([name for name in everything if name[0] == "b"], True)
    return [
        at_least(f"mooncake {what}, {THREADS} threads, {mib} MiB", "GB/s", gained[what], gained[f"bare {what}"], _BAR)
        for what in ("write", "read")
    ]


def _must(happened: bool) -> None:
    if not happened:
        raise RuntimeError("the pool did not take or give an object")


def _together(task: Callable[[int], None]) -> float:
    """Seconds that all threads take."""
    failures: list[BaseException] = []

    def run_one(thread: int) -> None:
        try:
            task(thread)
        except BaseException as exc:  # noqa: BLE001 - the top of a thread; raised below
            failures.append(exc)

    threads = [threading.Thread(target=run_one, args=(thread,)) for thread in range(THREADS)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return time.perf_counter() - begun


@contextmanager
def _pool() -> Iterator[int]:
    """A master, and a process that gives 1 GiB to the pool; the master's port."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None and spec.origin is not None
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    master = subprocess.Popen(
        [
            str(Path(spec.origin).parent / "mooncake_master"), f"--rpc_port={ports[0]}", "--rpc_address=127.0.0.1",
            f"--metrics_port={ports[1]}", "--metrics_host=127.0.0.1",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    member = None
    try:
        _wait_listening(ports[0])
        url = f"mooncake://127.0.0.1:{ports[0]}/?segment_gib=1&local_host=127.0.0.1"
        member = subprocess.Popen(
            code_command(_MEMBER, url), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL, env=dict(os.environ),
        )  # fmt: skip
        assert member.stdout is not None
        if member.stdout.readline().strip() != "ready":
            raise RuntimeError("no process could give memory to the pool")
        yield ports[0]
    finally:
        for process in (member, master):
            if process is not None:
                process.kill()
                process.wait()


def _wait_listening(port: int) -> None:
    deadline = time.monotonic() + _READY_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
