"""The arguments of `kvdepot simulate`; simulate/replay.py runs it, and simulate/capacity.py where there are hosts."""

from __future__ import annotations

from typing import Any

import click

from kvdepot.cli import options
from kvdepot.cli.output import progress
from kvdepot.eviction import POLICIES
from kvdepot.simulate.bounds import BOUNDS
from kvdepot.simulate.routing import ROUTINGS

__all__ = ["simulate"]

_FLEETS = ("hosts", "routing", "scale", "prefill_tokens_per_s", "tier_size", "tier_latency", "tier_bandwidth")


class _Simulate(click.Command):
    """A command whose help has the options of fleets in a section of their own."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], "Several hosts": []}
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if row is not None:
                sections["Several hosts" if param.name in _FLEETS else "Options"].append(row)
        for head, rows in sections.items():
            with formatter.section(head):
                formatter.write_dl(rows)


@click.command(cls=_Simulate)
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path())
@click.option(
    "--policy", metavar="NAME,...", help=f"eviction policies ({', '.join(POLICIES)}) and bounds "
    f"({', '.join(BOUNDS)}: what an infinite cache and a clairvoyant one would hit); default: all; "
    "with --hosts: lru",
)  # fmt: skip
@click.option(
    "--capacity-blocks", metavar="N,...", help="cache sizes in blocks of the trace; default: doubling, up to "
    "all of its blocks; with --hosts: of each host",
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
@click.option("--hosts", metavar="N,...", help="numbers of hosts, e.g. 1,10,1000; each has a cache of the sizes above")
@click.option(
    "--routing", metavar="NAME,...", help=f"how requests find their host ({', '.join(ROUTINGS)}): any host, that of "
    "the session, or that with the longest prefix unless it is overloaded; default: all",
)  # fmt: skip
@click.option("--scale", metavar="N", help="send N independent copies of the trace at once; default: 1")
@click.option("--prefill-tokens-per-s", metavar="N", help="prefill speed of a host's engine; shows the prefill time "
    "saved per day")  # fmt: skip
@click.option(
    "--tier-size", metavar="SIZE,...", help="sizes of a tier shared by all hosts, 0 = none; needs --kv-bytes-per-token"
)
@click.option("--tier-latency", metavar="TIME", help="time from a lookup to the tier's first byte, e.g. 2ms")
@click.option("--tier-bandwidth", metavar="SIZE", help="bytes per second of a request's load from the tier, e.g. 5GB")
def simulate(**given: Any) -> int:
    """Replay traces of requests through the server's own index and eviction policies, at several cache sizes,
    and print the hit rates.

    A TRACE is a file of requests in the Mooncake, Bailian or WEKA format, also gzip, or a folder of such files as one
    trace. --json prints an array of objects instead of tables.

    With --hosts, traces are replayed through a model of a fleet with LRU caches instead: several hosts, a router before
    them, and perhaps a tier behind them.
    """
    from kvdepot.simulate.arguments import Asked

    asked = Asked(**given)
    if asked.hosts is not None:
        from kvdepot.simulate.capacity import run
    else:
        from kvdepot.simulate.replay import run
    return run(asked, progress)
