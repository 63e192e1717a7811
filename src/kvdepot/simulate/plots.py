"""Plots of hit rate over capacity, drawn by matplotlib (extra `simulate`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvdepot.errors import ConfigError
from kvdepot.eviction import POLICIES
from kvdepot.install import advice
from kvdepot.simulate.sweep import Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORMATS = (".svg", ".png", ".pdf")
_LINES: dict[str, dict[str, Any]] = {
    "infinite": {"color": "0.55", "linestyle": "--"},
    "belady": {"color": "black", "linestyle": "--"},
    **{name: {"color": f"C{number}", "marker": "os"[number]} for number, name in enumerate(POLICIES)},
}
"""Colour and style by policy or bound."""


def check(path: str) -> None:
    """Raise ConfigError if no plot can be written to `path`."""
    if Path(path).suffix.lower() not in _FORMATS:
        raise ConfigError(f"--plot writes {', '.join(_FORMATS)}, not {path!r}")
    if not os.access(Path(path).parent, os.W_OK):
        raise ConfigError(f"--plot: cannot write into {str(Path(path).parent)!r}")


def draw(sweeps: list[Sweep], path: str) -> bool:
    """Draw hit rate over capacity, one chart per trace; without matplotlib, print how to get it and return False."""
    try:
        import matplotlib.figure
    except ImportError:
        print(f"kvdepot: a plot needs matplotlib: {advice('simulate')}", file=sys.stderr)
        return False
    figure = matplotlib.figure.Figure(figsize=(8.5, 5.2 * len(sweeps)), layout="constrained")
    for number, sweep in enumerate(sweeps, 1):
        _draw(figure.add_subplot(len(sweeps), 1, number), sweep)
    try:
        figure.savefig(path, dpi=150)
    except OSError as exc:
        raise ConfigError(f"--plot: cannot write {path}: {exc.strerror}") from exc
    return True


def _draw(axes: Axes, sweep: Sweep) -> None:
    capacities, trace = sweep.capacities, sweep.trace
    for policy in dict.fromkeys(policy for policy, _ in sweep.results):
        rates = [100 * sweep.results[policy, capacity].hit_rate for capacity in capacities]
        axes.plot(capacities, rates, label=policy, linewidth=1.3, markersize=5.5, **_LINES[policy])
    if capacities[-1] > 8 * capacities[0]:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda blocks, _: _label(blocks, sweep.block_bytes))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("capacity in blocks" + (f" of {trace.block_tokens} tokens" if trace.block_tokens else ""))
    axes.set_ylabel("hit rate (% of block references)")
    axes.set_title(f"{Path(trace.name).name}: {trace.contents}", fontsize=10)
    axes.grid(alpha=0.25)
    # Best on average first, like the lines themselves.
    lines = sorted(axes.get_lines(), key=lambda line: -float(np.mean(np.asarray(line.get_ydata()))))
    axes.legend(handles=lines, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _label(blocks: float, block_bytes: int) -> str:
    """A capacity at the axis, in GiB, too, if a block's size is known."""
    unit, name = (1e6, "M") if blocks >= 1e6 else (1e3, "k") if blocks >= 1e3 else (1, "")
    text = f"{blocks / unit:.3g}{name}"
    return f"{text}\n{blocks * block_bytes / 2**30:.3g} GiB" if block_bytes else text
