"""What the log of a process looks like: lines for people, or one JSON object a line for whoever collects them.

Set up once by the command that runs. A line that belongs to a client, a request or a tier carries them as fields:
`log.info("...", extra={"request": request_id})`; they stand at the line's end, or as keys of the object. The one law:
what others sent stays within its line and within bounds.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import msgspec

__all__ = ["configure"]

_OURS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
"""What every record has."""
_MOST_TEXT = 256
"""Characters of a field."""


def configure(level: str, form: str, stream: TextIO | None = None) -> None:
    """Log to `stream` (standard error) from `level` on, as `form` says: "human" or "json"."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(_Json() if form == "json" else _Human())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {
        name: value if isinstance(value, int | float | bool) else str(value)[:_MOST_TEXT]
        for name, value in record.__dict__.items()
        if name not in _OURS and value not in ("", None)
    }


class _Human(logging.Formatter):
    """2026-01-31 12:00:00,000 INFO message [client=0a1b2c3d request=cmpl-7]"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, without a traceback."""
        # A request id or a file's name is somebody else's word: it must not look like a line of ours, nor be heard by
        # a terminal.
        line = super().formatMessage(record)
        if not line.isprintable():
            line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
        fields = " ".join(f"{name}={_quoted(value)}" for name, value in _fields(record).items())
        return f"{line} [{fields}]" if fields else line


def _quoted(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text and "]" not in text else repr(text)


class _Json(logging.Formatter):
    """{"ts": seconds since 1970, "level": "info", "logger": "kvdepot.server", "message": "...", and the fields}"""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        said: dict[str, Any] = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        said |= {name: value for name, value in _fields(record).items() if name not in said}
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        # surrogates: what was no UTF-8 on its way in (a file's name, say) is no UTF-8 on its way out
        return msgspec.json.encode(_clean(said)).decode()


def _clean(said: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
        for name, value in said.items()
    }
