"""The server's listening socket: its keys, and a limit on connections. Used by server/loop.py on the deciding thread.

Invariant: connections never exhaust the process's file descriptors, because ZeroMQ would then abort it (unix sockets)
or spin (TCP). At the limit, a unix socket is renamed until some clients have disconnected, and further connections are
shut down at once. (Unbinding would disconnect the clients.)
"""

from __future__ import annotations

import logging
import os
import resource
from typing import cast

import zmq

from kvdepot.protocol.counters import Counters
from kvdepot.protocol.curve import ALL_TENANTS, NO_KEYS, Gate, read_server_keys
from kvdepot.protocol.endpoints import Binding
from kvdepot.protocol.monitor import Monitor, shut

log = logging.getLogger(__name__)

RECEIVED, SENT = 32, 1024
"""The most messages of one client that ZeroMQ queues: received and to be sent."""
_CLIENT_FILES = 2
"""Descriptors of a client besides its connection: its liveness file, open and mapped."""
_NOW, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
"""Flags as plain integers: enums and pyzmq's own multipart calls double the cost of a message."""
_WATCHED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class Listener:
    """One endpoint, bound to a ROUTER socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], url: str, keys: str, most_bytes: int) -> None:
        """Listen. keys: a folder of keys; empty: all processes of this user may connect. most_bytes: the longest
        message.

        Raises ConfigError, Unavailable; the caller must then destroy `context`, which already has open sockets.
        """
        self.socket = socket = context.socket(zmq.ROUTER)
        self.keys = read_server_keys(keys) if keys else NO_KEYS
        self._gate = Gate(context, self.keys) if keys else None
        if self._gate is not None:
            self._gate.guard(socket, self.keys.key)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # A client that finds the backlog full tries again, so clients do not connect faster than we can count them.
        socket.setsockopt(zmq.BACKLOG, max(1, min(128, hard // 64)))
        # These limit the memory that one client can use, by requests and replies that are not read.
        socket.setsockopt(zmq.RCVHWM, RECEIVED)
        socket.setsockopt(zmq.SNDHWM, SENT)
        # ZeroMQ drops the connection above this size; below it, the sender gets an error (core/connections.py).
        socket.setsockopt(zmq.MAXMSGSIZE, 4 * most_bytes)
        self._monitor = Monitor(socket, _WATCHED)
        self._connections = 0
        self._most = 1 << 30
        self.binding = Binding(socket, url)
        self.wake_up = cast(int, socket.getsockopt(zmq.FD))
        """ZeroMQ's notification descriptor; readable when an idle connection has events."""
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """The sockets to poll besides `socket`; the caller passes the ready ones to `turn`."""
        return [self._monitor.socket] if self._gate is None else [self._monitor.socket, self._gate.socket]

    def take(self) -> tuple[list[bytes], str]:
        """The next message's frames, and the name of the sender's key (empty without keys). Raises zmq.Again."""
        receive = self.socket.recv
        frames, last = [receive(_NOW)], receive(_NOW, copy=False)  # a message arrives whole
        frames.append(last.bytes)
        while last.more:
            last = receive(_NOW, copy=False)
            frames.append(last.bytes)
        return frames, "" if self._gate is None else str(last.get("User-Id"))

    def send(self, client: bytes, frame: bytes) -> bool:
        """Send a client one message; False if the client is gone, or does not read. Never blocks."""
        try:
            self.socket.send(client, _MORE)
            self.socket.send(frame, _NOW)
        except zmq.ZMQError:
            return False
        return True

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """If the server has keys, admit only clients without a tenant to another of its sockets."""
        if self._gate is not None:
            self._gate.guard(socket, self.keys.key, ALL_TENANTS)

    def share_out(self, clients: int) -> int:
        """Divide the free descriptors; returns the most clients that they allow, at most `clients`."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        left = limit - len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names, not paths
        # A reserve for connections that ZeroMQ accepts before it tells us.
        left -= min(1024, max(16, left // 8))
        most = max(1, min(clients, left // (_CLIENT_FILES + 2)))
        if most < clients:
            log.warning("the limit of %d open files allows %d clients, not %d", limit, most, clients)
        # Half of the rest is for clients that are refused, or that disconnect after one question.
        self._most = most + max(0, left - (_CLIENT_FILES + 1) * most) // 2
        return most

    def turn(self, ready: zmq.Socket[bytes], counters: Counters) -> None:
        """Process the events of one of `sockets`; count refusals."""
        if self._gate is not None and ready is self._gate.socket:
            counters["keys_refused"] += not self._gate.answer()
            return
        for event, value in self._monitor.read():
            if event == zmq.EVENT_ACCEPTED:
                self._connections += 1
                if self._connections > self._most:
                    counters["connections_refused"] += 1
                    shut(value)
                elif self._connections == self._most:
                    counters["connections_refused"] += 1
                    log.warning(
                        "%d connections: the limit of open files is reached, no more are accepted; "
                        "raise it (ulimit -n, LimitNOFILE=) and restart the server",
                        self._connections,
                    )
                    self.binding.hide()
            elif event == zmq.EVENT_DISCONNECTED:
                self._connections -= 1
            else:
                counters["handshakes_refused"] += 1

    def tick(self) -> None:
        """Accept clients again after the limit was reached, or after the unix socket was removed."""
        if self._connections < self._most:
            self.binding.show()
        self.binding.check()

    def close(self) -> None:
        """Stop listening; ZeroMQ may send queued replies for another second."""
        self.binding.show()
        self._monitor.close()
        if self._gate is not None:
            self._gate.close()
        self.socket.close()
