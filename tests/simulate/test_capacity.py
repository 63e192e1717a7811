"""`kvdepot simulate --hosts`: figures by hand, output, and what cannot be."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvdepot.cli import main
from kvdepot.install import advice
from kvdepot.simulate.replay import replay
from kvdepot.simulate.traces import load
from kvdepot.testing.traces import WORKLOADS, write_mooncake

DAY = """\
{"timestamp": 0, "hash_ids": [0, 1]}
{"timestamp": 43200000, "hash_ids": [0, 1, 2]}
{"timestamp": 86400000, "hash_ids": [0, 1, 2]}
"""
TIER = ("--tier-size", "1.5MiB", "--tier-latency", "250ms", "--tier-bandwidth", "1MiB")
"""Of three blocks of 512 KiB."""
FIGURES = [
    "requests", "block_references", "hit_rate", "memory_hit_rate", "tier_hit_rate", "tier_read_bytes_per_day",
    "tier_written_bytes_per_day", "prefill_saved_s_per_day",
]  # fmt: skip


@pytest.fixture
def day(tmp_path: Path) -> str:
    path = tmp_path / "day.jsonl"
    path.write_text(DAY)
    return str(path)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("traces") / "chat.jsonl"
    write_mooncake(path, WORKLOADS["chat"](1, 300))
    return str(path)


def rows_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["simulate", *arguments, "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_the_figures_of_a_day_are_those_by_hand(day: str, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = rows_of(
        capsys, day, "--hosts", "1", "--capacity-blocks", "2", "--kv-bytes-per-token", "1KiB",
        "--prefill-tokens-per-s", "512", *TIER,
    )  # fmt: skip
    # Two blocks are written, then the third, which does not fit into memory and is loaded by the last request.
    figures = {
        "requests": 3, "block_references": 8, "hit_rate": 5 / 8, "memory_hit_rate": 4 / 8, "tier_hit_rate": 1 / 8,
        "tier_read_bytes_per_day": 2**19, "tier_written_bytes_per_day": 3 * 2**19,
        "prefill_saved_s_per_day": 5 - 0.25 - 0.5,
    }  # fmt: skip
    expected = {
        "trace": day, "scale": 1, "hosts": 1, "routing": "random", "capacity_blocks": 2, "tier_blocks": 3, **figures,
        "per_host": [figures],
    }  # fmt: skip
    assert row == expected
    assert list(row) == list(expected)
    assert list(row["per_host"][0]) == FIGURES


def test_copies_add_up_and_leave_the_rates_of_each(day: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = (day, "--hosts", "4", "--routing", "session", "--capacity-blocks", "999", "--prefill-tokens-per-s", "512")
    (one,), (ten,) = rows_of(capsys, *common), rows_of(capsys, *common, "--scale", "10")
    assert (ten["requests"], ten["hit_rate"]) == (30, one["hit_rate"])
    assert ten["prefill_saved_s_per_day"] == pytest.approx(10 * one["prefill_saved_s_per_day"])
    assert sum(host["requests"] for host in ten["per_host"]) == 30
    assert sum(host["prefill_saved_s_per_day"] for host in ten["per_host"]) == pytest.approx(
        ten["prefill_saved_s_per_day"]
    )


def test_one_host_has_the_hit_rate_of_the_policy_lru(chat: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = {row["capacity_blocks"]: row["hit_rate"] for row in rows_of(capsys, chat, "--hosts", "1")}
    assert len(found) == 7
    for capacity, rate in found.items():
        assert rate == replay(load(chat), "lru", capacity).hit_rate


def test_json_is_an_array_of_one_object_a_fleet(chat: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(
        capsys, chat, "--hosts", "1,3", "--routing", "session,prefix", "--capacity", "1GiB,4GiB",
        "--kv-bytes-per-token", "128KiB", "--tier-size", "0,64GiB,64.01GiB",
    )  # fmt: skip
    found = [(row["hosts"], row["tier_blocks"], row["routing"], row["capacity_blocks"]) for row in rows]
    assert found == [
        *itertools.product((1,), (0, 1024), ("session",), (16, 64)),
        *itertools.product((3,), (0, 1024), ("session", "prefix"), (16, 64)),
    ]
    assert all(len(row["per_host"]) == row["hosts"] for row in rows)
    assert all((row["tier_read_bytes_per_day"] > 0) == (row["tier_blocks"] > 0) for row in rows)
    assert all(row["prefill_saved_s_per_day"] is None for row in rows)


def test_what_is_not_known_is_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text('{"timestamp": 5, "hash_ids": [0, 1]}\n')
    (row,) = rows_of(
        capsys, str(path), "--hosts", "1", "--capacity-blocks", "2", "--prefill-tokens-per-s", "512", "--scale", "2"
    )
    assert (row["requests"], row["hit_rate"], row["prefill_saved_s_per_day"]) == (2, 0.0, None)


@pytest.mark.faults
def test_the_result_does_not_depend_on_processes(chat: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = (chat, "--hosts", "2,5", "--capacity-blocks", "50,500")
    alone = rows_of(capsys, *common, "--jobs", "1")
    assert len(alone) == 2 * 3 * 2
    assert rows_of(capsys, *common, "--jobs", "2") == alone


def test_tables_have_a_line_a_fleet_in_sum_and_per_host(day: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([
        "simulate", day, "--hosts", "1,2", "--routing", "session", "--capacity-blocks", "2", "--kv-bytes-per-token",
        "1KiB", "--prefill-tokens-per-s", "512", "--scale", "3", *TIER,
    ]) == 0  # fmt: skip
    out = capsys.readouterr().out
    assert f"3 times {day}: 3 requests" in out
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert len(lines) == 3  # one host has no least and most
    assert lines[0][:5] == ["1", "", "2", "0.000977", "0.00146"]
    assert [line[:2] for line in lines[1:]] == [["2", "session"]] * 2
    assert "tier reads per day" in out and "prefill saved per day" in out


def test_tables_show_only_what_is_known(day: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", day, "--hosts", "1", "--capacity-blocks", "2"]) == 0
    out = capsys.readouterr().out
    assert "50.0 %" in out
    assert "--kv-bytes-per-token" in out and "--prefill-tokens-per-s" in out
    assert "tier" not in out and "Per host" not in out


@pytest.mark.faults
def test_a_plot_has_a_line_a_way_to_route(chat: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.svg"
    assert main(["simulate", chat, "--hosts", "1,4", "--routing", "random,prefix", "--plot", str(path)]) == 0
    drawn = path.read_text()
    assert [
        label for label in ("1 host", "4 hosts, random", "4 hosts, prefix") if f"<!-- {label} -->" not in drawn
    ] == []


def test_without_matplotlib_the_tables_come_and_how_to_get_a_plot(
    day: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, library, None)
    arguments = ["--hosts", "1", "--capacity-blocks", "2", "--plot", str(tmp_path / "plot.svg")]
    assert main(["simulate", day, *arguments]) == 1
    out, err = capsys.readouterr()
    assert "50.0 %" in out and advice("simulate") in err


def test_an_empty_trace_is_said_to_be_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    assert main(["simulate", str(path), "--hosts", "2", "--scale", "3", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [(row["requests"], row["hit_rate"]) for row in json.loads(out)] == [(0, 0.0)] * 3
    assert "contains no requests" in err


HOSTS = ["--hosts", "2"]
SIZED = ["--kv-bytes-per-token", "1KiB"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--hosts", "0"], "'0'"),
        (["--hosts", "1,ten"], "'ten'"),
        ([*HOSTS, "--routing", "sticky"], "'sticky'"),
        ([*HOSTS, "--scale", "0.5"], "'0.5'"),
        ([*HOSTS, "--policy", "lru,adaptive"], "lru"),
        ([*HOSTS, "--policy", "infinite"], "lru"),
        ([*HOSTS, "--capacity", "1GiB"], "--kv-bytes-per-token"),
        ([*HOSTS, "--tier-size", "1TiB"], "--kv-bytes-per-token"),
        ([*HOSTS, *SIZED, "--tier-size", "1TiBs"], "'1TiBs'"),
        ([*HOSTS, *SIZED, "--tier-size", "1KiB"], "a block"),
        ([*HOSTS, *SIZED, "--tier-latency", "1ms"], "--tier-size"),
        ([*HOSTS, *SIZED, "--tier-bandwidth", "1GB"], "--tier-size"),
        ([*HOSTS, *SIZED, "--tier-size", "1TiB", "--tier-latency", "5"], "'5'"),
        ([*HOSTS, *SIZED, "--tier-size", "1TiB", "--tier-bandwidth", "fast"], "'fast'"),
        ([*HOSTS, *SIZED, "--tier-size", "1TiB", "--prefill-tokens-per-s", "9"], "--tier-latency"),
        ([*HOSTS, "--prefill-tokens-per-s", "many"], "'many'"),
        ([*HOSTS, "--jobs", "0"], "'0'"),
        ([*HOSTS, "--plot", "plot.txt"], "plot.txt"),
        (["--routing", "random"], "--hosts"),
        (["--scale", "2"], "--hosts"),
        (["--tier-size", "1TiB"], "--hosts"),
        (["--prefill-tokens-per-s", "9"], "--hosts"),
    ],
)
def test_what_cannot_be_is_a_sentence_and_exit_code_2(
    day: str, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert main(["simulate", day, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvdepot: ")
    assert complaint in err
    assert len(err.splitlines()) == 1


def test_the_help_has_the_options_of_fleets_in_a_section_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--help"]) == 0
    general, _, fleets = capsys.readouterr().out.partition("Several hosts:")
    options = (
        "--hosts",
        "--routing",
        "--scale",
        "--tier-size",
        "--tier-latency",
        "--tier-bandwidth",
        "--prefill-tokens",
    )
    assert [option for option in options if f"\n  {option}" not in fleets or f"\n  {option}" in general] == []
    assert "\n  --capacity" in general
