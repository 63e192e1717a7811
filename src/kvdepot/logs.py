"""Logging: readable lines, or one JSON object per line for log collectors.

Configured once by the running command. A line about a client, a request or a tier carries them as fields:
`log.info("...", extra={"request": request_id})`; they are at the line's end, or keys of the object. Invariants: text
from others is bounded and stays within its line; logging never blocks. So a separate thread writes the lines; if the
pipe or disk does not accept them, those beyond a limit are dropped and counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from queue import SimpleQueue
from typing import Any

import msgspec

__all__ = ["Sparing", "configure"]

_OURS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
"""Attributes of every record."""
_MOST_TEXT = 256
"""Characters of a field."""
_MOST_SAID = 8192
"""Characters of a message, and of a traceback, of which the end is kept."""
_MOST_LINES = 4096
"""Lines that wait to be written."""
_SPARED_S = 60.0
"""Time in which a line of `Sparing` is logged once."""
_MOST_SPARED = 100
"""Different lines that `Sparing` remembers."""
_END_S = 1.0
"""Time to write waiting lines when the process ends."""


def configure(level: str, form: str, fd: int = 2) -> None:
    """Log to a descriptor (standard error) from `level` on. form: "human" or "json"."""
    writer = _Writer(fd)
    writer.setFormatter(_Json() if form == "json" else _Human())
    logging.basicConfig(level=level.upper(), handlers=[writer], force=True)


class Sparing:
    """Logs failures that may repeat with every request: each line once a minute, with the number of repetitions since.

    Any thread may call it.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._lines: dict[str, tuple[float, int]] = {}  # when each was logged (time.monotonic), repetitions since

    def __repr__(self) -> str:
        return f"<Sparing of {len(self._lines)} lines>"

    def info(self, text: str, *args: object) -> None:
        self._write(logging.INFO, text % args)

    def warning(self, text: str, *args: object) -> None:
        self._write(logging.WARNING, text % args)

    def error(self, text: str, *args: object) -> None:
        self._write(logging.ERROR, text % args)

    def _write(self, level: int, line: str) -> None:
        now = time.monotonic()
        with self._lock:
            logged, repeated = self._lines.get(line, (-_SPARED_S, 0))
            if now - logged < _SPARED_S:
                self._lines[line] = logged, repeated + 1
                return
            if len(self._lines) >= _MOST_SPARED:
                self._lines.clear()
            self._lines[line] = now, 0
        self._log.log(level, "%s%s", line, f" ({repeated} more times since the last such line)" if repeated else "")


class _Writer(logging.Handler):
    """Writes lines to a descriptor, on a thread of its own."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._lines: SimpleQueue[str | threading.Event | None] = SimpleQueue()
        self._dropped = 0  # changed under the handler's lock
        self._told = 0  # of these, reported in the log; used by the thread only
        self._thread = threading.Thread(target=self._run, name="kvdepot-log", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<_Writer {self._lines.qsize()} lines wait, {self._dropped} dropped>"

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line. Never blocks."""
        if self._lines.qsize() >= _MOST_LINES:
            self._dropped += 1
            return
        try:
            self._lines.put(self.format(record))
        except Exception:  # noqa: BLE001 - like all handlers of logging: a bad line must not raise in the caller
            self.handleError(record)

    def flush(self) -> None:
        """Wait until all lines are written, for a second at most."""
        if self._thread.is_alive():
            written = threading.Event()
            self._lines.put(written)
            written.wait(_END_S)

    def close(self) -> None:
        """End the thread after the waiting lines."""
        self._lines.put(None)
        super().close()

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            if isinstance(line, threading.Event):
                line.set()
                continue
            self._write(line)
            if (dropped := self._dropped) > self._told:
                lost, self._told = dropped - self._told, dropped
                record = logging.LogRecord(
                    __name__, logging.WARNING, __file__, 0,
                    "%d log lines lost: the reader of standard error is too slow", (lost,), None,
                )  # fmt: skip
                self._write(self.format(record))

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
        """The line, without a traceback."""
        # Request ids and file names come from others: they must not forge a line, or send control characters to a
        # terminal.
        line = _printable(super().formatMessage(record)[:_MOST_SAID])
        fields = " ".join(f"{name}={_quoted(value)}" for name, value in _fields(record).items())
        return f"{line} [{fields}]" if fields else line


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _quoted(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text and "]" not in text else repr(text)


class _Json(logging.Formatter):
    """{"ts": seconds since 1970, "level": "info", "logger": "kvdepot.server.loop", "message": "...", and the fields}"""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        said: dict[str, object] = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:_MOST_SAID],
        }
        said |= {name: value for name, value in _fields(record).items() if name not in said}
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)[-_MOST_SAID:]
        # surrogates stand for bytes that were not UTF-8 (in a file's name, for example), and cannot be encoded
        return msgspec.json.encode(_clean(said)).decode()


def _clean(said: dict[str, object]) -> dict[str, object]:
    return {
        name: value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
        for name, value in said.items()
    }
