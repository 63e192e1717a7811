"""The server's way in: what it listens on, with which keys, and how many connections it can bear.

Made and turned by server.py on its one thread. The one law: the process never runs out of file descriptors by
connections, for ZeroMQ then ends it (unix sockets) or spins (TCP). So connections are counted, and when there are as
many as there are descriptors for, it stops listening until some have gone.
"""

from __future__ import annotations

import logging
import os
import resource
from collections import Counter
from typing import Any, cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvdepot.config import Config
from kvdepot.curve import Gate, ServerKeys, is_loopback, read_server_keys
from kvdepot.errors import ConfigError, Unavailable

__all__ = ["Door"]

log = logging.getLogger(__name__)

RECEIVED, SENT = 32, 1024
"""Messages of one client that wait in ZeroMQ, each way."""
_CLIENT_FILES = 2
"""Descriptors of a client besides its connection: its card, open and mapped."""
_WATCHED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class Door:
    """One endpoint, bound to a ROUTER socket."""

    def __init__(self, context: zmq.Context[Any], socket: zmq.Socket[Any], config: Config) -> None:
        """Set the socket's options and listen. Raises ConfigError for keys that are missing, Unavailable."""
        if not config.keys and not is_loopback(config.url):
            raise ConfigError(
                f"{config.url} can be reached from other hosts, so clients need keys: make them with `kvdepot keygen "
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
        socket.setsockopt(zmq.BACKLOG, 128 if hard > 2048 else max(4, hard // 16))
        # Messages that wait for us, and for a client that does not read: what one client can make us keep.
        socket.setsockopt(zmq.RCVHWM, RECEIVED)
        socket.setsockopt(zmq.SNDHWM, SENT)
        # ZeroMQ drops the connection above this; up to it, the sender is told (see Server._receive).
        socket.setsockopt(zmq.MAXMSGSIZE, 4 * config.max_message_mib << 20)
        self._monitor = socket.get_monitor_socket(_WATCHED)
        self._listening = False
        self._closing = False  # stopped listening, and ZeroMQ has not said yet that it has
        self._connections = 0
        self._most = 1 << 30
        self._bind()
        self._url = cast(bytes, socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    @property
    def sockets(self) -> list[zmq.Socket[Any]]:
        """What to wait for besides the socket itself; hand what is ready to `turn`."""
        return [self._monitor] if self._gate is None else [self._monitor, self._gate.socket]

    def _bind(self) -> None:
        old = os.umask(0o177)
        try:
            self._socket.bind(self._url)
        except zmq.ZMQError as exc:
            raise Unavailable(f"cannot listen on {self._url}: {exc.strerror}") from exc
        finally:
            os.umask(old)
        self._listening = True

    def share_out(self, clients: int) -> tuple[int, int]:
        """Divide the descriptors that are left: the most clients (at most `clients`), and files of KV tensors."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        left = limit - len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names, not paths
        most = max(1, min(clients, (left - 16) // 4))
        if most < clients:
            log.warning("%d open files are allowed: %d clients at most, not %d", limit, most, clients)
        # Half of the rest is for those that connect to be told that there are too many, or to look and go.
        spare = left - (_CLIENT_FILES + 1) * most - min(128, left // 8)
        self._most = most + spare // 2
        return most, spare - spare // 2

    def turn(self, ready: zmq.Socket[Any], counters: Counter[str]) -> None:
        """Something has happened at one of `sockets`: take it in, count what was refused."""
        if self._gate is not None and ready is self._gate.socket:
            counters["keys_refused"] += not self._gate.answer()
            return
        event = parse_monitor_message(self._monitor.recv_multipart())["event"]
        if event == zmq.EVENT_ACCEPTED:
            self._connections += 1
        elif event == zmq.EVENT_DISCONNECTED:
            self._connections -= 1
        elif event == zmq.EVENT_CLOSED:
            self._closing = False
        else:
            counters["handshakes_refused"] += 1
        if self._connections >= self._most and self._listening:
            log.warning("%d connections, as many as open files allow: not listening for more", self._connections)
            counters["connections_refused"] += 1
            self._socket.unbind(self._url)
            self._listening, self._closing = False, True

    def tick(self) -> None:
        """Listen again where there is room again."""
        if not self._listening and not self._closing and self._connections < self._most:
            try:
                self._bind()
            except Unavailable as exc:
                log.warning("%s; trying again", exc)
            else:
                log.info("listening again")

    def close(self) -> None:
        """Before the socket is."""
        self._socket.disable_monitor()
        self._monitor.close()
        if self._gate is not None:
            self._gate.close()
