"""`kvdepot simulate --hosts`: how much memory a fleet needs, how to route its requests, and what a shared tier adds.

Called by cli/simulate.py. It reads the arguments, replays each trace through each fleet that they describe
(simulate/fleet.py), and prints the answers (simulate/answers.py).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from kvdepot.errors import ConfigError
from kvdepot.simulate import answers
from kvdepot.simulate.answers import Plan, Rates
from kvdepot.simulate.arguments import Asked, Capacities, count, fitting, names, seconds, size, split, spread
from kvdepot.simulate.fleet import Counts, Fleet, replay_fleet
from kvdepot.simulate.plot import check_plot
from kvdepot.simulate.pool import Progress, processes, results
from kvdepot.simulate.routing import ROUTINGS
from kvdepot.simulate.traces import Trace, load
from kvdepot.simulate.traffic import Traffic

__all__ = ["run"]

_SMALL = 200_000
"""Up to this many requests in all, starting processes costs more than it saves."""


def run(args: Asked, progress: Callable[[], AbstractContextManager[Progress]]) -> int:
    """Replay traces through fleets and print the answers; returns the exit code.

    Raises ConfigError for invalid arguments. progress: shows the progress until the answers are printed.
    """
    settings = _settings(args)
    if args.plot is not None:
        check_plot(args.plot)
    plans = []
    with progress() as update:
        for path in dict.fromkeys(args.traces):
            update(f"reading {path}", 0, 0)
            plans.append(settings.plan(load(path)))
        _replay_all(plans, settings.processes, update)
    for plan in plans:
        if not len(plan.traffic):
            print(f"kvdepot: {plan.traffic.trace.name}: contains no requests", file=sys.stderr)
    if args.as_json:
        print(answers.as_json(plans), flush=True)
    else:
        answers.print_tables(plans)
    return 0 if args.plot is None or answers.plot(plans, args.plot) else 1


@dataclass(frozen=True)
class _Settings:
    """The arguments, read; what depends on a trace is not decided yet."""

    hosts: list[int]
    routings: list[str]
    scale: int
    capacities: Capacities
    tiers: list[int]
    """Bytes; 0 = no tier."""
    rates: Rates
    token_bytes: int
    tokens: int
    processes: int

    def plan(self, trace: Trace) -> Plan:
        """What to replay of a trace."""
        trace.block_tokens = self.tokens or trace.block_tokens
        block_bytes = self.token_bytes * trace.block_tokens
        if self.rates.prefill_tokens_per_s and not trace.block_tokens:
            raise ConfigError(f"{trace.name}: does not give the tokens per block; use --block-tokens")
        capacities = self.capacities.of(block_bytes, trace.name)
        capacities = capacities or spread(trace.unique * self.scale // max(self.hosts))
        tiers = [fitting(tier, block_bytes, trace.name, "--tier-size") if tier else 0 for tier in self.tiers]
        fleets = dict.fromkeys(
            Fleet(hosts, routing, capacity, tier)
            for hosts, tier in itertools.product(self.hosts, tiers)
            for routing in (self.routings if hosts > 1 else self.routings[:1])  # one host leaves no choice
            for capacity in capacities
        )
        return Plan(Traffic(trace, self.scale), block_bytes, self.rates, list(fleets))


def _settings(args: Asked) -> _Settings:
    if args.policy is not None and split(args.policy) != ["lru"]:
        raise ConfigError(f"with --hosts, the only policy is lru, not {args.policy!r}")
    assert args.hosts is not None
    rates = Rates(
        0 if args.prefill_tokens_per_s is None else count(args.prefill_tokens_per_s, "--prefill-tokens-per-s"),
        0.0 if args.tier_latency is None else seconds(args.tier_latency, "--tier-latency"),
        0 if args.tier_bandwidth is None else size(args.tier_bandwidth, "--tier-bandwidth"),
    )
    if args.tier_size is not None:
        if args.kv_bytes_per_token is None:
            raise ConfigError("--tier-size needs --kv-bytes-per-token: the KV size of a token")
        if rates.prefill_tokens_per_s and (args.tier_latency is None or args.tier_bandwidth is None):
            raise ConfigError("--prefill-tokens-per-s with a tier needs --tier-latency and --tier-bandwidth")
    return _Settings(
        hosts=[count(text, "--hosts") for text in split(args.hosts)],
        routings=names(args.routing, ROUTINGS, "routing") if args.routing is not None else [*ROUTINGS],
        scale=1 if args.scale is None else count(args.scale, "--scale"),
        capacities=args.capacities(),
        tiers=[0 if text == "0" else size(text, "--tier-size") for text in split(args.tier_size)] or [0],
        rates=rates,
        token_bytes=args.token_bytes,
        tokens=args.tokens,
        processes=args.processes,
    )


def _replay_all(plans: list[Plan], jobs: int, progress: Progress) -> None:
    """Fill in all counts. jobs: processes; 0 = as many as are worthwhile."""
    work = [(number, fleet) for number, plan in enumerate(plans) for fleet in plan.fleets]
    sizes = [len(plans[number].traffic) for number, _ in work]
    total, done = sum(sizes), 0
    jobs = processes(jobs, total < _SMALL, len(work))

    def replay(traffics: list[Traffic], item: tuple[int, Fleet]) -> Counts:
        number, fleet = item
        return replay_fleet(traffics[number], fleet, lambda now: progress("replaying", done + now, total))

    progress("replaying", done, total)
    traffics = [plan.traffic for plan in plans]
    with results(replay if jobs == 1 else _replay_one, traffics, work, jobs) as found:
        for (number, fleet), requests, counts in zip(work, sizes, found, strict=True):
            plans[number].counts[fleet] = counts
            done += requests
            progress(f"replayed hosts: {fleet.hosts:,}, routing: {fleet.routing}", done, total)


def _replay_one(traffics: list[Traffic], item: tuple[int, Fleet]) -> Counts:
    number, fleet = item
    return replay_fleet(traffics[number], fleet)
