"""Binds sockets to endpoints. A unix socket is for this user alone, and belongs to one process.

Invariant: no file of another user or program is removed. (ZeroMQ itself removes whatever is at the path it binds to.)
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import socket
import stat
from pathlib import Path

import zmq

from kvdepot import locks
from kvdepot.errors import Unavailable
from kvdepot.protocol.addresses import MOST_PATH, is_ipv6, socket_path, split_authority

log = logging.getLogger(__name__)

_LOCK = ".lock"
"""Suffix of a unix socket's lock file, which names the process that holds it."""
_ASIDE = ".full"
"""Suffix of a unix socket's name while the server accepts no more connections."""
_CONNECT_S = 1.0


def listen(listener: zmq.Socket[bytes], url: str) -> None:
    """Bind a socket; a unix socket's file is accessible to this user alone. Raises Unavailable."""
    old = os.umask(0o177)
    try:
        listener.setsockopt(zmq.IPV6, is_ipv6(url))
        listener.bind(url)
    except zmq.ZMQError as exc:
        why = "the folder of the socket does not exist" if exc.errno == errno.ENOENT else exc.strerror
        raise Unavailable(f"cannot listen on {url}: {why}") from exc
    finally:
        os.umask(old)


class Binding:
    """A socket bound to an endpoint. If the endpoint is a unix socket, others may later remove or replace its file."""

    def __init__(self, listener: zmq.Socket[bytes], url: str) -> None:
        self.obstacle = ""
        """Why new clients cannot connect, because the socket's file was removed or replaced; empty: they can."""
        self._socket = listener
        self._url = url
        self._path = socket_path(url)
        self._is_hidden = False
        self._file: os.stat_result | None = None
        self._listen()

    def _listen(self) -> None:
        listen(self._socket, self._url)
        self._file = self._path.lstat() if self._path is not None else None

    def hide(self) -> None:
        """Rename the unix socket so that no client can connect. Connected clients stay connected."""
        if self._path is not None and not self._is_hidden:
            self._is_hidden = self._rename(self._path, self._path.with_name(self._path.name + _ASIDE))

    def show(self) -> None:
        if self._path is not None and self._is_hidden:
            self._is_hidden = not self._rename(self._path.with_name(self._path.name + _ASIDE), self._path)

    def _rename(self, old: Path, new: Path) -> bool:
        try:
            old.rename(new)
        except OSError as exc:
            log.warning("%s cannot be moved: %s", self._path, exc.strerror)
            return False
        return True

    def check(self) -> None:
        """Check that the socket's own file is still there; bind again if it was removed."""
        if self._path is None or self._file is None or self._is_hidden:
            return
        try:
            is_ours = os.path.samestat(self._path.lstat(), self._file)
            self.obstacle = "" if is_ours else "another file has replaced the unix socket"
        except FileNotFoundError:
            if not self._path.parent.exists():
                self.obstacle = "the folder of the unix socket was removed"
                if re.match(r"/run/user/\d+(/|$)", os.fspath(self._path.parent)):  # systemd's
                    self.obstacle += (
                        ", as at the logout of its user (`loginctl enable-linger` prevents that; or use another --url)"
                    )
                return
            try:
                self._listen()
            except (Unavailable, OSError) as exc:
                self.obstacle = f"the unix socket was removed and cannot be made again ({exc})"
            else:
                log.warning("%s was removed: listening there again", self._path)
                self.obstacle = ""


def holder(url: str) -> str:
    """The holder of a unix socket's lock: `pid N`, or `a process` if the file does not say; empty if it is free."""
    path = socket_path(url)
    return _locker(lock_file(path)) if path is not None else ""


def _locker(lock: Path) -> str:
    """The process that has locked a file: `pid N`, or `a process` if the file does not say; empty: it is not locked."""
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        return (_read_holder(fd) or "a process") if locks.is_locked(fd) else ""
    finally:
        os.close(fd)


def _read_holder(fd: int) -> str:
    """The text that `Claim` wrote: `pid N`, with the host or container if it is not this one; empty: none."""
    pid, _, host = os.pread(fd, 300, 0).decode(errors="replace").strip().partition(" ")
    if not pid.isdecimal():
        return ""
    return f"pid {pid}" if host == os.uname().nodename else f"pid {pid} of {host}"


