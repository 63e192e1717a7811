"""The allocator against a set of free pages."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from kvdepot.memory.allocator import PAGE, Allocator, Extents


def pages_of(extents: Extents, base: int = 0) -> list[int]:
    found = []
    for start, length in extents:
        assert (start - base) % PAGE == 0 and length % PAGE == 0 and length > 0, (start, length)
        found += range((start - base) // PAGE, (start - base + length) // PAGE)
    return found


def runs_of(pages: set[int]) -> list[int]:
    """Lengths of the maximal runs of adjacent pages."""
    ordered = sorted(pages)
    groups = itertools.groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])
    return [len(list(group)) for _, group in groups]


class SpaceMachine(RuleBasedStateMachine):
    taken = Bundle("taken")

    @initialize(
        base=st.sampled_from([0, 64, PAGE, 2 * PAGE + 1]),
        pages=st.integers(1, 70),
        ragged=st.sampled_from([0, 1, PAGE - 1]),
    )
    def begin(self, base: int, pages: int, ragged: int) -> None:
        self.base = base
        self.allocator = Allocator(base, base + pages * PAGE + ragged)
        self.all = set(range(pages))
        self.free = set(self.all)
        assert self.allocator.capacity == pages * PAGE

    @rule(target=taken, size=st.one_of(st.integers(1, 12 * PAGE), st.integers(1, 80 * PAGE)))
    def allocate(self, size: int) -> Extents:
        need = (size + PAGE - 1) // PAGE
        extents = self.allocator.allocate(size)
        assert (extents is not None) == (need <= len(self.free)), "it succeeds whenever so many bytes are free"
        if extents is None:
            return ()
        pages = pages_of(extents, self.base)
        assert len(pages) == need == Allocator.rounded(size) // PAGE
        assert len(set(pages)) == need and set(pages) <= self.free, "only free pages, each once"
        roomy = max(runs_of(self.free))
        if (roomy * PAGE).bit_length() > (need * PAGE).bit_length():
            assert len(extents) == 1, f"{need} pages in {extents} although a run of {roomy} was free"
        self.free -= set(pages)
        return extents

    @rule(extents=consumes(taken))
    def give_back(self, extents: Extents) -> None:
        self.allocator.free(extents)
        self.free |= set(pages_of(extents, self.base))

    @precondition(lambda self: self.free)
    @rule(target=taken)
    def take_all_that_is_left(self) -> Extents:
        extents = self.allocator.allocate(len(self.free) * PAGE)
        assert extents is not None and sorted(pages_of(extents, self.base)) == sorted(self.free)
        assert len(extents) == len(runs_of(self.free)), "each free run is one extent"
        self.free.clear()
        return extents

    @rule()
    def take_too_much(self) -> None:
        assert self.allocator.allocate((len(self.free) + 1) * PAGE) is None

    @invariant()
    def free_neighbours_are_joined(self) -> None:
        if hasattr(self, "allocator"):
            assert self.allocator.free_bytes == len(self.free) * PAGE
            shown = re.search(r"in (\d+) extents", repr(self.allocator))
            assert shown is not None and int(shown[1]) == len(runs_of(self.free))
            self.allocator.validate()

    def teardown(self) -> None:
        if not hasattr(self, "allocator"):
            return
        self.allocator.validate()
        for page in sorted(self.all - self.free, key=lambda page: (page * 7) % 11):  # in pieces, out of order
            self.allocator.free(((self.base + page * PAGE, PAGE),))
        self.allocator.validate()
        whole = self.allocator.allocate(self.allocator.capacity)
        assert whole == ((self.base, len(self.all) * PAGE),), "all that is free again is one extent"


TestSpaceMachine = SpaceMachine.TestCase
TestSpaceMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_giving_back_twice_or_what_lies_outside_is_a_bug_of_the_caller() -> None:
    allocator = Allocator(0, 8 * PAGE)
    extents = allocator.allocate(PAGE)
    assert extents is not None
    allocator.free(extents)
    for wrong in (extents, ((8 * PAGE, PAGE),), ((-PAGE, PAGE),), ((0, 0),)):
        with pytest.raises(AssertionError):
            allocator.free(wrong)
    allocator.validate()
