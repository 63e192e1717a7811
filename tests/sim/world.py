"""A simulated world with its own clock: events, processes and a network, all drawn from one seed.

Used by simulations of clients and servers (tests/sim). Invariant: the same seed gives the same run, byte for byte. So
nothing here uses the real clock, the operating system's randomness, or the order of a set.

A `World` runs one event after the other and advances the time from each to the next. A `Process` is code that may
block: it has a thread, but the world lets only one thread run at a time. A `Link` is a peer's connection to the
listener: frames keep their order on one link, not between links; cutting a link loses the frames in transit.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from blake3 import blake3

__all__ = ["Killed", "Link", "Network", "Process", "Receiver", "World"]


_TIE_S = 0.05
"""How much longer a frame may take to arrive exactly at a deadline."""


class World:
    """Clock, events, randomness, log and counters of one run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 1000.0  # seconds
        self.random = random.Random(seed)
        self.counters: Counter[str] = Counter()
        self.lines: list[str] = []
        self.events = 0
        self.deadline = float("inf")
        """When somebody's next deadline is due. Some frames arrive in the same instant."""
        self._queue: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._serial = itertools.count()

    def __repr__(self) -> str:
        return f"<World seed={self.seed} at {self.now:.6f} after {self.events} events, {len(self._queue)} to come>"

    def after(self, delay_s: float, act: Callable[..., None], *args: object) -> None:
        """Run `act(*args)` in `delay_s` seconds; events of the same time run in the order in which they were added."""
        self.at(self.now + delay_s, act, *args)

    def at(self, when: float, act: Callable[..., None], *args: object) -> None:
        """The same at a time, which may be that of another event."""
        heapq.heappush(self._queue, (when, next(self._serial), act, args))

    def note(self, text: str) -> None:
        """Append a line to the log."""
        self.lines.append(f"{self.now:.6f} {text}")

    def digest(self) -> str:
        """A hash of the whole log; equal runs have equal digests."""
        return blake3("\n".join(self.lines).encode()).hexdigest()

    def next_event(self) -> float:
        """When the next event is due; infinity if there is none."""
        return self._queue[0][0] if self._queue else float("inf")

    def step(self) -> bool:
        """Run the next event; returns whether there was one."""
        if not self._queue:
            return False
        due, _, act, args = heapq.heappop(self._queue)
        self.now = max(self.now, due)
        self.events += 1
        act(*args)
        return True

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def spread(self, low: float, high: float) -> float:
        """Between `low` and `high`, uniform in the logarithm."""
        return float(low * (high / low) ** self.random.random())


class Killed(BaseException):
    """Raised in the thread of a killed process to unwind it; code that catches it calls `Process.check`."""


class Process:
    """Code that may block. It runs until it sleeps or waits; then the world continues."""

    def __init__(self, world: World, name: str, main: Callable[[], None]) -> None:
        """The process starts with an event at the current time."""
        self.name = name
        self.alive = True
        self.stopped = False
        self._world = world
        self._main = main
        self._go = threading.Lock()
        self._back = threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._killed = False
        self._failure: BaseException | None = None
        self._wait = 0  # serial number of the current wait
        self._condition: Callable[[], bool] = bool
        self._deadline = 0.0
        self._slice_s = 0.0
        self._met = False
        self._late = False  # a check was due while it was stopped
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        world.after(0, self._look, 0)

    def __repr__(self) -> str:
        return f"<Process {self.name}{'' if self.alive else ' dead'}{' stopped' if self.stopped else ''}>"

    # -- in the process's own thread

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._killed:
                self._main()
        except Killed:
            pass
        except BaseException as exc:  # noqa: BLE001 - the top of a thread: the world raises it again
            self._failure = exc
        self.alive = False
        self._back.release()

    def _park(self) -> None:
        self._back.release()
        self._go.acquire()
        if self._killed:
            raise Killed

    def wait(self, condition: Callable[[], bool], timeout_s: float, slice_s: float) -> bool:
        """Block until `condition()` is true; returns False after `timeout_s`. Checks every `slice_s` and when poked.

        During a long wait, checks become less frequent: otherwise simulating hours would take hours.
        """
        assert threading.current_thread() is self._thread, f"{self!r} was made to wait by another thread"
        self._wait += 1
        self._condition, self._slice_s = condition, slice_s
        self._deadline = self._world.now + timeout_s
        self._met = False
        self._arm()
        self._park()
        return self._met

    def check(self) -> None:
        """Raise Killed in this process's thread if it was killed: it may have caught that."""
        if self._killed and self.is_current():
            raise Killed

    def fail(self, failure: BaseException) -> None:
        """Have the world raise this when the process next blocks: what it runs may catch everything."""
        self._failure = self._failure or failure

    def is_current(self) -> bool:
        """Whether the calling thread is this process's."""
        return threading.current_thread() is self._thread

    def sleep(self, duration_s: float) -> None:
        """Block for `duration_s` seconds."""
        self.wait(_never, duration_s, duration_s)

    # -- in the world's thread

    def _arm(self) -> None:
        left = max(0.0, self._deadline - self._world.now)
        self._world.after(min(left, self._slice_s), self._look, self._wait)

    def _look(self, wait: int) -> None:
        if not self.alive or wait != self._wait:
            return
        if self.stopped:
            self._late = True
            return
        if wait and not self._condition():
            if self._world.now < self._deadline - 1e-9:
                self._slice_s = min(self._slice_s * 1.25, 1.0)
                self._arm()
                return
        else:
            self._met = True
        self._wait += 1  # voids all pokes and checks that are still queued
        self._resume()

    def _resume(self) -> None:
        self._go.release()
        self._back.acquire()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def poke(self) -> None:
        """Check its condition now."""
        if self.alive and self._condition is not _never:
            self._world.after(0, self._look, self._wait)

    def wake(self) -> None:
        """End its sleep or wait now."""
        self._deadline = self._world.now
        self._world.after(0, self._look, self._wait)

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def resume(self) -> None:
        """SIGCONT."""
        self.stopped = False
        if self._late:
            self._late = False
            self._world.after(0, self._look, self._wait)

    def kill(self) -> None:
        """SIGKILL: it never runs again. Not called from its own thread."""
        if self.alive:
            self._killed = True
            self._resume()


