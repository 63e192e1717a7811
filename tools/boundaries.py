"""What the spacing of boundaries costs and saves on a trace of requests (docs/decisions.md).

    python tools/boundaries.py TRACE [--reach-tokens N] [--no-junctions]

A model with a bounded KV cache group (a window, a state) can be resumed only at boundaries, with the group's parts of
the last `reach` tokens before them. Of each prompt of the trace, in any format of bench/replay.py, boundaries are
its end, the place where it parts from an earlier prompt (without `--no-junctions`), and every n-th token. Memory is
unlimited, and a chunk is a block of the trace. Prints, for each n, the share of prompt tokens that are cached, and how
many of the group's parts are stored for each new chunk.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvdepot.errors import ConfigError, KVDepotError

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.replay import Trace, load


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", metavar="TRACE", help="a trace as for bench/replay.py")
    parser.add_argument("--reach-tokens", type=int, default=1, metavar="N", help="of the group; default: 1, a state")
    parser.add_argument("--no-junctions", action="store_true", help="none where a prompt parts from an earlier one")
    args = parser.parse_args()
    if args.reach_tokens < 1:
        parser.error("--reach-tokens must be at least 1")
    trace = load(args.trace)
    if not len(trace) or not trace.block_tokens:
        raise ConfigError(f"{args.trace}: {'tokens per block are not known' if len(trace) else 'no requests'}")
    reach = -(-args.reach_tokens // trace.block_tokens)
    print(f"{len(trace)} requests; chunks of {trace.block_tokens} tokens, a reach of {reach}")
    print(f"{'tokens between':>14}  {'cached':>8}  {'parts per new chunk':>20}")
    longest = max(map(len, trace))
    spacing = 1
    while spacing < 2 * longest:
        cached, parts = replay(trace, spacing, reach, not args.no_junctions)
        print(f"{spacing * trace.block_tokens:>14}  {cached:>8.2%}  {parts:>20.3f}")
        spacing *= 2
    return 0


def replay(trace: Trace, spacing: int, reach: int, junctions: bool) -> tuple[float, float]:
    """Cached chunks per chunk asked for, and parts of the group stored per new chunk."""
    known: set[int] = set()
    boundaries: set[int] = set()  # by the chunk before them
    parts: set[int] = set()
    cached = asked = 0
    for prompt in trace:
        chunks = prompt.tolist()[:-1]  # the last one is not whole
        shared = next((i for i, chunk in enumerate(chunks) if chunk not in known), len(chunks))
        resumed = next((end for end in range(shared, 0, -1) if chunks[end - 1] in boundaries), 0)
        cached += resumed
        asked += len(chunks)
        ends = {len(chunks), *range(spacing, len(chunks), spacing), *([shared] if junctions else [])}
        for end in ends:
            if end > resumed:
                boundaries.add(chunks[end - 1])
                parts.update(chunks[max(0, end - reach) : end])
        known.update(chunks)
    return cached / max(1, asked), len(parts) / max(1, len(known))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KVDepotError as exc:
        sys.exit(f"boundaries: {exc}")
