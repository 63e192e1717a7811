"""What becomes of a ZeroMQ socket's connections: made, broken, refused.

ZeroMQ's own thread, which all sockets of a context share, tells of these through a PAIR socket, and waits for ever
where it cannot: after the reader has closed, or while the queue is full. So the reader is closed last, and the queue
has no bound but the rate of connections. Not `zmq.utils.monitor`: it brings asyncio and a tenth of a server's start;
nor `get_monitor_socket`, which names its address by descriptor, and an earlier socket's may not be gone yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from typing import Any

import zmq

__all__ = ["Monitor", "shut"]

_EVENT = struct.Struct("=Hi")
_libc = ctypes.CDLL(None)


class Monitor:
    """The events of `socket` that are in the mask `events` (`zmq.EVENT_...`), from now until `close`.

    `socket` must be of the thread that makes and closes this. Raises zmq.ZMQError where no socket is left.
    """

    def __init__(self, socket: zmq.Socket[Any], events: int) -> None:
        self._watched = socket
        address = f"inproc://kvdepot-{os.urandom(16).hex()}"
        self.socket: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        """To be polled for input."""
        try:
            self.socket.setsockopt(zmq.RCVHWM, 0)
            socket.monitor(address, events)
            self.socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise

    def read(self) -> Iterator[tuple[int, int]]:
        """Each event since the last look, and its number: a descriptor, or what ZeroMQ says of the kind.

        Never blocks. Ends early where the context has ended.
        """
        try:
            while True:
                yield _EVENT.unpack(self.socket.recv_multipart(zmq.NOBLOCK)[0])
        except zmq.ZMQError:
            return

    def close(self) -> None:
        """Before the socket that is watched is closed. Safe twice, and after the context has ended."""
        with contextlib.suppress(zmq.ZMQError):
            self._watched.disable_monitor()
        self.socket.close(linger=0)


def shut(fd: int) -> None:
    """End a connection without closing its descriptor, which is somebody else's; nothing where it is no connection."""
    _libc.shutdown(fd, 2)
