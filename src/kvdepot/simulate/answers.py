"""What a fleet's counts mean for its owner: hit rates, bytes moved and prefill time saved, per host and in sum.

Called by simulate/capacity.py; it prints them as JSON, tables and a plot. A day's figures are those of the trace,
divided by its length in days: they assume that the whole day is like the trace.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from kvdepot.simulate.fleet import Counts, Fleet
from kvdepot.simulate.plot import Chart, console, gib, look, save, title
from kvdepot.simulate.traffic import Traffic

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Figures", "Plan", "Rates", "as_json", "figures_of", "plot", "print_tables"]

DAY_S = 86400.0

Numbers: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rates:
    """What turns blocks into bytes and seconds."""

    prefill_tokens_per_s: int = 0
    """0 = not known."""
    tier_latency_s: float = 0.0
    """From a lookup to its first byte from the tier."""
    tier_bytes_per_s: int = 0
    """Of one request's load; 0 = not known."""


@dataclass(frozen=True)
class Plan:
    """Traffic, the fleets to send it through, and what happened."""

    traffic: Traffic
    block_bytes: int
    """0 = not known."""
    rates: Rates
    fleets: list[Fleet]
    counts: dict[Fleet, Counts] = field(default_factory=dict)


@dataclass(frozen=True)
class Figures:
    """The answers for some hosts: arrays with one entry per host, or with one entry for all of them."""

    requests: Numbers
    block_references: Numbers
    hit_rate: Numbers
    """In memory or in the tier, of block references; 0 if there are none."""
    memory_hit_rate: Numbers
    tier_hit_rate: Numbers
    tier_read_bytes_per_day: Numbers | None
    tier_written_bytes_per_day: Numbers | None
    prefill_saved_s_per_day: Numbers | None
    """None = not known, as are the bytes."""

    def at(self, host: int) -> dict[str, float | None]:
        """The figures of one host, as JSON has them."""
        row: dict[str, float | None] = {
            name: None if values is None else float(values[host]) for name, values in vars(self).items()
        }
        return row | {"requests": int(self.requests[host]), "block_references": int(self.block_references[host])}


def figures_of(plan: Plan, fleet: Fleet) -> tuple[Figures, Figures]:
    """The answers for all hosts together, and for each."""
    each = {name: values.astype(np.float64) for name, values in vars(plan.counts[fleet]).items()}
    return _figures(plan, {name: values.sum(keepdims=True) for name, values in each.items()}), _figures(plan, each)


def _figures(plan: Plan, counts: dict[str, Numbers]) -> Figures:
    """counts: the fields of `Counts`."""
    days, rates, block_bytes = plan.traffic.seconds / DAY_S, plan.rates, plan.block_bytes
    memory_hits, tier_hits = counts["memory_hits"], counts["tier_hits"]
    hits = memory_hits + tier_hits
    references = np.maximum(counts["blocks"], 1)
    saved_s = None
    if rates.prefill_tokens_per_s:
        saved_s = hits * (plan.traffic.trace.block_tokens / rates.prefill_tokens_per_s)
        saved_s = saved_s - counts["tier_loads"] * rates.tier_latency_s
        if rates.tier_bytes_per_s:
            saved_s = saved_s - tier_hits * (block_bytes / rates.tier_bytes_per_s)
    is_sized = block_bytes > 0 and days > 0
    return Figures(
        requests=counts["requests"],
        block_references=counts["blocks"],
        hit_rate=hits / references,
        memory_hit_rate=memory_hits / references,
        tier_hit_rate=tier_hits / references,
        tier_read_bytes_per_day=tier_hits * block_bytes / days if is_sized else None,
        tier_written_bytes_per_day=counts["tier_writes"] * block_bytes / days if is_sized else None,
        prefill_saved_s_per_day=saved_s / days if saved_s is not None and days > 0 else None,
    )


# -- output


def as_json(plans: list[Plan]) -> str:
    """An array of objects, one per trace and fleet, each with those of its hosts."""
    rows = []
    for plan in plans:
        for fleet in plan.fleets:
            whole, each = figures_of(plan, fleet)
            rows.append(
                {
                    "trace": plan.traffic.trace.name,
                    "scale": plan.traffic.copies,
                    "hosts": fleet.hosts,
                    "routing": fleet.routing,
                    "capacity_blocks": fleet.capacity_blocks,
                    "tier_blocks": fleet.tier_blocks,
                    **whole.at(0),
                    "per_host": [each.at(host) for host in range(fleet.hosts)],
                }
            )
    return json.dumps(rows, indent=2)


