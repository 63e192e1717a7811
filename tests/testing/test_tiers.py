"""The suite for tiers passes a tier that is right, and the tiers made for tests do what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from kvdepot.errors import TierError
from kvdepot.testing.tiers import FAULTS, FaultyTier, MemoryTier, TierConformance, content, name_of
from kvdepot.tiers import Blob, Tier

pytestmark = pytest.mark.faults


class TestMemory(TierConformance):
    shared: ClassVar[bool] = True
    slack_bytes: ClassVar[int] = 0
    _stores: ClassVar[dict[Path, MemoryTier]] = {}

    def open_tier(self, place: Path) -> Tier:
        return FaultyTier(self._stores.setdefault(place, MemoryTier()))

    def open_bounded(self, place: Path, capacity_bytes: int) -> Tier | None:
        return MemoryTier(capacity_bytes)


MUTANTS = {
    "reads what was removed": "def remove(self, names): pass",
    "forgets too much": "def forget(self, salt, space): return super().forget(salt, '')",
    "forgets half": "def forget(self, salt, space): return super().forget(salt, space + '0' * (32 - len(space)))",
    "counts wrong": "def forget(self, salt, space): return super().forget(salt, space) and 1",
    "cuts the last byte": "def _write(self, name, data): return super()._write(name, data[:-1] or data)",
    "ignores all but the first piece": "def write(self, blobs): return [self._write(b.name, bytes(b.buffers[0])) "
    "for b in blobs]",
    "answers in another order": "def read(self, blobs): return sorted(super().read(blobs))",
    "promises all": "def find(self, names): return [True for name in names]",
    "takes two names for one": "def _write(self, name, data): return super()._write(name[:130], data)",
    "has no bound": "def _write(self, name, data): self.capacity_bytes = None; return super()._write(name, data)",
    "tells of more than there is": "def usage(self): u = super().usage(); return type(u)(u.objects + 1, u.bytes)",
    "fails when it is closed twice": "def close(self): self.closed = 1 // (1 - getattr(self, 'closed', 0))",
    "keeps nothing": "def close(self): self.forget('', '')",
    "fills what has no room": "def read(self, blobs): return [min(s, b.size) for s, b in "
    "zip(super().read(blobs), blobs)]",
    "looks at memory it gave back": "def write(self, blobs): self.late = [*getattr(self, 'late', []), *blobs]; "
    "[self._write(b.name, b''.join(b.buffers)) for b in self.late]; return [True for b in blobs]",
    "shows parts": """def _write(self, name, data):
        for end in range(0, len(data) + 1, max(1, len(data) // 3)):
            super()._write(name, data[: end or 1]); time.sleep(0.0001)
        return super()._write(name, data)""",
    "fails instead of missing": "def read(self, blobs): return [len(self.objects[b.name]) and "
    "MemoryTier.read(self, [b])[0] for b in blobs]",
    "is overwhelmed by pieces": "def write(self, blobs): return [len(b.buffers) <= 1024 and "
    "MemoryTier.write(self, [b])[0] for b in blobs]",
}
HEAD = """
import time

import pytest
from kvdepot.testing.tiers import MemoryTier, TierConformance

noticed = set()

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and item.cls not in noticed:
        noticed.add(item.cls)
        print("noticed", item.cls.__name__, item.name)
    return report

def pytest_runtest_setup(item):
    if item.cls in noticed:
        pytest.skip("noticed already")
"""
MUTANT = """
class Tier{number}(MemoryTier):
    {change}

class Test{number}(TierConformance):
    slack_bytes = 0
    shared = True
    examples = 5
    stores = {{}}

    def open_tier(self, place):
        return self.stores.setdefault(place, Tier{number}())

    def open_bounded(self, place, capacity_bytes):
        return Tier{number}(capacity_bytes)
"""


def test_the_suite_notices_every_tier_that_has_one_thing_wrong(tmp_path: Path) -> None:
    module = tmp_path / "test_mutants.py"
    bodies = [MUTANT.format(number=n, change=change) for n, change in enumerate(MUTANTS.values())]
    module.write_text("\n".join([HEAD, *bodies]))
    ended = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-s", "-p", "test_mutants", "-p", "no:cacheprovider",
            "--rootdir", str(tmp_path), str(module),
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": os.pathsep.join(
            [str(tmp_path), *sys.path])},
    )  # fmt: skip
    noticed = {int(line.split()[1][4:]) for line in ended.stdout.splitlines() if "noticed Test" in line}
    missed = [name for number, name in enumerate(MUTANTS) if number not in noticed]
    assert not missed, ended.stdout + ended.stderr
    assert "noticed Test0 " in ended.stdout and ended.returncode == 1


def write(tier: Tier, number: int, size: int = 1000) -> bool:
    return tier.write([Blob(name_of(number), [memoryview(content(number, size))])])[0]


def read(tier: Tier, number: int, room: int = 1000) -> tuple[int, bytes]:
    area = bytearray(room)
    (size,) = tier.read([Blob(name_of(number), [memoryview(area)[:100], memoryview(area)[100:]])])
    return size, bytes(area)


def test_each_fault_is_injected_counted_and_over_when_it_is_withdrawn() -> None:
    tier = FaultyTier(MemoryTier(), seed=1)
    good = content(1, 1000)
    assert write(tier, 1)
    tier.inject(down=1)
    for call in (lambda: read(tier, 1), lambda: tier.find([]), lambda: tier.forget("", ""), tier.usage):
        with pytest.raises(TierError):
            call()
    tier.inject(late=1)
    with pytest.raises(TierError):
        write(tier, 2)
    tier.inject(hide=1)
    assert tier.find([name_of(2)]) == [False] and read(tier, 2)[0] == -1
    tier.inject(promise=1)
    assert tier.find([name_of(3)]) == [True]
    tier.inject(refuse=1)
    assert not write(tier, 3)
    tier.inject(lose=1)
    assert write(tier, 3)
    tier.inject(corrupt=1)
    size, data = read(tier, 1)
    assert size == 1000 and sum((a ^ b).bit_count() for a, b in zip(data, good, strict=True)) == 1
    tier.inject(truncate=1)
    assert 0 <= read(tier, 1)[0] < 1000
    tier.inject(swell=1)
    assert read(tier, 1)[0] == 1001
    tier.inject()
    assert read(tier, 1) == (1000, good) and read(tier, 2)[0] == 1000 and read(tier, 3)[0] == -1
    assert {fault for fault, count in tier.injected.items() if count} == set(FAULTS)
    with pytest.raises(ValueError, match="burn"):
        tier.inject(burn=1)


def test_the_same_seed_injects_the_same_faults() -> None:
    def life(seed: int) -> list[bool]:
        tier = FaultyTier(MemoryTier(), seed)
        tier.inject(refuse=0.3, hide=0.3)
        return [write(tier, n) and tier.find([name_of(n)])[0] for n in range(50)]

    assert life(1) == life(1) != life(2)
    assert 10 < sum(life(1)) < 40
