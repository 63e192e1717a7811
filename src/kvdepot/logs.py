"""What the log of a process looks like: lines for people, or one JSON object a line for whoever collects them.

Set up once by the command that runs. A line that belongs to a client, a request or a tier carries them as fields:
`log.info("...", extra={"request": request_id})`; they stand at the line's end, or as keys of the object. Two laws: what
others sent stays within its line and within bounds; and whoever logs never waits for who reads it. So lines are written
by a thread of their own, and where a pipe or a disk takes none, those beyond the limit are dropped and counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from queue import SimpleQueue
from typing import Any

import msgspec

__all__ = ["configure"]

_OURS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
"""What every record has."""
_MOST_TEXT = 256
"""Characters of a field."""
_MOST_SAID = 8192
"""Characters of a message, and of a traceback: of that its end, which says what went wrong."""
_MOST_LINES = 4096
"""Lines that wait to be written."""
_END_S = 1.0
"""For what waits to be written when the process ends."""


def configure(level: str, form: str, fd: int = 2) -> None:
    """Log to a descriptor (standard error) from `level` on, as `form` says: "human" or "json"."""
    writer = _Writer(fd)
    writer.setFormatter(_Json() if form == "json" else _Human())
    logging.basicConfig(level=level.upper(), handlers=[writer], force=True)


class _Writer(logging.Handler):
    """Writes lines to a descriptor, on a thread of its own."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._lines: SimpleQueue[str | threading.Event | None] = SimpleQueue()
        self._dropped = 0  # written by who logs, under the handler's lock
        self._told = 0  # of these; the thread's
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
        except Exception:  # noqa: BLE001 - as every handler of logging: a bad line must not end who says it
            self.handleError(record)

    def flush(self) -> None:
        """Wait until what was said is written, a second at most."""
        if self._thread.is_alive():
            written = threading.Event()
            self._lines.put(written)
            written.wait(_END_S)

    def close(self) -> None:
        """Write no more than what waits."""
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
        # Not through sys.stderr: the interpreter's end would wait for a lock that this thread has.
        left = memoryview(f"{line}\n".encode(errors="backslashreplace"))
        with contextlib.suppress(OSError):  # nobody is there any more: there is no one to tell
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
        """A traceback's end, each line of it set in: an error's words may be somebody else's, too."""
        lines = super().formatException(ei)[-_MOST_SAID:].splitlines()
        return "\n".join(f"  {_printable(line)}" for line in lines)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, without a traceback."""
        # A request id or a file's name is somebody else's word: it must not look like a line of ours, nor be heard by
        # a terminal.
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
        # surrogates: what was no UTF-8 on its way in (a file's name, say) is no UTF-8 on its way out
        return msgspec.json.encode(_clean(said)).decode()


def _clean(said: dict[str, object]) -> dict[str, object]:
    return {
        name: value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
        for name, value in said.items()
    }
