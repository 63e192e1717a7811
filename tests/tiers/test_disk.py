"""The disk tier's own promises: its bound, its order, restarts, and whatever a file system does to it."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdepot.errors import ConfigError, TierError
from kvdepot.testing.tiers import MIB, TierConformance, content, name_of, together
from kvdepot.tiers import Blob, Tier, disk, parse
from kvdepot.tiers.disk import Disk
from kvdepot.tiers.disk.directory import path_of
from kvdepot.tiers.disk.ledger import Ledger
from tests.conftest import HANG_S, eventually
from tests.tiers.disk_child import SIZES, stamped

GIB = 1 << 30


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    """Open a tier, counted: `start(capacity_bytes, path)`; all are closed with the test."""
    with contextlib.ExitStack() as stack:

        def begin(capacity_bytes: int = GIB, path: Path = tmp_path / "tier") -> Disk:
            tier = stack.enter_context(contextlib.closing(Disk(path, capacity_bytes)))
            eventually(lambda: tier.usage().objects is not None)
            return tier

        yield begin


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "tier"


def write(tier: Disk, number: int, size: int = 10_000) -> bool:
    return tier.write([Blob(name_of(number), [memoryview(content(number, size))])])[0]


def read(tier: Disk, number: int, room: int = 10_000) -> bytes | None:
    """The object; None if it is absent."""
    area = bytearray(room)
    (size,) = tier.read([Blob(name_of(number), [memoryview(area)])])
    return None if size is None else bytes(area[:size])


def there(tier: Disk, *numbers: int) -> list[int]:
    found = tier.find([name_of(number) for number in numbers])
    return [number for number, is_there in zip(numbers, found, strict=True) if is_there]


def file_of(root: Path, number: int) -> Path:
    (path,) = root.glob(f"??/*/*/??/{name_of(number).rpartition('/')[2]}")
    return path


def allocated(root: Path) -> int:
    """Bytes that the file system gives to all files there."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                total += (Path(folder) / name).lstat().st_blocks * 512
            except FileNotFoundError:
                continue
    return total


class TestDisk(TierConformance):
    def open_tier(self, place: Path) -> Tier:
        return self.open_bounded(place, GIB)

    def open_bounded(self, place: Any, capacity_bytes: int) -> Tier:
        tier = parse(f"disk://{place}?capacity_gib={capacity_bytes / 2**30}").open()
        eventually(lambda: tier.usage().objects is not None)  # until it is counted, it takes nothing
        return tier


# -- settings


def test_a_url_gives_directory_capacity_and_policy(tmp_path: Path) -> None:
    with contextlib.closing(parse(f"disk://{tmp_path}/a%20b/c?capacity_gib=0.5&policy=lru").open()) as tier:
        assert tier.usage().capacity_bytes == GIB // 2
        assert (tmp_path / "a b/c").is_dir()


