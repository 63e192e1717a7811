"""Starts `kvdepot serve` for an engine: one that all engines of this user share, or one of its own.

Called by integrations/vllm/ on the engine's thread; nothing here waits until a server serves. Invariants: of many
engines that start at once, one starts the shared server, which then outlives it; an engine's own server ends with the
engine's process, however that ends.

A shared server inherits a locked file from the engine that starts it, and holds the lock until its own end. So the lock
tells other engines that a server is there or being started, whatever happens to the engine, and it is free again if the
start fails. Until the server serves, the file also has the id of that engine, so that its other processes do not repeat
a start that has failed.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from kvdepot import locks
from kvdepot.config import arena_folder
from kvdepot.errors import KVDepotError, Unavailable
from kvdepot.memory import shm
from kvdepot.processes import module_command
from kvdepot.protocol.addresses import socket_path
from kvdepot.protocol.endpoints import holder, is_coming, is_on_demand, make_folder, start_lock

IDLE_EXIT_S = 3600
"""`--idle-exit` of a shared server, unless KVDEPOT_IDLE_EXIT says otherwise: longer than restarting an engine with a
large model, or a pause between two experiments, takes; short enough that its memory is free again the same day."""
_STOP_S = 10.0
_ONE_START_S = 300.0
"""Processes of one engine find out within this time that a server which one of them started has failed."""
_YOUNG_S = 10.0
"""An arena that is younger than this may be about to be locked by its server."""
_DETACH = "import os, sys\nif not os.fork():\n    os.execv(sys.argv[1], sys.argv[1:])"
"""A second fork: an orphan is no child of the engine, which may kill its children when it ends."""


def _command(url: str, folder: Path, *flags: str) -> list[str]:
    return module_command("kvdepot.cli", "serve", "--url", url, "--arena-dir", str(folder), *flags)


def _environment(**defaults: str) -> dict[str, str]:
    """The engine's environment without what concerns the engine alone: its key, and its choice of GPUs."""
    dropped = ("KVDEPOT_KEY", "CUDA_VISIBLE_DEVICES")
    return defaults | {name: value for name, value in os.environ.items() if name not in dropped}


