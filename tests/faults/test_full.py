"""Nothing left: arena, /dev/shm, disk, descriptors. Refusals are clear and counted, and end with the pressure."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import HANG_S, SHM, Depot, StartDepot, eventually, suspend
from tests.faults.conftest import Driver, Mounts, Nursery, StartDriver

pytestmark = pytest.mark.faults

MIB = 1 << 20
FULL = "mount -t tmpfs -o nr_inodes=1 tmpfs {}"


class Elsewhere(Mounts):
    """A mount namespace with a /dev/shm of its own; whatever runs in it ends with the test."""

    def __init__(self, size_mib: int) -> None:
        super().__init__(f"mount -t tmpfs -o size={size_mib}m,mode=1777 tmpfs {SHM}")
        self._servers: list[subprocess.Popen[bytes]] = []
        self._drivers: list[Driver] = []
        self._nursery: Nursery | None = None
        self.logs = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the servers
        self.url = f"ipc://{tempfile.gettempdir()}/kvdepot-test-{uuid.uuid4().hex[:12]}.sock"
        self.shm = self.root / str(SHM)[1:]

    def serve(self, arena_mib: float, *under: str) -> subprocess.Popen[bytes]:
        """under: a command that runs the server."""
        server = subprocess.Popen(
            [
                *self.inside, *under, sys.executable, "-m", "kvdepot.cli", "serve", "--url", self.url,
                "--arena-name", "arena", "--arena-gib", str(arena_mib / 1024), "--chunk-size", "64",
            ],
            stderr=self.logs,
        )  # fmt: skip
        self._servers.append(server)
        return server

    def logged(self) -> str:
        self.logs.seek(0)
        return self.logs.read()

    def spawn(self) -> Driver:
        self._nursery = self._nursery or Nursery(*self.inside)
        self._drivers.append(self._nursery.spawn())
        return self._drivers[-1]

    def fill(self) -> None:
        """Take all that is left."""
        stats = os.statvfs(self.shm)
        with (self.shm / "filler").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, stats.f_bavail * stats.f_frsize)

    def empty(self) -> None:
        (self.shm / "filler").unlink()

    def close(self) -> None:
        for driver in self._drivers:
            driver.close()
        if self._nursery is not None:
            self._nursery.close()
        for server in self._servers:
            server.kill()  # also while it is stopped
            server.wait(HANG_S)
        super().close()
        self.logs.close()
        for path in Path(tempfile.gettempdir()).glob(f"{Path(self.url).name}*"):
            path.unlink()


@pytest.fixture
def elsewhere() -> Iterator[Callable[[int], Elsewhere]]:
    with contextlib.ExitStack() as ending:
        yield lambda size_mib: ending.enter_context(contextlib.closing(Elsewhere(size_mib)))


OLD_KERNEL = (sys.executable, str(Path(__file__).with_name("old_kernel.py")))


@pytest.mark.parametrize("under", [(), OLD_KERNEL], ids=["on this kernel", "on one before 5.14"])
def test_a_full_dev_shm_drops_stores_until_there_is_room_again(
    elsewhere: Callable[[int], Elsewhere], under: tuple[str, ...]
) -> None:
    place = elsewhere(64)
    first = place.serve(4, *under)
    driver = place.spawn()
    driver.tell("open", url=place.url, blocks=64, width=1 << 10)  # 256 KiB a chunk
    families = list(range(100, 120))
    for family in families[:5]:
        assert driver.tell("store", family=family, chunks=2) is True
    first.kill()
    first.wait(HANG_S)
    second = place.serve(48, *under)  # it fits when it starts ...
    arena = place.shm / "arena"
    eventually(lambda: arena.stat().st_size == 48 * MIB)
    suspend(second.pid)
    place.fill()  # ... and then another takes the memory
    second.send_signal(signal.SIGCONT)
    eventually(lambda: driver.tell("reaches_server"))
    assert driver.tell("hits", families=families[:5], chunks=2) == 10
    stored = [driver.tell("store", family=family, chunks=2) for family in families[5:]]
    print(f"{stored.count(False)} of {len(stored)} stores were dropped")
    assert False in stored
    hits = driver.tell("hits", families=families, chunks=2)
    assert hits >= 10 + 2 * stored.count(True)
    status = driver.tell("server_status")
    assert status["counters"]["failed_chunks"] >= stored.count(False)
    assert status["reserved_shards"] == status["operations"] == 0
    eventually(lambda: f"{SHM} is full" in place.logged())
    assert place.logged().count(f"{SHM} is full") == 1, "one line, not one for each store"
    place.empty()
    for family in families:
        assert driver.tell("store", family=family, chunks=2) is True
    assert driver.tell("hits", families=families, chunks=2) == 40
    assert not driver.tell("stats")["wrong"]
    assert second.poll() is None


def test_a_client_that_finds_dev_shm_full_is_told_so_and_others_go_on(elsewhere: Callable[[int], Elsewhere]) -> None:
    place = elsewhere(16)
    server = place.serve(4)
    driver = place.spawn()
    driver.tell("open", url=place.url)
    assert driver.tell("store", family=1, chunks=3) is True
    eventually(lambda: (place.shm / "arena").stat().st_blocks * 512 >= 4 * MIB)
    place.fill()
    late = place.spawn()
    late.send("open", url=place.url, model="late", blocks=4096, width=64)
    with pytest.raises(AssertionError, match=r"(?s)kvdepot\.errors\.\w+: .*(No space left|cannot)"):
        late.answer()
    assert driver.tell("hits", families=[1], chunks=3) == 3
    place.empty()
    again = place.spawn()
    again.tell("open", url=place.url, model="late")
    assert again.tell("store", family=2, chunks=3) is True
    assert again.tell("hits", families=[2], chunks=3) == 3
    assert server.poll() is None


@pytest.mark.parametrize("size_mib", [243, 256, 300, 320, 330])
def test_a_server_that_chooses_its_size_leaves_what_an_engine_needs(
    elsewhere: Callable[[int], Elsewhere], size_mib: int
) -> None:
    """vLLM refuses to start where /dev/shm has less than 240 MiB and some bytes free."""
    place = elsewhere(size_mib)
    place.serve(0)
    arena = place.shm / "arena"
    eventually(lambda: arena.exists() and MIB <= arena.stat().st_size <= arena.stat().st_blocks * 512)  # all of it
    left = os.statvfs(place.shm)
    assert left.f_bavail * left.f_frsize > 240 * MIB + 4096
    driver = place.spawn()
    driver.tell("open", url=place.url, blocks=64, width=1 << 10)
    assert driver.tell("store", family=1, chunks=2) is True
    assert driver.tell("hits", families=[1], chunks=2) == 2


def test_a_server_whose_log_is_on_a_full_disk_serves_and_ends_like_any_other(
    start_depot: StartDepot, start_driver: StartDriver
) -> None:
    with Path("/dev/full").open("w") as full:
        depot = start_depot("--log-level", "debug", arena_mib=8, chunk_size=64, stderr=full.fileno())
    driver = start_driver(depot.url)
    assert driver.tell("store", family=1, chunks=3) is True
    start_driver(depot.url).kill()  # the server logs that
    eventually(lambda: driver.tell("server_status")["clients"] == 2)
    assert driver.tell("hits", families=[1], chunks=3) == 3
    assert not driver.tell("stats")["wrong"]
    assert depot.stop() == 0
    assert not (SHM / depot.name).exists()


def test_a_socket_on_a_full_disk_is_refused_with_its_name_and_leaves_nothing() -> None:
    name = f"kvdepot-test-{uuid.uuid4().hex[:12]}"
    Depot.names.add(name)
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Mounts(FULL.format(folder))) as place:
        words = "-m", "kvdepot.cli", "serve", "--url", f"ipc://{folder}/depot.sock", "--arena-name", name
        command = [*place.inside, sys.executable, *words, "--arena-gib", "0.01"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert ended.returncode == 1
    assert "depot.sock" in ended.stderr and "No space left on device" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (SHM / name).exists()
