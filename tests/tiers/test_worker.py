"""A tier's threads: they answer each task and live on, whatever a library raises."""

from __future__ import annotations

import logging
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from kvdepot.errors import InternalError, TierError
from kvdepot.tiers import TierUsage, disk, parse
from kvdepot.tiers.codec import Codec
from kvdepot.tiers.worker import Find, ForgetSpaces, Forgotten, Probe, TierWorker
from tests.conftest import HANG_S
from tests.tiers.faulty import Area, MemoryTier


class Panic(BaseException):
    """A panic of Rust code, as pyo3 hands it to Python."""


class Panicking(MemoryTier):
    """A tier whose library panics in some of its calls."""

    def find(self, names: Any) -> list[bool]:
        raise Panic("called `Option::unwrap()` on a `None` value")


@pytest.mark.parametrize("panics_on_open", [False, True])
def test_a_panic_of_a_library_is_answered_and_ends_no_thread(
    panics_on_open: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_open = not panics_on_open

    def open_tier(*_: object) -> Panicking:
        if not is_open:
            raise Panic("no")
        return Panicking()

    monkeypatch.setattr(disk, "open", open_tier)
    outcomes: SimpleQueue[object] = SimpleQueue()
    config = parse("disk:///nowhere?capacity_gib=1&threads=1")
    worker = TierWorker(config, Area(4096), lambda _, outcome: outcomes.put(outcome), Codec())
    try:
        for _ in range(5):  # more than it has threads
            worker.submit(Find(0, [], b""))
            assert isinstance(outcomes.get(timeout=HANG_S), InternalError)
        errors = [each for each in caplog.records if each.levelno == logging.ERROR]
        assert len(errors) == 1 + panics_on_open, "not one a call"
        is_open = True
        worker.submit(ForgetSpaces(0, "", [], []))
        assert outcomes.get(timeout=HANG_S) == Forgotten(0)
        worker.submit(Probe(0))
        assert isinstance(outcomes.get(timeout=HANG_S), TierUsage)
    finally:
        worker.stop(HANG_S)
    assert not worker.is_busy()


def test_calls_fail_once_the_counting_of_a_folder_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> Any:
        raise MemoryError

    monkeypatch.setattr(disk, "objects_in", fail)
    tier = parse(f"disk://{tmp_path}/kv?capacity_gib=1").open()
    with pytest.raises(TierError, match="cannot count its objects: MemoryError"):
        tier.find([])
    tier.close()
