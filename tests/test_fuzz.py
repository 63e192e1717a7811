"""The targets of fuzz/targets.py, run with Hypothesis for a few seconds; fuzz/run.py runs them guided by coverage."""

from __future__ import annotations

import pytest
from fuzz.targets import TARGETS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

anything = st.one_of(st.binary(max_size=64), st.binary(min_size=200, max_size=900))
EXAMPLES = {"requests": 500, "replies": 500, "config": 150, "records": 250, "table": 200, "arena": 250}


@pytest.mark.parametrize("name", TARGETS)
def test_what_holds_for_every_input_holds_for_the_seeds_of_the_fuzzer(name: str) -> None:
    seeds = TARGETS[name].seeds()
    assert len(seeds) >= 10
    for seed in seeds:
        TARGETS[name].check(seed)


@pytest.mark.faults
@pytest.mark.parametrize("name", TARGETS)
def test_what_holds_for_every_input_holds_for_bytes_that_hypothesis_makes_up(name: str) -> None:
    @settings(max_examples=EXAMPLES[name], deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(anything)
    def holds(data: bytes) -> None:
        TARGETS[name].check(data)

    holds()
