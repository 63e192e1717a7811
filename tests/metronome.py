"""For how long the machine has not run us: what a bound on time is not about."""

from __future__ import annotations

import atexit
import functools
import subprocess
import sys
import threading
import time

_TICK = """
import select, sys, time
last = time.monotonic()
gaps = []
while True:
    asked = select.select([0], [], [], 0.005)[0]
    now = time.monotonic()
    if now - last > 0.05:
        gaps.append(f"{last} {now}")  # not printed until somebody reads: a full pipe would hold us up, too
    last = now
    if asked:
        if not sys.stdin.readline():
            break
        print(*gaps, "now", sep="\\n", flush=True)
        gaps.clear()
"""


class Metronome:
    """A process that only tells the time: what holds it up is the machine, not a fault."""

    def __init__(self) -> None:
        command = [sys.executable, "-S", "-c", _TICK]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._gaps: list[tuple[float, float]] = []
        self._lock = threading.Lock()

    def gaps(self) -> list[tuple[float, float]]:
        """From when to when (monotonic) nothing ran, up to now."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with self._lock:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            # All of them: it may have been held up until this moment itself.
            while (line := self.process.stdout.readline()) != "now\n":
                begin, end = map(float, line.split())
                self._gaps.append((begin, end))
            return self._gaps.copy()

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
    """Seconds between two moments (monotonic) in which the machine did not run us."""
    return sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in started().gaps())


def ran_s(since: float, until: float | None = None) -> float:
    """Seconds from a moment (monotonic) until another, or now, in which the machine ran us."""
    until = time.monotonic() if until is None else until
    return until - since - stalled_s(since, until)
