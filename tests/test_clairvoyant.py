"""The clairvoyant depot of the benchmark (bench/clairvoyant.py) beside all depots there could be, in tiny cases."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations

from bench.clairvoyant import Names, Queued, reaches
from hypothesis import given
from hypothesis import strategies as st

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=4)


@st.composite
def queues(draw: st.DrawFn) -> list[Queued]:
    """Prompts of chunks of one token, of which others share the beginning."""
    names, found = Names(1), []
    for tokens in draw(st.lists(TOKENS, min_size=1, max_size=5)):
        asked = draw(st.integers(0, len(tokens)))
        found.append(Queued(names.of(tokens), asked, draw(st.integers(0, asked))))
    return found


def most(queue: Sequence[Queued], capacity: int) -> int:
    """The most chunks that are not computed, over everything that a depot could keep after each prompt."""

    @cache
    def from_here(at: int, kept: frozenset[int]) -> int:
        if at == len(queue):
            return 0
        each = queue[at]
        reach = each.own
        while reach < each.asked and each.chunks[reach] in kept:
            reach += 1
        there = kept.union(each.chunks)
        choices = combinations(sorted(there), min(capacity, len(there)))
        return reach + max(from_here(at + 1, frozenset(choice)) for choice in choices)

    return from_here(0, frozenset())


@given(queue=queues(), capacity=st.integers(0, 4))
def test_no_depot_finds_more_than_the_clairvoyant_one(queue: list[Queued], capacity: int) -> None:
    assert sum(reaches(queue, capacity)) == most(queue, capacity)


def test_an_answer_is_found_by_the_next_prompt_of_its_chat() -> None:
    names = Names(2)
    prompt, answer, more = [1, 2, 3], [4, 5, 6], [7, 8]
    turns = Queued(names.of(prompt + answer), 1, 0), Queued(names.of(prompt + answer + more), 3, 0)
    assert reaches(turns, 8) == [0, 3]


def test_the_same_tokens_behind_different_ones_are_different_chunks() -> None:
    names = Names(2)
    assert names.of([1, 2, 9, 9]) == names.of([1, 2, 9, 9, 1])
    assert names.of([1, 2, 9, 9])[1] != names.of([3, 4, 9, 9])[1]
