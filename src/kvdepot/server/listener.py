"""The server's way in: what it listens on, with which keys, and how many connections it can bear.

Made and turned by server/loop.py on its one thread. The one law: the process never runs out of file descriptors by
connections, for ZeroMQ then ends it (unix sockets) or spins (TCP). So connections are counted. When there are as many
as there are descriptors for, a unix socket is moved to where nobody looks for it until some have gone, and what comes
in beyond that is shut at once. (Unbinding would cut off those that are connected.)
"""

from __future__ import annotations

import logging
import os
import resource
from pathlib import Path
from typing import Any

import zmq

from kvdepot.config import Config
from kvdepot.errors import ConfigError, Unavailable
from kvdepot.protocol.counters import Counters
from kvdepot.protocol.curve import Gate, ServerKeys, is_loopback, read_server_keys
from kvdepot.protocol.endpoints import listen
from kvdepot.protocol.handshake import is_open_to_all
from kvdepot.protocol.monitor import Monitor, shut

__all__ = ["Listener"]

log = logging.getLogger(__name__)

RECEIVED, SENT = 32, 1024
"""Messages of one client that wait in ZeroMQ, each way."""
ASIDE = ".full"
"""What a unix socket's name ends in while there is no room for more connections."""
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

    def __init__(self, context: zmq.Context[Any], socket: zmq.Socket[Any], config: Config) -> None:
        """Set the socket's options and listen. Raises ConfigError for keys that are missing, Unavailable."""
        for url in (config.url, config.kv_events):
            if not config.keys and not is_loopback(url or "ipc://"):
                raise ConfigError(
                    f"{url} can be reached from other hosts, so clients need keys: make them with `kvdepot keygen "
                    "DIR CLIENT...` and give --keys DIR, or listen on 127.0.0.1 or a unix socket"
                )
        self._socket = socket
        self._url = config.url
        self.keys: ServerKeys | None = None
        self._gate: Gate | None = None
        if config.keys:
            self.keys = read_server_keys(config.keys)
            self._gate = Gate(context, self.keys)
            self._gate.guard(socket, self.keys.key)
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
        # ZeroMQ drops the connection above this; up to it, the sender is told (see Server._receive).
        socket.setsockopt(zmq.MAXMSGSIZE, 4 * config.max_message_mib << 20)
        self._monitor = Monitor(socket, _WATCHED)
        has_path = self._url.startswith("ipc://") and not is_open_to_all(self._url)
        self._path = Path(self._url[len("ipc://") :]) if has_path else None
        self._hidden = False
        self._listening: os.stat_result | None = None  # the unix socket's file
        self.lost = False
        """Whether something else lies where our unix socket was, so that no new client can find us."""
        self._connections = 0
        self._most = 1 << 30
        self._listen()

    def _listen(self) -> None:
        listen(self._socket, self._url)
        self._listening = self._path.lstat() if self._path is not None else None

    @property
    def sockets(self) -> list[zmq.Socket[Any]]:
        """What to wait for besides the socket itself; hand what is ready to `turn`."""
        return [self._monitor.socket] if self._gate is None else [self._monitor.socket, self._gate.socket]

    def guard(self, socket: zmq.Socket[Any]) -> None:
        """Another socket of the server, which tells of all tenants: with keys, for who has one and no tenant."""
        if self._gate is not None and self.keys is not None:
            self._gate.guard(socket, self.keys.key, all_tenants=True)

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
                    self._hide(True)
            elif event == zmq.EVENT_DISCONNECTED:
                self._connections -= 1
            else:
                counters["handshakes_refused"] += 1

    def tick(self) -> None:
        """Let clients in again where there is room again, or where somebody has removed our unix socket."""
        if self._hidden and self._connections < self._most:
            self._hide(False)
        if self._path is None or self._listening is None or self._hidden:
            return
        try:
            self.lost = not os.path.samestat(self._path.lstat(), self._listening)
        except FileNotFoundError:
            try:
                self._listen()
            except (Unavailable, OSError) as exc:
                if not self.lost:
                    log.error("%s was removed and cannot be recreated: %s", self._path, exc)
                self.lost = True
            else:
                log.warning("%s was removed: listening there again", self._path)
                self.lost = False

    def _hide(self, hidden: bool) -> None:
        """Move the unix socket out of the clients' sight, or back."""
        if self._path is None:
            return
        aside = self._path.with_name(self._path.name + ASIDE)
        try:
            if hidden:
                self._path.rename(aside)
            else:
                aside.rename(self._path)
        except OSError as exc:
            log.warning("%s cannot be moved: %s", self._path, exc.strerror)
        else:
            self._hidden = hidden

    def close(self) -> None:
        """Before the socket is."""
        if self._hidden:
            self._hide(False)
        self._monitor.close()
        if self._gate is not None:
            self._gate.close()