def make_folder(url: str) -> None:
    """Create the folder of a default endpoint, for this user alone. Raises Unavailable, OSError."""
    path = socket_path(url)
    if path is not None and re.fullmatch(r"kvdepot-\d+", path.parent.name):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        info = path.parent.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            raise Unavailable(f"cannot listen on {url}: {path.parent} belongs to another user")


def lock_file(path: Path) -> Path:
    """The file beside a unix socket that the server keeps open and locked."""
    return path.with_name(path.name + _LOCK)


def start_lock(path: Path) -> Path:
    """The file beside a unix socket that is locked while a server that an engine started is there or starting."""
    return path.with_name(f"{path.name}.start")


def is_on_demand(url: str) -> bool:
    """Whether a server that an engine has started serves a unix socket, or is about to."""
    path = socket_path(url)
    return path is not None and bool(_locker(start_lock(path)))


def is_coming(url: str) -> bool:
    """Whether a server serves a unix socket, or is about to."""
    return bool(holder(url)) or is_on_demand(url)


def note_serving(url: str) -> None:
    """Record that the server which an engine has started serves, so that engines know that the start has not failed."""
    path = socket_path(url)
    if path is not None:
        with contextlib.suppress(OSError):  # no engine has started it
            flags = os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            os.close(os.open(start_lock(path), flags))


def is_taken(url: str) -> bool:
    """Whether a process listens at an endpoint, or holds it. Blocks for up to a second."""
    if socket_path(url) is not None:
        return bool(holder(url))
    place = url.partition("://")[2]
    host, port = split_authority(place) or ("", "")
    with contextlib.suppress(OSError, ValueError, OverflowError):
        if place.startswith("@"):
            with socket.socket(socket.AF_UNIX) as asking:
                asking.settimeout(_CONNECT_S)
                asking.connect(f"\0{place[1:]}")
        else:
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        return True
    return False


class Claim:
    """The exclusive right to listen at an endpoint; only unix sockets need one. Close it after ZeroMQ's socket."""

    def __init__(self, url: str, setting: str) -> None:
        """setting: the name of the setting to change if the endpoint is taken, for the error. Raises Unavailable."""
        self._url = url
        self._setting = setting
        self._fd = -1
        path = socket_path(url)
        if path is None:
            return  # the kernel itself gives a port or an abstract name to one socket only
        self._path = path
        self._lock = lock_file(path)
        if len(os.fsencode(self._path)) > MOST_PATH:
            raise Unavailable(
                f"cannot listen on {url}: a unix socket's path has at most {MOST_PATH} bytes; choose another {setting}"
            )
        try:
            make_folder(url)
            while not self._take():
                pass
            self._refuse_foreign()
        except BaseException as exc:
            self._give_back()
            if isinstance(exc, OSError):
                raise Unavailable(f"cannot listen on {url}: {exc.strerror}") from exc
            raise

    def _take(self) -> bool:
        """Lock the endpoint; False if the lock file was removed in the meantime, which makes the lock worthless."""
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if not locks.lock(fd):
            who = _read_holder(fd)
            os.close(fd)
            raise Unavailable(
                f"another kvdepot server listens on {self._url}{f' ({who})' * bool(who)}; stop it, or choose another "
                f"{self._setting}"
            )
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), self._lock.lstat()):
                self._fd = fd
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()} {os.uname().nodename}\n".encode(), 0)
                return True
        os.close(fd)
        return False

    def _refuse_foreign(self) -> None:
        try:
            mode = self._path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise Unavailable(f"cannot listen on {self._url}: a file is there; choose another {self._setting}")
        with socket.socket(socket.AF_UNIX) as asking:
            asking.setblocking(False)
            try:
                asking.connect(os.fspath(self._path))
            except (ConnectionRefusedError, FileNotFoundError):
                return  # left behind by a process that has ended
            except BlockingIOError:
                pass  # its backlog is full
        raise Unavailable(f"another program listens on {self._url}; stop it, or choose another {self._setting}")

    def _give_back(self) -> None:
        if self._fd >= 0:
            if locks.leads_to(self._lock, self._fd):
                self._lock.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Remove the socket's file and release the lock."""
        if self._fd >= 0 and locks.leads_to(self._lock, self._fd):  # otherwise another server may serve there
            self._path.unlink(missing_ok=True)
        self._give_back()
