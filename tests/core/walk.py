"""Which source files one message crosses on the server, as the interpreter sees it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import kvdepot

_SOURCE = str(Path(kvdepot.__file__).parent) + "/"


class Walk:
    """The files of the package that were entered, in order: a stay begins with a call from another file."""

    def __init__(self) -> None:
        self.stays: list[str] = []

    def __str__(self) -> str:
        return f"{len(self.stays)} stays in {len(self.files)} files, {self.returns} returns: {' '.join(self.stays)}"

    @property
    def files(self) -> list[str]:
        """Each file once, in the order of the first stays."""
        return list(dict.fromkeys(self.stays))

    @property
    def returns(self) -> int:
        """Stays in files that had been left before."""
        return len(self.stays) - len(self.files)

    @property
    def counts(self) -> Counter[str]:
        """Stays by file."""
        return Counter(self.stays)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the files that are entered."""
        before = sys.getprofile()
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(_SOURCE):
            return
        before = frame.f_back
        while before is not None and not before.f_code.co_filename.startswith(_SOURCE):
            before = before.f_back  # a caller outside, such as a built-in function's, or the test itself
        if before is None or before.f_code.co_filename != frame.f_code.co_filename:
            self.stays.append(frame.f_code.co_filename.removeprefix(_SOURCE).removesuffix(".py"))
