"""vLLM's scheduler and both halves of the connector under the seeds of tests/vllm/sim.

They hold, are replayed exactly, and notice when something is wrong.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from kvdepot.client.worker import WorkerClient
from kvdepot.integrations.vllm.stores import Holds
from kvdepot.integrations.vllm.worker import WorkerHalf
from tests.sim.run import Broken
from tests.vllm.sim.run import parts, simulate

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module", autouse=True)
def _parts() -> Iterator[None]:
    """The parts of the runs. The plugin's way of logging ends with them: later tests would see each line twice."""
    ours = logging.getLogger("kvdepot")
    before = ours.parent, ours.propagate, list(ours.handlers)
    with parts():
        yield
    ours.parent, ours.propagate, ours.handlers[:] = before


def test_no_invariant_breaks_in_the_first_seeds() -> None:
    happened: Counter[str] = Counter()
    for seed in range(36):
        happened.update({name: count for name, count in simulate(seed).counters.items() if count})
    common = {"answered", "loads", "loaded_in_step", "preempted", "shards_retrieved", "server_shut_down"}
    assert not common - happened.keys()
    assert not happened["stalls_broken"], "an engine was waiting for a step, a load or a hurried lookup"


def test_the_same_seed_is_the_same_run() -> None:
    assert [simulate(seed).digest() for seed in (3, 11)] == [simulate(seed).digest() for seed in (3, 11)]


# -- planted bugs: each breaks one function of the real code


def forgets_which_loads_have_failed(patch: Patch) -> None:
    patch.setattr(WorkerClient, "take_failed_blocks", lambda self: set())
    patch.setattr(WorkerClient, "take_failed_requests", lambda self: set())


def says_that_loads_have_ended_as_they_begin(patch: Patch) -> None:
    get_finished = WorkerHalf.get_finished
    patch.setattr(WorkerHalf, "get_finished", lambda self, orders: (get_finished(self, orders)[0], {*orders.loads}))


def stores_of_windows_hold_no_blocks(patch: Patch) -> None:
    patch.setattr(Holds, "hold", lambda self, blocks: True)
    patch.setattr(Holds, "release", lambda self, blocks: None)


def never_says_that_a_load_has_ended(patch: Patch) -> None:
    get_finished = WorkerHalf.get_finished
    patch.setattr(WorkerHalf, "get_finished", lambda self, orders: (get_finished(self, orders)[0], None))


@pytest.mark.parametrize(
    "plant",
    [
        forgets_which_loads_have_failed,
        says_that_loads_have_ended_as_they_begin,
        stores_of_windows_hold_no_blocks,
        never_says_that_a_load_has_ended,
    ],
)
def test_a_planted_bug_of_the_connector_is_noticed(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    with pytest.raises(Broken) as broken:
        for seed in range(300):
            simulate(seed)
    cause = broken.value.__cause__
    assert isinstance(cause, AssertionError), f"it was planted badly: {cause!r}"
