"""Output of `kvdepot simulate`: JSON, tables, and a plot of hit rate over capacity (matplotlib, extra `simulate`)."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvdepot.errors import ConfigError
from kvdepot.eviction import POLICIES
from kvdepot.install import advice
from kvdepot.simulate.bounds import BOUNDS
from kvdepot.simulate.replay import Result
from kvdepot.simulate.traces import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORMATS = (".svg", ".png", ".pdf")
_MARKERS = "os"
_BOUND_COLORS = {"infinite": "0.55", "belady": "black"}


@dataclass(frozen=True)
class Sweep:
    """A trace, the capacities to replay it at, and the results."""

    trace: Trace
    capacities: list[int]
    """Sizes in blocks, ascending."""
    block_bytes: int = 0
    """Bytes of KV per block; 0 = not known."""
    results: dict[tuple[str, int], Result] = field(default_factory=dict)


def as_json(sweeps: list[Sweep], policies: list[str]) -> str:
    """An array of objects, one per trace, policy and capacity."""
    rows = []
    for sweep in sweeps:
        for policy in policies:
            for capacity in sweep.capacities:
                result = sweep.results[policy, capacity]
                rows.append(
                    {
                        "trace": sweep.trace.name,
                        "policy": policy,
                        "capacity_blocks": capacity,
                        "requests": result.requests,
                        "block_references": result.block_references,
                        "hit_rate": result.hit_rate,
                    }
                )
    return json.dumps(rows, indent=2)


def print_tables(sweeps: list[Sweep], policies: list[str]) -> None:
    """Print a table per trace: rows are capacities, columns policies; the best policy of each row is bold."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Without a terminal rich assumes 80 columns, and would cut the table.
    out = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    for sweep in sweeps:
        heads, rows = _cells(sweep, policies)
        table = Table()
        for head in heads:
            table.add_column(head, justify="right", style="dim" if head in BOUNDS else "")
        for row, capacity in zip(rows, sweep.capacities, strict=True):
            hits = {policy: sweep.results[policy, capacity].hits for policy in policies if policy not in BOUNDS}
            best = max(hits.values(), default=0) if len(hits) > 1 else -1
            table.add_row(
                *(Text(text, "bold" if hits.get(head) == best else "") for text, head in zip(row, heads, strict=True))
            )
        out.print(Text(_title(sweep.trace.name, sweep.trace), "bold"), soft_wrap=True)
        out.print(table)
        hint = "" if sweep.block_bytes else "; --kv-bytes-per-token shows it in GiB"
        out.print(f"Hit rate in % of block references, by capacity in blocks{hint}", soft_wrap=True)


def _cells(sweep: Sweep, policies: list[str]) -> tuple[list[str], list[list[str]]]:
    sized = ["GiB"] if sweep.block_bytes else []
    rows = [
        [
            f"{capacity:,}",
            *([_gib(capacity * sweep.block_bytes)] if sized else []),
            *(f"{100 * sweep.results[policy, capacity].hit_rate:.1f} %" for policy in policies),
        ]
        for capacity in sweep.capacities
    ]
    return ["blocks", *sized, *policies], rows


def _title(name: str, trace: Trace) -> str:
    text = f"{name}: {len(trace):,} requests, {len(trace.blocks):,} block references, {trace.unique:,} blocks"
    return f"{text} of {trace.block_tokens} tokens" if trace.block_tokens else text


def _gib(size_bytes: int) -> str:
    size = size_bytes / 2**30
    return f"{size:,.0f}" if size >= 100 else f"{size:.3g}"


def check_plot(path: str) -> None:
    """Raise ConfigError if no plot can be written to `path`."""
    if Path(path).suffix.lower() not in _FORMATS:
        raise ConfigError(f"--plot writes {', '.join(_FORMATS)}, not {path!r}")
    if not os.access(Path(path).parent, os.W_OK):
        raise ConfigError(f"--plot: cannot write into {str(Path(path).parent)!r}")


def plot(sweeps: list[Sweep], policies: list[str], path: str) -> bool:
    """Draw hit rate over capacity, one chart per trace; without matplotlib, print how to get it and return False."""
    try:
        import matplotlib.figure
    except ImportError:
        print(f"kvdepot: a plot needs matplotlib: {advice('simulate')}", file=sys.stderr)
        return False
    figure = matplotlib.figure.Figure(figsize=(8.5, 5.2 * len(sweeps)), layout="constrained")
    for number, sweep in enumerate(sweeps):
        _draw(figure.add_subplot(len(sweeps), 1, number + 1), sweep, policies)
    try:
        figure.savefig(path, dpi=150)
    except OSError as exc:
        raise ConfigError(f"--plot: cannot write {path}: {exc.strerror}") from exc
    return True


def _draw(axes: Axes, sweep: Sweep, policies: list[str]) -> None:
    capacities, trace = sweep.capacities, sweep.trace
    for policy in policies:
        rates = [100 * sweep.results[policy, capacity].hit_rate for capacity in capacities]
        if policy in BOUNDS:
            axes.plot(capacities, rates, label=policy, color=_BOUND_COLORS[policy], linestyle="--", linewidth=1.3)
        else:
            number = list(POLICIES).index(policy)
            axes.plot(capacities, rates, label=policy, color=f"C{number}", marker=_MARKERS[number], markersize=5.5)
    if capacities[-1] > 8 * capacities[0]:
        axes.set_xscale("log", base=2)
    shown = _apart(capacities, axes.get_xscale() != "linear")
    axes.set_xticks(shown, [_tick(capacity, sweep.block_bytes) for capacity in shown])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("capacity in blocks" + (f" of {trace.block_tokens} tokens" if trace.block_tokens else ""))
    axes.set_ylabel("hit rate (% of block references)")
    axes.set_title(_title(Path(trace.name).name, trace), fontsize=10)
    axes.grid(alpha=0.25)
    # Best on average first, like the lines themselves.
    lines = sorted(axes.get_lines(), key=lambda line: -float(np.mean(np.asarray(line.get_ydata()))))
    axes.legend(handles=lines, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _apart(capacities: list[int], logarithmic: bool) -> list[int]:
    """The capacities to label, so that labels do not overlap; always includes the last one."""
    scale = math.log if logarithmic else float
    least = (scale(capacities[-1]) - scale(capacities[0])) / 12
    shown: list[int] = []
    for capacity in reversed(capacities):
        if not shown or scale(shown[-1]) - scale(capacity) >= least:
            shown.append(capacity)
    return shown[::-1]


def _tick(capacity: int, block_bytes: int) -> str:
    text = (
        f"{capacity / 1e6:.3g}M" if capacity >= 1e6 else f"{capacity / 1e3:.3g}k" if capacity >= 1e3 else f"{capacity}"
    )
    return f"{text}\n{_gib(capacity * block_bytes)} GiB" if block_bytes else text
