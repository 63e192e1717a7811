"""Where sockets listen: unix sockets for this user alone, each for one process.

Used by server/ and kv_events/publisher.py on the deciding thread. The one law: no file is taken away that is somebody
else's. ZeroMQ by itself removes whatever lies where it is to listen.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import stat
from pathlib import Path
from typing import Any

import zmq

from kvdepot import locks
from kvdepot.errors import Unavailable
from kvdepot.protocol.handshake import is_open_to_all

__all__ = ["Binding", "Claim", "holder", "listen", "silence"]

log = logging.getLogger(__name__)

_LOCK = ".lock"
"""What the name of a unix socket's lock ends in; the file says who has it."""
_ASIDE = ".full"
"""What a unix socket's name ends in while there is no room for more connections."""
_MOST_PATH = 107
_CONNECT_S = 1.0
_NO_ANSWER = (
    "the process listening at {url} does not answer: it is stopped or hangs, is no kvdepot server, or has --keys and "
    "does not know this client's key (KVDEPOT_KEY)"
)


def listen(listener: zmq.Socket[Any], url: str) -> None:
    """Bind a socket; what it makes in the file system is for this user alone. Raises Unavailable."""
    old = os.umask(0o177)
    try:
        listener.bind(url)
    except zmq.ZMQError as exc:
        raise Unavailable(f"cannot listen on {url}: {exc.strerror}") from exc
    finally:
        os.umask(old)


class Binding:
    """A socket bound to an endpoint. Where that is a unix socket, others may remove or replace its file meanwhile."""

    def __init__(self, listener: zmq.Socket[Any], url: str) -> None:
        """Bind. Raises Unavailable."""
        self.is_lost = False
        """Whether something else lies where our file was, so that no new client can find us."""
        self._socket = listener
        self._url = url
        has_path = url.startswith("ipc://") and not is_open_to_all(url)
        self._path = Path(url[len("ipc://") :]) if has_path else None
        self._is_hidden = False
        self._file: os.stat_result | None = None
        self._listen()

    def __repr__(self) -> str:
        return f"<Binding to {self._url}{', hidden' * self._is_hidden}{', lost' * self.is_lost}>"

    def _listen(self) -> None:
        listen(self._socket, self._url)
        self._file = self._path.lstat() if self._path is not None else None

    def hide(self, hidden: bool) -> None:
        """Move the unix socket out of the clients' sight, or back: those that are connected stay so."""
        if self._path is None or hidden == self._is_hidden:
            return
        aside = self._path.with_name(self._path.name + _ASIDE)
        try:
            if hidden:
                self._path.rename(aside)
            else:
                aside.rename(self._path)
        except OSError as exc:
            log.warning("%s cannot be moved: %s", self._path, exc.strerror)
        else:
            self._is_hidden = hidden

    def look(self) -> None:
        """See whether our file is where it was; listen anew where it was removed."""
        if self._path is None or self._file is None or self._is_hidden:
            return
        try:
            self.is_lost = not os.path.samestat(self._path.lstat(), self._file)
        except FileNotFoundError:
            try:
                self._listen()
            except (Unavailable, OSError) as exc:
                if not self.is_lost:
                    log.error("%s was removed and cannot be recreated: %s", self._path, exc)
                self.is_lost = True
            else:
                log.warning("%s was removed: listening there again", self._path)
                self.is_lost = False


def holder(url: str) -> str:
    """Who has the lock of a unix socket, as far as it says: `pid N`, or `a process`; empty: nobody, or it has none."""
    if not url.startswith("ipc://") or is_open_to_all(url):
        return ""
    try:
        fd = os.open(url[len("ipc://") :] + _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        return (_read_holder(fd) or "a process") if locks.is_locked(fd) else ""
    finally:
        os.close(fd)


def _read_holder(fd: int) -> str:
    """What `Claim` wrote: `pid N`, with its host or container where that is not ours; empty where there is nothing."""
    pid, _, host = os.pread(fd, 300, 0).decode(errors="replace").strip().partition(" ")
    if not pid.isdecimal():
        return ""
    return f"pid {pid}" if host == os.uname().nodename else f"pid {pid} of {host}"


def silence(url: str) -> str:
    """Why nobody answers where somebody listens, and what to do; empty where nobody does. Blocks for a second."""
    who = holder(url)
    if not who:
        return _NO_ANSWER.format(url=url) if is_open_to_all(url) and _accepts(url) else ""
    said = f"the kvdepot server at {url} ({who}) holds its socket but does not answer"
    pid = who.removeprefix("pid ")
    if pid.isdecimal() and _is_stopped(pid):
        return f"{said} because it is stopped (SIGSTOP, Ctrl-Z); continue it with `kill -CONT {pid}`"
    end = f"`kill -9 {pid}`" if pid.isdecimal() else "SIGKILL"
    return (
        f"{said}: it hangs (kill it with {end}; the next one takes over its chunks), or has --keys and does not know "
        "this client's key (KVDEPOT_KEY)"
    )


def _accepts(url: str) -> bool:
    """Whether somebody takes connections at a TCP port or an abstract unix socket."""
    place = url.partition("://")[2]
    try:
        if place.startswith("@"):
            with socket.socket(socket.AF_UNIX) as asking:
                asking.settimeout(_CONNECT_S)
                asking.connect("\0" + place[1:])
        else:
            host, _, port = place.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _is_stopped(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


class Claim:
    """The sole right to listen at an endpoint; only unix sockets need one. `close` it when ZeroMQ is done with it."""

    def __init__(self, url: str, setting: str) -> None:
        """setting: what to change where the place is taken. Raises Unavailable."""
        self._url = url
        self._setting = setting
        self._fd = -1
        if not url.startswith("ipc://") or is_open_to_all(url):
            return  # the kernel gives a port or an abstract name to one socket
        self._path = Path(url[len("ipc://") :])
        self._lock = self._path.with_name(self._path.name + _LOCK)
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
                raise Unavailable(f"cannot listen on {self._url}: {folder} belongs to another user")

    def _take(self) -> bool:
        """Lock the place; False where the lock's file went meanwhile, and the lock is worth nothing."""
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
                return  # left behind by a process that is gone
            except BlockingIOError:
                pass  # there are just too many that want in
        raise Unavailable(f"another program listens on {self._url}; stop it, or choose another {self._setting}")

    def _give_back(self) -> None:
        """Let others have the place, and what lies there."""
        if self._fd >= 0:
            if locks.leads_to(self._lock, self._fd):
                self._lock.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Remove the socket's file, and let others have the place."""
        if self._fd >= 0 and locks.leads_to(self._lock, self._fd):  # else another server may be there
            self._path.unlink(missing_ok=True)
        self._give_back()
