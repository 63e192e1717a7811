"""What a comparison has measured: medians and percentiles over all rounds, as data and as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

__all__ = ["answers", "markdown", "percentile", "summary", "tables", "turns"]

Table = list[tuple[str, ...]]
"""The first row is the head."""


def percentile(values: Sequence[float], part: float) -> float:
    """The value that `part` of all values do not exceed (nearest rank). Raises ValueError without values, or for a
    part that is not in (0, 1].
    """
    if not values or not 0 < part <= 1:
        raise ValueError(f"no percentile {part} of {len(values)} values")
    return sorted(values)[math.ceil(part * len(values)) - 1]


def summary(rounds: dict[str, list[dict[str, Any]]], baseline: str) -> dict[str, Any]:
    """The figures of each system, from what its rounds have measured (see compare.py); times in seconds.

    baseline: the system whose answers the others' should be.
    """
    return {key: _system(found, rounds[baseline]) for key, found in rounds.items()}


def _system(rounds: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"rounds": len(rounds)}
    for figure in ("start_s", "resident_bytes", "engine_start_s"):
        values = [each[figure] for each in rounds if each.get(figure) is not None]
        found[figure] = median(values) if values else None
    lengths = sorted({length for each in rounds for length in each.get("prompts", {})}, key=int)
    found["prompts"] = {length: _prompts([each["prompts"][length] for each in rounds]) for length in lengths}
    for workload in ("chats", "documents"):
        runs = [each[workload] for each in rounds if workload in each]
        if runs:
            found[workload] = _workload(runs, [each[workload] for each in baseline])
    return found


def _prompts(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of a prompt's times, and the fewest tokens that were found."""
    found: dict[str, float] = {
        figure: median(run[figure] for run in runs) for figure in ("cold_s", "settled_s", "own_s")
    }
    if "lookup_s" in runs[0]:
        lookups = [seconds for run in runs for seconds in run["lookup_s"]]
        found |= {
            "lookup_s": median(lookups),
            "lookup_worst_s": max(lookups),
            "cache_s": median(seconds for run in runs for seconds in run["cache_s"]),
            "cached": min(tokens for run in runs for tokens in run["cached"]),
        }
    return found


def _workload(runs: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> dict[str, Any]:
    requests = [request for run in runs for request in run["requests"]]
    first = [request["first_s"] for request in requests]
    again = [request["first_s"] for request in requests if request["turn"] > 0]
    wanted = answers(baseline[0])
    return {
        "requests": len(runs[0]["requests"]),
        "prompt_tokens": sum(request["prompt"] for request in runs[0]["requests"]),
        "seconds": median(run["seconds"] for run in runs),
        "requests_s": median(len(run["requests"]) / run["seconds"] for run in runs),
        "first_median_s": median(first),
        "first_p99_s": percentile(first, 0.99),
        "new_median_s": median(request["first_s"] for request in requests if request["turn"] == 0),
        "again_median_s": median(again),
        "again_p90_s": percentile(again, 0.9),
        "again_p99_s": percentile(again, 0.99),
        "computed": median(run["computed"] for run in runs),
        "same_answers": min(sum(given == wanted.get(name) for name, given in answers(run).items()) for run in runs),
    }


def answers(run: dict[str, Any]) -> dict[str, list[int]]:
    """The generated tokens of each request."""
    return {request["name"]: request["answer"] for request in run["requests"]}


def turns(runs: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """Of each turn of the chats: its number, from 0; the median of all first tokens' times in seconds; and their
    ninetieth percentile. Turns that fewer than three in four chats have are left out: the engine has room for those.
    """
    times: dict[int, list[float]] = {}
    for run in runs:
        for request in run["requests"]:
            times.setdefault(request["turn"], []).append(request["first_s"])
    most = max(map(len, times.values()))
    return [
        (turn, median(found), percentile(found, 0.9))
        for turn, found in sorted(times.items())
        if 4 * len(found) >= 3 * most
    ]


# -- tables


def tables(figures: dict[str, Any], names: dict[str, str]) -> dict[str, Table]:
    """The tables of a summary, by title. names: of the systems, in the order of the rows."""
    there = {names[key]: figures[key] for key in names if key in figures}
    found = {"Start and memory": _start_table(there)}
    for length in next(iter(there.values()))["prompts"]:
        found[f"One prompt of {int(length):,} tokens"] = _prompt_table(
            {name: each["prompts"][length] for name, each in there.items()}
        )
    for workload, title, new, again in _WORKLOADS:
        if any(workload in each for each in there.values()):
            found[title] = _workload_table({name: each[workload] for name, each in there.items()}, new, again)
    return found


_WORKLOADS = (
    ("chats", "Multi-turn chats", "first turn", "later turns"),
    ("documents", "Long documents, asked repeatedly", "new", "asked again"),
)
"""Key, title, and what the requests of turn 0 and of the others are."""


def _start_table(figures: dict[str, Any]) -> Table:
    rows = [
        (name, _seconds(each["start_s"]), _mib(each["resident_bytes"]), _seconds(each["engine_start_s"]))
        for name, each in figures.items()
    ]
    return [("system", "server start", "resident without KV", "vLLM start"), *rows]


def _prompt_table(figures: dict[str, Any]) -> Table:
    rows = [
        (
            name, _ms(each["cold_s"]), _ms(each["settled_s"]) if "cache_s" in each else "-", _ms(each.get("lookup_s")),
            _ms(each.get("lookup_worst_s")), _ms(each.get("cache_s")), _ms(each["own_s"]),
        )
        for name, each in figures.items()
    ]  # fmt: skip
    return [
        ("system", "TTFT computed", "blocks free after", "lookup", "slowest", "TTFT from cache", "own cache"),
        *rows,
    ]


def _workload_table(figures: dict[str, Any], new: str, again: str) -> Table:
    rows = [
        (
            name, _ms(each["first_median_s"]), _ms(each["first_p99_s"]), _ms(each["new_median_s"]),
            *(_ms(each[f"again_{part}_s"]) for part in ("median", "p90", "p99")), f"{each['requests_s']:.2f}",
            f"{each['computed']:,.0f} of {each['prompt_tokens']:,}", f"{each['same_answers']} of {each['requests']}",
        )
        for name, each in figures.items()
    ]  # fmt: skip
    return [("system", "TTFT", "p99", new, again, "p90", "p99", "requests/s", "tokens computed", "same answers"), *rows]


def markdown(table: Table) -> str:
    """A table for a document: the first column to the left, the others to the right."""
    lines = ["| " + " | ".join(row) + " |" for row in table]
    lines.insert(1, "|---|" + "---:|" * (len(table[0]) - 1))
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:,.0f} ms" if value >= 0.00995 else f"{value * 1e3:.2g} ms"


def _mib(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**20:,.0f} MiB"
