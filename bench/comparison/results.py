"""What a comparison has measured: medians and percentiles over all rounds, as data and as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

__all__ = ["markdown", "percentile", "summary", "tables", "turns"]

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
    wanted = answers(baseline[0])
    return {
        "requests": len(runs[0]["requests"]),
        "prompt_tokens": sum(request["prompt"] for request in runs[0]["requests"]),
        "seconds": median(run["seconds"] for run in runs),
        "requests_s": median(len(run["requests"]) / run["seconds"] for run in runs),
        "first_median_s": median(first),
        "first_p99_s": percentile(first, 0.99),
        "computed": median(run["computed"] for run in runs),
        "same_answers": min(sum(given == wanted.get(name) for name, given in answers(run).items()) for run in runs),
    }


def answers(run: dict[str, Any]) -> dict[str, list[int]]:
    """The generated tokens of each request."""
    return {request["name"]: request["answer"] for request in run["requests"]}


def turns(runs: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """Of each turn of the chats: its number, from 0; the median of all first tokens' times in seconds; and their
    ninetieth percentile.
    """
    times: dict[int, list[float]] = {}
    for run in runs:
        for request in run["requests"]:
            times.setdefault(request["turn"], []).append(request["first_s"])
    return [(turn, median(found), percentile(found, 0.9)) for turn, found in sorted(times.items())]


# -- tables


def tables(figures: dict[str, Any], names: dict[str, str]) -> dict[str, Table]:
    """The tables of a summary, by title. names: of the systems, in the order of the rows."""
    keys = [key for key in names if key in figures]
    found: dict[str, Table] = {
        "Start and memory": [
            ("system", "server start", "resident without KV", "vLLM start"),
            *(
                (
                    names[key], _seconds(figures[key]["start_s"]), _mib(figures[key]["resident_bytes"]),
                    _seconds(figures[key]["engine_start_s"]),
                )
                for key in keys
            ),
        ]
    }  # fmt: skip
    for length in figures[keys[0]]["prompts"]:
        title = f"One prompt of {int(length):,} tokens"
        head = ("system", "TTFT computed", "stored after", "lookup", "slowest", "TTFT from cache", "own cache")
        rows = [head]
        for key in keys:
            each = figures[key]["prompts"][length]
            rows.append(
                (
                    names[key], _ms(each["cold_s"]), _ms(each["settled_s"]) if "cache_s" in each else "-",
                    _ms(each.get("lookup_s")), _ms(each.get("lookup_worst_s")), _ms(each.get("cache_s")),
                    _ms(each["own_s"]),
                )
            )  # fmt: skip
        found[title] = rows
    for workload, title in (("chats", "Multi-turn chats"), ("documents", "Long documents, asked repeatedly")):
        there = [key for key in keys if workload in figures[key]]
        if there:
            rows = [("system", "TTFT median", "p99", "requests/s", "tokens computed", "same answers")]
            for key in there:
                each = figures[key][workload]
                rows.append(
                    (
                        names[key], _ms(each["first_median_s"]), _ms(each["first_p99_s"]),
                        f"{each['requests_s']:.2f}", f"{each['computed']:,.0f} of {each['prompt_tokens']:,}",
                        f"{each['same_answers']} of {each['requests']}",
                    )
                )  # fmt: skip
            found[title] = rows
    return found


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
