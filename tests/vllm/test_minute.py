"""The line of what an engine stored, loaded and saved, once a minute in which it did."""

from __future__ import annotations

from kvdepot.integrations.vllm.stats import Minute, Moved

MIB = 1 << 20


def test_a_minute_in_which_something_moved_is_told_once_it_is_over() -> None:
    minute = Minute(chunk_tokens=256, ranks=2)
    assert minute.line(1000.0) == ""
    minute.requested()
    minute.moved(Moved(stored_chunks=30, stored_bytes=45 * MIB, loaded_bytes=96 * MIB))
    minute.loaded(8192, 3.21)
    minute.requested()
    assert minute.line(1059.9) == ""
    assert minute.line(1060.0) == (
        "last 60 s: 2 requests; stored (or found stored) 3,840 tokens (45.0 MiB), loaded 8,192 tokens (96.0 MiB), "
        "saved about 3.2 s of prefill"
    )
    assert minute.line(1200.0) == "", "told twice"


def test_nothing_is_told_of_a_minute_whose_requests_moved_nothing() -> None:
    minute = Minute(256, 1)
    minute.requested()
    minute.moved(Moved())
    assert minute.line(0.0) == minute.line(100.0) == ""
    minute.requested()
    minute.moved(Moved(stored_chunks=1, stored_bytes=MIB))
    assert minute.line(110.0) == ""
    assert minute.line(500.0) == "last 390 s: 1 request; stored (or found stored) 256 tokens (1.0 MiB)", (
        "an idle engine has no steps"
    )


def test_what_went_wrong_is_told_and_alone_is_enough() -> None:
    minute = Minute(256, 1)
    minute.failed()
    minute.moved(Moved(dropped_stores=2))
    minute.refused()
    assert minute.line(0.0) == ""
    assert minute.line(60.0) == "last 60 s: 0 requests; 1 load failed, 2 stores dropped, 1 request not cached"


def test_a_load_of_unknown_worth_is_logged_and_the_end_of_an_engine_does_not_wait() -> None:
    minute = Minute(256, 1)
    minute.loaded(512, 0.0)
    minute.moved(Moved(loaded_bytes=MIB // 2))
    assert minute.line(0.0) == ""
    assert minute.last_line(7.0) == "last 7 s: 0 requests; loaded 512 tokens (0.5 MiB)"
    assert minute.last_line(8.0) == ""
