"""How much memory a process may take: every limit above it counts, wherever the limits are mounted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdepot.memory.room import Limit, default_arena, limits
from tests.conftest import HANG_S
from tests.programs import missing

GIB = 1 << 30
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
MEMINFO = "MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable: 33554432 kB\n"


def tree(root: Path, cgroup: str, mounts: str, **files: int | str) -> dict[str, tuple[int, int, bool]]:
    """What `limits` finds below a root: by name, the most and the free bytes, and whether the limit is hard.

    files: contents by path, with `__` for each slash.
    """
    for path, text in {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts, "proc/meminfo": MEMINFO}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("-", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    found = [each for each in limits(Path("/dev/shm"), root) if each.what != "/dev/shm"]
    assert [each.free for each in found] == sorted(each.free for each in found), "the tightest comes first"
    return {each.what: (each.most // GIB, each.free // GIB, each.is_hard) for each in found}


MACHINE = {"this machine": (64, 32, False)}


def test_every_limit_up_the_tree_of_version_2_counts_less_what_is_used_for_good(tmp_path: Path) -> None:
    found = tree(
        tmp_path,
        "0::/user.slice/app.service/inner",
        "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw",
        **{
            "user.slice__memory-max": 16 * GIB, "user.slice__memory-current": 10 * GIB,
            "user.slice__memory-stat": f"anon 1\ninactive_file {4 * GIB}\nslab_reclaimable 3",
            "user.slice__app.service__memory-max": "max", "user.slice__app.service__memory-high": 8 * GIB,
            "user.slice__app.service__memory-current": 3 * GIB,
            "user.slice__app.service__inner__memory-max": "max",
        },
    )  # fmt: skip
    assert found == MACHINE | {
        "control group /user.slice": (16, 10, True), "control group /user.slice/app.service": (8, 5, False),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "top"),
    [("/docker/abc", "/docker/abc"), ("/", "/"), ("/", "/docker/abc"), ("/../..", "/")],
    ids=["host's paths", "own namespace", "own paths, host's mount", "moved out of the namespace"],
)
def test_a_containers_limit_is_found_at_the_root_of_its_mount(tmp_path: Path, path: str, top: str) -> None:
    found = tree(
        tmp_path,
        f"5:cpu,cpuacct:{path}\n4:memory:{path}\n0::/",
        f"30 23 0:27 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n35 31 0:32 {top} /sys/fs/cgroup/memory ro master:9 - cgroup "
        f"cgroup rw,memory\n36 31 0:33 {top} /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct",
        **{
            "memory__memory-limit_in_bytes": GIB, "memory__memory-usage_in_bytes": 3 * GIB,
            "memory__memory-stat": f"inactive_file 7\ntotal_inactive_file {GIB}",
        },
    )  # fmt: skip
    assert found == MACHINE | {"control group /": (1, 0, True)}


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with a limit of 1 GiB, and one inside it."""
    base, limit = (V1, "memory.limit_in_bytes") if V1.is_dir() else (V2, "memory.max")
    outer = base / f"kvdepot-test-{uuid.uuid4().hex[:12]}"
    try:
        (outer / "inner").mkdir(parents=True)
        (outer / limit).write_text(str(GIB))
    except OSError as exc:
        missing(f"a memory control group that can be changed ({exc})")
    yield outer / "inner"
    (outer / "inner").rmdir()
    outer.rmdir()


@pytest.mark.faults
def test_the_arena_of_a_server_in_a_control_group_stays_within_its_limit(group: Path) -> None:
    name = f"kvdepot-test-{uuid.uuid4().hex[:12]}"

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "kvdepot.cli", *command, "--url", f"ipc:///tmp/{name}.sock"]
        join = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
        return subprocess.run([*join, *words], capture_output=True, text=True, timeout=HANG_S, env=clean)

    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVDEPOT_")}
    arena = json.loads(run("config", "--json").stdout)["arena"]["bytes"]
    assert 0 < arena <= GIB // 4
    refused = run("serve", "--arena-gib", "1.5", "--arena-name", name, "--http", "off")
    assert refused.returncode == 2 and "an arena of 1.5 GiB exceeds the 1 GiB that control group" in refused.stderr
    assert not Path("/dev/shm", name).exists()
    found = json.loads(run("doctor", "--json").stdout)
    memory = [finding["text"] for finding in found if finding["what"] == "memory"]
    assert any("of 1 GiB available" in text for text in memory)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("shm_mib", "machine_mib", "arena_mib"),
    [
        (64, 4000, 16), (242, 4000, 60), (243, 4000, 1), (250, 4000, 8), (300, 4000, 58), (320, 4000, 78),
        (323, 4000, 80), (400, 4000, 100), (16000, 64000, 4000), (300, 100, 25), (16000, 300, 75),
    ],
)  # fmt: skip
def test_an_arena_that_nobody_sized_leaves_engines_their_share(shm_mib: int, machine_mib: int, arena_mib: int) -> None:
    shm = Limit("/dev/shm", shm_mib * MIB, shm_mib * MIB, "", is_shm=True)
    bounds = [shm, Limit("this machine", GIB, machine_mib * MIB, "")]
    assert default_arena(bounds, 0) // MIB == arena_mib
    bounds = [each._replace(free=each.free - 10 * MIB) for each in bounds]
    assert default_arena(bounds, 10 * MIB) // MIB == arena_mib, "an earlier server's arena counts as free"
    elsewhere = [Limit("/mnt/arena", shm_mib * MIB, shm_mib * MIB, "")]
    assert default_arena(elsewhere, 0) == shm_mib * MIB // 4, "no engine needs room there"


def test_the_room_of_the_arenas_folder_is_a_limit_whatever_folder_it_is(tmp_path: Path) -> None:
    def of(folder: Path) -> list[Limit]:
        return [each for each in limits(folder, tmp_path) if each.what == str(folder)]

    (found,) = of(tmp_path)
    assert 0 < found.free <= found.most == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    assert not found.is_shm and str(tmp_path) in found.advice
    assert [each.is_shm for each in of(Path("/dev/shm"))] == [True] * (os.statvfs("/dev/shm").f_blocks > 0)
    assert of(tmp_path / "none") == []
