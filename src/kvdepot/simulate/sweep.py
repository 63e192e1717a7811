"""`kvdepot simulate`: traces replayed by several policies at several capacities, in parallel processes.

Prints JSON or tables, and draws a plot of hit rate over capacity (matplotlib, extra `simulate`). Wrong arguments raise
ConfigError with the option's name.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvdepot.errors import ConfigError
from kvdepot.eviction import POLICIES
from kvdepot.install import advice
from kvdepot.simulate.bounds import BOUNDS
from kvdepot.simulate.replay import Result, replay
from kvdepot.simulate.traces import Trace, load
from kvdepot.values import parse_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Progress: TypeAlias = Callable[[str, int, int], None]
"""Shows what is done now, how much is done, and of how much."""
Work: TypeAlias = tuple[int, str, int]
"""Number of a trace, policy, capacity in blocks."""

_SMALL = 300_000
"""Up to this many block references, starting processes costs more than it saves."""
_SAFE_PATH = "PYTHONSAFEPATH"
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


@dataclass(frozen=True)
class Asked:
    """The arguments of `kvdepot simulate`, as typed; None = not given."""

    traces: tuple[str, ...]
    policy: str | None = None
    capacity_blocks: str | None = None
    capacity: str | None = None
    kv_bytes_per_token: str | None = None
    block_tokens: str | None = None
    as_json: bool = False
    plot: str | None = None
    jobs: str | None = None


def run(args: Asked, progress: Callable[[], AbstractContextManager[Progress]]) -> int:
    """Replay traces and print the results; returns the exit code. progress: shows it until the results are printed."""
    known = (*POLICIES, *BOUNDS)
    policies = _split(args.policy) or [*known]
    if unknown := [name for name in policies if name not in known]:
        raise ConfigError(f"unknown policy {unknown[0]!r}; available: {', '.join(known)}")
    if args.capacity is not None and args.kv_bytes_per_token is None:
        raise ConfigError("--capacity needs --kv-bytes-per-token: the KV size of a token")
    blocks = [_count(text, "--capacity-blocks") for text in _split(args.capacity_blocks)]
    sizes = [_size(text, "--capacity") for text in _split(args.capacity)]
    token_bytes = _size(args.kv_bytes_per_token, "--kv-bytes-per-token") if args.kv_bytes_per_token is not None else 0
    tokens = _count(args.block_tokens, "--block-tokens") if args.block_tokens is not None else 0
    jobs = _count(args.jobs, "--jobs") if args.jobs is not None else 0
    if args.plot is not None:
        check_plot(args.plot)

    sweeps = []
    with progress() as update:
        for path in dict.fromkeys(args.traces):
            update(f"reading {path}", 0, 0)
            trace = load(path)
            trace.block_tokens = tokens or trace.block_tokens
            block_bytes = token_bytes * trace.block_tokens
            capacities = sorted({*blocks, *(_fitting(size, block_bytes, path) for size in sizes)})
            sweeps.append(Sweep(trace, capacities or _spread(trace.unique), block_bytes))
        _replay_all(sweeps, policies, jobs, update)

    for sweep in sweeps:
        if not len(sweep.trace):
            print(f"kvdepot: {sweep.trace.name}: contains no requests", file=sys.stderr)
    if args.as_json:
        print(as_json(sweeps, policies), flush=True)
    else:
        print_tables(sweeps, policies)
    return 0 if args.plot is None or plot(sweeps, policies, args.plot) else 1


def _split(text: str | None) -> list[str]:
    """The parts of a list with commas, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(","))) if text is not None else []


def _count(text: str, option: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ConfigError(f"{option} takes positive whole numbers, not {text!r}")
    return int(text)


def _size(text: str, option: str) -> int:
    """Bytes of a size with or without a unit; at least 1."""
    try:
        found = round(parse_size(text))
    except (ValueError, OverflowError):
        found = 0
    if found < 1:
        raise ConfigError(f"{option} takes sizes like 64GiB, 500GB or 131072, not {text!r}")
    return found


def _fitting(size_bytes: int, block_bytes: int, path: str) -> int:
    """Blocks of the trace at `path` that fit into `size_bytes`."""
    if not block_bytes:
        raise ConfigError(f"{path}: does not give the tokens per block; use --block-tokens")
    if size_bytes < block_bytes:
        raise ConfigError(f"--capacity: a block of {path} takes {block_bytes} bytes, more than {size_bytes}")
    return size_bytes // block_bytes


def _spread(most: int) -> list[int]:
    """Capacities from a 64th of `most` to `most`, each about twice the one before, rounded."""
    sizes = {most or 1}
    for part in (2, 4, 8, 16, 32, 64):
        each = most // part
        step = 10 ** max(len(str(each)) - 2, 0)
        sizes.add(max(each // step * step, 1))
    return sorted(sizes)


def _replay_all(sweeps: list[Sweep], policies: list[str], jobs: int, progress: Progress) -> None:
    """Fill in all results. jobs: processes; 0 = as many as are worthwhile."""
    work = [
        (number, policy, capacity)
        for number, sweep in enumerate(sweeps)
        for policy in policies
        for capacity in sweep.capacities
    ]
    references = [len(sweeps[number].trace.blocks) for number, _, _ in work]
    total, done = sum(references), 0
    jobs = min(jobs or (1 if total < _SMALL else os.cpu_count() or 1), len(work))
    progress("replaying", done, total)
    with _results([sweep.trace for sweep in sweeps], work, jobs) as found:
        for (number, policy, capacity), size, result in zip(work, references, found, strict=True):
            sweeps[number].results[policy, capacity] = result
            done += size
            progress(f"replayed {policy} with {capacity:,} blocks", done, total)


@contextmanager
def _results(traces: list[Trace], work: list[Work], jobs: int) -> Iterator[Iterator[Result]]:
    if jobs == 1:
        yield (replay(traces[number], policy, capacity) for number, policy, capacity in work)
        return
    before = os.environ.get(_SAFE_PATH, "")
    os.environ[_SAFE_PATH] = "1"  # they import nothing from the working directory; Python 3.10 ignores this
    # Spawned, not forked, because this process may have threads (the progress bar's).
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin, (traces,))
    try:
        yield pool.map(_replay_one, work)
    except BaseException:  # interrupted: do not wait for the replays
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        os.environ[_SAFE_PATH] = before  # to Python, empty is as not set


_traces: list[Trace] = []


def _begin(traces: list[Trace]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    _traces[:] = traces


def _replay_one(work: Work) -> Result:
    return replay(_traces[work[0]], *work[1:])


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
