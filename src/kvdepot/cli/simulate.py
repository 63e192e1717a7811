"""`kvdepot simulate`: traces replayed by several policies at several cache sizes; prints the hit rates."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from kvdepot.cli import options
from kvdepot.cli.output import print_json, progress, size
from kvdepot.errors import ConfigError
from kvdepot.eviction import POLICIES
from kvdepot.simulate.bounds import BOUNDS

if TYPE_CHECKING:
    from kvdepot.simulate.sweep import Sweep

_POLICIES = [*POLICIES, *BOUNDS]
_COUNT = click.IntRange(1)


@click.command
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path())
@click.option(
    "--policy", "policies", metavar="NAME,...", type=options.several(click.Choice(_POLICIES)),
    help=f"eviction policies ({', '.join(POLICIES)}) and bounds ({', '.join(BOUNDS)}: what an infinite cache and a "
    "clairvoyant one would hit); default: all",
)  # fmt: skip
@click.option(
    "--capacity-blocks", "blocks", metavar="N,...", type=options.several(_COUNT), help="cache sizes in "
    "blocks of the trace; default: doubling, up to all of its blocks",
)  # fmt: skip
@click.option(
    "--capacity", "sizes", metavar="SIZE,...", type=options.several(options.size), help="cache sizes in bytes, "
    "e.g. 64GiB,128GiB; needs --kv-bytes-per-token",
)  # fmt: skip
@click.option(
    "--kv-bytes-per-token", "token_bytes", metavar="SIZE", type=options.size, help="KV size of a token: 2 x layers x "
    "KV heads x head size x bytes per element (Llama 3.1 8B in bf16: 128KiB, 70B: 320KiB); shows capacities in bytes",
)  # fmt: skip
@click.option("--block-tokens", metavar="N", type=_COUNT, help="tokens per block, if not the default of the trace's "
              "format")  # fmt: skip
@options.as_json
@click.option("--plot", metavar="FILE", type=click.Path(), help="draw hit rate over capacity into this .svg, .png or "
    ".pdf")  # fmt: skip
@click.option("--jobs", metavar="N", type=_COUNT, help="parallel processes; default: one per core")
def simulate(
    traces: tuple[str, ...], policies: list[str] | None, blocks: list[int] | None, sizes: list[int] | None,
    token_bytes: int | None, block_tokens: int | None, as_json: bool, plot: str | None, jobs: int | None,
) -> int:  # fmt: skip
    """Replay traces of requests through the server's own index and eviction policies, at several cache sizes,
    and print the hit rates.

    A TRACE is a file of requests in the Mooncake or Bailian format, also gzip. --json prints an array of objects
    instead of tables.
    """
    from kvdepot.simulate import plots
    from kvdepot.simulate.sweep import Sweep, replay_all, spread
    from kvdepot.simulate.traces import load

    policies = policies or _POLICIES
    if sizes and token_bytes is None:
        raise click.UsageError("--capacity needs --kv-bytes-per-token: the KV size of a token")
    if token_bytes == 0:
        raise click.UsageError("--kv-bytes-per-token: a token takes 1 byte or more, not 0")
    if plot is not None:
        plots.check(plot)
    sweeps = []
    with progress() as update:
        for path in dict.fromkeys(traces):
            update(f"reading {path}", 0, 0)
            trace = load(path)
            trace.block_tokens = block_tokens or trace.block_tokens
            block_bytes = (token_bytes or 0) * trace.block_tokens
            capacities = sorted({*(blocks or ()), *(_fitting(each, block_bytes, path) for each in sizes or ())})
            sweeps.append(Sweep(trace, capacities or spread(trace.unique), block_bytes))
        replay_all(sweeps, policies, jobs, update)
    for sweep in sweeps:
        if not len(sweep.trace):
            print(f"kvdepot: {sweep.trace.name}: contains no requests", file=sys.stderr)
    if as_json:
        print_json([
            {"trace": sweep.trace.name, "policy": found.policy, "capacity_blocks": found.capacity_blocks,
             "requests": found.requests, "block_references": found.block_references, "hit_rate": found.hit_rate}
            for sweep in sweeps for found in sweep.results.values()
        ])  # fmt: skip
    else:
        for sweep in sweeps:
            _print(sweep, policies)
    return 0 if plot is None or plots.draw(sweeps, plot) else 1


def _fitting(size_bytes: int, block_bytes: int, path: str) -> int:
    """The blocks of the trace at `path` that fit into `size_bytes`."""
    if not block_bytes:
        raise ConfigError(f"{path}: does not give the tokens per block; use --block-tokens")
    if size_bytes < block_bytes:
        raise ConfigError(f"--capacity: a block of {path} takes {block_bytes} bytes, more than {size_bytes}")
    return size_bytes // block_bytes


def _print(sweep: Sweep, policies: list[str]) -> None:
    """Print a table of hit rates: rows are capacities, columns policies; the best policy of each row is bold."""
    from rich.text import Text

    from kvdepot.cli.view import Listing, console, print_tables

    rows: list[list[str | Text]] = []
    for capacity in sweep.capacities:
        found = [sweep.results[policy, capacity] for policy in policies]
        hits = [each.hits for each in found if each.policy not in BOUNDS]
        best = max(hits) if len(hits) > 1 else -1
        styles = ["dim" if each.policy in BOUNDS else "bold" if each.hits == best else "" for each in found]
        rates = [Text(f"{100 * each.hit_rate:.1f} %", style) for each, style in zip(found, styles, strict=True)]
        sized = [size(capacity * sweep.block_bytes)] if sweep.block_bytes else []
        rows.append([f"{capacity:,}", *sized, *rates])
    heads = ["blocks", *(["KV"] if sweep.block_bytes else []), *policies]
    out = console()
    out.print(Text(f"{sweep.trace.name}: {sweep.trace.contents}", "bold"), soft_wrap=True)
    print_tables(Listing(tuple(f">{head}" for head in heads), rows))
    hint = "" if sweep.block_bytes else "; --kv-bytes-per-token shows it in bytes"
    out.print(f"Hit rate in % of block references, by capacity in blocks{hint}", soft_wrap=True)