def test_a_file_system_without_locks_is_named_with_what_to_do(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_flock(fd: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", no_flock)
    with pytest.raises(TierError, match=r"its file system has no file locks; use a folder on a local disk"):
        parse(f"disk://{root}?capacity_gib=1").open()


def test_a_directory_with_files_of_others_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        Disk(tmp_path, GIB)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_directory_in_use_is_refused_and_free_once_its_process_is_killed(
    root: Path, start: Callable[..., Disk]
) -> None:
    child = _Child(root, GIB, 0)
    with pytest.raises(ConfigError, match="in use"):
        Disk(root, GIB)
    child.kill()
    assert read(start(), child.kept[0], 400_000) == stamped(child.kept[0])


# -- the bound


def test_the_order_of_use_survives_a_restart(root: Path, start: Callable[..., Disk]) -> None:
    tier = start()
    for number in range(8):
        assert write(tier, number, 100_000)
        long_ago = time.time() - 3600 + number
        os.utime(file_of(root, number), (long_ago, long_ago))
    tier.close()
    tier = start()
    for number in (2, 5):
        assert read(tier, number, 100_000) == content(number, 100_000)
    tier.close()
    tier = start(MIB)
    for number in range(100, 107):
        assert write(tier, number, 100_000)
    assert there(tier, *range(8)) == [2, 5]


# -- what lies in the directory


def test_directories_and_files_are_ours_alone_whatever_the_mask(root: Path, start: Callable[..., Disk]) -> None:
    before = os.umask(0)
    try:
        tier = start()
        for number in range(3):
            assert write(tier, number)
        tier.remove([name_of(0)])
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [root, *root.rglob("*")]}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


@pytest.mark.parametrize(
    "name",
    [
        "../../../outside",
        "/outside",
        f"{'0' * 32}/../../../{'0' * 32}.0",
        f"{'0' * 32}/{'0' * 32}/../../../outside.0",
        f"{'0' * 32}/{'0' * 32}/..",
        f"{'0' * 32}/{'0' * 32}/{'0' * 64}.0\n",
        f"{'0' * 32}/{'0' * 32}/{'0' * 64}.0\0",
        f"{'0' * 32}/{'0' * 32}/{'0' * 200}.0",
        f"{'0' * 32}/{'0' * 32}/{'0' * 64}.0/x",
        "tmp/x",
        "kvdepot.lock",
        "",
    ],
)
def test_texts_that_name_no_object_lead_to_no_file(name: str, root: Path, start: Callable[..., Disk]) -> None:
    tier = start()
    (root.parent / "outside").write_bytes(b"mine")
    area = memoryview(bytearray(b"evil"))
    assert tier.write([Blob(name, [area])]) == [False]
    assert tier.find([name]) == [False]
    assert tier.read([Blob(name, [area])]) == [None]
    tier.remove([name])
    assert (root.parent / "outside").read_bytes() == b"mine"
    assert {path.name for path in root.parent.iterdir()} == {"tier", "outside"}
    assert {path.name for path in root.iterdir()} == {"kvdepot.lock"}


@pytest.mark.parametrize("salt", ["../..", "..", "/", "0" * 40, "*"])
def test_to_forget_what_is_no_beginning_of_a_name_removes_nothing(
    salt: str, root: Path, start: Callable[..., Disk]
) -> None:
    tier = start()
    (root.parent / "outside").write_bytes(b"mine")
    assert write(tier, 1)
    assert tier.forget(salt, "") == 0 == tier.forget("", salt)
    assert there(tier, 1) == [1] and (root.parent / "outside").exists()


def test_links_are_not_followed(root: Path, start: Callable[..., Disk]) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"s" * 10_000)
    tier = start()
    assert write(tier, 1) and write(tier, 2)
    file_of(root, 1).unlink()
    place = file_of(root, 2).with_name("x").parent.parent / name_of(1).split("/")[2][:2]
    place.mkdir(exist_ok=True)
    (place / name_of(1).split("/")[2]).symlink_to(outside / "secret")
    assert read(tier, 1) is None
    assert write(tier, 1) and read(tier, 1) == content(1, 10_000)
    assert (outside / "secret").read_bytes() == b"s" * 10_000
    tier.close()
    shutil.move(root / "00", outside / "00")
    (root / "00").symlink_to(outside / "00")
    tier = start()
    assert there(tier, 1, 2) == []
    assert write(tier, 3) and not (root / "00").is_symlink()
    assert tier.forget("", "") == 1
    assert len([path for path in (outside / "00").rglob("*") if path.is_file()]) == 2


def test_objects_that_were_away_for_a_time_are_forgotten_with_the_others(
    root: Path, start: Callable[..., Disk]
) -> None:
    tier = start()
    assert write(tier, 1)
    (top,) = root.glob("[0-9a-f][0-9a-f]")
    top.rename(root.with_name("away"))
    assert read(tier, 1) is None
    root.with_name("away").rename(top)
    tier.forget("", "")
    tier.close()
    assert there(start(), 1) == []


def test_objects_that_cannot_be_moved_to_the_trash_do_not_count_as_forgotten(
    root: Path, start: Callable[..., Disk]
) -> None:
    tier = start()
    assert write(tier, 1)
    (root / "trash").symlink_to(root / "nowhere")
    with pytest.raises(TierError, match="does not allow removing"):
        tier.forget("", "")
    assert there(tier, 1) == [1]
    tier.close()
    tier = start()
    assert tier.forget("", "") == 1 and there(tier, 1) == []