def print_tables(plans: list[Plan]) -> None:
    """Print two tables per trace: the figures of all hosts in sum, and the least and the most of one host."""
    from rich.text import Text

    out = console()
    for plan in plans:
        found = [(fleet, *figures_of(plan, fleet)) for fleet in plan.fleets]
        columns = _columns(plan)
        out.print(Text(_title(plan, plan.traffic.trace.name), "bold"), soft_wrap=True)
        out.print(_table(plan, columns, [(fleet, whole) for fleet, whole, _ in found], _only))
        if several := [(fleet, each) for fleet, _, each in found if fleet.hosts > 1]:
            hosts = {head: column for head, column in columns.items() if not head.startswith("in ")}
            requests: dict[str, Column] = {"requests": ("requests", lambda value: f"{value:,.0f}")}
            out.print("Per host, minimum to maximum:")
            out.print(_table(plan, requests | hosts, several, _least_and_most))
        out.print(_caption(plan), soft_wrap=True)


Show: TypeAlias = Callable[[float], str]
Column: TypeAlias = tuple[str, Show]
"""A field of `Figures`, and how its values are shown."""


def _table(
    plan: Plan,
    columns: dict[str, Column],
    found: Iterable[tuple[Fleet, Figures]],
    cell: Callable[[Show, Numbers], str],
) -> Table:
    from rich.table import Table

    table = Table()
    has_tier = any(fleet.tier_blocks for fleet in plan.fleets)
    heads = ["hosts", "routing", "blocks", *(["GiB"] if plan.block_bytes else []), *(["tier GiB"] if has_tier else [])]
    for head in (*heads, *columns):
        table.add_column(head, justify="left" if head == "routing" else "right")
    for fleet, figures in found:
        cells = [f"{fleet.hosts:,}", fleet.routing if fleet.hosts > 1 else "", f"{fleet.capacity_blocks:,}"]
        cells += [gib(fleet.capacity_blocks * plan.block_bytes)] if plan.block_bytes else []
        cells += [gib(fleet.tier_blocks * plan.block_bytes) if fleet.tier_blocks else "none"] if has_tier else []
        for name, show in columns.values():
            values = getattr(figures, name)
            cells.append("" if values is None else cell(show, values))
        table.add_row(*cells)
    return table


def _columns(plan: Plan) -> dict[str, Column]:
    """Those that are known, by head."""
    columns: dict[str, Column] = {}
    has_tier = any(fleet.tier_blocks for fleet in plan.fleets)
    if has_tier:
        columns |= {"in memory": ("memory_hit_rate", _share), "in the tier": ("tier_hit_rate", _share)}
    columns["hits"] = "hit_rate", _share
    if has_tier and plan.traffic.seconds:
        columns["tier reads per day"] = "tier_read_bytes_per_day", _bytes
        columns["tier writes per day"] = "tier_written_bytes_per_day", _bytes
    if plan.rates.prefill_tokens_per_s and plan.traffic.seconds:
        columns["prefill saved per day"] = "prefill_saved_s_per_day", _duration
    return columns


def _only(show: Show, values: Numbers) -> str:
    return show(float(values[0]))


def _least_and_most(show: Show, values: Numbers) -> str:
    least, most = show(float(values.min())), show(float(values.max()))
    return least if least == most else f"{least} to {most}"


def _title(plan: Plan, name: str) -> str:
    text = title(name, plan.traffic.trace)
    return text if plan.traffic.copies == 1 else f"{plan.traffic.copies:,} times {text}"


def _caption(plan: Plan) -> str:
    text = "Hit rate in % of block references, by host memory"
    if not plan.block_bytes:
        text += "; --kv-bytes-per-token shows it in GiB"
    if not plan.rates.prefill_tokens_per_s:
        text += "; --prefill-tokens-per-s shows the prefill time saved"
    return text


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:,.0f} TiB" if value >= 100 else f"{value:.3g} TiB"


def _duration(value: float) -> str:
    for unit, length in (("d", DAY_S), ("h", 3600.0), ("min", 60.0)):
        if abs(value) >= length:
            count = value / length
            return f"{count:,.0f} {unit}" if abs(count) >= 100 else f"{count:.3g} {unit}"
    return f"{value:.3g} s"


def plot(plans: list[Plan], path: str) -> bool:
    """Draw hit rate over capacity, one chart per trace; without matplotlib, say so on stderr and return False."""
    return save([_chart(plan) for plan in plans], path)


def _chart(plan: Plan) -> Chart:
    capacities = sorted({fleet.capacity_blocks for fleet in plan.fleets})
    rates: dict[str, list[float]] = {}
    for fleet in plan.fleets:  # those of a line are in the order of their capacities
        rates.setdefault(_label(plan, fleet), []).append(float(figures_of(plan, fleet)[0].hit_rate[0]))
    lines = {label: (values, look(number)) for number, (label, values) in enumerate(rates.items())}
    return Chart(
        _title(plan, Path(plan.traffic.trace.name).name), plan.traffic.trace, plan.block_bytes, capacities, lines
    )


def _label(plan: Plan, fleet: Fleet) -> str:
    hosts = "1 host" if fleet.hosts == 1 else f"{fleet.hosts:,} hosts, {fleet.routing}"
    return f"{hosts}, tier of {gib(fleet.tier_blocks * plan.block_bytes)} GiB" if fleet.tier_blocks else hosts
