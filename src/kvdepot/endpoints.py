"""Where sockets listen: unix sockets for this user alone, each for one process.

Used by server.py, door.py and kv_events.py on the deciding thread, before it serves. The one law: no file is taken away
that is somebody else's. ZeroMQ by itself removes whatever lies where it is to listen.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat
from pathlib import Path
from typing import Any

import zmq

from kvdepot.errors import Unavailable

__all__ = ["Claim", "listen"]

_MOST_PATH = 107


def listen(listener: zmq.Socket[Any], url: str) -> None:
    """Bind a socket; what it makes in the file system is for this user alone. Raises Unavailable."""
    old = os.umask(0o177)
    try:
        listener.bind(url)
    except zmq.ZMQError as exc:
        raise Unavailable(f"cannot listen on {url}: {exc.strerror}") from exc
    finally:
        os.umask(old)


class Claim:
    """The sole right to listen at an endpoint; only unix sockets need one. `close` it when ZeroMQ is done with it."""

    def __init__(self, url: str, setting: str) -> None:
        """setting: what to change where the place is taken. Raises Unavailable."""
        self._url = url
        self._setting = setting
        self._fd = -1
        if not url.startswith("ipc://"):
            return
        self._path = Path(url[len("ipc://") :])
        self._lock = self._path.with_name(self._path.name + ".lock")
        if len(os.fsencode(self._path)) > _MOST_PATH:
            raise Unavailable(f"cannot listen on {url}: a unix socket's path has at most {_MOST_PATH} bytes")
        try:
            self._make_folder()
            while not self._take():
                pass
            self._refuse_foreign()
        except BaseException as exc:
            self._give_back()
            if isinstance(exc, OSError):
                raise Unavailable(f"cannot listen on {url}: {exc.strerror}") from exc
            raise

    def __repr__(self) -> str:
        return f"<Claim of {self._url}{', given back' * (self._fd < 0)}>"

    def _make_folder(self) -> None:
        folder = self._path.parent
        if re.fullmatch(r"kvdepot-\d+", folder.name):
            folder.mkdir(mode=0o700, exist_ok=True)
            info = folder.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
                raise Unavailable(f"cannot listen on {self._url}: {folder} belongs to somebody else")

    def _take(self) -> bool:
        """Lock the place; False where the lock's file went meanwhile, and the lock is worth nothing."""
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise Unavailable(
                f"another kvdepot server listens on {self._url}; stop it, or choose another {self._setting}"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), self._lock.lstat()):
                self._fd = fd
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
                return  # left behind by a process that is gone
            except BlockingIOError:
                pass  # there are just too many that want in
        raise Unavailable(f"another program listens on {self._url}; stop it, or choose another {self._setting}")

    def _give_back(self) -> None:
        """Let others have the place, and what lies there."""
        if self._fd >= 0:
            self._lock.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Remove the socket's file, and let others have the place."""
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
        self._give_back()
