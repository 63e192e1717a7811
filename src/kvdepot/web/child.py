"""Runs the web process beside the server: starts it, restarts it when it dies, and ends it.

The process inherits the listening socket and gets its settings, including secrets, through a pipe, and ends when that
closes, however the server ended. Invariant: nothing that happens here affects the depot.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from kvdepot.config import Config
from kvdepot.processes import module_command
from kvdepot.protocol.addresses import split_authority
from kvdepot.protocol.curve import Key, is_loopback
from kvdepot.web.token import obtain_token

if TYPE_CHECKING:
    import subprocess

log = logging.getLogger(__name__)

_USER = ".web"
_GRACE_S = 0.3
"""Delay of the start, so that clients that waited for the server come first."""
_LISTEN_S = 1.0
"""Interval between attempts to bind an address that is in use."""
_WELL_S = 30.0
"""A process that ran for longer is restarted after 0.5 s, others after 1 s, then 2, 4, up to _LONGEST_S."""
_FIRST_S, _LONGEST_S = 0.5, 30.0
_STOP_S = 3.0
_BACKLOG = 64


class Order(msgspec.Struct, frozen=True):
    """The settings of the process: one line of JSON through its pipe. key: None unless clients need keys."""

    url: str
    listener: int
    address: str
    token: str
    key: Key | None
    log_level: str
    log_format: str

    def __repr__(self) -> str:
        return f"Order(url={self.url!r}, address={self.address!r})"


def beside(config: Config, endpoint: str, admit: Callable[[str], Key | None]) -> Child | None:
    """The `Child` of a server that listens at `endpoint`; None if HTTP is off or the endpoint is not public.

    admit: makes a key for a new user, if clients need one. Raises ConfigError.
    """
    if config.http == "off" or not endpoint.startswith(("ipc://", "tcp://")):
        return None
    # A server that listens on all addresses is reachable at the loopback address.
    url = endpoint.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    return Child(config, url, admit(_USER))


class Child:
    """Keeps a web process running beside a server."""

    def __init__(self, config: Config, url: str, key: Key | None) -> None:
        """url: the server's endpoint. key: the process's own, if clients need one. Raises ConfigError for the token."""
        self._config = config
        self._url = url
        self._key = key
        self._token = obtain_token(config)
        self.address = ""
        """HOST:PORT while we listen there, whether or not a process runs. Written by the thread, read by any."""
        self.failure = ""
        """Why HTTP is not served, with what to do; empty if it is. Written by the thread, read by any."""
        self._lock = threading.Lock()  # guards the next two against `end`
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvdepot-web", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Tell the process to end. Never blocks. May be called twice."""
        with self._lock:
            self._stopping.set()
            if self._process is not None and self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()

    def close(self) -> None:
        """End the process and wait for it; kills it if necessary. Blocks for some seconds at most."""
        self.end()
        if self._thread.ident is None:
            return
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            with self._lock:
                if self._process is not None:
                    self._process.kill()
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        if self._stopping.wait(_GRACE_S):
            return
        listener = self._listen()
        if listener is None:
            return
        with listener:
            host, port = listener.getsockname()[:2]
            self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            try:
                self._keep(listener)
            finally:
                self.address = ""

    def _keep(self, listener: socket.socket) -> None:
        """Run one process after the other, until the server ends."""
        delay_s = _FIRST_S
        while not self._stopping.is_set():
            began = time.monotonic()
            self.failure = ""
            try:
                status = self._live(listener)
            except OSError as exc:
                log.warning("the web process cannot be started: %s", exc.strerror)
                status = -1
            if self._stopping.is_set():
                return
            delay_s = _FIRST_S if time.monotonic() - began > _WELL_S else min(2 * delay_s, _LONGEST_S)
            self.failure = f"the web process ended with status {status}, and is started again in {delay_s:g} s"
            log.warning("the web process ended with status %d; the next one starts in %g s", status, delay_s)
            self._stopping.wait(delay_s)

    def _listen(self) -> socket.socket | None:
        """The listening socket; None if the server ends before the address is free."""
        place = self._config.http
        host, port = split_authority(place) or ("", "")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        while not self._stopping.is_set():
            try:
                return socket.create_server((host, int(port)), family=family, backlog=_BACKLOG)
            except OSError as exc:
                why = os.strerror(exc.errno) if exc.errno else exc  # `strerror` may have the address once more
                if not self.failure:
                    log.warning("cannot bind HTTP to %s (%s); retrying, or choose another --http", place, why)
                self.failure = f"cannot bind {place} ({why}); retrying, or choose another --http"
            self._stopping.wait(_LISTEN_S)
        return None

    def _live(self, listener: socket.socket) -> int:
        """Run one process until it ends; returns its exit status. Raises OSError."""
        import subprocess  # imported here, because the server needs it for nothing else

        address, level, form = self.address, self._config.log_level, self._config.log_format
        order = Order(self._url, listener.fileno(), address, self._token, self._key, level, form)
        # A key for another server is none of its business.
        environ = {name: value for name, value in os.environ.items() if name != "KVDEPOT_KEY"}
        environ["KVDEPOT_ARENA_DIR"] = self._config.arena_dir
        with self._lock:
            if self._stopping.is_set():
                return 0
            process = self._process = subprocess.Popen(
                module_command("kvdepot.web"),
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env=environ,
                start_new_session=True,
            )
        assert process.stdin is not None
        try:
            with contextlib.suppress(OSError, ValueError):  # already dead, or told to end
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
