"""What the other tests stand on: a server that does not start is told of at once, with what it said."""

from __future__ import annotations

import time

import pytest

from .conftest import Depot
from .metronome import ran_s

pytestmark = pytest.mark.faults


def test_a_server_that_ends_while_it_starts_is_told_of_at_once_with_its_log() -> None:
    began = time.monotonic()
    depot = Depot("--policy", "by-the-moon")
    try:
        with pytest.raises(pytest.fail.Exception, match=r"(?s)ended with status 2.*by-the-moon"):
            depot.wait_ready()
    finally:
        depot.close()
    assert ran_s(began) < 4
