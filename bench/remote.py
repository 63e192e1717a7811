"""The tiers in shared stores beside their bare clients, with one object per call and the same number of threads.

redis: `redis-server` and redis-py (`get` into bytes, `set` of bytes). object: moto's S3 server, and a directory in
memory, both through obstore (`get().bytes()`, `put` of bytes in one piece). Our side gathers from and scatters into
three pieces of memory; the bare client does neither. The four measurements alternate; no figure waits for a disk.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import SHM, Scale, free_port, listening, say
from report import Figure, at_least

from kvdepot.processes import code_command
from kvdepot.tiers import Blob, Tier, parse

__all__ = ["run"]

MIB = 1 << 20
SIZES = (1, 8, 32)
THREADS = 2
_ROUND_MIB = 64
"""Maximum bytes that each thread moves in one measurement."""
_BAR = 0.8

Bare = tuple[Callable[[str, bytes], Any], Callable[[str], Any]]


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """Figures of each store that can be started here."""
    figures: list[Figure] = []
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "bench")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "bench")
    for name, store, commands, modules in (
        ("redis", _redis, ["redis-server"], ["redis"]),
        ("object (S3)", _s3, [], ["obstore", "moto", "flask"]),
        ("object (file)", _directory, [], ["obstore"]),
    ):
        missing = [command for command in commands if shutil.which(command) is None]
        missing += [module for module in modules if importlib.util.find_spec(module) is None]
        if missing:
            notes.append(f"{name}: left out, {', '.join(missing)} missing")
            continue
        with (
            tempfile.TemporaryDirectory(dir=SHM, prefix="kvdepot-bench-") as directory,
            store(Path(directory)) as opened,
        ):
            url, bare = opened
            tier = parse(url).open()
            tier.usage()
            for mib in SIZES:
                say(f"remote: {name}, {mib} MiB")
                figures += _measure(name, mib, tier, bare, scale)
            tier.close()
    return figures


def _measure(name: str, mib: int, tier: Tier, bare: Bare, scale: Scale) -> list[Figure]:
    size = mib * MIB * scale.blocks // Scale.blocks
    count = max(2, min(16, _ROUND_MIB // mib))
    put, get = bare
    data = os.urandom(size)
    source = bytearray(data)
    targets = [bytearray(size) for _ in range(THREADS)]

    def blob(memory: bytearray, key: str) -> Blob:
        view, third = memoryview(memory), size // 3
        return Blob(key, [view[:1024], view[1024:third], view[third:]])

    def ours_put(_: int, key: str) -> None:
        if tier.write([blob(source, key)]) != [True]:
            raise RuntimeError("a write was refused")

    def ours_get(thread: int, key: str) -> None:
        if tier.read([blob(targets[thread], key)]) != [size]:
            raise RuntimeError("a read missed")

    works: dict[str, Callable[[int, str], Any]] = {
        "bare write": lambda _, key: put(key, data),
        "write": ours_put,
        "bare read": lambda _, key: get(key),
        "read": ours_get,
    }
    speeds: dict[str, list[float]] = {what: [] for what in works}
    names = [[_name(thread * 100 + number) for number in range(count)] for thread in range(THREADS)]
    for turn in range(-1, scale.copy_runs):  # the first warms everything up
        for what, work in works.items():
            seconds = _together(work, names)
            if turn >= 0:
                speeds[what].append(THREADS * count * size / seconds / 1e9)
        for target in targets:
            if target != data:
                raise RuntimeError("what was read is not what was written")
            target[:] = bytes(size)
    tier.remove([key for keys in names for key in keys])
    return [
        at_least(f"{name} {what} {mib} MiB, {THREADS} threads", "GB/s", speeds[what], speeds[f"bare {what}"], _BAR)
        for what in ("write", "read")
    ]


def _together(work: Callable[[int, str], Any], names: list[list[str]]) -> float:
    """Seconds until every thread has finished its names."""
    failures: list[BaseException] = []
    barrier = threading.Barrier(len(names) + 1)

    def live(thread: int) -> None:
        barrier.wait()
        try:
            for key in names[thread]:
                work(thread, key)
        except BaseException as exc:  # noqa: BLE001 - the top of a thread; raised below
            failures.append(exc)

    threads = [threading.Thread(target=live, args=(number,)) for number in range(len(names))]
    for thread in threads:
        thread.start()
    barrier.wait()
    begun = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begun
    if failures:
        raise failures[0]
    return seconds


def _name(number: int) -> str:
    return f"{0:032x}/{0:032x}/{number:064x}.0"


@contextmanager
def _redis(directory: Path) -> Iterator[tuple[str, Bare]]:
    import redis

    port = free_port()
    flags = ["--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]
    with listening(["redis-server", "--port", str(port), *flags], port):
        client = redis.Redis(port=port)
        try:
            yield (
                f"redis://127.0.0.1:{port}",
                (lambda key, data: client.set(f"kvdepot/{key}", data), lambda key: client.get(f"kvdepot/{key}")),
            )
        finally:
            client.close()


@contextmanager
def _s3(directory: Path) -> Iterator[tuple[str, Bare]]:
    from obstore.store import S3Store

    port = free_port()
    quiet = "import warnings; warnings.simplefilter('ignore')"
    serve = f"{quiet}; from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    with listening(code_command(serve), port):
        endpoint = f"http://127.0.0.1:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bench", method="PUT"), timeout=10).close()
        place: Any = {"endpoint": endpoint, "region": "us-east-1"}
        store = S3Store("bench", prefix="kv", config=place, client_options={"allow_http": True})
        yield f"s3://bench/kv?endpoint={endpoint}&region=us-east-1&timeout_s=60", _obstore(store)


@contextmanager
def _directory(directory: Path) -> Iterator[tuple[str, Bare]]:
    from obstore.store import LocalStore

    yield f"file://{directory}/kv", _obstore(LocalStore(directory / "kv", mkdir=True))


def _obstore(store: Any) -> Bare:
    import obstore

    return (
        lambda key, data: obstore.put(store, key, data, use_multipart=False),
        lambda key: obstore.get(store, key).bytes(),
    )
