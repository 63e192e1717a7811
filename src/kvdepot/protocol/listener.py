"""What the server listens on: its socket, with which keys, and how many connections the process can bear.

Made and turned by server/loop.py on its one thread. The one law: the process never runs out of file descriptors by
connections, for ZeroMQ then ends it (unix sockets) or spins (TCP). So connections are counted. When there are as many
as there are descriptors for, a unix socket is moved to where nobody looks for it until some have gone, and what comes
in beyond that is shut at once. (Unbinding would cut off those that are connected.)
"""

from __future__ import annotations

import logging
import os
import resource
from typing import Any, cast

import zmq

from kvdepot.protocol.counters import Counters
from kvdepot.protocol.curve import Gate, Key, ServerKeys, read_server_keys
from kvdepot.protocol.endpoints import Binding
from kvdepot.protocol.monitor import Monitor, shut

__all__ = ["Listener"]

log = logging.getLogger(__name__)

RECEIVED, SENT = 32, 1024
"""Messages of one client that wait in ZeroMQ, each way."""
_CLIENT_FILES = 2
"""Descriptors of a client besides its connection: its lease, open and mapped."""
_WATCHED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class Listener:
    """One endpoint, bound to a ROUTER socket."""

    def __init__(self, context: zmq.Context[Any], url: str, keys: str, most_bytes: int) -> None:
        """Listen. keys: their folder; empty: everybody of this user may come in. most_bytes: of a message.

        Raises ConfigError, Unavailable; then the caller must destroy `context`, which already has open sockets.
        """
        self.socket = socket = context.socket(zmq.ROUTER)
        self._keys: ServerKeys | None = None
        self._gate: Gate | None = None
        if keys:
            self._keys = read_server_keys(keys)
            self._gate = Gate(context, self._keys)
            self._gate.guard(socket, self._keys.key)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # Who finds the queue full tries again: so a crowd does not come in faster than we hear of it.
        socket.setsockopt(zmq.BACKLOG, max(1, min(128, hard // 64)))
        # Messages that wait for us, and for a client that does not read: what one client can make us keep.
        socket.setsockopt(zmq.RCVHWM, RECEIVED)
        socket.setsockopt(zmq.SNDHWM, SENT)
        # ZeroMQ drops the connection above this; up to it, the sender is told (core/connections.py).
        socket.setsockopt(zmq.MAXMSGSIZE, 4 * most_bytes)
        self._monitor = Monitor(socket, _WATCHED)
        self._connections = 0
        self._most = 1 << 30
        self.binding = Binding(socket, url)
        self.wake_up = cast(int, socket.getsockopt(zmq.FD))
        """The descriptor by which ZeroMQ tells that connections which were silent have something for us."""
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def sockets(self) -> list[zmq.Socket[Any]]:
        """What to wait for besides the socket itself; hand what is ready to `turn`."""
        return [self._monitor.socket] if self._gate is None else [self._monitor.socket, self._gate.socket]

    def take(self) -> tuple[list[bytes], str]:
        """The next message's frames, and the user that sent it (empty without keys). Raises zmq.Again."""
        if self._keys is None:
            return self.socket.recv_multipart(zmq.NOBLOCK), ""
        frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        return [frame.bytes for frame in frames], str(frames[-1].get("User-Id"))

    def tenant(self, user: str) -> str:
        """Whose chunks a user reaches; empty: the default tenant."""
        return "" if self._keys is None else self._keys.tenant(user)

    def admit(self, user: str) -> Key | None:
        """A new key for a process of our own, where clients need one."""
        return None if self._keys is None else self._keys.admit(user)

    def guard(self, socket: zmq.Socket[Any]) -> None:
        """Another socket of the server, which tells of all tenants: with keys, for who has one and no tenant."""
        if self._gate is not None and self._keys is not None:
            self._gate.guard(socket, self._keys.key, all_tenants=True)

    def share_out(self, clients: int) -> tuple[int, int]:
        """Divide the descriptors that are left: the most clients (at most `clients`), and files of KV tensors."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        left = limit - len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names, not paths
        # For what is accepted before we hear of it.
        left -= min(1024, max(16, left // 8))
        most = max(1, min(clients, left // (_CLIENT_FILES + 2)))
        if most < clients:
            log.warning("the limit of %d open files allows %d clients, not %d", limit, most, clients)
        # Half of the rest is for those that connect to be told that there are too many, or to look and go.
        spare = max(0, left - (_CLIENT_FILES + 1) * most)
        self._most = most + spare // 2
        return most, spare - spare // 2

    def turn(self, ready: zmq.Socket[Any], counters: Counters) -> None:
        """Something has happened at one of `sockets`: take it in, count what was refused."""
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
                    log.warning("%d connections: the limit of open files is reached", self._connections)
                    self.binding.hide(True)
            elif event == zmq.EVENT_DISCONNECTED:
                self._connections -= 1
            else:
                counters["handshakes_refused"] += 1

    def tick(self) -> None:
        """Let clients in again where there is room again, or where somebody has removed our unix socket."""
        if self._connections < self._most:
            self.binding.hide(False)
        self.binding.look()

    def close(self) -> None:
        """Stop listening; replies that wait in ZeroMQ go out within a second."""
        self.binding.hide(False)
        self._monitor.close()
        if self._gate is not None:
            self._gate.close()
        self.socket.close()
