"""Logging: readable lines, or one JSON object per line for log collectors.

A line about a client, a request or a tier carries them as fields (`extra={"request": request_id}`), at the line's end
or as keys of the object. Invariants: text from others is bounded and stays within its line; logging never blocks, so a
thread of its own writes the lines, and those beyond a limit are dropped and counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from functools import partialmethod
from queue import SimpleQueue
from typing import Any

import msgspec

_OURS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_MOST_TEXT = 256
_MOST_SAID = 8192
"""Characters of a message, and of a traceback, of which the end is kept."""
_MOST_LINES = 4096
_SPARED_S = 60.0
"""Time in which a line of `Sparing` is logged once, in seconds."""
_MOST_SPARED = 100
_END_S = 1.0
"""Time to write waiting lines when the process ends."""


def configure(level: str, form: str, fd: int = 2) -> None:
    """Log to a descriptor (standard error) from `level` on. form: "human" or "json"."""
    handler = _Writer(fd)
    handler.setFormatter(_Json() if form == "json" else _Human())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class Sparing:
    """Logs failures that may repeat with every request: each line once a minute, with the repetitions since. Any
    thread."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._lines: dict[str, tuple[float, int]] = {}  # when each was logged (time.monotonic), repetitions since

    def _write(self, level: int, text: str, *args: object) -> None:
        line, now = text % args, time.monotonic()
        with self._lock:
            logged, repeated = self._lines.get(line, (-_SPARED_S, 0))
            if now - logged < _SPARED_S:
                self._lines[line] = logged, repeated + 1
                return
            if len(self._lines) >= _MOST_SPARED:
                self._lines.clear()
            self._lines[line] = now, 0
        self._log.log(level, "%s%s", line, f" ({repeated} more times since the last such line)" if repeated else "")

    info = partialmethod(_write, logging.INFO)
    warning = partialmethod(_write, logging.WARNING)
    error = partialmethod(_write, logging.ERROR)


class _Writer(logging.Handler):
    """Writes lines to a descriptor, on a thread of its own. Whoever logs never blocks: SimpleQueue has no lock that a
    writing thread could hold."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._queue: SimpleQueue[str | threading.Event | None] = SimpleQueue()
        self._dropped = 0  # lines since the start; changed under the handler's lock
        threading.Thread(target=self._run, name="kvdepot-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._queue.qsize() >= _MOST_LINES:
            self._dropped += 1
            return
        try:
            self._queue.put_nowait(self.format(record))
        except Exception:  # noqa: BLE001 - a wrong call of a logger: its traceback goes to standard error
            self.handleError(record)

    def flush(self) -> None:
        """Wait until all lines are written, for a second at most."""
        written = threading.Event()
        self._queue.put_nowait(written)
        written.wait(_END_S)

    def close(self) -> None:
        self._queue.put_nowait(None)
        super().close()

    def _run(self) -> None:
        """Write lines, and how many were dropped before each."""
        reported = 0
        while (line := self._queue.get()) is not None:
            if isinstance(line, threading.Event):
                line.set()
                continue
            self._write(line)
            if (dropped := self._dropped) > reported:
                lost, reported = dropped - reported, dropped
                text = "%d log lines lost: the reader of standard error is too slow"
                lines = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (lost,), None)
                self._write(self.format(lines))

    def _write(self, line: str) -> None:
        # Not through sys.stderr, because the interpreter's exit would wait for its lock, which this thread may hold.
        left = memoryview(f"{line}\n".encode(errors="backslashreplace"))
        with contextlib.suppress(OSError):  # the reader is gone
            while left:
                try:
                    left = left[os.write(self._fd, left) :]
                except BlockingIOError:
                    select.select([], [self._fd], [])


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {
        name: value if isinstance(value, int | float | bool) else str(value)[:_MOST_TEXT]
        for name, value in record.__dict__.items()
        if name not in _OURS and value not in ("", None)
    }


class _Human(logging.Formatter):
    """2026-01-31 12:00:00,000 INFO message [client=0a1b2c3d request=cmpl-7]"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatException(self, ei: Any) -> str:
        """The end of a traceback, indented and without control characters: the error's text may come from others."""
        lines = super().formatException(ei)[-_MOST_SAID:].splitlines()
        return "\n".join(f"  {_printable(line)}" for line in lines)

    def formatMessage(self, record: logging.LogRecord) -> str:
        # Request ids and file names come from others: they must not forge a line, or send control characters to a
        # terminal.
        line = _printable(super().formatMessage(record)[:_MOST_SAID])
        fields = {name: str(value) for name, value in _fields(record).items()}
        for name, text in fields.items():
            if not text.isprintable() or " " in text or "]" in text:
                fields[name] = repr(text)
        return f"{line} [{' '.join(map('='.join, fields.items()))}]" if fields else line


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class _Json(logging.Formatter):
    """{"ts": seconds since 1970, "level": "info", "logger": "kvdepot.server.loop", "message": "...", and the fields}"""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, object] = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:_MOST_SAID],
        }
        said |= {name: value for name, value in _fields(record).items() if name not in said}
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)[-_MOST_SAID:]
        for name, value in said.items():
            if isinstance(value, str):  # surrogates stand for bytes that were not UTF-8, and cannot be encoded
                said[name] = value.encode(errors="backslashreplace").decode()
        return msgspec.json.encode(said).decode()
