"""Engine cores and workers in processes of their own that need not import vLLM again.

vLLM starts them by `spawn`: a new interpreter, which takes 10 s of CPU time to import vLLM. Here they come from
multiprocessing's fork server, which has imported it. Nothing else changes: arguments are pickled, and no object, file
or thread of the parent reaches the new process.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing import context, forkserver, parent_process, reduction, resource_tracker
from typing import Any

_WORKER_S = 30.0
"""A worker whose engine core has ended has this long to end by itself."""
_alive = -1  # a file that this engine's processes have locked


class _Process(context.ForkServerProcess):
    """A process of the fork server's, which takes over its parent's environment, output and lock, and ends with it."""

    _start_method = "spawn"

    def __reduce__(self) -> tuple[Any, ...]:
        outputs = [reduction.DupFd(fd) for fd in (1, 2, _alive)]
        return _rebuild, (dict(os.environ), outputs, bytes(reduction.ForkingPickler.dumps(self.__dict__)))

    def run(self) -> None:
        threading.Thread(target=_end_with_parent, daemon=True).start()
        super().run()


def _rebuild(environ: dict[str, str], outputs: list[Any], state: bytes) -> _Process:
    os.environ.clear()
    os.environ.update(environ)
    for fd, output in enumerate(outputs[:2], 1):
        os.dup2(output.detach(), fd)
    keep(outputs[2].detach())
    made = _Process()
    made.__dict__.update(reduction.ForkingPickler.loads(state))
    return made


def keep(alive: int) -> None:
    """Keep a locked file, which says that an engine's processes are there. Programs that they start do not have it."""
    global _alive
    _alive = alive
    os.set_inheritable(alive, False)


def _end_with_parent() -> None:
    """Kill this process once its parent has ended.

    A worker closes its connections first. vLLM's front end kills cores with all processes below them, whose clients it
    has marked as having left (kvdepot's start.py); but this worker is a child of the fork server, so it was not marked.
    """
    parent = parent_process()
    assert parent
    parent.join()
    if parent.name != "MainProcess":  # the front end
        time.sleep(_WORKER_S)
    os.kill(os.getpid(), signal.SIGKILL)


class _Context(context.SpawnContext):
    Process = _Process


def start_server(*unwanted: socket.socket) -> Callable[[], None]:
    """Fork a server from this process, whose children and theirs then start processes from it where they would spawn
    them. unwanted: what it closes. Returns what ends it.
    """
    address = f"\0kvdepot-test-preloaded-{os.getpid()}"  # not a file: none is left behind
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        alive_r, alive_w = os.pipe()
        server = forkserver._forkserver
        server._forkserver_address, server._forkserver_alive_fd = address, alive_w  # type: ignore[attr-defined]
        server.ensure_running = resource_tracker.ensure_running  # type: ignore[method-assign]
        context._concrete_contexts["spawn"] = _Context()  # type: ignore[attr-defined]
        pid = os.fork()
        if pid == 0:
            os.close(alive_w)
            for each in unwanted:
                each.close()
            forkserver.main(listener.fileno(), alive_r, [])
            os._exit(0)
    os.close(alive_r)

    def end() -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    return end
