"""Toy engines and tail engines in processes of their own, to be killed, stopped and started by the hundred.

Run as `python driver.py FD PARENT`: torch is imported once, then every message on the socket FD, which brings an end of
a socket pair, forks a process that serves one engine there: one JSON line in (`{"do": method of the engine, ...}`), one
out. `start` begins traffic, which goes on between commands until `stop`. All of them die with the process PARENT.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any

from tools.toy_engine import ToyEngine

from kvdepot.client import connection
from kvdepot.client.operations import CopyPhase
from tests.faults.halting import halt
from tests.faults.tail_engine import TailEngine
from tests.programs import die_with_parent

_PACE_S = 0.002
"""What a toy engine's forward pass takes."""


class Child:
    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.lines = channel.makefile("r")
        self.engine: ToyEngine | TailEngine | None = None
        self.traffic: dict[str, Any] | None = None

    def serve(self) -> None:
        while True:
            if self.traffic is not None:
                assert isinstance(self.engine, ToyEngine)
                self.engine.step(**self.traffic)
                if not select.select([self.channel], [], [], _PACE_S)[0]:
                    continue
            line = self.lines.readline()
            if not line:
                return
            answer = json.dumps({"ok": self.handle(**json.loads(line))})
            self.channel.sendall(answer.encode() + b"\n")

    def handle(self, do: str, **arguments: Any) -> Any:
        match do:
            case "open":
                connection._STALE_S = arguments.pop("stale_s", connection._STALE_S)
                self.engine = (TailEngine if "widths" in arguments else ToyEngine)(**arguments)
                return os.getpid()
            case "start":
                self.traffic = arguments
                return None
            case "stop":
                self.traffic = None
                assert isinstance(self.engine, ToyEngine)
                self.engine.drain(**arguments)
                return self.engine.stats()
        assert self.engine is not None
        if do == "halt":  # in the middle of the next copy
            return halt(self.engine.worker, **arguments)
        if do == "is_completing":
            return all(each.phase is CopyPhase.COMPLETING for each in list(self.engine.worker.lane._live.values()))
        return getattr(self.engine, do)(**arguments)


def serve(channel: socket.socket) -> None:
    try:
        Child(channel).serve()
    except Exception as exc:  # noqa: BLE001 - the top of a process: whoever gave the command hears of it
        text = "".join(traceback.format_exception(exc))
        channel.sendall(json.dumps({"error": text[-3000:]}).encode() + b"\n")


def main() -> None:
    die_with_parent(int(sys.argv[2]))
    requests = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries our children
    while True:
        message, fds, _, _ = socket.recv_fds(requests, 16, 1)
        if not message:
            return
        me = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with_parent(me)
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.set_inheritable(fds[0], False)
            serve(socket.socket(fileno=fds[0]))
            os._exit(0)
        os.close(fds[0])
        requests.sendall(pid.to_bytes(8, "little"))


if __name__ == "__main__":
    main()
