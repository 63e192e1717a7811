"""The deepest boundary that groups can restore, compared with trying all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvdepot.core.index.matching import deepest_boundary, needed_parts

CHUNKS = 12


@given(
    reaches=st.lists(st.integers(1, CHUNKS + 2), max_size=4),
    there=st.lists(st.sets(st.integers(0, CHUNKS - 1)), min_size=4, max_size=4),
    end=st.integers(0, CHUNKS),
)
def test_the_answer_is_the_largest_boundary_whose_windows_are_whole(
    reaches: list[int], there: list[set[int]], end: int
) -> None:
    whole = [
        boundary
        for boundary in range(end + 1)
        if all(set(range(max(0, boundary - reach), boundary)) <= there[group] for group, reach in enumerate(reaches))
    ]
    found = deepest_boundary(list(enumerate(reaches)), end, lambda group, i: i in there[group])
    assert found == max(whole)


def test_an_unbounded_group_needs_every_part_and_a_bounded_one_its_last() -> None:
    assert list(needed_parts(0, 3)) == [0, 1, 2]
    assert list(needed_parts(2, 3)) == [1, 2]
    assert list(needed_parts(5, 3)) == [0, 1, 2]
    assert not needed_parts(2, 0)


def test_no_part_is_asked_for_twice_in_a_row_where_one_group_lacks_everything() -> None:
    asked: list[int] = []

    def has(group: int, i: int) -> bool:
        asked.append(i)
        return False

    assert deepest_boundary([(0, 4)], 1000, has) == 0
    assert asked == list(range(999, -1, -1))
