"""Clocks for bounds on time that hold on a busy machine, too: they hardly count the time when others had the machine.

A test of what takes time (that something ends at a deadline, that a thread does not block) cannot read a wall clock:
where all processors are taken, everything takes several times as long. `ran_s` is for what other processes do,
`slept_s` for what this thread waits for.
"""

from __future__ import annotations

import atexit
import functools
import subprocess
import sys
import threading
import time
from pathlib import Path

CONTENDED = 0.1
"""What a second counts in `ran_s` during which no processor was idle: a process may have had a tenth of one."""

_TICK = """
import os, select, sys, time
TICK_S, HELD_UP_S, SAMPLE_S = 0.005, 0.05, 0.1
user_hz = os.sysconf("SC_CLK_TCK")
ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
def idle():  # seconds of our processors together; one whose process waits for a disk is not idle
    with open("/proc/stat") as file:
        fields = [line.split() for line in file]
    return sum(int(row[4]) for row in fields if row[0] in ours) / user_hz
def look():  # now, and a clock that stands still while others have the processors, where the kernel tells
    try:
        with open("/proc/self/schedstat") as file:
            others = sum(map(int, file.readline().split()[:2])) / 1e9
    except OSError:
        others = 0.0
    now = time.monotonic()
    return now, now - others
(last, sleeping), idled, stalled = look(), idle(), 0.0
began = last
said = []  # not printed until somebody reads: a full pipe would hold us up, too
while True:
    asked = select.select([0], [], [], TICK_S)[0]
    now, awake = look()
    if awake - sleeping > HELD_UP_S:
        said.append(f"stalled {last} {now} {awake - sleeping}")
        stalled += awake - sleeping
    last, sleeping = now, awake
    if asked or now - began > SAMPLE_S:
        free = idle()
        contended = now - began - stalled - (free - idled)
        if contended > 0.01:
            said.append(f"contended {began} {now} {contended}")
        began, idled, stalled = now, free, 0.0
    if asked:
        if not sys.stdin.readline():
            break
        print(*said, "now", sep="\\n", flush=True)
        said.clear()
"""


class Metronome:
    """A process that only tells the time, and how much of the processors nobody used."""

    def __init__(self) -> None:
        command = [sys.executable, "-S", "-c", _TICK]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._told: dict[str, list[tuple[float, float, float]]] = {"stalled": [], "contended": []}
        self._lock = threading.Lock()

    def stalled(self) -> list[tuple[float, float, float]]:
        """From when to when (monotonic), and for how long, the machine ran nothing, up to now."""
        return self._ask("stalled")

    def contended(self) -> list[tuple[float, float, float]]:
        """From when to when (monotonic), and for how long in that time, no processor was idle."""
        return self._ask("contended")

    def _ask(self, what: str) -> list[tuple[float, float, float]]:
        assert self.process.stdin is not None and self.process.stdout is not None
        with self._lock:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            # All of it: it may have been held up until this moment itself.
            while (line := self.process.stdout.readline()) != "now\n":
                kind, begin, end, lasted = line.split()
                self._told[kind].append((float(begin), float(end), float(lasted)))
            return self._told[what].copy()

    def close(self) -> None:
        """It ends by itself, too, with us."""
        self.process.communicate()


@functools.cache
def started() -> Metronome:
    """The one of this process; it knows of nothing before its start."""
    made = Metronome()
    atexit.register(made.close)
    return made


def stalled_s(since: float, until: float = float("inf")) -> float:
    """Seconds between two moments (monotonic) in which the machine ran nothing."""
    return _within(started().stalled(), since, until)


def ran_s(since: float, until: float | None = None) -> float:
    """Seconds from a moment (monotonic) until another, or now, in which the machine had a processor to spare for us.

    A second without one counts as `CONTENDED`; one in which the machine ran nothing at all does not count.
    """
    until = time.monotonic() if until is None else until
    contended_s = _within(started().contended(), since, until)
    return max(0.0, until - since - stalled_s(since, until) - (1 - CONTENDED) * contended_s)


def _within(spans: list[tuple[float, float, float]], since: float, until: float) -> float:
    """How much of what lasted for a part of each span lies between two moments, were it spread evenly."""
    return sum(lasted * max(0.0, min(end, until) - max(begin, since)) / (end - begin) for begin, end, lasted in spans)


def slept_s() -> float:
    """A clock that runs while this thread sleeps or is blocked, not while it computes or waits for a processor.

    On a kernel that does not tell (no schedstat), it always runs.
    """
    try:
        ran_ns, delayed_ns, _ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
    except OSError:
        return time.monotonic()
    return time.monotonic() - (ran_ns + delayed_ns) / 1e9
