"""The web process, as its server sees it: started, given what it needs, started again when it dies, ended.

Made by server/loop.py; a thread of its own does all of it. The process gets the listening socket and, through a pipe,
what it must know, secrets too; the pipe stays open, and when it closes, whatever ended the server, the process ends.
The one law: whatever happens here, the depot works on.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from kvdepot import install
from kvdepot.config import Config, masked
from kvdepot.protocol.curve import Key, is_loopback
from kvdepot.web.token import obtain_token

if TYPE_CHECKING:
    import subprocess

__all__ = ["Child", "Order", "beside", "missing_packages", "split_address"]

log = logging.getLogger(__name__)

_USER = ".web"
"""What the process is called where clients have keys."""
_NEEDS = ("litestar", "uvicorn", "prometheus_client")
_GRACE_S = 0.3
"""Whoever has waited for the server comes first."""
_LISTEN_S = 1.0
"""Between two tries to listen where somebody else does."""
_WELL_S = 30.0
"""Who lived so long is started again after 0.5 s; who did not, after 1 s, then 2, 4, up to _LONGEST_S."""
_FIRST_S, _LONGEST_S = 0.5, 30.0
_STOP_S = 3.0
_BACKLOG = 64


def missing_packages() -> list[str]:
    """What the web process imports and is not installed."""
    return [name for name in _NEEDS if importlib.util.find_spec(name) is None]


class Order(msgspec.Struct, frozen=True):
    """What the process is told through its pipe, as one line of JSON. key: public, secret, server; or empty."""

    url: str
    listener: int
    address: str
    token: str
    key: tuple[str, str, str] | None
    settings: dict[str, Any]
    log_level: str

    def __repr__(self) -> str:
        return f"Order(url={self.url!r}, address={self.address!r})"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `[HOST]:PORT`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def beside(config: Config, endpoint: str, admit: Callable[[str], Key | None]) -> Child | None:
    """What keeps the web process of a server that listens at `endpoint`; None where there is to be none.

    admit: makes a key for a new user, where clients need one. Raises ConfigError.
    """
    if config.http == "off" or not endpoint.startswith(("ipc://", "tcp://")):
        return None
    # What listens on all addresses is found at this host's own.
    url = endpoint.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    return Child(config, url, admit(_USER))


class Child:
    """Keeps a web process beside a server. Raises ConfigError for a token that cannot be had."""

    def __init__(self, config: Config, url: str, key: Key | None) -> None:
        """url: where the process finds the server. key: its own, where clients need one."""
        self._config = config
        self._url = url
        self._key = key
        self._token = obtain_token(config)
        self.address = ""
        """HOST:PORT while it listens there, whether a process lives or not. Written by the thread, read by anybody."""
        self._lock = threading.Lock()  # guards the next two against `end`
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvdepot-web", daemon=True)

    def __repr__(self) -> str:
        return f"<Child {self._config.http} pid {self._process.pid if self._process else None}>"

    def start(self) -> None:
        """Never blocks."""
        self._thread.start()

    def end(self) -> None:
        """Tell the process to end. Never blocks; safe twice."""
        with self._lock:
            self._stopping.set()
            if self._process is not None and self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()

    def close(self) -> None:
        """Wait until it has ended, and see to it. Blocks for some seconds at most."""
        self.end()
        if self._thread.ident is None:
            return
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            with self._lock:
                if self._process is not None:
                    self._process.kill()
            self._thread.join(_STOP_S)

    # -- on the thread

    def _run(self) -> None:
        if self._stopping.wait(_GRACE_S):
            return
        if missing := missing_packages():
            log.info("HTTP is disabled: %s is missing; %s, or set --http off", missing[0], install.advice("web"))
            return
        listener = self._listen()
        if listener is None:
            return
        with listener:
            self.address = _address(listener)
            try:
                self._keep(listener)
            finally:
                self.address = ""

    def _keep(self, listener: socket.socket) -> None:
        """One process after the other, until the server ends."""
        delay_s = _FIRST_S
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                status = self._live(listener)
            except OSError as exc:
                log.warning("the web process cannot be started: %s", exc.strerror)
                status = -1
            if self._stopping.is_set():
                return
            delay_s = _FIRST_S if time.monotonic() - began > _WELL_S else min(2 * delay_s, _LONGEST_S)
            log.warning("the web process ended with status %d; the next one starts in %g s", status, delay_s)
            self._stopping.wait(delay_s)

    def _listen(self) -> socket.socket | None:
        """The listening socket; None when the server ends before it can be had."""
        host, port = split_address(self._config.http)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        told = False
        while not self._stopping.is_set():
            try:
                return socket.create_server((host, port), family=family, backlog=_BACKLOG)
            except OSError as exc:
                if not told:
                    log.warning("cannot bind HTTP to %s (%s); retrying", self._config.http, exc.strerror)
                told = True
            self._stopping.wait(_LISTEN_S)
        return None

    def _live(self, listener: socket.socket) -> int:
        """One process, from its start to its end; its exit status. Raises OSError."""
        import subprocess  # which the server needs for nothing else before it serves

        address = self.address
        key = self._key
        order = Order(
            self._url,
            listener.fileno(),
            address,
            self._token,
            (key.public.decode(), key.secret.decode(), key.server.decode()) if key is not None else None,
            masked(self._config),
            self._config.log_level,
        )
        # Not the server's working directory on the import path, and not a key that is meant for clients of others.
        command = [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), "-m", "kvdepot.web"]
        environ = {name: value for name, value in os.environ.items() if name != "KVDEPOT_KEY"}
        with self._lock:
            if self._stopping.is_set():
                return 0
            process = self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=environ, start_new_session=True
            )
        assert process.stdin is not None
        try:
            with contextlib.suppress(OSError, ValueError):  # dead already, or told to end
                process.stdin.write(msgspec.json.encode(order) + b"\n")
                process.stdin.flush()
            log.info("web page, metrics and API: http://%s", address)
            if not is_loopback(f"tcp://{address}"):
                log.warning("other hosts can reach HTTP; the token is sent unencrypted unless a TLS proxy is in front")
            return process.wait()
        finally:
            with self._lock:
                self._process = None
                with contextlib.suppress(OSError):
                    process.stdin.close()
