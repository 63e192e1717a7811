"""Connection events of a ZeroMQ socket: made, broken, refused.

ZeroMQ's I/O thread, which all sockets of a context share, sends these events through a PAIR socket. It blocks forever
if it cannot send, because the reader has closed or the queue is full. So the reader is closed last, and the queue is
unbounded. `zmq.utils.monitor` is not used because it imports asyncio, a tenth of a server's start; nor is
`get_monitor_socket`, which makes its address from the descriptor: an earlier socket's address may still exist.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator

import zmq

_EVENT = struct.Struct("=Hi")
_libc = ctypes.CDLL(None)


class Monitor:
    """The events of `socket` in the mask `events` (`zmq.EVENT_...`), from now until `close`.

    Create and close it on the thread of `socket`. Raises zmq.ZMQError if the context has no sockets left.
    """

    def __init__(self, socket: zmq.Socket[bytes], events: int) -> None:
        self._watched = socket
        address = f"inproc://kvdepot-{os.urandom(16).hex()}"
        self.socket: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        """Poll this for input."""
        try:
            self.socket.setsockopt(zmq.RCVHWM, 0)
            socket.monitor(address, events)
            self.socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise

    def read(self) -> Iterator[tuple[int, int]]:
        """Each event since the last call, with its value: a descriptor, or what ZeroMQ defines for the event.

        Never blocks. Ends early if the context was terminated.
        """
        try:
            while True:
                yield _EVENT.unpack(self.socket.recv_multipart(zmq.NOBLOCK)[0])
        except zmq.ZMQError:
            return

    def close(self) -> None:
        """Called before the watched socket is closed. May be called twice, and after the context was terminated."""
        with contextlib.suppress(zmq.ZMQError):
            self._watched.disable_monitor()
        self.socket.close(linger=0)


def shut(fd: int) -> None:
    """Shut down a connection without closing its descriptor, which ZeroMQ owns. Ignores other descriptors."""
    _libc.shutdown(fd, 2)
