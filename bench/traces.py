"""Synthetic request traces: chats, agents, floods and loops, drawn from a seed.

For tests and comparisons of eviction policies (replay.py). Invariant: the same arguments give the same
trace on every machine. Each generator yields `(timestamp in seconds, block ids of the prompt)` in order of time,
without end unless `requests` is given, one request at a time, so that a long trace needs no memory.

Ids mean prefixes, as in the Mooncake format: an id always follows the same ids. To send several traces to one cache,
give them the same `ids` counter and `merge` them, or concatenate them with `phases`.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

__all__ = [
    "WORKLOADS",
    "agents",
    "chat",
    "loop",
    "merge",
    "phases",
    "rag",
    "scan",
    "scan_heavy",
    "shifting",
    "system_prompts",
]

Prompts: TypeAlias = Iterator[tuple[float, list[int]]]
"""Requests: time in seconds, and block ids."""
Ids: TypeAlias = Iterator[int]
"""Unused ids."""


def chat(seed: int, requests: int | None = None, ids: Ids | None = None, *, every_s: float = 2.0) -> Prompts:
    """Conversations: each turn is the whole previous one, its answer and a few blocks more, after a think time.

    Four in ten sessions end at each turn; the median think time is a minute, sometimes half an hour.
    every_s: between new sessions.
    """
    draw, ids = random.Random(f"chat {seed}"), ids or itertools.count()

    def session() -> Prompts:
        prompt: list[int] = []
        think_s = 0.0
        while True:
            prompt = prompt + _fresh(ids, _long_tailed(draw, 8 if not prompt else 3))
            yield think_s, prompt
            if draw.random() < 0.4:
                return
            think_s = draw.lognormvariate(4.1, 1.2)

    return itertools.islice(_interleaved(draw, every_s, session), requests)


def agents(seed: int, requests: int | None = None, ids: Ids | None = None, *, every_s: float = 60.0) -> Prompts:
    """Agents: tens of calls in a row, seconds apart, each with about 95 % of its prompt from the previous one.

    Some wait long for a tool or a person. every_s: between new agents.
    """
    draw, ids = random.Random(f"agents {seed}"), ids or itertools.count()
    tools = _fresh(ids, 12)  # the same for all

    def session() -> Prompts:
        prompt = tools + _fresh(ids, draw.randint(10, 40))
        think_s = 0.0
        for _ in range(draw.randint(15, 60)):
            yield think_s, prompt
            prompt = prompt + _fresh(ids, draw.randint(1, 4))
            think_s = draw.lognormvariate(5.5, 1.0) if draw.random() < 0.05 else draw.expovariate(1 / 12)

    return itertools.islice(_interleaved(draw, every_s, session), requests)


def system_prompts(
    seed: int, requests: int | None = None, ids: Ids | None = None, *, prompts: int = 300, every_s: float = 0.5
) -> Prompts:
    """Many applications, each with its own system prompt before a question that is asked once.

    Their popularity follows Zipf's law: the n-th is used 1/n as often as the first. prompts: how many there are.
    """
    draw, ids = random.Random(f"system prompts {seed}"), ids or itertools.count()
    heads = [_fresh(ids, draw.randint(4, 40)) for _ in range(prompts)]
    popular = _zipf(draw, prompts, 1.0)

    def questions() -> Iterator[list[int]]:
        while True:
            yield heads[popular()] + _fresh(ids, _long_tailed(draw, 3))

    return itertools.islice(_arrivals(draw, every_s, questions()), requests)


def rag(
    seed: int, requests: int | None = None, ids: Ids | None = None, *, documents: int = 2000, every_s: float = 0.5
) -> Prompts:
    """Questions about documents: instructions, one to three documents, and the question.

    A document is a prefix only after the same documents; their popularity differs (Zipf, 0.9).
    """
    draw, ids = random.Random(f"rag {seed}"), ids or itertools.count()
    instructions = _fresh(ids, 2)
    lengths = [draw.randint(3, 12) for _ in range(documents)]
    wanted = _zipf(draw, documents, 0.9)
    known: dict[tuple[int, ...], list[int]] = {}

    def questions() -> Iterator[list[int]]:
        while True:
            prompt = instructions
            found: tuple[int, ...] = ()
            for _ in range(draw.choice((1, 1, 2, 3))):
                found = (*found, wanted())
                if found not in known:
                    known[found] = _fresh(ids, lengths[found[-1]])
                prompt = prompt + known[found]
            yield prompt + _fresh(ids, 1)

    return itertools.islice(_arrivals(draw, every_s, questions()), requests)


def scan(seed: int, requests: int | None = None, ids: Ids | None = None, *, every_s: float = 0.5) -> Prompts:
    """A flood of long prompts that are never repeated: batch jobs, embeddings of a corpus."""
    draw, ids = random.Random(f"scan {seed}"), ids or itertools.count()

    def documents() -> Iterator[list[int]]:
        while True:
            yield _fresh(ids, _long_tailed(draw, 30))

    return itertools.islice(_arrivals(draw, every_s, documents()), requests)


def loop(
    seed: int, requests: int | None = None, ids: Ids | None = None, *, prompts: int = 500, every_s: float = 0.5
) -> Prompts:
    """The same prompts in the same order, repeatedly: a test suite, a nightly job. About 20 blocks each.

    With a capacity slightly below all of it, LRU evicts each block just before it is needed.
    """
    draw, ids = random.Random(f"loop {seed}"), ids or itertools.count()
    shared = _fresh(ids, 4)
    steps = [shared + _fresh(ids, draw.randint(8, 32)) for _ in range(prompts)]
    return itertools.islice(_arrivals(draw, every_s, itertools.cycle(steps)), requests)


def scan_heavy(seed: int, requests: int | None = None, ids: Ids | None = None) -> Prompts:
    """Chats and system prompts during a flood: seven of ten blocks are never used again."""
    ids = ids or itertools.count()
    parts = (
        chat(seed, ids=ids, every_s=3.0),
        system_prompts(seed, ids=ids, every_s=1.0),
        scan(seed, ids=ids, every_s=0.8),
    )
    return itertools.islice(merge(*parts), requests)


def shifting(seed: int, requests: int | None = None, ids: Ids | None = None, *, phase: int = 2000) -> Prompts:
    """A day: chats, agents, loops, floods and system prompts alternate, `phase` requests each, over a few chats."""
    draw, ids = random.Random(f"shifting {seed}"), ids or itertools.count()
    parts = [
        chat(seed, ids=ids, every_s=1.0),
        agents(seed, ids=ids, every_s=20.0),
        loop(seed, ids=ids, prompts=400),
        scan_heavy(seed, ids=ids),
        system_prompts(seed, ids=ids),
        rag(seed, ids=ids),
    ]
    draw.shuffle(parts)
    return itertools.islice(merge(phases(parts, phase), chat(seed + 1, ids=ids, every_s=10.0)), requests)


WORKLOADS: dict[str, Callable[[int, int], Prompts]] = {
    "chat": chat,
    "agents": agents,
    "system_prompts": system_prompts,
    "rag": rag,
    "scan": scan,
    "scan_heavy": scan_heavy,
    "loop": loop,
    "shifting": shifting,
}
"""Generators by name, called with a seed and the number of requests."""


def merge(*traces: Prompts) -> Prompts:
    """Several traces at once, in order of time."""
    return heapq.merge(*traces, key=lambda request: request[0])


def phases(traces: Iterable[Prompts], requests: int) -> Prompts:
    """`requests` of one trace, then of the next, in rotation; each continues where it stopped."""
    now_s = 0.0
    for trace in itertools.cycle(traces):
        last_s: float | None = None
        for time_s, prompt in itertools.islice(trace, requests):
            now_s += 0.0 if last_s is None else time_s - last_s
            last_s = time_s
            yield now_s, prompt
        if last_s is None:
            return


def _fresh(ids: Ids, count: int) -> list[int]:
    return list(itertools.islice(ids, count))


def _long_tailed(draw: random.Random, middle: int) -> int:
    """A log-normal length with median `middle`, at most 40 times as long."""
    return max(1, min(40 * middle, round(draw.lognormvariate(0, 0.9) * middle)))


def _zipf(draw: random.Random, count: int, exponent: float) -> Callable[[], int]:
    """A function that draws numbers below `count`, n with a frequency of 1 / (n + 1) ** exponent."""
    sums = list(itertools.accumulate(1 / (n + 1) ** exponent for n in range(count)))
    return lambda: min(bisect.bisect(sums, draw.random() * sums[-1]), count - 1)


def _arrivals(draw: random.Random, every_s: float, prompts: Iterator[list[int]]) -> Prompts:
    now_s = 0.0
    for prompt in prompts:
        now_s += draw.expovariate(1 / every_s)
        yield now_s, prompt


def _interleaved(draw: random.Random, every_s: float, session: Callable[[], Prompts]) -> Prompts:
    """Overlapping sessions. A session yields the time since its previous request, and a prompt."""
    begin_s = draw.expovariate(1 / every_s)
    serial = itertools.count()
    waiting: list[tuple[float, int, list[int], Prompts]] = []
    while True:
        while not waiting or begin_s <= waiting[0][0]:
            _next(waiting, begin_s, serial, session())
            begin_s += draw.expovariate(1 / every_s)
        time_s, _, prompt, rest = heapq.heappop(waiting)
        yield time_s, prompt
        _next(waiting, time_s, serial, rest)


def _next(
    waiting: list[tuple[float, int, list[int], Prompts]], now_s: float, serial: Iterator[int], session: Prompts
) -> None:
    for think_s, prompt in itertools.islice(session, 1):
        heapq.heappush(waiting, (now_s + think_s, next(serial), prompt, session))
