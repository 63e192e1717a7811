"""What `kvdepot status` and `kvdepot top` draw on a terminal."""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest

from kvdepot import cli
from kvdepot.cli import view
from kvdepot.metrics import BOUNDS_S, Event, Latency
from kvdepot.status import OTHERS, AnswersStatus, Engine, NamespaceStatus, Status, TierStatus, TokenCounts, Usage
from tests.cli.command import terminal
from tests.conftest import Depot, eventually

# -- status


def a_status(**parts: Any) -> Status:
    whole: dict[str, Any] = {
        "chunk_size_tokens": 256, "capacity_bytes": 4 << 30, "used_bytes": 1 << 30, "chunks": 12_345,
        "reserved_shards": 0, "holds": 0, "evicted_chunks": 7, "record_slots": 10, "record_slots_used": 3,
        "unrecorded_shards": 0, "operations": 0, "clients": 2, "sessions": 0, "instances": 1, "uptime_s": 90.0,
        **parts,
    }  # fmt: skip
    return Status(**whole)


def shown(status: Status, width: int = 100) -> str:
    from rich.console import Console

    console = Console(width=width, highlight=False, markup=False, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(view.summary(status, "ipc:///x"))
        for listing in view.listings(status):
            console.print(listing.table(width))
    return captured.get()


def test_names_from_clients_are_shown_without_control_characters_or_markup() -> None:
    name = "[red]x[/red]\x1b[2Jy\x9b1mz\r\n"
    text = shown(
        a_status(
            namespaces=[NamespaceStatus("", name, 1, 4, 1, 1, 1)],
            events=[Event(0.0, "x", f"client registers {name}")],
            tiers=[TierStatus(name, "through", name, None, None, None, 0, 0, {})],
        )
    )
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    assert text.count("[red]x[/red]") >= 4


LATE = [0, 0, 60, *[0] * (len(BOUNDS_S) - 3), 40]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({}, "no lookup by an engine yet"),
        ({"tokens": TokenCounts(256_000, 128_000, 64_000)}, "25.0 % of 256,000 tokens in all; found 50.0 %"),
        ({"holds_s": 8000.0}, "holds about 2 h 13 min of traffic"),
        ({"latencies": [Latency("Lookup", 100, 0, 1.0, LATE)]}, "458 µs"),
        ({"latencies": [Latency("Lookup", 100, 0, 1.0, LATE)]}, "≥ 10 s"),
    ],
    ids=str,
)  # fmt: skip
def test_the_summary_shows_reuse_retention_and_latencies(parts: dict[str, Any], said: str) -> None:
    assert said in shown(a_status(**parts))


def test_tokens_are_told_by_model_and_where_there_are_tenants_by_tenant() -> None:
    model = NamespaceStatus(
        "", "m", 2, 4, 10, 1 << 20, 1, chunk_tokens=256, asked_tokens=1000, found_tokens=500, reused_tokens=250,
        answers=AnswersStatus("auto", False, 0.012),
    )  # fmt: skip
    others = NamespaceStatus(OTHERS, OTHERS, 0, 0, 7, 1 << 20, 0, asked_tokens=10)
    usage = [Usage("", 10), Usage("blue", 1000, 500, 250)]
    lines = shown(a_status(namespaces=[model], other_namespaces=others, usage=usage)).splitlines()
    rows = [re.split(r"  +", line.strip()) for line in lines]
    assert ["models", "ranks", "tokens", "bytes", "asked", "found", "reused", "engines", "answers"] in rows
    assert ["m", "2", "2,560", "1 MiB", "1,000", "50.0 %", "25.0 %", "1", "not stored (1.2 % return)"] in rows
    assert ["others", "-", "-", "1 MiB", "10", "0.0 %", "0.0 %", "0", "-"] in rows
    assert ["blue", "1,000", "50.0 %", "25.0 %", "250"] in rows
    assert "tokens by tenant" not in shown(a_status(usage=[Usage("", 10)]))


def test_the_summary_shows_warnings_and_uncached_engines() -> None:
    tier = TierStatus("redis://h", "through", "circuit breaker open", None, None, None, 0, 0, {})
    text = shown(a_status(tiers=[tier], unrecorded_shards=3, counters={"corrupt_chunks": 2}))
    assert "Needs attention: 3 warnings, up" in text and "redis://h: circuit breaker open" in text
    assert "3 shards would not survive" in text and "2 chunks failed checksum verification" in text
    engine = Engine("4b7d", 9.0, 0.1, ["m"], [0], "", 0, 0, 0, "gpu-7", fault="block 3 came back different")
    lines = shown(a_status(engines=[engine], faulty_engines=1)).splitlines()
    assert any("gpu-7: block 3 came back different" in line for line in lines)
    assert ["m", "gpu-7", "rank 0", "uncached"] in [re.split(r"  +", line.strip())[:4] for line in lines]
    assert "Healthy, no engine is connected, up" in shown(a_status())
    assert "Healthy, up" in shown(a_status(engine_count=1))


@pytest.mark.faults
def test_a_watched_status_is_printed_until_it_is_interrupted(depot: Depot) -> None:
    with terminal("status", "--url", depot.url, "--watch", "0.1", "--json") as shown:
        eventually(lambda: shown.text.count('{"version"') >= 3)
        shown.process.send_signal(signal.SIGINT)
        assert shown.end() == 130
    with terminal("status", "-u", depot.url, "-w") as shown:
        eventually(lambda: shown.raw.count("\x1b[2J") >= 1 and "memory" in shown.text)
        shown.process.send_signal(signal.SIGINT)
        assert shown.end() == 130 and "Traceback" not in shown.text


@pytest.mark.parametrize("interval", ["0", "often", "1e9", "nan"])
def test_status_refuses_an_interval_out_of_range(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--watch", interval]) == 2
    assert "--watch" in capsys.readouterr().err
