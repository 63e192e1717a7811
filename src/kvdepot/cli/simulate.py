"""The arguments of `kvdepot simulate`; simulate/sweep.py runs it."""

from __future__ import annotations

from typing import Any

import click

from kvdepot.cli import options
from kvdepot.cli.output import progress
from kvdepot.eviction import POLICIES
from kvdepot.simulate.bounds import BOUNDS


@click.command
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path())
@click.option(
    "--policy", metavar="NAME,...", help=f"eviction policies ({', '.join(POLICIES)}) and bounds "
    f"({', '.join(BOUNDS)}: what an infinite cache and a clairvoyant one would hit); default: all",
)  # fmt: skip
@click.option(
    "--capacity-blocks", metavar="N,...", help="cache sizes in blocks of the trace; default: doubling, up to "
    "all of its blocks",
)  # fmt: skip
@click.option(
    "--capacity", metavar="SIZE,...", help="cache sizes in bytes, e.g. 64GiB,128GiB; needs --kv-bytes-per-token"
)
@click.option(
    "--kv-bytes-per-token", metavar="SIZE", help="KV size of a token: 2 x layers x KV heads x head size "
    "x bytes per element (Llama 3.1 8B in bf16: 128KiB, 70B: 320KiB); shows capacities in GiB",
)  # fmt: skip
@click.option("--block-tokens", metavar="N", help="tokens per block, if not the default of the trace's format")
@options.as_json
@click.option("--plot", metavar="FILE", type=click.Path(), help="draw hit rate over capacity into this .svg, .png or "
    ".pdf")  # fmt: skip
@click.option("--jobs", metavar="N", help="parallel processes; default: one per core")
def simulate(**given: Any) -> int:
    """Replay traces of requests through the server's own index and eviction policies, at several cache sizes,
    and print the hit rates.

    A TRACE is a file of requests in the Mooncake or Bailian format, also gzip. --json prints an array of objects
    instead of tables.
    """
    from kvdepot.simulate.sweep import Asked, run

    return run(Asked(**given), progress)
