"""Passes file descriptors of device memory from a worker to the server, over a unix socket of their own.

The worker calls `offer`: its process then listens in /dev/shm and creates descriptors on request, on daemon
threads. The server calls `fetch` on a copy thread. sharing.py exports and imports the memory behind them. Invariant: a
descriptor is open only while it is passed on. So it does not keep memory alive, and thousands of pieces need no more
open files than one message carries.

A request is (secret, number of the offer, first piece); the reply is the sizes of the next pieces with as many
descriptors, or the text of an error. Only processes of the same user get a reply; the secret, which is sent with the
registration, proves that they know of this memory.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import logging
import os
import re
import secrets
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvdepot.errors import DeviceError, KVDepotError, LayoutError
from kvdepot.memory.shm import SHM, is_being_made

log = logging.getLogger(__name__)

_PREFIX = "kvdepot-fds-"
_NAME = re.compile(_PREFIX + "[0-9a-f]{16}")
_SECRET_BYTES = 16
_BATCH = 64
"""Descriptors in one message: the kernel allows 253, but an engine may not be able to open that many files."""
_FD = struct.Struct("i")
_ROOM = socket.CMSG_LEN(_BATCH * _FD.size)
"""Bytes for ancillary data. (socket.recv_fds ignores its flags, so children would inherit the descriptors.)"""
_MOST_PIECES = 1 << 16
_MOST_BYTES = 1 << 16
_CONNECTIONS = 8
_IDLE_S = 10.0
"""A connection without requests for this long is closed."""
_PATIENCE_S = 10.0
"""Total time that the server waits for one worker's descriptors."""
_NO_FILES_S = 0.1

Export = Callable[[int, int], Iterator[int]]
"""Creates descriptors of the pieces `[first, end)`, which the caller closes. Raises KVDepotError."""


class _Handle(msgspec.Struct, frozen=True, array_like=True):
    name: str
    secret: bytes
    number: int
    pieces: int


class _Ask(msgspec.Struct, frozen=True, array_like=True):
    secret: bytes
    number: int
    first: int


class _Offer(NamedTuple):
    sizes: Sequence[int]
    export: Export


_decode_handle = msgspec.msgpack.Decoder(_Handle).decode
_decode_ask = msgspec.msgpack.Decoder(_Ask).decode
_decode_answer: Callable[[bytes], list[int] | str] = msgspec.msgpack.Decoder(list[int] | str).decode

_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError)
"""Errors that msgspec raises for invalid bytes."""

_starting = threading.Lock()
_listener: _Listener | None = None


def offer(key: Hashable, sizes: Sequence[int], export: Export) -> bytes:
    """Let the server fetch descriptors of memory in pieces of these sizes; returns the handle for `fetch`. Memory with
    the same key is offered once. `export` is called for each request, on the thread that serves the client. Raises
    DeviceError if this process cannot listen, LayoutError for too many pieces."""
    global _listener
    if len(sizes) > _MOST_PIECES:
        raise LayoutError(f"device memory in {len(sizes)} pieces, more than {_MOST_PIECES}")
    with _starting:
        if _listener is None or _listener.pid != os.getpid():  # a forked child needs its own
            try:
                _listener = _Listener()
            except OSError as exc:
                raise DeviceError(f"cannot listen in {SHM} to share device memory: {exc}") from exc
        return _listener.add(key, _Offer(sizes, export))


