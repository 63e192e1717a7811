"""The benchmark: each figure beside the lower bound ("floor") measured in the same run.

    python bench/bench.py [--tiny] [--only NAME[,NAME]] [--no-vllm] [--trace FILE] [--out bench.json]

Families: copies, verify, library, sglang, gpu, lookups, small, watched, floods, serve, coding, disk, remote, pool,
tiers, evictions, leases, policies, and with vLLM engine, starts, chats and pressure. The exit code is 0 if it ran to
the end: a missed bar is a result, no failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import os
import sys
import time
from pathlib import Path

from common import TINY, Scale, say
from report import Figure, describe_machine, table, write

FAMILIES = (
    "copies", "verify", "library", "sglang", "gpu", "lookups", "small", "watched", "floods", "serve", "coding", "disk",
    "remote", "pool", "tiers", "evictions", "leases", "policies", "engine", "starts", "chats", "pressure",
)  # fmt: skip
_NEED_VLLM = {"engine", "starts", "chats", "pressure"}


def main(argv: list[str] | None = None) -> int:
    """Run the chosen families, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="bench.py", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--tiny", action="store_true", help="run for seconds instead of minutes; the numbers are meaningless"
    )
    parser.add_argument("--only", metavar="NAME", help=f"some of {', '.join(FAMILIES)}, separated by commas")
    parser.add_argument("--no-vllm", action="store_true", help="leave out the figures that need a vLLM engine")
    parser.add_argument(
        "--trace", metavar="FILE", default=os.environ.get("KVDEPOT_BENCH_TRACE", ""),
        help="requests to replay with each policy, in addition to synthetic ones; default: KVDEPOT_BENCH_TRACE",
    )  # fmt: skip
    parser.add_argument("--out", metavar="FILE", type=Path, default=Path("bench.json"), help="default: bench.json")
    args = parser.parse_args(argv)
    names = args.only.split(",") if args.only else list(FAMILIES)
    for name in names:
        if name not in FAMILIES:
            parser.error(f"{name!r} is not one of {', '.join(FAMILIES)}")
    if _NEED_VLLM & set(names) and (args.no_vllm or importlib.util.find_spec("vllm") is None):
        say(
            f"{' and '.join(n for n in names if n in _NEED_VLLM)}: left out"
            + ("" if args.no_vllm else ", vLLM is not installed")
        )
        names = [name for name in names if name not in _NEED_VLLM]
    scale = dataclasses.replace(TINY if args.tiny else Scale(), trace=args.trace)
    begun = time.monotonic()
    for line in describe_machine():
        print(line)
    if args.tiny:
        print("tiny       sizes far below those the names say: the numbers mean nothing")
    figures: list[Figure] = []
    notes: list[str] = []
    try:
        for name in names:
            for figure in importlib.import_module(name).run(scale, notes):
                figures.append(figure)
                write(figures, args.out)  # a time limit or an error costs only what has not been measured yet
    finally:
        print()
        print(table(figures))
        print()
        for note in notes:
            print(note)
        missed = sum(not figure.holds for figure in figures)
        print(f"{len(figures)} figures, {missed} missed, {time.monotonic() - begun:.0f} s")
        write(figures, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
