"""The suite for tiers passes a tier that is right."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from kvdepot.testing.tiers import TierConformance
from kvdepot.tiers import Tier
from tests.tiers.faulty import MemoryTier

pytestmark = pytest.mark.faults


class TestMemory(TierConformance):
    shared: ClassVar[bool] = True
    slack_bytes: ClassVar[int] = 0
    _stores: ClassVar[dict[Path, MemoryTier]] = {}

    def open_tier(self, place: Path) -> Tier:
        return self._stores.setdefault(place, MemoryTier())

    def open_bounded(self, place: Path, capacity_bytes: int) -> Tier | None:
        return MemoryTier(capacity_bytes)


MUTANTS = {
    "reads what was removed": "def remove(self, names): pass",
    "forgets too much": "def forget(self, salt, space): return super().forget(salt, '')",
    "forgets half": "def forget(self, salt, space): return super().forget(salt, space + '0' * (32 - len(space)))",
    "counts wrong": "def forget(self, salt, space): return super().forget(salt, space) and 1",
    "cuts the last byte": "def put(self, name, data, born=0): return super().put(name, data[:-1] or data)",
    "ignores all but the first piece": "def write(self, blobs): return [self.put(b.name, bytes(b.buffers[0])) "
    "for b in blobs]",
    "answers in another order": "def read(self, blobs): return sorted(super().read(blobs))",
    "promises all": "def find(self, names): return [True for name in names]",
    "takes two names for one": "def put(self, name, data, born=0): return super().put(name[:130], data)",
    "has no bound": "def put(self, *args): self.capacity_bytes = None; return super().put(*args)",
    "tells of more than there is": "def usage(self): u = super().usage(); return type(u)(u.objects + 1, u.bytes)",
    "fails when it is closed twice": "def close(self): self.closed = 1 // (1 - getattr(self, 'closed', 0))",
    "keeps nothing": "def close(self): self.forget('', '')",
    "keeps what was removed": "def remove(self, names): self.old = {n: self.objects.get(n, b'?') for n in names}; "
    "super().remove(names)\n    def close(self): self.objects.update(getattr(self, 'old', {}))",
    "keeps what was replaced": "def write(self, blobs): self.old = dict(self.objects); return super().write(blobs)\n"
    "    def close(self): self.objects.update({n: self.old[n] for n in self.objects if n in self.old})",
    "writes over the beginning": "def put(self, name, data, born=0): return super().put(name, data + "
    "self.objects.get(name, b'')[len(data) :])",
    "counts what was replaced": "def usage(self): u = super().usage(); self.top = max(u.bytes, "
    "getattr(self, 'top', 0)); return type(u)(u.objects, self.top)",
    "fills what has no room": "def read(self, blobs): return [min(s, b.size) for s, b in "
    "zip(super().read(blobs), blobs)]",
    "looks at memory it gave back": "def write(self, blobs): self.late = [*getattr(self, 'late', []), *blobs]; "
    "[self.put(b.name, b''.join(b.buffers)) for b in self.late]; return [True for b in blobs]",
    "shows parts": """def put(self, name, data, born=0):
        for end in range(0, len(data) + 1, max(1, len(data) // 3)):
            super().put(name, data[: end or 1]); time.sleep(0.0001)
        return super().put(name, data)""",
    "fails instead of missing": "def read(self, blobs): return [len(self.objects[b.name]) and "
    "MemoryTier.read(self, [b])[0] for b in blobs]",
    "is overwhelmed by pieces": "def write(self, blobs): return [len(b.buffers) <= 1024 and "
    "MemoryTier.write(self, [b])[0] for b in blobs]",
}
HEAD = """
import time

import pytest
from kvdepot.testing.tiers import TierConformance
from tests.tiers.faulty import MemoryTier

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
    stores = {{}}

    def open_tier(self, place):
        return self.stores.setdefault(place, Tier{number}())

    def open_bounded(self, place, capacity_bytes):
        return Tier{number}(capacity_bytes)
"""


def test_the_suite_notices_every_tier_that_has_one_thing_wrong(tmp_path: Path) -> None:
    """Without drawn examples: what it notices is no matter of luck."""
    module = tmp_path / "test_mutants.py"
    bodies = [MUTANT.format(number=n, change=change) for n, change in enumerate(MUTANTS.values())]
    module.write_text("\n".join([HEAD, *bodies]))
    ended = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-s", "-p", "test_mutants", "-p", "no:cacheprovider", "--tb=native",
            "--rootdir", str(tmp_path), "-k", "not test_any_life", str(module),
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": os.pathsep.join(
            [str(tmp_path), *sys.path])},
    )  # fmt: skip
    noticed = {int(line.split()[1][4:]) for line in ended.stdout.splitlines() if "noticed Test" in line}
    missed = [name for number, name in enumerate(MUTANTS) if number not in noticed]
    assert not missed, ended.stdout + ended.stderr
    assert "noticed Test0 " in ended.stdout and ended.returncode == 1


def test_drawn_examples_notice_a_tier_that_is_wrong_in_all_of_them(tmp_path: Path) -> None:
    class Promising(MemoryTier):
        def find(self, names: Sequence[str]) -> list[bool]:
            return [True] * len(names)

    class Suite(TierConformance[Path]):
        def open_tier(self, place: Path) -> Tier:
            return Promising()

    with pytest.raises(AssertionError):
        Suite().test_any_life_is_that_of_a_dict(tmp_path, memoryview(b""))
