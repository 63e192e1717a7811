"""Which store in progress makes a prefix longer: compared with trying every boundary."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvdepot.core.index.matching import coming_part
from tests.core.groups import SHAPES, Rack, Reaches, deepest, needed
from tests.core.shelf import keys

ABSENT, COMING, THERE = range(3)
CHUNKS = 6


@settings(max_examples=300, deadline=None)
@given(
    reaches=st.sampled_from([(0,), *SHAPES]),
    parts=st.lists(st.sampled_from([ABSENT, COMING, THERE, THERE]), min_size=3 * CHUNKS, max_size=3 * CHUNKS),
    ranks=st.integers(1, 2),
)
def test_a_part_is_waited_for_exactly_if_stores_in_progress_make_the_prefix_longer(
    reaches: Reaches, parts: list[int], ranks: int
) -> None:
    rack, chain = Rack(reaches, world_size=ranks, pages=128), keys("a", CHUNKS)
    state = {(group, key): parts[group * CHUNKS + i] for group in range(len(reaches)) for i, key in enumerate(chain)}
    for group in range(len(reaches)):
        for number, key in enumerate(chain):
            for rank in range(ranks if state[group, key] else 0):
                chunk = rack.reserve(group, chain, number, rank)
                assert chunk is not None
                if state[group, key] == THERE or rank:  # one of two ranks still writes
                    rack.index.seal(chunk, rank)
    now = deepest(reaches, chain, lambda group, key: state[group, key] == THERE)
    then = deepest(reaches, chain, lambda group, key: state[group, key] != ABSENT)
    assert rack.boundary(chain) == now
    part = coming_part(rack.namespaces[0], b"".join(chain), now)
    assert (part is not None) == (then > now)
    if part is not None:
        assert state[part.namespace.group, part.key] == COMING
        assert (part.namespace.group, part.key) in needed(reaches, chain, then)
