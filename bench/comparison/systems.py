"""The systems that are compared: what each is, its server, and what vLLM must know to use it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from common import READY_S, SHM, Serve, free_port, mappings, say, transfer_config, wait_or_kill

from comparison.engine import kv_bytes
from kvdepot.client.transfer import free_chunk_tokens

__all__ = ["BASELINE", "SYSTEMS", "Running", "System", "installed", "resident_bytes"]


@dataclass(frozen=True)
class Running:
    """A started system. transfer: vLLM's `kv_transfer_config`. start_s: from launch to the first answer to an engine's
    first question; resident_bytes: see there. Both are None for a system without a server.
    """

    transfer: dict[str, Any] | None = None
    start_s: float | None = None
    resident_bytes: int | None = None


@dataclass(frozen=True)
class System:
    """name: in the table. package: what must be installed, besides vLLM. start: a context manager, which takes the
    size of its memory in GiB and the tokens of an engine's block.
    """

    name: str
    package: str
    start: Callable[[int, int], contextlib.AbstractContextManager[Running]]

    @property
    def version(self) -> str:
        return importlib.metadata.version(self.package) if self.package else ""


def installed(systems: dict[str, System]) -> dict[str, System]:
    """Those whose package is there; says which are left out."""
    found = {}
    for key, system in systems.items():
        try:
            _ = system.version
        except importlib.metadata.PackageNotFoundError:
            say(f"{system.name}: left out, {system.package} is not installed")
        else:
            found[key] = system
    return found


@contextmanager
def _nothing(gib: int, block_tokens: int) -> Iterator[Running]:
    yield Running()


@contextmanager
def _kvdepot(gib: int, block_tokens: int) -> Iterator[Running]:
    server = Serve("--http", f"127.0.0.1:{free_port()}", arena_gib=gib)
    context: zmq.Context[Any] = zmq.Context()
    try:
        start_s = server.wait_first_answer(context)
        server.wait_populated(context)
        yield Running(
            transfer_config(server.url), start_s=start_s, resident_bytes=resident_bytes(server.process.pid, gib << 30)
        )
    finally:
        server.close()
        context.term()


# -- LMCache, multi-process mode

_QUIET = {"DO_NOT_TRACK": "1", "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_LOG_LEVEL": "WARNING"}
"""It reports its use to its makers unless told otherwise."""


def _lmcache(
    mode: str, shared: bool, follows: bool = False
) -> Callable[[int, int], contextlib.AbstractContextManager[Running]]:
    """mode: who copies: `engine_driven` or `lmcache_driven`. shared: whether engines map the server's memory; otherwise
    they send KV in messages, or, where the server copies, it maps theirs. follows: whether its chunks have the size of
    kvdepot's, which follow the engine's blocks, instead of its own 256 tokens.
    """

    @contextmanager
    def start(gib: int, block_tokens: int) -> Iterator[Running]:
        os.environ.update(_QUIET)  # of engines, too
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        port, name = free_port(), f"lmcache-compare-{uuid.uuid4().hex[:12]}"
        chunks = ["--chunk-size", str(_our_chunk_tokens(block_tokens))] if follows else []
        memory = ["--no-l1-use-lazy", "--shm-name", name] if shared else ["--l1-init-size-gb", str(gib)]
        with tempfile.TemporaryFile("w+") as log:
            begun = time.perf_counter()
            process = subprocess.Popen(
                [
                    str(Path(sys.executable).with_name("lmcache")), "server", "--host", "127.0.0.1",
                    "--port", str(port), "--http-port", str(free_port()), "--prometheus-port", str(free_port()),
                    "--l1-size-gb", str(gib), "--eviction-policy", "LRU", "--supported-transfer-mode", mode, *memory,
                    *chunks,
                ],
                stdout=log, stderr=log,
            )  # fmt: skip
            try:
                client = RequestClientFactory.create(f"tcp://127.0.0.1:{port}")
                try:
                    client.get_chunk_size().result(timeout=READY_S)
                    start_s = time.perf_counter() - begun
                finally:
                    client.close()
                time.sleep(1.0)  # its threads have begun; what it holds before anybody stores is what counts
                yield Running(
                    {
                        "kv_connector": "LMCacheMPConnector",
                        "kv_role": "kv_both",
                        "kv_connector_extra_config": {
                            "lmcache.mp.host": "tcp://127.0.0.1",
                            "lmcache.mp.port": port,
                            "lmcache.mp.mp_transfer_mode": mode,
                        },
                    },
                    start_s,
                    resident_bytes(process.pid, gib << 30),
                )
            except Exception:
                log.seek(0)
                sys.stderr.write(log.read()[-6000:])
                raise
            finally:
                process.terminate()
                wait_or_kill(process, 20)
                (SHM / f"lmcache_l1_pool_{name}").unlink(missing_ok=True)

    return start


def _our_chunk_tokens(block_tokens: int) -> int:
    """Tokens of kvdepot's chunks with `chunk_size = auto`: whole blocks of the engine."""
    return -(-free_chunk_tokens(kv_bytes(), 1) // block_tokens) * block_tokens


SYSTEMS = {
    "none": System("no cache", "", _nothing),
    "lmcache-shm": System("LMCache, shared memory", "lmcache", _lmcache("engine_driven", True)),
    "lmcache-chunks": System(
        "LMCache, shared memory, kvdepot's chunks", "lmcache", _lmcache("engine_driven", True, follows=True)
    ),
    "lmcache-messages": System("LMCache, messages", "lmcache", _lmcache("engine_driven", False)),
    "lmcache-server": System("LMCache, server copies", "lmcache", _lmcache("lmcache_driven", False)),
    "kvdepot": System("kvdepot", "kvdepot", _kvdepot),
}
BASELINE = "none"


def resident_bytes(pid: int, kv_bytes: int) -> int:
    """Resident memory of a process and its descendants without the memory for KV: mappings of /dev/shm, and those of at
    least `kv_bytes`. What the processes share counts once.
    """
    total = 0
    for each in [pid, *_descendants(pid)]:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for head, size in mappings(each, "Pss"):
                begin, end = (int(address, 16) for address in head.split(maxsplit=1)[0].split("-"))
                if " /dev/shm/" not in head and end - begin < kv_bytes:
                    total += size
    return total


def _descendants(pid: int) -> list[int]:
    children = [
        int(child)
        for tasks in Path(f"/proc/{pid}/task").glob("*/children")
        for child in tasks.read_text().split()
    ]  # fmt: skip
    return [found for child in children for found in (child, *_descendants(child))]
