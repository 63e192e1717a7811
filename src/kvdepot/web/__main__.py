"""The web process. Started by child.py, which says what it must know through standard input; it ends when that closes.

Its main thread runs the event loop, another is the depot's client (poll.py), two wait for the end, and one ends it when
the loop hangs. The one law: it leaves nothing behind, and is gone some seconds after its server at the latest.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading

import msgspec

from kvdepot import logs
from kvdepot.curve import Key
from kvdepot.errors import KVDepotError
from kvdepot.web.child import Order

log = logging.getLogger(__name__)

_NICE = 10
"""Whoever looks at a depot never competes with it."""
_END_S = 2.0
_HUNG_S = 10.0


def main() -> int:
    """Serve until standard input closes."""
    try:
        order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    except msgspec.DecodeError:
        print("kvdepot.web is started by `kvdepot serve`, not by people", file=sys.stderr)
        return 2
    ended, serving = threading.Event(), threading.Event()
    threading.Thread(target=_await_end, args=(ended, serving), daemon=True).start()
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.configure(order.log_level, order.settings["log_format"])
    try:
        return _serve(order, ended, serving)
    except KVDepotError as exc:
        log.error("%s", exc)
        return 1


def _await_end(ended: threading.Event, serving: threading.Event) -> None:
    """Set `ended` when the server has gone, or wants us to go; and see to it that we do."""
    while os.read(0, 1):  # not sys.stdin: its lock would hang the interpreter's end
        pass
    ended.set()
    if serving.is_set():
        threading.Event().wait(_END_S)
    os._exit(0)


def _live_on() -> None:
    """Unless it is called again in time, the process ends with all its stacks said; the server starts the next one."""
    faulthandler.dump_traceback_later(_HUNG_S, exit=True)  # by a thread that needs no GIL


def _serve(order: Order, ended: threading.Event, serving: threading.Event) -> int:
    import uvicorn

    from kvdepot.web.app import make_app
    from kvdepot.web.connections import MOST_CONNECTIONS, Connection, Server
    from kvdepot.web.poll import Poll
    from kvdepot.web.turns import Turns

    key = Key(*(part.encode() for part in order.key)) if order.key is not None else None
    serving.set()
    poll = Poll(order.url, key)
    turns = Turns(poll)
    try:
        config = uvicorn.Config(
            make_app(poll, turns, order.settings, order.address, order.token),
            http=Connection,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=MOST_CONNECTIONS,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=16 << 10,
        )
        listener = socket.socket(fileno=order.listener)
        listener.setblocking(False)
        Server(config, ended, _live_on, turns.end).run(sockets=[listener])
    finally:
        poll.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
