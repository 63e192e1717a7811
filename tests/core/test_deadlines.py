"""What is due when, of tier lookups and forgettings."""

from __future__ import annotations

from kvdepot.core.tiering.deadlines import Deadlines, Overdue
from kvdepot.core.tiering.forgetting import Forgetting


def forgetting(name: str) -> Forgetting:
    return Forgetting(None, name, (), None)


def test_what_is_due_first_comes_first_and_of_two_at_once_the_one_that_was_added_first() -> None:
    deadlines = Deadlines()
    assert deadlines.next() == float("inf")
    late, early, next_to_it = (Overdue(forgetting(name)) for name in ("late", "early", "next to it"))
    deadlines.add(2.0, late)
    deadlines.add(1.0, early)
    deadlines.add(1.0, next_to_it)
    assert deadlines.next() == 1.0
    assert [deadlines.pop() for _ in range(3)] == [early, next_to_it, late]
    assert deadlines.next() == float("inf")


def test_deadlines_of_what_has_ended_are_not_kept() -> None:
    deadlines = Deadlines()
    for number in range(10):
        ended = forgetting(str(number))
        deadlines.add(float(number), Overdue(ended))
        ended.ended = True
    assert len(deadlines) == 1