def _never() -> bool:
    return False


class Receiver(Protocol):
    """The receiver of a network's frames."""

    def accepts(self) -> bool:
        """Whether a new connection would be accepted."""

    def deliver(self, link: Link, frame: bytes) -> None:
        """Take a frame that has arrived."""


class Network:
    """Connects peers with one listener at a time."""

    def __init__(self, world: World, delay_s: Callable[[], float]) -> None:
        """delay_s: draws the latency of a frame."""
        self.world = world
        self.delay_s = delay_s
        self.listener: Receiver | None = None
        self.links: list[Link] = []
        self.era = 0  # frames for one listener never reach the next

    def listen(self, listener: Receiver) -> None:
        self.listener = listener

    def hang_up(self, all_arrives: bool) -> None:
        """Remove the listener and break every connection.

        all_arrives: all its frames in transit still arrive; otherwise a random number of them.
        """
        self.listener = None
        self.era += 1
        for link in self.links:
            heard = len(link.coming)
            link.cut(keep=heard if all_arrives else self.world.random.randint(0, heard))


class Link:
    """One peer's connection, which reconnects when it breaks."""

    def __init__(
        self,
        network: Network,
        name: str,
        identity: bytes,
        receive: Callable[[bytes], None],
        changed: Callable[[bool], None] = lambda up: None,
    ) -> None:
        """receive: takes frames at the peer's end. changed: called there when the connection is made or breaks."""
        self.name = name
        self.identity = identity
        self.up = False
        self.coming: list[bytes] = []  # frames in transit to the peer
        self.slow_until = 0.0
        self.cut_at = float("-inf")  # when it last broke while both ends lived; set by the code that breaks it
        self._network = network
        self._world = network.world
        self._receive = receive
        self._changed = changed
        self._closed = False
        self._generation = 0  # frames of an earlier connection never arrive
        self._last_there = self._last_here = 0.0
        network.links.append(self)
        self._connect()

    def __repr__(self) -> str:
        return f"<Link {self.name} {'up' if self.up else 'down'}, {len(self.coming)} coming>"

    def _connect(self) -> None:
        if self._closed or self.up:
            return
        listener = self._network.listener
        if listener is not None and listener.accepts():
            self.up = True
            self._changed(True)
        else:
            self._world.after(0.02 + 0.08 * self._world.random.random(), self._connect)

    def _due(self, last: float) -> float:
        delay_s = self._network.delay_s()
        if self._world.now < self.slow_until:
            delay_s += 0.3 * self._world.random.random()
        due, deadline = max(last, self._world.now + delay_s), self._world.deadline
        return deadline if due < deadline < due + _TIE_S and self._world.chance(0.1) else due

    def send(self, frame: bytes) -> bool:
        """Send a frame from peer to listener; returns whether there is a connection."""
        if not self.up:
            return False
        self._last_there = self._due(self._last_there)
        self._world.at(self._last_there, self._arrive_there, self._generation, self._network.era, frame)
        return True

    def _arrive_there(self, generation: int, era: int, frame: bytes) -> None:
        listener = self._network.listener
        if generation == self._generation and era == self._network.era and listener is not None:
            listener.deliver(self, frame)

    def reply(self, frame: bytes) -> bool:
        """Send a frame from listener to peer; returns whether there is a connection."""
        if not self.up:
            return False
        self.coming.append(frame)
        self._last_here = self._due(self._last_here)
        self._world.at(self._last_here, self._arrive_here, self._generation)
        return True

    def _arrive_here(self, generation: int) -> None:
        if generation == self._generation and self.coming and not self._closed:
            self._receive(self.coming.pop(0))

    def cut(self, keep: int = 0) -> None:
        """Break the connection; the first `keep` of the frames in transit to the peer still arrive."""
        kept = self.coming[:keep]
        self.coming.clear()
        self._generation += 1
        if not self._closed:
            for frame in kept:
                self._receive(frame)
        if self.up:
            self.up = False
            self._changed(False)
            self._world.after(self._world.spread(0.02, 0.5), self._connect)

    def close(self) -> None:
        """Close the peer's end; the frames that it has sent still arrive."""
        if not self._closed:
            self._closed = True
            self.up = False
            self._network.links.remove(self)