class _Listener:
    """The worker's end: one socket per process, and a thread for each client that is served."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.name = f"{_PREFIX}{secrets.token_hex(8)}"
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._offers: list[_Offer] = []  # appended to under _starting; read by the threads
        self._numbers: dict[Hashable, int] = {}
        self._socket = _listen(SHM / self.name)
        self._free = threading.Semaphore(_CONNECTIONS)
        os.register_at_fork(after_in_child=self._socket.close)  # otherwise a child would seem to be listening
        atexit.register(self._remove)
        threading.Thread(target=self._run, name="kvdepot-descriptors", daemon=True).start()

    def add(self, key: Hashable, what: _Offer) -> bytes:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._offers)
            self._offers.append(what)
        return msgspec.msgpack.encode(_Handle(self.name, self._secret, number, len(what.sizes)))

    def _remove(self) -> None:
        if self.pid == os.getpid():
            with contextlib.suppress(OSError):
                (SHM / self.name).unlink()

    def _run(self) -> None:
        while True:
            self._free.acquire()  # further clients wait in the kernel's queue
            connection = None
            try:
                connection, _ = self._socket.accept()
                threading.Thread(
                    target=self._serve, args=(connection,), name="kvdepot-descriptors", daemon=True
                ).start()
            except (OSError, RuntimeError) as exc:  # out of descriptors or threads, but perhaps not for long
                if connection is not None:
                    connection.close()
                log.warning("cannot share device memory: %s", exc)
                self._free.release()
                time.sleep(_NO_FILES_S)

    def _serve(self, connection: socket.socket) -> None:
        """Answer one client, until it is gone, silent for too long, or sends something invalid."""
        try:
            with connection, contextlib.suppress(OSError, *_UNREADABLE):
                connection.setblocking(False)  # one that does not read its replies is not waited for
                asks = select.poll()
                asks.register(connection, select.POLLIN)
                is_ours = _peer(connection) == os.geteuid()
                while is_ours and asks.poll(_IDLE_S * 1000) and self._answer(connection):
                    pass
        except Exception:
            log.exception("could not export device memory")
        finally:
            self._free.release()

    def _answer(self, connection: socket.socket) -> bool:
        """Raises OSError, or what msgspec raises."""
        ask = _decode_ask(connection.recv(_MOST_BYTES))
        known = hmac.compare_digest(ask.secret, self._secret) and 0 <= ask.number < len(self._offers)
        if not known or not 0 <= ask.first < len(self._offers[ask.number].sizes):
            return False
        sizes, export = self._offers[ask.number]
        end = min(len(sizes), ask.first + _BATCH)
        fds: list[int] = []
        try:
            fds.extend(export(ask.first, end))
            socket.send_fds(connection, [msgspec.msgpack.encode(sizes[ask.first : end])], fds)
        except KVDepotError as exc:
            connection.send(msgspec.msgpack.encode(str(exc)))
            return False
        finally:
            for fd in fds:
                os.close(fd)
        return True


def _listen(path: Path) -> socket.socket:
    """A socket that listens under this name, for this user only. Raises OSError."""
    hidden = path.with_name(f".{path.name}")  # until it listens, so that it is not taken for a dead process's
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.settimeout(None)  # whatever this process's default is
    try:
        listening.bind(str(hidden))
        try:
            hidden.chmod(0o600)  # before it listens, because until then no process can connect
            listening.listen(_CONNECTIONS)
            hidden.rename(path)
        except OSError:
            hidden.unlink()
            raise
    except OSError:
        listening.close()
        raise
    return listening


def _peer(connection: socket.socket) -> int:
    size = struct.calcsize("iII")
    _, user, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(user)


def fetch(handle: bytes, patience_s: float = _PATIENCE_S) -> Generator[tuple[int, int], None, None]:
    """Yield (descriptor, bytes) of each piece of an offer, in order; a descriptor is open until the next is taken.

    patience_s: total time to wait for the worker. Raises LayoutError if it is not a handle of a process of ours,
    DeviceError if the worker refuses or does not answer.
    """
    try:
        where = _decode_handle(handle)
    except _UNREADABLE as exc:
        raise LayoutError("invalid device memory handle") from exc
    if not _NAME.fullmatch(where.name) or not 0 < where.pieces <= _MOST_PIECES or where.number < 0:
        raise LayoutError(f"{where.name[:64]!r}, {where.pieces} pieces: not a device memory handle")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        patience = _Patience(where.name, patience_s)
        _connect(connection, SHM / where.name, patience)
        done = 0
        while done < where.pieces:
            asked = msgspec.msgpack.encode(_Ask(where.secret, where.number, done))
            sizes, fds = _receive(connection, asked, min(_BATCH, where.pieces - done), patience)
            done += len(fds)
            try:
                for size in sizes:
                    yield fds[0], size
                    os.close(fds.pop(0))
            finally:
                for fd in fds:
                    os.close(fd)


@dataclass
class _Patience:
    """The remaining time to wait for a worker; time spent on processing its replies does not count."""

    name: str
    _left_s: float

    @contextlib.contextmanager
    def spend(self, connection: socket.socket) -> Iterator[float]:
        """Wait inside this context. Raises DeviceError if it takes too long, or the worker is gone."""
        began = time.monotonic()
        connection.settimeout(max(0.001, self._left_s))
        try:
            yield began + self._left_s
        except TimeoutError as exc:
            raise DeviceError(f"the worker at {self.name} did not share its device memory in time") from exc
        except OSError as exc:
            raise DeviceError(f"the worker at {self.name} is gone: {exc.strerror}") from exc
        finally:
            self._left_s -= time.monotonic() - began


def _connect(connection: socket.socket, path: Path, patience: _Patience) -> None:
    """Connect to a process of ours. Raises LayoutError if it is not one, DeviceError."""
    try:
        info = path.lstat()
    except OSError as exc:
        raise LayoutError(f"{path.name} cannot be reached: {exc.strerror}") from exc
    if not stat.S_ISSOCK(info.st_mode) or info.st_uid != os.geteuid():
        raise LayoutError(f"{path.name} is not a socket of user {os.geteuid()}")
    with patience.spend(connection) as deadline:
        while True:
            try:
                connection.connect(str(path))
                break
            except BlockingIOError:  # its queue is full, for which unix sockets do not wait
                if time.monotonic() > deadline:
                    raise TimeoutError from None
                time.sleep(0.01)
    if _peer(connection) != os.geteuid():
        raise LayoutError(f"another user listens at {path.name}")


def _receive(connection: socket.socket, asked: bytes, count: int, patience: _Patience) -> tuple[list[int], list[int]]:
    """Request this many pieces; returns sizes and descriptors, which the caller closes. Raises DeviceError."""
    with patience.spend(connection):
        connection.sendall(asked)
        data, ancillary, flags, _ = connection.recvmsg(_MOST_BYTES, _ROOM, socket.MSG_CMSG_CLOEXEC)
    fds = [fd for *_, carried in ancillary for (fd,) in _FD.iter_unpack(carried[: len(carried) // _FD.size * _FD.size])]
    try:
        if flags & socket.MSG_CTRUNC:
            raise DeviceError(
                f"{count} descriptors of device memory could not be received: raise the limit of open files"
            )
        if not data:
            raise DeviceError(f"the worker at {patience.name} is gone, or refuses")
        try:
            sizes = _decode_answer(data)
        except _UNREADABLE as exc:
            raise DeviceError(f"the worker at {patience.name} sent an invalid reply") from exc
        if isinstance(sizes, str):
            raise DeviceError(f"the worker cannot share its device memory: {sizes[:500]}")
        if not len(sizes) == len(fds) == count or min(sizes) < 1:
            raise DeviceError(f"the worker at {patience.name} answers {len(fds)} descriptors, not {count}")
    except DeviceError:
        for fd in fds:
            os.close(fd)
        raise
    return sizes, fds


def sweep() -> None:
    """Remove sockets of workers that were killed. Sockets of live processes stay."""
    for path in SHM.glob(f"*{_PREFIX}*"):
        try:
            info = path.lstat()
            if not stat.S_ISSOCK(info.st_mode) or info.st_uid != os.geteuid() or is_being_made(path):
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                probe.setblocking(False)
                probe.connect(str(path))
        except ConnectionRefusedError:  # proves that no process has it open
            with contextlib.suppress(OSError):
                path.unlink()
        except OSError:
            continue  # already gone, or busy and hence alive