class Shared:
    """The server at a unix socket that all engines of this user share."""

    def __init__(self, url: str, arena_dir: str = "") -> None:
        """arena_dir: as for Client. Starts nothing."""
        path = socket_path(url)
        assert path is not None, f"{url} is not a unix socket with a path"
        self.url = url
        self._arena_dir = arena_dir
        self.log = path.with_suffix(".log")
        """The server's log; the log of the server before it has the suffix `.log.1`."""
        self._path = path
        self._lock = start_lock(path)
        self._is_engines = False  # the server that was last seen was started by an engine

    def start(self, engine: str = "") -> bool:
        """Start the server, unless it is there or being started. Returns whether it was started. engine: the engine's
        id, equal in all its processes, for `has_failed_for`. Raises Unavailable, ConfigError."""
        try:
            make_folder(self.url)
            fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                self._is_engines = not locks.lock(fd)
                if self._is_engines or holder(self.url) or self._was_started_for(engine):
                    return False
                os.ftruncate(fd, 0)
                os.pwrite(fd, engine.encode(), 0)
                self._spawn(fd)
                self._is_engines = True
                return True
            finally:
                os.close(fd)
        except (OSError, subprocess.SubprocessError) as exc:
            raise Unavailable(f"`kvdepot serve` cannot be started at {self.url}: {exc}") from exc

    def _spawn(self, lock: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.log.replace(self.log.with_suffix(".log.1"))
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            subprocess.run(
                [sys.executable, "-I", "-S", "-c", _DETACH, *_command(self.url, arena_folder(self._arena_dir))],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[lock],
                env=_environment(KVDEPOT_IDLE_EXIT=str(IDLE_EXIT_S)),
                start_new_session=True,
                check=True,
                timeout=_STOP_S,
            )
        finally:
            os.close(log)

    def is_running(self) -> bool:
        """Whether a server is there or being started, by any engine or by hand."""
        return is_coming(self.url)

    def has_crashed(self) -> bool:
        """Whether a server that an engine started has ended without removing its socket, as one that is stopped
        does; False for a server that was started by hand, which its user starts again. Call this or `start` also
        while a server runs: who has started a server cannot be seen later."""
        if is_on_demand(self.url):
            self._is_engines = True
        elif holder(self.url):
            self._is_engines = False
        else:
            return self._is_engines and os.path.lexists(self._path)
        return False

    def has_failed_for(self, engine: str) -> bool:
        """Whether a process of this engine has started a server that has ended before it served."""
        return self._was_started_for(engine) and not is_coming(self.url)

    def _was_started_for(self, engine: str) -> bool:
        """Whether a process of this engine has started the last server, and that has not served yet."""
        try:
            starter = self._lock.read_text(errors="replace")
            age_s = time.time() - self._lock.stat().st_mtime
        except OSError:
            return False
        # vLLM appends the rank of a data-parallel replica to the engine's id. An id that a user has chosen stays the
        # same at the engine's next start.
        is_ours = bool(starter) and re.fullmatch(re.escape(starter) + r"(_dp\d+)*", engine) is not None
        return is_ours and 0 <= age_s < _ONE_START_S

    def failure(self) -> str:
        """Why the server is not running: the last line of its log, and the path of the log."""
        try:
            lines = self.log.read_text(errors="replace").split("\n")
        except OSError as exc:
            return f"cannot read the log of the server, {self.log}: {exc.strerror}"
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        return f"the shared server has exited: {last} (its log: {self.log})"


class Embedded:
    """An engine's own server, a child of this process. It logs where the engine does, from warnings on unless
    KVDEPOT_LOG_LEVEL says otherwise."""

    arenas = "kvdepot-{user}-engine-"
    """The beginning of its arena's name, for `str.format`."""

    def __init__(self, url: str, name: str, arena_dir: str = "") -> None:
        """Start the server. name: the engine's, unique on this host. arena_dir: see Client. Raises Unavailable,
        ConfigError."""
        self._folder = arena_folder(arena_dir)
        _remove_left_arenas(self._folder)
        self.url = url
        self._arena = f"{self.arenas.format(user=os.geteuid())}{name}"
        self._process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        flags = ["--until-eof", "--http", "off", "--arena-name", self._arena, "--on-stop", "remove", "--idle-exit", "0"]
        try:
            make_folder(self.url)
            process = subprocess.Popen(
                _command(self.url, self._folder, *flags),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=_environment(KVDEPOT_LOG_LEVEL="warning"),
                start_new_session=True,
            )
        except OSError as exc:
            raise Unavailable(f"`kvdepot serve` cannot be started: {exc}") from exc
        assert process.stdin is not None
        # A child that this process forks would hold the pipe open after our end.
        os.register_at_fork(after_in_child=process.stdin.close)
        return process

    def is_running(self) -> bool:
        return self._process.poll() is None

    def has_crashed(self) -> bool:
        """Whether a signal has ended it: it was killed, or has crashed."""
        return (self._process.poll() or 0) < 0

    def start(self) -> bool:
        """Start another server in place of the one that has ended. Returns True. Raises Unavailable."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process = self._spawn()
        return True

    def failure(self) -> str:
        return f"the embedded server exited with status {self._process.poll()}; see its log lines above"

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError):
            (self._folder / self._arena).unlink()  # a server that was killed leaves it


def _remove_left_arenas(folder: Path) -> None:
    """Remove the arenas of engines' own servers that were killed together with their engines."""
    for path in folder.glob(f"{Embedded.arenas.format(user=os.geteuid())}*"):
        with contextlib.suppress(OSError, KVDepotError):
            if 0 <= time.time() - path.lstat().st_mtime < _YOUNG_S:
                continue
            fd = shm.open_shared(folder, path.name)
            try:
                if not locks.is_locked(fd):
                    path.unlink()
            finally:
                os.close(fd)
