"""The phases of a client's connection, and the one table of what changes them. Used by client/connection.py.

An engine outlives servers: they restart, hang, and are replaced at the same address, while the engine's requests go on.
So a connection is always in one of few phases, and each has one deadline:

    APART       no server serves us                   the earliest time of the next hello
    GREETING    our hello is sent                     when its answer is overdue
    PROVING     our own proof is sent                 when its answer is overdue
    SERVING     requests go out as they come          when the server has been silent, so its lock is checked

A change that the table lacks is a bug of ours and raises KeyError, as in h11. What becomes of requests is not decided
here but by the table in client/requests.py: a request may outlive several phases, and even its server.

Two things were considered and left out. A phase for registering again: registrations are the first requests that a new
server is sent, and a lost one shows in the refusal of the first copy. A phase for a server that is suspected: the only
proof of its end is its lock, which is free or not. The doubt that stays is a server that holds its lock and hangs:
SERVING then lasts, copies wait, and only the deadlines of callers end them.
"""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """A stage of a connection with its server; the table above says what it waits for."""

    APART = enum.auto()
    GREETING = enum.auto()
    PROVING = enum.auto()
    SERVING = enum.auto()
    CLOSED = enum.auto()


class Change(enum.Enum):
    GREET = enum.auto()
    PROVE = enum.auto()
    """The server has proved itself, and our own proof was sent."""
    WELCOME = enum.auto()
    """The server has admitted us."""
    LOSE = enum.auto()
    """The server is gone, silent, or does not know us, or the connection broke."""
    CLOSE = enum.auto()


TRANSITIONS: dict[Phase, dict[Change, Phase]] = {
    Phase.APART: {Change.GREET: Phase.GREETING, Change.CLOSE: Phase.CLOSED},
    Phase.GREETING: {Change.PROVE: Phase.PROVING, Change.LOSE: Phase.APART, Change.CLOSE: Phase.CLOSED},
    Phase.PROVING: {Change.WELCOME: Phase.SERVING, Change.LOSE: Phase.APART, Change.CLOSE: Phase.CLOSED},
    Phase.SERVING: {Change.LOSE: Phase.APART, Change.CLOSE: Phase.CLOSED},
    Phase.CLOSED: {},
}
