"""`python -m tests.sim`: run many seeds over processes, or replay one; with `--vllm`, those of tests/vllm/sim.

Prints progress, and at the first failure its seed, what broke and the end of its log; exit code 1 then.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import os
import sys
import time
from collections import Counter
from typing import Any

from tests.sim.run import Broken

_TAIL = 40


_parts = contextlib.ExitStack()
"""What all runs of this process need."""


def _begin(name: str) -> None:
    """Have this process run seeds of a module."""
    global _module
    _module = importlib.import_module(name)
    _parts.enter_context(_module.parts() if hasattr(_module, "parts") else contextlib.nullcontext())


def _one(job: tuple[int, int]) -> tuple[int, str, list[str], dict[str, int]]:
    """Seed, what broke (empty: nothing), the end of the log, counters."""
    seed, steps = job
    try:
        world = _module.simulate(seed, steps)
    except Broken as exc:
        return seed, str(exc), exc.world.lines[-_TAIL:], {}
    return seed, "", [], {name: count for name, count in world.counters.items() if count}


def _replay(seed: int, steps: int) -> int:
    try:
        world = _module.simulate(seed, steps)
    except Broken as exc:
        print("\n".join(exc.world.lines))
        print(exc)
        return 1
    print("\n".join(world.lines))
    print(f"seed {seed}: {world.events} events, log {world.digest()}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="run seeds 0 .. N-1")
    parser.add_argument("--first", type=int, default=0, help="begin with this seed instead of 0")
    parser.add_argument("--seed", type=int, help="replay this one and print its log")
    parser.add_argument("--vllm", action="store_true", help="real vLLM schedulers and connectors")
    parser.add_argument("--steps", type=int, help="engine steps a run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--keep-going", action="store_true", help="run all seeds and list every failure")
    parser.add_argument("--coverage", action="store_true", help="print how often everything happened")
    args = parser.parse_args()
    name = "tests.vllm.sim.run" if args.vllm else "tests.sim.run"
    module: Any = importlib.import_module(name)
    steps = args.steps or module.STEPS
    if args.seed is not None:
        _begin(name)
        return _replay(args.seed, steps)
    began = time.monotonic()
    totals: Counter[str] = Counter()
    failures: list[str] = []
    jobs = [(seed, steps) for seed in range(args.first, args.first + args.seeds)]
    with multiprocessing.get_context("fork").Pool(args.jobs, _begin, (name,)) as pool:
        outcomes = pool.imap_unordered(_one, jobs, chunksize=1 if args.vllm else 10)
        for done, (_, broken, tail, counters) in enumerate(outcomes, 1):
            totals.update(counters)
            if broken:
                failures.append(broken)
                if not args.keep_going:
                    print("\n".join(tail))
                    print(broken)
                    break
            if done % 500 == 0:
                print(f"{done} seeds, {time.monotonic() - began:.0f} s", flush=True)
    if args.coverage:
        for name, count in sorted(totals.items()):
            print(f"{count:9d} {name}")
    absent = module.EXPECTED - totals.keys() if args.seeds >= 1000 and not failures else set()
    if absent:
        failures.append(f"seed {args.first}: never happened: {', '.join(sorted(absent))}")
        print(failures[-1])
    for text in failures if args.keep_going else ():
        print(text)
    if failures:
        command = f"python -m tests.sim{' --vllm' * args.vllm} --seed"
        print(f"{len(failures)} failed; replay: {command} {failures[0].split(':')[0].split()[-1]}")
        return 1
    took_s = time.monotonic() - began
    print(f"{args.seeds} seeds held in {took_s:.1f} s, {1000 * took_s * args.jobs / args.seeds:.1f} ms of a core each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