# -- other users

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")


def test_a_directory_that_others_could_enter_is_closed_to_them_and_the_log_says_so(
    root: Path, start: Callable[..., Disk], caplog: pytest.LogCaptureFixture
) -> None:
    tier = start()
    assert write(tier, 1)
    tier.close()
    for directory in (root, *(path for path in root.rglob("*") if path.is_dir())):
        directory.chmod(0o777)
    tier = start()
    assert read(tier, 1) == content(1, 10_000)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (root, *root.rglob("*")) if path.is_dir()} == {0o700}
    assert f"{root} had mode 0777" in caplog.text


@as_root
def test_files_of_another_user_in_an_open_directory_are_never_read(
    root: Path, start: Callable[..., Disk], caplog: pytest.LogCaptureFixture
) -> None:
    tier = start()
    assert write(tier, 1) and write(tier, 2)
    tier.close()
    root.chmod(0o777)
    os.chown(file_of(root, 1), NOBODY, NOBODY)
    os.chown(root / "kvdepot.lock", NOBODY, NOBODY)
    planted = file_of(root, 2).parents[2]
    os.chown(planted, NOBODY, NOBODY)
    tier = start()
    assert there(tier, 1, 2) == [] and not planted.exists()
    for removed in (root / "kvdepot.lock", planted):
        assert f"removed {removed}: it belongs to user {NOBODY}" in caplog.text
    assert (root / "kvdepot.lock").stat().st_uid == os.geteuid()
    assert write(tier, 2) and read(tier, 2) == content(2, 10_000)


def test_a_directory_that_any_user_could_replace_is_refused(root: Path) -> None:
    (root / "open").mkdir(parents=True)
    (root / "open").chmod(0o777)
    with pytest.raises(ConfigError, match=f"chmod o-w {root}/open"):
        Disk(root / "open" / "tier", GIB)
    (root / "open").chmod(0o1777)  # as /tmp: only owners can rename what is in it
    Disk(root / "open" / "tier", GIB).close()


@as_root
def test_a_directory_or_a_link_of_another_user_is_refused(root: Path) -> None:
    root.mkdir()
    (root / "real").mkdir(mode=0o700)
    (root / "link").symlink_to(root / "real")
    Disk(root / "link", GIB).close()
    assert (root / "real" / "kvdepot.lock").exists()
    os.lchown(root / "link", NOBODY, NOBODY)
    with pytest.raises(ConfigError, match="link"):
        Disk(root / "link", GIB)
    os.chown(root / "real", NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}.*{root}/real/kvdepot"):
        Disk(root / "real", GIB)


def test_a_start_removes_files_that_a_killed_process_was_writing_or_removing(
    root: Path, start: Callable[..., Disk]
) -> None:
    tier = start()
    assert write(tier, 1)
    tier.close()
    (root / "tmp").mkdir(exist_ok=True)
    (root / "tmp/dead-1").write_bytes(bytes(MIB))
    (root / "trash/dead-2/aa").mkdir(parents=True)
    (root / "trash/dead-2/aa/old").write_bytes(bytes(MIB))
    tier = start()
    usage = tier.usage()
    assert usage.objects == 1 and usage.counters["swept"] == 2
    assert allocated(root) < MIB and read(tier, 1) == content(1, 10_000)


# -- files that change behind our back


def test_a_file_cut_off_or_grown_is_answered_with_its_true_size(root: Path, start: Callable[..., Disk]) -> None:
    tier = start()
    for number in (1, 2, 3):
        assert write(tier, number)
    os.truncate(file_of(root, 1), 4000)
    os.truncate(file_of(root, 2), 20_000)
    os.truncate(file_of(root, 3), 0)
    area = memoryview(bytearray(10_000))
    assert tier.read([Blob(name_of(number), [area]) for number in (1, 2, 3)]) == [4000, 20_000, 0]
    assert read(tier, 1) == content(1, 10_000)[:4000]


