"""The phases of a client's connection, and the one table of what changes them.

Used by client/connection.py, in the manner of h11: a change that the table lacks is a bug of ours. Each phase has one
deadline:

    APART       no server serves us                   the earliest time of the next hello
    GREETING    our hello is sent                     when its answer is overdue
    PROVING     our own proof is sent                 when its answer is overdue
    SERVING     requests go out as they come          when the server has been silent, so its lock is checked

The registrations that a new server lacks need no phase: they are the first requests that it is sent, and one that is
lost shows in the refusal of the first copy.
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
