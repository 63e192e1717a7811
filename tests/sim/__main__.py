"""`python -m tests.sim`: run many seeds over processes, or replay one.

Prints progress, and at the first failure its seed, what broke and the end of its log; exit code 1 then.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter

from tests.sim.run import EXPECTED, STEPS, Broken, simulate

_TAIL = 40


def _one(job: tuple[int, int]) -> tuple[int, str, list[str], dict[str, int]]:
    """Seed, what broke (empty: nothing), the end of the log, counters."""
    seed, steps = job
    try:
        world = simulate(seed, steps)
    except Broken as exc:
        return seed, str(exc), exc.world.lines[-_TAIL:], {}
    return seed, "", [], {name: count for name, count in world.counters.items() if count}


def _replay(seed: int, steps: int) -> int:
    try:
        world = simulate(seed, steps)
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
    parser.add_argument("--steps", type=int, default=STEPS, help="engine steps a run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--keep-going", action="store_true", help="run all seeds and list every failure")
    parser.add_argument("--coverage", action="store_true", help="print how often everything happened")
    args = parser.parse_args()
    if args.seed is not None:
        return _replay(args.seed, args.steps)
    began = time.monotonic()
    totals: Counter[str] = Counter()
    failures: list[str] = []
    jobs = [(seed, args.steps) for seed in range(args.first, args.first + args.seeds)]
    with multiprocessing.get_context("fork").Pool(args.jobs) as pool:
        for done, (_, broken, tail, counters) in enumerate(pool.imap_unordered(_one, jobs, chunksize=10), 1):
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
    absent = EXPECTED - totals.keys() if args.seeds >= 1000 and not failures else set()
    if absent:
        failures.append(f"seed {args.first}: never happened: {', '.join(sorted(absent))}")
        print(failures[-1])
    for text in failures if args.keep_going else ():
        print(text)
    if failures:
        print(f"{len(failures)} failed; replay: python -m tests.sim --seed {failures[0].split(':')[0].split()[-1]}")
        return 1
    took_s = time.monotonic() - began
    print(f"{args.seeds} seeds held in {took_s:.1f} s, {1000 * took_s * args.jobs / args.seeds:.1f} ms of a core each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
