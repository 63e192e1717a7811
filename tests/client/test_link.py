"""The threads of a program that copies chunks itself; tests/library and tests/integrations have whole operations."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvdepot.client import link
from kvdepot.client.link import copy_all

LARGE = 64 << 20


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_COPY_THREADS", 2)


def test_an_error_in_a_copying_thread_reaches_the_caller() -> None:
    started = threading.Barrier(2, timeout=30)

    def copy(place: Any) -> None:
        started.wait()
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("no room")

    with pytest.raises(MemoryError):
        copy_all(copy, [1, 2], LARGE)


def test_without_more_threads_the_caller_copies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    copied: list[int] = []
    copy_all(copied.append, [1, 2, 3], LARGE)
    assert copied == [1, 2, 3]


def test_few_bytes_are_copied_by_the_caller_alone() -> None:
    copied: list[threading.Thread] = []
    copy_all(lambda item: copied.append(threading.current_thread()), [1, 2, 3], 1 << 20)
    assert copied == [threading.current_thread()] * 3
