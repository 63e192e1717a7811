"""The targets of fuzz/targets.py, run with Hypothesis for a few seconds; fuzz/run.py runs them guided by coverage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.targets import REACHED, TARGETS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import HANG_S

RUN = Path(__file__).parent.parent / "fuzz" / "run.py"
SHM = Path("/dev/shm")

anything = st.one_of(st.binary(max_size=64), st.binary(min_size=200, max_size=900))
EXAMPLES = {"requests": 500, "replies": 500, "config": 150, "records": 250, "table": 200, "arena": 250}


@pytest.mark.parametrize("name", TARGETS)
def test_what_holds_for_every_input_holds_for_the_seeds_of_the_fuzzer(name: str) -> None:
    seeds = TARGETS[name].seeds()
    assert len(seeds) >= 10
    for seed in seeds:
        TARGETS[name].check(seed)


def test_the_seeds_come_to_what_the_targets_are_about() -> None:
    reached = {}
    for name in ("records", "table", "arena"):
        REACHED.clear()
        for seed in TARGETS[name].seeds():
            TARGETS[name].check(seed)
        reached[name] = dict(REACHED)
    for name in ("records", "table", "arena"):
        assert reached[name]["chunks restored"] > 30, reached
        assert reached[name]["chained chunks restored"] > 0, reached


@pytest.mark.faults
@pytest.mark.parametrize("name", TARGETS)
def test_what_holds_for_every_input_holds_for_bytes_that_hypothesis_makes_up(name: str) -> None:
    @settings(max_examples=EXAMPLES[name], deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(anything)
    def holds(data: bytes) -> None:
        TARGETS[name].check(data)

    holds()


def test_the_targets_leave_no_file_in_shared_memory() -> None:
    before = set(SHM.glob("kvdepot-fuzz-*"))
    for target in TARGETS.values():
        target.check(target.seeds()[-1])
    assert set(SHM.glob("kvdepot-fuzz-*")) <= before


def test_an_input_that_was_found_can_be_replayed_from_its_file(tmp_path: Path) -> None:
    found = tmp_path / "table-crash-0123"
    found.write_bytes(TARGETS["table"].seeds()[0])
    done = subprocess.run(
        [sys.executable, str(RUN), "--replay", str(found)], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing wrong" in done.stdout


def test_an_unknown_target_is_told_from_the_known_ones() -> None:
    done = subprocess.run(
        [sys.executable, str(RUN), "arenas"], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 2
    assert "no target 'arenas', only requests" in done.stderr