def test_a_directory_where_a_file_should_be_is_that_objects_failure_alone(
    root: Path, start: Callable[..., Disk]
) -> None:
    tier = start()
    assert write(tier, 1) and write(tier, 2)
    path = file_of(root, 1)
    path.unlink()
    (path / "more").mkdir(parents=True)
    area = memoryview(bytearray(20_000))
    assert tier.read([Blob(name_of(1), [area[:10_000]]), Blob(name_of(2), [area[10_000:]])]) == [None, 10_000]
    assert write(tier, 1) is False
    assert tier.usage().counters["errors"] == 2
    shutil.rmtree(path)
    assert write(tier, 1) and read(tier, 1) == content(1, 10_000)
    tier.forget("", "")
    assert tier.usage().bytes == 0


# -- a process that is killed


class _Child:
    """A process that lives on a directory (disk_child.py)."""

    def __init__(self, root: Path, capacity_bytes: int, number: int) -> None:
        self.kept: list[int] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.tiers.disk_child", str(root), str(capacity_bytes), str(number)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()
        eventually(lambda: self.kept)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("kept ") and line.endswith("\n"):
                self.kept.append(int(line[5:]))

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(HANG_S)
        self._listener.join(HANG_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


def test_whenever_it_is_killed_all_objects_are_whole_and_the_newest_are_there(
    root: Path, start: Callable[..., Disk]
) -> None:
    bound = 8 * MIB
    draw = random.Random()
    for turn in range(8):
        child = _Child(root, bound, turn)
        count = draw.randrange(1, 60)
        eventually(lambda child=child, count=count: len(child.kept) >= count)  # type: ignore[misc]
        child.kill()
        assert allocated(root) <= bound
        tier = start(bound)
        newest = {number // 1_000_000: number for number in child.kept}
        for number in newest.values():
            assert read(tier, number, SIZES[-1]) == stamped(number), "what was written was lost"
        files = list(root.glob("??/*/*/??/*"))
        assert tier.usage().objects == len(files)
        for path in files:
            data = path.read_bytes()
            assert data == stamped(int.from_bytes(data[:8], "little")), "a part of an object"
        assert not (root / "tmp").exists() or not list((root / "tmp").iterdir())
        tier.close()


# -- file systems that refuse


class _Mount:
    """A mount namespace with a small file system of its own, seen from outside."""

    def __init__(self, *command: str) -> None:
        self._folder = tempfile.mkdtemp()
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo ready; exec sleep 1000"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._holder.stdout is not None and self._holder.stderr is not None
        is_ready = self._holder.stdout.readline() == "ready\n"
        said = "" if is_ready else self._holder.stderr.read()
        self.path = Path(f"/proc/{self._holder.pid}/root{self._folder}")
        if is_ready:
            said = self.run("mount", *command, self._folder)
        if said:
            self.close()
            if os.environ.get("CI"):
                pytest.fail(f"CI must be able to mount a small file system: {said}")
            pytest.skip(f"needs the right to mount a small file system: {said}")

    def run(self, *command: str) -> str:
        """A command inside; what it said when it failed. `.` is the mount."""
        inside = ["nsenter", "--mount", f"--target={self._holder.pid}"]
        words = [self._folder if word == "." else word for word in command]
        ended = subprocess.run([*inside, *words], capture_output=True, text=True, timeout=HANG_S)
        return ended.stderr if ended.returncode else ""

    def fill(self) -> None:
        """Take all that is left."""
        with (self.path / "filler").open("wb") as file:
            for size in (MIB, 4096):
                with contextlib.suppress(OSError):
                    while True:
                        os.write(file.fileno(), bytes(size))

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate(timeout=HANG_S)
        Path(self._folder).rmdir()


@pytest.fixture
def mount() -> Iterator[Callable[..., _Mount]]:
    with contextlib.ExitStack() as stack:
        yield lambda *command: stack.enter_context(contextlib.closing(_Mount(*command)))


def test_files_never_take_more_than_the_capacity_half_written_ones_included(
    mount: Callable[..., _Mount], start: Callable[..., Disk]
) -> None:
    bound = 6 * MIB
    place = mount("-t", "tmpfs", "-o", "size=64m", "tmpfs")  # whose directories take nothing
    root = place.path / "tier"
    tier = start(bound, root)
    ended = threading.Event()
    seen: list[int] = []

    def live(thread: int) -> Callable[[], None]:
        def run() -> None:
            draw = random.Random(thread)
            for turn in range(120):
                number = thread * 1000 + draw.randrange(20)
                size = draw.choice([1, 5000, 17_000, 300_000, MIB + 1, 3 * MIB])
                write(tier, number, size)
                read(tier, thread * 1000 + draw.randrange(20), 3 * MIB)
                if turn % 10 == 0:
                    tier.remove([name_of(number)])
                if turn % 50 == 49:
                    tier.forget("", "")

        return run

    def watch() -> None:
        while not ended.wait(0.0005):  # a look as often as the others can bear
            stats = os.statvfs(root)
            seen.append((stats.f_blocks - stats.f_bfree) * stats.f_frsize)

    def all_lives() -> None:
        try:
            together(*(live(thread) for thread in range(4)))
        finally:
            ended.set()

    together(all_lives, watch)
    assert len(seen) > 100 and bound // 2 < max(seen) <= bound
    usage = tier.usage()
    assert usage.bytes is not None and allocated(root) <= usage.bytes <= bound
    tier.forget("", "")
    tier.close()
    tier = start(bound, root)
    assert tier.usage().bytes == 0


def test_a_disk_that_others_have_filled_refuses_without_a_leak_and_comes_back(
    mount: Callable[..., _Mount], start: Callable[..., Disk]
) -> None:
    place = mount("-t", "tmpfs", "-o", "size=4m", "tmpfs")
    tier = start(GIB, place.path / "tier")
    assert write(tier, 0, 500_000)
    tier.forget("", "")
    place.fill()
    for number in range(1, 10):
        assert write(tier, number, 500_000) is False
    usage = tier.usage()
    assert (usage.objects, usage.bytes) == (0, 0) and usage.counters["errors"] >= 9
    assert list((place.path / "tier/tmp").iterdir()) == []
    (place.path / "filler").unlink()
    assert write(tier, 1, 500_000) and read(tier, 1, 500_000) == content(1, 500_000)


def test_a_disk_that_became_read_only_still_reads_and_writes_again_later(
    mount: Callable[..., _Mount], start: Callable[..., Disk]
) -> None:
    place = mount("-t", "tmpfs", "-o", "size=4m", "tmpfs")
    tier = start(MIB, place.path / "tier")
    for number in range(9):
        assert write(tier, number, 100_000)
    # Another view of the same, on top: the mount itself cannot change while our lock is open in it.
    assert place.run("mount", "--bind", ".", ".") == place.run("mount", "-o", "remount,ro,bind", ".") == ""
    assert not write(tier, 100, 100) and not write(tier, 101, 900_000)  # the second has to evict
    with pytest.raises(TierError, match="allow removing"):
        tier.remove([name_of(8)])
    with pytest.raises(TierError, match="allow removing"):
        tier.forget("", "")
    assert there(tier, *range(9)) == [*range(9)] and tier.usage().objects == 9
    for number in range(9):
        assert read(tier, number, 100_000) == content(number, 100_000)
    assert place.run("umount", ".") == ""
    assert write(tier, 101, 900_000) and read(tier, 101, 900_000) == content(101, 900_000)
    tier.remove([name_of(101)])
    tier.forget("", "")
    assert tier.usage().bytes == 0


def test_blocks_that_cannot_be_read_are_that_objects_failure_alone(
    mount: Callable[..., _Mount], start: Callable[..., Disk], tmp_path: Path
) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(16 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", str(image)], check=True)
    place = mount("-o", "loop", str(image))
    tier = start(GIB, place.path / "tier")
    for number in range(8):
        assert write(tier, number, MIB)
    for path in place.path.rglob("*.0"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    os.truncate(image, 7 * MIB)  # the disk has lost its end
    got = [read(tier, number, MIB) for number in range(8)]
    assert got.count(None) and all(data in (None, content(number, MIB)) for number, data in enumerate(got))
    assert tier.usage().counters["errors"] == got.count(None)
    assert there(tier, *range(8)) == [number for number, data in enumerate(got) if data is not None], "found in vain"
    os.truncate(image, 16 * MIB)


@pytest.fixture
def nobody() -> Iterator[None]:
    """Where we are root, who may do anything, be someone else."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_directory_without_permission_is_refused_at_the_start(nobody: None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o500)
        try:
            with pytest.raises(TierError, match="Permission denied"):
                Disk(Path(folder) / "tier", GIB)
        finally:
            Path(folder).chmod(0o700)


def _is_gone(tier: Disk) -> None:
    """Every call says so, from the first one on that needs the directory."""
    for call in (
        lambda: tier.forget("", ""),  # or what it has would be served when it is back
        lambda: write(tier, 9),
        lambda: there(tier, 1),
        lambda: read(tier, 1),
        lambda: tier.remove([name_of(1)]),
    ):
        with pytest.raises(TierError, match="gone"):
            call()


def test_a_directory_that_was_removed_is_made_anew_and_one_moved_away_comes_back(
    root: Path, start: Callable[..., Disk]
) -> None:
    tier = start()
    assert write(tier, 1)
    shutil.rmtree(root)
    with pytest.raises(TierError):
        read(tier, 1)
    eventually(lambda: tier.usage().bytes == 0)
    assert write(tier, 1) and there(tier, 1, 2) == [1]
    root.rename(root.with_name("elsewhere"))
    root.mkdir()
    (root / "thesis.tex").touch()
    _is_gone(tier)
    with pytest.raises(TierError, match="thesis"):
        tier.usage()
    (root / "thesis.tex").unlink()
    root.rmdir()
    root.with_name("elsewhere").rename(root)
    eventually(lambda: tier.usage().objects == 1)
    assert read(tier, 1) == content(1, 10_000) and write(tier, 2)
    tier.close()
    with pytest.raises(TierError, match="closed"):
        tier.usage()  # which opens one that is gone


def test_while_a_directory_is_opened_again_calls_are_refused(
    root: Path, start: Callable[..., Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = start()
    assert write(tier, 1)
    shutil.rmtree(root)
    _is_gone(tier)

    def open_ledger(*settings: Any) -> Ledger:
        _is_gone(tier)
        return Ledger(*settings)

    monkeypatch.setattr(disk, "Ledger", open_ledger)
    eventually(lambda: tier.usage().objects == 0)
    assert there(tier, 1) == [] and write(tier, 1)


def test_the_directory_of_an_unmounted_disk_is_not_made_anew(
    mount: Callable[..., _Mount], start: Callable[..., Disk]
) -> None:
    place = mount("-t", "tmpfs", "-o", "size=4m", "tmpfs")
    tier = start(GIB, place.path / "tier")
    assert write(tier, 1)
    assert place.run("umount", "--lazy", ".") == ""
    _is_gone(tier)
    for _ in range(2):
        with pytest.raises(TierError, match="not mounted"):
            tier.usage()
    assert not (place.path / "tier").exists()


# -- many objects


def test_with_many_objects_it_is_open_before_they_are_counted(root: Path) -> None:
    """And serves meanwhile. How soon they are counted, the benchmark measures."""
    count = 30_000
    for number in range(count):
        path = Path(path_of(str(root), name_of(number)))
        if number < 10_000:  # enough to meet each of 256
            path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(number.to_bytes(8, "little"))
    Disk(root, GIB).close()  # which ends the counting
    tier = Disk(root, GIB)
    assert tier.usage().objects is None, "it has waited for all to be counted"
    misses = 0
    while tier.usage().objects is None:
        area = bytearray(8)
        number = misses % count
        (size,) = tier.read([Blob(name_of(number), [memoryview(area)])])
        assert size is None or (size == 8 and area == number.to_bytes(8, "little"))
        if tier.usage().objects is None:
            assert tier.write([Blob(name_of(count + 1), [memoryview(area)])]) in ([False], [True])
        misses += 1
        time.sleep(0.001)  # the counting shares our interpreter
    assert misses > 0
    assert tier.usage().objects in (count, count + 1)
    assert tier.forget("", "") >= count
    tier.close()


def test_a_files_date_is_written_once_a_minute_at_most(root: Path, start: Callable[..., Disk]) -> None:
    tier = start()
    assert write(tier, 1)
    first = file_of(root, 1).stat().st_mtime_ns
    assert read(tier, 1) == content(1, 10_000)
    assert file_of(root, 1).stat().st_mtime_ns == first
