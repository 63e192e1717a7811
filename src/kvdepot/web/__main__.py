"""The web process. child.py starts it and passes its settings through standard input; it ends when that closes.

Its main thread runs the event loop, one thread is the server's client (poll.py), one waits for the end, and one exits
the process if the loop hangs. Invariant: it leaves nothing behind, and ends at most some seconds after its server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback

import msgspec

from kvdepot import logs
from kvdepot.errors import KVDepotError
from kvdepot.processes import prepare_standard_files
from kvdepot.web.child import Order
from kvdepot.web.server import HttpServer

log = logging.getLogger(__name__)

_NICE = 10
"""Lower priority, so that it does not compete with the server."""
_END_S = 2.0
_WATCH_S = 2.5
_MOST_MISSED = 4
"""Checks of the watchdog without a sign of life: 10 s."""


def main() -> int:
    prepare_standard_files()
    try:
        order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    except msgspec.DecodeError:
        print("`kvdepot serve` starts kvdepot.web; do not start it yourself", file=sys.stderr)
        return 2
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.configure(order.log_level, order.log_format)
    try:
        return _serve(order)
    except KVDepotError as exc:
        log.error("%s", exc)
        return 1


def _await_end(server: HttpServer) -> None:
    """End the web server when standard input closes, then the process if it does not end by itself."""
    while os.read(0, 1):  # not sys.stdin, whose lock would block the interpreter's exit
        pass
    server.end()
    time.sleep(_END_S)
    os._exit(0)


def _watch(signs: list[object]) -> None:
    """Exit the process if its event loop hangs, and log where; the server starts the next one.

    signs: the loop adds one with each second that it is alive. Checks are counted, not seconds, because a process that
    was stopped, or frozen with its container, does not hang.
    """
    missed = 0
    while missed < _MOST_MISSED:
        time.sleep(_WATCH_S)
        missed = 0 if signs else missed + 1
        signs.clear()
    stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
    places = (f"{frame.name} ({frame.filename}:{frame.lineno})" for frame in reversed(stack))
    log.error("the web process hangs and will exit; it is stuck in %s", ", in ".join(places))
    logging.shutdown()  # waits for a second at most
    os._exit(1)


def _serve(order: Order) -> int:
    from kvdepot.web.app import make_app
    from kvdepot.web.poll import Poll

    poll, signs = Poll(order.url, order.key), list[object]()
    try:
        server = HttpServer(make_app(poll, order), lambda: signs.append(None))
        threading.Thread(target=_watch, args=(signs,), name="kvdepot-watchdog", daemon=True).start()
        threading.Thread(target=_await_end, args=(server,), daemon=True).start()
        listener = socket.socket(fileno=order.listener)
        listener.setblocking(False)
        server.run(sockets=[listener])
    finally:
        poll.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
